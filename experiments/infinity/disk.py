"""A step's state through a disk, against reading and writing the same bytes with nothing between.

python experiments/infinity/disk.py --path /nvme/folder              # 1.5 GiB of state; a few minutes
python experiments/infinity/disk.py --show                           # the tables of the last result

*raw* is the ceiling: one thread reads every tile with O_DIRECT, another one writes as many bytes, and the
file is synced. *sweep* is `jzero.offload.nvme` over the same bytes: read ahead, checked, updated by nobody or
by AdamW's kernels, checksummed, written behind, committed. *in turns* is the same without any overlap, in one
thread. All are run in turns, so that a busy machine hits all alike, and the ratio is of neighbours: raw's
time over the other's, in the same round. Also what a checksum costs, which size of transfer is best, and how
fast parts of tiles are read that have a checksum of their own, as layers read parameters.
Prints tables in Markdown, writes <date>-disk.json.

Needs no accelerator. Processors must be free for the ratio to mean something: the load is written with it. On
a busy machine, `chrt -f 10 python ...` gives them to this process when it asks for them (root only).
"""

import argparse
import collections
import functools
import itertools
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.shared import records
from jzero.offload.kernels._tiled_update import TiledUpdate
from jzero.offload.memory._addresses import host_empty
from jzero.offload.nvme import _direct
from jzero.offload.nvme._aligned import TileRing, pages
from jzero.offload.nvme._checksum import checksum
from jzero.offload.nvme._files import FileSpec, TileAt, TileFiles
from jzero.offload.nvme._sweep import sweep
from jzero.offload.nvme._tile_layout import TileLayout

WHO = "disk.py"
TX = optax.adamw(1e-3)


def update(state: Any, inputs: Any) -> Any:
    """AdamW on float32 masters and moments; new bfloat16 parameters are what leaves."""
    (w, m, v), (g, count) = state, inputs
    rest = TX.init(w)[1:]
    found = TX.update(
        g.astype(jnp.float32), (optax.ScaleByAdamState(count=count, mu=m, nu=v), *rest), w
    )
    updates, (adam, *_) = found
    new = w + updates
    return (new, adam.mu, adam.nu), (new.astype(jnp.bfloat16),)


def removed(files: TileFiles) -> None:
    for path in files.paths:
        path.unlink(missing_ok=True)
    files.close()


class OneState:
    """The state of one leaf on a disk, and what updates it."""

    def __init__(self, folder: Path, num_params: int, tile_bytes: int, host_bytes: int):
        leaf = jax.ShapeDtypeStruct((num_params,), jnp.float32)
        grads = jax.ShapeDtypeStruct((num_params,), jnp.bfloat16)
        count = jax.ShapeDtypeStruct((), jnp.int32)
        cores = os.cpu_count()
        self.kernels = TiledUpdate(
            update, [leaf] * 3, [grads, count], tile_bytes=tile_bytes, threads=cores
        )
        spec = FileSpec(self.kernels.layout, {"leaf": num_params})
        start = time.perf_counter()
        self.files = TileFiles.create(folder / "state", {"state.tiles": spec})
        self.ring = TileRing(host_bytes, self.files.most_bytes)
        self.step_bytes = sum(self.kernels.layout.nbytes)  # read, and as many written
        self.grads = host_empty((num_params,), jnp.bfloat16)
        self.grads.view(np.uint16)[:] = 0x3C00  # 0.0078
        self.params = host_empty((num_params,), jnp.bfloat16)
        self.files.begin(0)
        with sweep(self.files.tiles(), self.ring, write=self.files.write) as visits:
            for visit in visits:
                visit.buffer[:] = 0
        self.files.commit(0)
        self.seconds_to_make = time.perf_counter() - start

    def step(self, body: Callable[[], None], prepare: bool) -> None:
        """One committed step; `prepare` if the kernels are to run in it."""
        assert self.files.step is not None
        step = self.files.step + 1
        if prepare:
            count = np.array(step - 1, np.int32)  # of updates before this one
            self.kernels.prepare([[]], [[self.grads, count]])
            self.kernels.begin([[self.params]])
        self.files.begin(step)
        body()
        self.files.commit(step)
        if prepare:
            self.kernels.end()

    def swept(self, threads: int, with_update: bool) -> None:
        def body() -> None:
            order, files = self.files.tiles(), self.files
            with sweep(order, self.ring, files.read, files.write, threads) as visits:
                for visit in visits:
                    if with_update:
                        self.kernels.update_tile(0, visit.at.tile, visit.buffer)

        self.step(body, with_update)

    def in_turns(self) -> None:
        def body() -> None:
            buffer = self.ring.buffers[0]
            for at in self.files.tiles():
                self.files.read(at, buffer)
                self.kernels.update_tile(0, at.tile, buffer)
                self.files.write(at, buffer)

        self.step(body, True)

    def updated_in_memory(self) -> None:
        """The kernels alone, over tiles that are in memory, so many bytes as a step has."""
        self.kernels.prepare([[]], [[self.grads, np.array(1, np.int32)]])
        self.kernels.begin([[self.params]])
        for at in self.files.tiles():
            self.kernels.update_tile(0, at.tile, self.ring.buffers[at.tile % self.ring.num])
        self.kernels.end()


