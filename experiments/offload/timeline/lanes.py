"""Reads a trace of jax.profiler into lanes: who was busy when."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

Interval = tuple[float, float]  # milliseconds since the first step began
Timeline = dict[str, list[Interval]]  # by lane

STEP = "train step"
DEVICES, KERNELS, SEND, TO_DEVICE, TO_HOST, WAIT = (
    "devices compute",
    "host updates",
    "host sends parameters",
    "copies to the devices",
    "copies to the host",
    "host waits for gradients",
)
ANNOTATIONS = {  # as jzero/offload/_host_engine.py and jzero/offload/kernels/_loops.py name them
    STEP: STEP,
    "jzero: wait for gradients": WAIT,
    "jzero: update": KERNELS,
    "jzero: send parameters": SEND,  # On an accelerator this only starts copies.
}
COPIES = {"MemcpyD2H": TO_HOST, "MemcpyH2D": TO_DEVICE}
GAP = 0.02  # milliseconds: shorter ones cannot be seen


def read(folder: Path) -> Timeline:
    """The lanes of the one trace in a folder; intervals in order, none of them overlapping."""
    (path,) = folder.rglob("*.xplane.pb")
    found: dict[str, list[Interval]] = {}
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            for event in line.events:
                lane = lane_of(plane.name, line.name, event)
                if lane is not None:
                    start = event.start_ns / 1e6
                    found.setdefault(lane, []).append((start, start + event.duration_ns / 1e6))
    zero = min(found[STEP])[0]
    return {
        lane: [(round(start - zero, 3), round(end - zero, 3)) for start, end in union(xs)]
        for lane, xs in found.items()
        if lane != STEP
    } | {STEP: [(start - zero, end - zero) for start, end in sorted(found[STEP])]}


def lane_of(plane: str, line: str, event: Any) -> str | None:
    """Which lane an event belongs to, if any."""
    if event.name in ANNOTATIONS:
        return ANNOTATIONS[event.name]
    if plane.startswith("/device:"):
        if not line.startswith("Stream"):
            return None
        return next((COPIES[name] for name in COPIES if event.name.startswith(name)), DEVICES)
    # XLA:CPU runs a program's operations in several threads.
    return DEVICES if any(name == "hlo_op" for name, _ in event.stats) else None


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The times that any of them covers."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1] + GAP:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def common_time(left: list[Interval], right: list[Interval]) -> float:
    """Milliseconds that both cover."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in left for b in right)


def summary(timeline: Timeline) -> dict[str, Any]:
    """Of a step: milliseconds of each lane, and the share of the updates beside which devices compute."""
    steps = timeline[STEP]
    window = [(steps[0][0], steps[-1][1])]
    busy = {
        lane: round(common_time(timeline.get(lane, []), window) / len(steps), 2)
        for lane in (DEVICES, WAIT, KERNELS, SEND, TO_HOST, TO_DEVICE)
    }
    kernels = timeline.get(KERNELS, [])
    beside = common_time(kernels, timeline[DEVICES])
    share = round(beside / common_time(kernels, kernels), 3) if kernels else None
    step = round((window[0][1] - window[0][0]) / len(steps), 2)
    return {"step": step, **busy, "share of updates beside the devices": share}
