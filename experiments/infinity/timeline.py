"""Draws one step in time: which fetch, iteration, store and host update was in flight when.

python experiments/infinity/timeline.py                                     # a minute on idle cores
python experiments/infinity/timeline.py --files --path /nvme/folder         # parameters and state in files
python experiments/infinity/timeline.py --devices 8 --layers 12 --out /tmp/infinity

The training of experiments/train_lm with parameters and optimizer state on the host, or in files, recorded by
jax.profiler: XLA names the program of every operation, jzero what the host does, and this script what is read
and written. On virtual devices the copies are the same processors' work as all else, so lanes show the order,
not speeds. Writes <date>-timeline.png and .json, or <date>-timeline-files.
"""

import argparse
import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jzero
from experiments.offload.timeline import lanes
from experiments.shared import pictures, training
from experiments.shared.devices import use_virtual_devices
from jzero.offload.nvme._file import TileFile
from tiers import ALL, tiers

common, train_linen = training.modules()

# ---------------------------------------------------------------------------------------------
# A lane's programs, by the names of their functions, and its color.
LANES: dict[str, tuple[tuple[str, ...], str]] = {
    "fetches of parameters": (("jit_fetch",), "#6a1b9a"),
    "iterations of the loops": (("jit_iteration",), "#0d47a1"),
    "what is between loops": (("jit_stretch", "jit_enter", "jit_finish"), "#64b5f6"),
    "stores of gradients": (("jit_store",), "#2e7d32"),
}
WAITS = {lanes.WAIT: "#b0bec5", lanes.KERNELS: "#e65100"}
# Of files: in several threads, one for each tile or parameter.
DISK = {
    "read_lone": ("parameters read from files", "#ad1457"),
    "read": ("tiles read from files", "#f06292"),
    "write": ("tiles written to files", "#795548"),
}
device_bytes, host_bytes = 2**24, 2**25
warm_up = 3  # steps that compile, and touch all memory
# ---------------------------------------------------------------------------------------------


def annotated(name: str) -> None:
    """Shows in the trace when threads are in a method of a file."""
    method = getattr(TileFile, name)

    def run(*args: Any) -> Any:
        with jax.profiler.TraceAnnotation(DISK[name][0]):
            return method(*args)

    setattr(TileFile, name, run)


def memory(args: argparse.Namespace, folder: Path) -> jzero.Memory:
    if not args.files:
        found: jzero.Memory = tiers(device_bytes)[ALL]["memory"]
        return found
    for name in DISK:
        annotated(name)
    state = jzero.NVMe(folder, host_bytes=host_bytes)
    params = dataclasses.replace(state, device_bytes=device_bytes)
    return jzero.Memory(params=params, optimizer=state)


def record(args: argparse.Namespace, folder: Path, files: Path) -> None:
    """Traces a step of a training that has run for a while."""
    init = train_linen.make_init(argparse.Namespace(steps=100, seed=0))
    mesh = jax.make_mesh((args.devices,), ("data",), devices=jax.devices()[: args.devices])
    step = jzero.shard_train_step(train_linen.train_step, mesh=mesh, memory=memory(args, files))
    shape = args.rows * args.devices, common.context + 1
    batch = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    state = step.init(init)
    for _ in range(warm_up):
        state, metrics = step(state, batch)
    jax.block_until_ready(metrics)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(str(folder), profiler_options=options):
        with jax.profiler.StepTraceAnnotation(lanes.STEP, step_num=0):
            state, metrics = step(state, batch)
            jax.block_until_ready(metrics)


def read(folder: Path) -> lanes.Timeline:
    """The lanes of the one trace in a folder, in milliseconds since the step began."""
    (path,) = folder.rglob("*.xplane.pb")
    of_files = {lane: lane for lane, _ in DISK.values()}
    programs = {name: lane for lane, (names, _) in LANES.items() for name in names}
    found: lanes.Timeline = {}
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            for event in line.events:
                module = next((value for key, value in event.stats if key == "hlo_module"), None)
                lane = programs.get(str(module)) or (lanes.ANNOTATIONS | of_files).get(event.name)
                if lane is not None:
                    start = event.start_ns / 1e6
                    found.setdefault(lane, []).append((start, start + event.duration_ns / 1e6))
    ((zero, end),) = found.pop(lanes.STEP)
    return {lanes.STEP: [(0.0, round(end - zero, 3))]} | {
        lane: [(round(a - zero, 3), round(b - zero, 3)) for a, b in lanes.union(spans)]
        for lane, spans in found.items()
    }


def draw(path: Path, timeline: lanes.Timeline, where: str) -> None:
    colors = {name: color for name, (_, color) in LANES.items()} | WAITS
    colors = dict([DISK["read_lone"]]) | colors | dict([DISK["read"], DISK["write"]])
    shown = [name for name in colors if timeline.get(name)]
    size = (11, 1.2 + 0.45 * len(shown))
    with pictures.drawn(path, font=11, figsize=size) as (_, axes):
        for y, name in enumerate(shown):
            bars = [(start, end - start) for start, end in timeline[name]]
            axes.broken_barh(bars, (y - 0.36, 0.72), color=colors[name], linewidth=0)
        axes.set(yticks=range(len(shown)), yticklabels=shown, xlim=(0, timeline[lanes.STEP][0][1]))
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.set(xlabel=f"milliseconds of one step; {where}")


def summary(timeline: lanes.Timeline) -> dict[str, Any]:
    """Milliseconds of each lane, and of fetches beside iterations."""
    busy = {name: round(sum(b - a for a, b in spans), 2) for name, spans in timeline.items()}
    fetches, iterations = (timeline.get(name, []) for name in list(LANES)[:2])
    found = {**busy, "fetches beside iterations": round(lanes.common_time(fetches, iterations), 2)}
    kernels = timeline.get(lanes.KERNELS, [])
    for name, beside in (("read_lone", iterations), ("read", kernels), ("write", kernels)):
        lane = DISK[name][0]
        if lane in timeline:
            what = "iterations" if beside is iterations else "updates"
            found[f"{lane}, beside {what}"] = round(lanes.common_time(timeline[lane], beside), 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--devices", type=int, default=2)
    add("--layers", type=int, default=6)
    add("--dim", type=int, default=256)
    add("--rows", type=int, default=2, help="sequences of each device")
    add("--files", action="store_true", help="parameters and optimizer state in files")
    add("--path", type=Path, help="a folder on the disk; by default a new one of the system's")
    add("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    use_virtual_devices(args.devices)
    vars(common).update(num_layers=args.layers, dim=args.dim, num_heads=max(args.dim // 64, 1))
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=args.path) as on:
        record(args, Path(folder), Path(on))
        timeline = read(Path(folder))
    settings = {name: vars(args)[name] for name in ("devices", "layers", "dim", "rows", "files")}
    told = summary(timeline)
    result = {
        **common.environment(args.devices), "jzero files": common.records.library(),
        "settings": settings, "summary": told, "timeline": timeline,
    }  # fmt: skip
    stem = args.out / f"{result['date']}-timeline{'-files' * args.files}"
    common.records.write(stem.with_suffix(".json"), result)
    where = f"{args.devices} virtual devices on {os.cpu_count()} cores"
    draw(stem.with_suffix(".png"), timeline, where)
    for name, milliseconds in told.items():
        print(f"{name}: {milliseconds} ms")
    print(f"written: {os.path.relpath(stem)}.png")


if __name__ == "__main__":
    main()
