"""Optimizer steps with state on a disk by jzero and by DeepSpeed, in turns, on one file system.

make swapper SWAPPER_ARGS="--path /nvme/folder"                       # creates .venv-host-update, runs this
.venv-host-update/bin/python experiments/infinity/against_deepspeed.py --show     # the last run's table

A step reads float32 masters and both moments of AdamW, updates them, writes them, and leaves new bfloat16
parameters in memory, where gradients are. jzero: `jzero.offload.nvme` with its kernels, as disk.py runs it.
DeepSpeed: the two classes that swap optimizer state (`pipeline_read` and `pipeline_write` on, and off) and
DeepSpeedCPUAdam, in the order in which stage 3 calls them. Each has a process of its own. They take turns of
two steps, of which the second is timed, and a ratio is of neighbours. DeepSpeed's settings are tuned first,
each pipeline for itself: one after the other of them is changed, and kept where that is faster. Prints a
table in Markdown, writes <date>-swapper.json.

Needs libaio's headers, a C++ compiler and ninja for DeepSpeed's operators. On a busy machine, `chrt -f 10`.
"""

import argparse
import collections
import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from experiments.shared import records

# ---------------------------------------------------------------------------------------------
JZERO, PIPELINED, PLAIN = "jzero", "DeepSpeed, pipeline on", "DeepSpeed, pipeline off"
# In this order, first those that matter most.
CANDIDATES: dict[str, list[Any]] = {
    "sub_group_size": [2**22, 2**23, 2**24, 2**25],
    "queue_depth": [8, 32],
    "intra_op_parallelism": [1, 2, 4],
    "block_size": [2**20, 2**22, 2**23],
    "single_submit": [False, True],
    "overlap_events": [True, False],
}
TILE_BYTES, HOST_BYTES = 2**25, 2**28  # of jzero: the largest tiles that it makes, eight of them
# ---------------------------------------------------------------------------------------------


class Worker:
    """A process of one side, which does what it is asked for, one thing at a time."""

    def __init__(self, serve: Callable[..., None], folder: Path, num_params: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.ours, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, folder, num_params), daemon=True)
        self.process.start()

    def __call__(self, *request: Any) -> Any:
        self.ours.send(request)
        return self.ours.recv()

    def close(self) -> None:
        self.ours.send(())
        self.process.join()