class Raw:
    """A file of the same size, read and written with nothing between, nothing checked."""

    def __init__(self, path: Path, nbytes: int, block: int):
        direct = os.O_DIRECT if _direct.DirectFile(path, create=True).direct else 0
        self.fd = os.open(path, os.O_RDWR | direct)
        self.nbytes, self.buffers = nbytes, [pages(block) for _ in range(2)]
        os.posix_fallocate(self.fd, 0, 2 * nbytes)
        self._move(os.pwrite, 0, 0)
        self._move(os.pwrite, 0, nbytes)
        os.fdatasync(self.fd)

    def __call__(self) -> None:
        """Reads the first half while the second one is written, and syncs."""
        reader = threading.Thread(target=self._move, args=(_preadv, 0, 0))
        writer = threading.Thread(target=self._move, args=(os.pwrite, 1, self.nbytes))
        for thread in (reader, writer):
            thread.start()
        for thread in (reader, writer):
            thread.join()
        os.fdatasync(self.fd)

    def _move(self, move: Callable[[int, Any, int], int], which: int, start: int) -> None:
        view = self.buffers[which].data
        for at in range(0, self.nbytes, len(view)):
            part = view[: min(len(view), self.nbytes - at)]
            assert move(self.fd, part, start + at) == len(part)


def _preadv(fd: int, part: Any, at: int) -> int:
    return os.preadv(fd, [part], at)


