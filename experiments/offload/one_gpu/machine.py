"""What the machine is: `describe`; `link`, how fast it copies; `touch GIB`, which makes its memory be there.

Each prints a line of JSON. A virtual machine may grow its memory only when it is used, and count what it has
not yet as not available; and whoever touches a page first waits for it. `touch` writes that many GiB once.
"""

import concurrent.futures
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "llvmlite", "pytest")
CHUNK = 2**28


def numbers(path: str) -> dict[str, int]:
    """Of /proc/meminfo, in bytes."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return {}
    parts = [line.split() for line in lines]
    return {p[0].rstrip(":"): 1024 * int(p[1]) for p in parts if p[-1] == "kB"}


def host() -> dict[str, Any]:
    found = numbers("/proc/meminfo")
    return {"host_bytes": found.get("MemTotal"), "host_available": found.get("MemAvailable")}


def output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def describe() -> dict[str, Any]:
    """Versions, processors, memory, the device; and what `ratio='auto'` goes by."""
    # Here: a process of run.py has this checkout on its path, run.py itself may have not even JAX.
    import jax

    from experiments.shared import records
    from jzero.offload import _bandwidth

    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    query = "--query-gpu=name,driver_version,memory.total"
    return {
        **records.versions(*PACKAGES),
        "commit": output("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"),
        "platform": device.platform,
        "device": device.device_kind,
        "nvidia_smi": output("nvidia-smi", query, "--format=csv,noheader"),
        "bytes_limit": stats.get("bytes_limit"),
        "processors": len(os.sched_getaffinity(0)),
        "processor": records.processor(),
        **host(),
        "bytes_per_second": _bandwidth.measure(device, 1, None)._asdict(),
    }


def link() -> dict[str, Any]:
    """What `jzero.bandwidth()` measures."""
    import jzero

    return jzero.bandwidth().to_dict()


def touch(gib: float) -> dict[str, Any]:
    """Writes memory with all processors, and gives it back."""
    before, start = host(), time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        # Held until all are there: memory that was given back would be taken again.
        held = list(pool.map(_touched, range(round(gib * 2**30 / CHUNK))))
    seconds = time.perf_counter() - start
    found = {"gib": gib, "seconds": seconds, "before": before, "while": host()}
    del held
    return found


def _touched(_: int) -> Any:
    import numpy as np

    return np.full(CHUNK, 1, np.uint8)


def main() -> None:
    what, *rest = sys.argv[1:]
    asked = {"describe": describe, "link": link, "touch": lambda: touch(float(*rest))}
    print(json.dumps(asked[what]()))


if __name__ == "__main__":
    main()