def timed(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def serve_jzero(pipe: Any, folder: Path, num_params: int) -> None:
    """Steps, as they are asked for."""
    import disk

    state = disk.OneState(folder / "jzero", num_params, TILE_BYTES, HOST_BYTES)
    while request := pipe.recv():
        match request:
            case ("step",):
                pipe.send(timed(lambda: state.swept(4, True)))
            case ("params",):
                pipe.send(np.unique(state.params.astype(np.float32)).tolist())


def serve_deepspeed(pipe: Any, folder: Path, num_params: int) -> None:
    """Steps of states that are made as they are asked for, and forgotten."""
    import deepspeed_side as side

    side.start(folder)
    made: dict[str, side.Swapped] = {}
    while request := pipe.recv():
        match request:
            case ("make", name, settings, pipelined):
                place = folder / name.replace(", ", "-").replace(" ", "-")
                made[name] = side.Swapped(place, num_params, side.Settings(**settings), pipelined)
                pipe.send(side.Settings(**settings).host_bytes(pipelined))
            case ("step", name):
                pipe.send(timed(made[name].step))
            case ("params", name):
                pipe.send(made[name].params.float().unique().tolist())
            case ("forget", name):
                shutil.rmtree(made.pop(name).folder)
                pipe.send(None)


def tune(deepspeed: Worker, pipelined: bool, steps: int) -> tuple[dict[str, Any], dict[str, float]]:
    """The fastest settings, found one after the other, and the median seconds of all that were tried."""
    tried: dict[str, float] = {}

    def seconds(settings: dict[str, Any]) -> float:
        key = json.dumps(settings)
        if key not in tried:
            deepspeed("make", "tuned", settings, pipelined)
            took = [deepspeed("step", "tuned") for _ in range(steps + 1)]
            deepspeed("forget", "tuned")
            tried[key] = round(float(np.median(took[1:])), 4)
        return tried[key]

    best = {name: values[0] for name, values in CANDIDATES.items()}
    for name, values in CANDIDATES.items():
        best = min((best | {name: value} for value in values), key=seconds)
    return best, tried


def compare(
    sides: dict[str, Callable[[], float]], rounds: int
) -> Iterator[tuple[float, dict[str, float]]]:
    """The load before each round, and seconds of each side; who is first changes from round to round.

    A side's first step may wait for what the one before has left to the disk.
    """
    names = list(sides)
    for number in range(rounds):
        first = number % len(names)
        load = os.getloadavg()[0]
        yield (
            load,
            {name: [sides[name](), sides[name]()][1] for name in names[first:] + names[:first]},
        )


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    jzero, deepspeed = (
        Worker(serve, folder, args.params) for serve in (serve_jzero, serve_deepspeed)
    )
    sides: dict[str, Callable[[], float]] = {JZERO: lambda: jzero("step")}
    settings: dict[str, dict[str, Any]] = {}
    tried: dict[str, dict[str, float]] = {}
    host_bytes = {JZERO: HOST_BYTES}
    for name, pipelined in ((PIPELINED, True), (PLAIN, False)):
        if args.tuned:
            before = json.loads(args.tuned.read_text())
            settings[name] = before["settings of DeepSpeed"][name]
            tried[name] = before["seconds of all that was tuned"][name]
        else:
            settings[name], tried[name] = tune(deepspeed, pipelined, args.tune_steps)
        print(f"{name}: {settings[name]}", flush=True)
        host_bytes[name] = deepspeed("make", name, settings[name], pipelined)
        sides[name] = lambda name=name: deepspeed("step", name)  # type: ignore[misc]
    for step in sides.values():  # The first one makes moments, and compiles.
        step()
    seconds: dict[str, list[float]] = collections.defaultdict(list)
    loads = []
    for load, took in compare(sides, args.rounds):
        loads.append(round(load, 2))
        for name, x in took.items():
            seconds[name].append(round(x, 4))
    values = {JZERO: jzero("params"), **{name: deepspeed("params", name) for name in settings}}
    assert len({tuple(x) for x in values.values()}) == 1, f"the sides do not do the same: {values}"
    jzero.close()
    deepspeed.close()
    return {
        "load before each round": loads,
        "settings of DeepSpeed": settings,
        "bytes of buffers": host_bytes,
        "seconds": dict(seconds),
        "seconds of all that was tuned": tried,
    }


def show(result: dict[str, Any]) -> None:
    loads = result["load before each round"]
    print(f"load {min(loads)} to {max(loads)}, {len(loads)} rounds")
    print("\n| | buffers, MiB | seconds | GB/s | over jzero's, same round | least | most |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    ours = np.array(result["seconds"][JZERO])
    for name, seconds in result["seconds"].items():
        ratios, median = np.array(seconds) / ours, float(np.median(seconds))
        cells = [
            f"{result['bytes of buffers'][name] / 2**20:.0f}", f"{median:.2f}",
            f"{24e-9 * result['parameters'] / median:.1f}",
            *(f"{float(x):.2f}" for x in (np.median(ratios), ratios.min(), ratios.max())),
        ]  # fmt: skip
        print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--path", type=Path, default=Path("."), help="a folder on the disk")
    parser.add_argument("--show", action="store_true", help="what the last run has written")
    parser.add_argument("--params", type=int, default=2**27, help="12 bytes of state each")
    parser.add_argument("--tune-steps", type=int, default=3)
    parser.add_argument("--tuned", type=Path, help="a result whose settings of DeepSpeed are taken")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    if args.show:
        show(records.latest(args.out, "swapper"))
        return
    args.path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="swapper-", dir=args.path) as folder:
        found = run(args, Path(folder))
    result = {
        **records.versions("jax", "numpy", "optax", "torch", "deepspeed"),
        "cpu": f"{os.cpu_count()} x {records.processor()}",
        "kernel": os.uname().release,
        "real-time priority": os.sched_getscheduler(0) == os.SCHED_FIFO,
        "jzero files": records.library(),
        "parameters": args.params,
        **found,
    }
    path = args.out / f"{result['date']}-swapper.json"
    records.write(path, result)
    show(result)
    print(f"written: {os.path.relpath(path)}")


if __name__ == "__main__":
    main()
