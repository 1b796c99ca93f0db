"""Draws a result of compare.py: python experiments/fsdp2/picture.py results/<date>.json."""

import json
import sys
from pathlib import Path
from typing import Any

from experiments.shared import pictures

SHORT = {
    "FSDP2": "FSDP2",
    "FSDP2, compiled": "FSDP2\ncompiled",
    "jzero, unrolled": "jzero\nunrolled",
    "jzero, scanned": "jzero\nscanned",
}


def draw(result: dict[str, Any], path: Path) -> None:
    """Three panels: what a step takes, sends, and adds to a process's memory."""
    sides = {name: side for name, side in result["sides"].items() if name in SHORT}
    colors = ["tab:orange" if name.startswith("FSDP2") else "tab:blue" for name in sides]
    labels = [SHORT[name] for name in sides]
    with pictures.drawn(path, 1, 3, font=10, figsize=(11, 3.4)) as (_, axes):
        blocks = [side["seconds_per_step_of_blocks"] for side in sides.values()]
        boxes = axes[0].boxplot(blocks, tick_labels=labels, patch_artist=True, whis=(0, 100))
        for box, color in zip(boxes["boxes"], colors, strict=True):
            box.set(facecolor=color, alpha=0.6)
        axes[0].set(title="a step (medians of blocks)", ylabel="seconds", ylim=(0, None))

        sent = [side["wire"]["loopback_bytes"] / 1e6 for side in sides.values()]
        axes[1].bar(labels, sent, color=colors, alpha=0.6)
        counted = [side["wire"]["counted_bytes"] / 1e6 for side in sides.values()]
        axes[1].plot(labels, counted, "k_", markersize=36)
        axes[1].set(title="sent per step (line: 3 Psi, by rings)", ylabel="MB per process")

        grown = [
            max(p - b for p, b in zip(m["peak_in_steps"], m["baseline"], strict=True)) / 1e6
            for m in (side["memory"] for side in sides.values())
        ]
        at_rest = [side["memory"]["at_rest"] / 1e6 for side in sides.values()]
        axes[2].bar(labels, grown, color=colors, alpha=0.6)
        axes[2].plot(labels, at_rest, "k_", markersize=36)
        axes[2].set(title="peak above imports (line: state)", ylabel="MB per process")


if __name__ == "__main__":
    source = Path(sys.argv[1])
    draw(json.loads(source.read_text()), source.with_suffix(".png"))
