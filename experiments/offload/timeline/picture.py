"""Draws lanes of several timelines, one below the other, over the same time."""

from pathlib import Path

from experiments.shared import pictures
from lanes import DEVICES, KERNELS, SEND, STEP, TO_DEVICE, TO_HOST, WAIT, Timeline

COLORS = {
    DEVICES: "#0d47a1",
    TO_HOST: "#6a1b9a",
    WAIT: "#b0bec5",
    KERNELS: "#e65100",
    SEND: "#2e7d32",
    TO_DEVICE: "#2e7d32",
}


def draw(path: Path, timelines: dict[str, Timeline], where: str) -> None:
    shown = {
        name: [lane for lane in COLORS if timeline.get(lane)]
        for name, timeline in timelines.items()
    }
    longest = max(end for timeline in timelines.values() for _, end in timeline[STEP])
    heights = [len(lanes) + 1 for lanes in shown.values()]
    size = (11, 0.8 + 0.42 * sum(heights))
    with pictures.drawn(
        path, len(timelines), 1, font=11, figsize=size, sharex=True, height_ratios=heights
    ) as (_, rows):
        for axes, (name, timeline) in zip(rows, timelines.items(), strict=True):
            lanes = shown[name]
            for y, lane in enumerate(lanes):
                bars = [(start, end - start) for start, end in timeline[lane]]
                axes.broken_barh(bars, (y - 0.36, 0.72), color=COLORS[lane], linewidth=0)
            for start, end in timeline[STEP]:
                axes.axvline(start, color="#9e9e9e", linewidth=0.8, linestyle="--")
                axes.axvline(end, color="#9e9e9e", linewidth=0.8, linestyle="--")
            axes.set(yticks=range(len(lanes)), yticklabels=lanes, xlim=(0, longest))
            axes.set_ylim(len(lanes) - 0.4, -0.6)
            axes.set_title(name, loc="left", fontsize=12, fontweight="bold")
        rows[-1].set(xlabel=f"milliseconds; a step lies between dashed lines; {where}")
