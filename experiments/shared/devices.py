"""Virtual devices. Imports no JAX: flags must be in the environment before a device is asked for."""

import os


def use_virtual_devices(num: int, num_processes: int = 1) -> None:
    """So many CPU devices in each process, where there are no others. Before JAX touches a device."""
    # XLA reads its flags when the first device is asked for, not at import, and of two settings the
    # last one counts.
    flags = [f"--xla_force_host_platform_device_count={num}"]
    if num_processes == 1:
        # Virtual devices may wait for each other for ever under this scheduler. Without it, processes
        # may call collectives in different orders (docs/facts.md#gloo-pairs-collectives-by-order-alone).
        flags += ["--xla_cpu_enable_concurrency_optimized_scheduler=false"]
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])
    os.environ.setdefault("PJRT_NPROC", "32")  # threads: collectives that wait hold one each
