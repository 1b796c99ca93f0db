"""What the machine is and how fast: `describe`, `links`, `disk`; prints lines of JSON as it learns.

DISK=. python experiments/offload/one_gpu/machine.py disk
"""

import concurrent.futures
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGES = (
    "jax", "jaxlib", "jax-cuda13-plugin", "numpy", "optax", "flax", "orbax-checkpoint", "llvmlite", "rich",
    "pytest", "pytest-xdist", "hypothesis",
)  # fmt: skip
READERS = 4


def memory_bytes(name: str = "MemTotal") -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def describe() -> Iterator[dict[str, Any]]:
    """Versions, processors, memory and the device."""
    os.environ["XLA_CLIENT_MEM_FRACTION"] = "0.5"  # Half of the device's memory is the limit, then.
    import jax

    from experiments.shared import records

    device = jax.devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    driver, jzero = "", None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        driver = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.strip()
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        jzero = records.library(records.ROOT)  # A copy of the tree may have no history.
    yield {
        **records.versions(*PACKAGES), "jzero files": jzero, "platform": device.platform,
        "kind": device.device_kind, "driver": driver, "device_bytes": limit and 2 * limit,
        "processors": len(os.sched_getaffinity(0)), "processor": records.processor(),
        "host_bytes": memory_bytes(), "host_available": memory_bytes("MemAvailable"),
        "disk_available": shutil.disk_usage(os.environ.get("DISK", ".")).free,
    }  # fmt: skip


def links() -> Iterator[dict[str, Any]]:
    """Bytes per second between device and host, and of the update where it may happen."""
    import jax

    from jzero.offload import _bandwidth

    device = jax.devices()[0]
    size = 2**28 if device.platform == "gpu" else 2**22
    down, up = _bandwidth.copied([device], size)
    yield {"to_host": down, "to_device": up}
    yield {"both_ways": _bandwidth.copied([device], size, both_ways=True)[0]}
    yield {"device_update": _bandwidth.device_update(device)}
    yield {"host_update": _bandwidth.host_update(None)}
    for threads in (1, 4):
        yield {f"host_update_{threads}_threads": _bandwidth.host_update(threads)}


def disk(nbytes: str = str(2**32)) -> Iterator[dict[str, Any]]:
    """Bytes per second of a file, past the page cache where the file system lets one, in large transfers."""
    from jzero.offload.nvme._aligned import pages
    from jzero.offload.nvme._direct import BLOCK, DirectFile

    file = DirectFile(Path(os.environ["DISK"]) / "disk", create=True)
    size = int(nbytes)
    file.resize(size)
    buffers = [pages(BLOCK) for _ in range(READERS)]
    for buffer in buffers:
        buffer[:] = 7

    def timed(move: Any) -> float:
        def share(which: int) -> None:
            for start in range(which * BLOCK, size, READERS * BLOCK):
                move(buffers[which], start, "blocks")

        begin = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
            list(pool.map(share, range(READERS)))
        file.sync()
        return size / (time.perf_counter() - begin)

    yield {"direct": file.direct, "why_not": file.why_not, "disk_write": timed(file.write)}
    yield {"disk_read": timed(file.read)}


def main() -> None:
    known: dict[str, Any] = {}
    what, *rest = sys.argv[1:]
    try:
        asked: dict[str, Any] = {"describe": describe, "links": links, "disk": disk}
        for found in asked[what](*rest[:1]):
            known |= found
            print(json.dumps(known), flush=True)
    except ImportError as error:
        print(json.dumps({**known, "status": "left out", "told": str(error)[:300]}), flush=True)
    else:
        print(json.dumps({**known, "status": "ok"}), flush=True)
        os._exit(0)  # Whatever may hang at the end of the process has nothing to say.


if __name__ == "__main__":
    main()