def timed(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compare(state: OneState, raw: Raw, rounds: int, threads: Sequence[int]) -> dict[str, Any]:
    """Seconds of each, in turns; the first round counts for none."""
    systems: dict[str, Callable[[], None]] = {
        "raw": raw,
        **{
            f"sweep, {what}, {num} + {num} threads": functools.partial(
                state.swept, num, with_update
            )
            for num in threads
            for what, with_update in (("no update", False), ("AdamW", True))
        },
        "in turns, AdamW": state.in_turns,
        "kernels alone": state.updated_in_memory,
    }
    seconds: dict[str, list[float]] = collections.defaultdict(list)
    loads = []
    for number in range(rounds + 1):
        loads.append(os.getloadavg()[0])
        for name, run in systems.items():
            took = timed(run)
            if number:
                seconds[name].append(took)
    moved = 2 * state.step_bytes
    found = {}
    for name, each in seconds.items():
        ratios = np.array(seconds["raw"]) / np.array(each)
        found[name] = {
            "seconds": [round(x, 4) for x in each],
            "GB/s, median": round(moved / float(np.median(each)) / 1e9, 3),
            "of raw, median": round(float(np.median(ratios)), 3),
            "of raw, least": round(float(ratios.min()), 3),
            "of raw, most": round(float(ratios.max()), 3),
        }
    return {"load before each round": [round(x, 2) for x in loads], "systems": found}


def checksum_rates() -> dict[str, float]:
    """GB/s of one thread over a tile of 16 MiB, the best of 20."""
    tile = np.random.default_rng(0).integers(0, 256, 2**24, np.uint8)
    rates = {}
    for name, run in (("jzero's", checksum), ("zlib.crc32", lambda x: zlib.crc32(x.data))):
        best = min(timed(lambda run=run: run(tile)) for _ in range(20))  # type: ignore[misc]
        rates[name] = round(tile.nbytes / best / 1e9, 1)
    return rates


def block_rates(folder: Path, nbytes: int, rounds: int) -> dict[str, float]:
    """GB/s of raw reads and writes together, by the bytes of one transfer; the median of rounds in turns."""
    sizes = [2**k for k in (19, 20, 21, 22, 23, 24)]
    raws = {size: Raw(folder / f"blocks-{size}", nbytes, size) for size in sizes}
    seconds: dict[int, list[float]] = collections.defaultdict(list)
    for _ in range(rounds):
        for size, raw in raws.items():
            seconds[size].append(timed(raw))
    for size, raw in raws.items():
        os.close(raw.fd)
        (folder / f"blocks-{size}").unlink()
    return {
        f"{size >> 10} KiB": round(2 * nbytes / float(np.median(each)) / 1e9, 2)
        for size, each in seconds.items()
    }


def lone_rates(folder: Path, nbytes: int, rounds: int) -> dict[str, float]:
    """GB/s at which the last 4 of 28 MiB of each tile are read alone: raw, and checked; median of rounds."""
    part, num = 2**22, nbytes // 2**22
    layout = TileLayout.of(
        [("m", 6 * part * k, 6 * part), ("w", part * k, part, True)] for k in range(num)
    )
    specs = {"lone.tiles": FileSpec(layout, {})}
    with TileFiles.create(folder, specs, in_place=True) as files:
        files.begin(0)
        ring = TileRing(4 * layout.most_bytes, layout.most_bytes)
        with sweep(files.tiles(), ring, write=files.write) as visits:
            for visit in visits:
                visit.buffer[:] = 1
        files.commit(0)
        (file,), ring = files._files, TileRing(16 * part, part)

        def raw(at: TileAt, buffer: np.ndarray) -> None:
            file.file.read(buffer, file._places.tiles[0][at.tile] + 6 * part, "a part")

        def alone(at: TileAt, buffer: np.ndarray) -> None:
            files.read_lone(at, 1, buffer)

        def swept(read: Callable[[TileAt, np.ndarray], None], threads: int) -> None:
            with sweep(files.tiles(), ring, read, threads=threads) as visits:
                collections.deque(visits, maxlen=0)

        seconds: dict[str, list[float]] = collections.defaultdict(list)
        for _ in range(rounds):
            for threads, read in itertools.product((1, 2, 4), (raw, alone)):
                name = f"{read.__name__}, {threads} threads"
                seconds[name].append(timed(functools.partial(swept, read, threads)))
        removed(files)
    return {name: round(part * num / float(np.median(x)) / 1e9, 2) for name, x in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--path", type=Path, default=Path("."), help="a folder on the disk")
    parser.add_argument("--show", action="store_true", help="what the last run has written")
    parser.add_argument("--params", type=int, default=2**27, help="12 bytes of state each")
    parser.add_argument("--tile-mib", type=int, default=12)
    parser.add_argument("--host-mib", type=int, default=96, help="of all buffers")
    help_threads = "that read, and as many that write"
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4], help=help_threads)
    parser.add_argument("--transfers-mib", type=int, default=256, help="for the sizes of transfers")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    if args.show:
        show(records.latest(args.out, "disk"))
        return
    folder = args.path / f"disk-{os.getpid()}"
    folder.mkdir(parents=True)
    try:
        result = {
            **records.environment("jax", "jaxlib", "numpy", "optax"),
            "kernel": os.uname().release,
            "real-time priority": os.sched_getscheduler(0) == os.SCHED_FIFO,
            "file system": _direct._file_system(os.open(folder, os.O_RDONLY)),
            "jzero files": records.library(),
            "settings": {
                key: str(x) for key, x in vars(args).items() if key not in ("path", "out", "show")
            },
            "GB/s of a checksum": checksum_rates(),
            "GB/s by size of a transfer": block_rates(
                folder, args.transfers_mib * 2**20, args.rounds
            ),
            "GB/s of parts of tiles": lone_rates(
                folder / "lone", args.transfers_mib * 2**20, args.rounds
            ),
        }
        state = OneState(folder, args.params, args.tile_mib * 2**20, args.host_mib * 2**20)
        raw = Raw(folder / "raw", state.step_bytes, _direct.BLOCK)
        result |= {
            "GB of a step, read and written": round(2 * state.step_bytes / 1e9, 3),
            "buffers": state.ring.num,
            "direct": all(file.file.direct for file in state.files._files),
            "seconds to make and fill": round(state.seconds_to_make, 2),
            **compare(state, raw, args.rounds, args.threads),
        }
        removed(state.files)
    finally:
        shutil.rmtree(folder)
    path = args.out / f"{result['date']}-disk.json"
    records.write(path, result)
    show(result)
    print(f"written: {os.path.relpath(path)}")


def show(result: dict[str, Any]) -> None:
    loads = result["load before each round"]
    print(f"load {min(loads)} to {max(loads)} on {result['cpu']}")
    for what, rates in result.items():
        if what.startswith("GB/s"):
            print(f"{what}: {', '.join(f'{name} {x}' for name, x in rates.items())}")
    print("\n| | seconds | GB/s | of raw, in the same round | least | most |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, each in result["systems"].items():
        ratios = [each[f"of raw, {which}"] for which in ("median", "least", "most")]
        seconds = float(np.median(each["seconds"]))
        cells = [f"{seconds:.2f}", each["GB/s, median"], *(f"{x:.2f}" for x in ratios)]
        print(f"| {name} | {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    main()
