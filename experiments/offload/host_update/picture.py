"""Draws a result of compare.py: python experiments/offload/host_update/picture.py results/<date>.json."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from experiments.shared import pictures

COLORS = {
    "jzero": "tab:blue",
    "DeepSpeed": "tab:orange",
    "torch fused": "tab:red",
    "torch foreach": "tab:pink",
    "optax on XLA:CPU": "tab:green",
}


def draw(result: dict[str, Any], path: Path) -> None:
    """One panel per traffic: the share of the memory limit of every side, by optimizer, in one leaf."""
    largest = max(row["millions"] for row in result["rows"])
    panels = [("float32", False), ("bfloat16", True)]
    with pictures.drawn(path, 1, 2, font=10, figsize=(11, 3.6), sharey=True) as (figure, axes):
        for axis, (grads, copy) in zip(axes, panels, strict=True):
            chosen = (largest, 1, grads, copy)
            rows = [
                row
                for row in result["rows"]
                if (row["millions"], row["num_leaves"], row["grads"], row["copy"]) == chosen
            ]
            shown = [name for name in COLORS if any(name in row["share"] for row in rows)]
            for i, name in enumerate(shown):
                at = [j for j, row in enumerate(rows) if name in row["share"]]
                shares = [rows[j]["share"][name] for j in at]
                places = np.array(at) + 0.16 * (i - (len(shown) - 1) / 2)
                axis.bar(places, shares, 0.15, color=COLORS[name], alpha=0.7, label=name)
            axis.axhline(1.0, color="black", linewidth=0.8)
            axis.set_xticks(range(len(rows)), [row["optimizer"] for row in rows])
            axis.set_title(
                f"{grads} gradients" + (", bfloat16 copy of the parameters" if copy else "")
            )
        axes[0].set_ylabel(f"share of the memory limit, {largest}M")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize="small")


if __name__ == "__main__":
    source = Path(sys.argv[1])
    draw(json.loads(source.read_text()), source.with_suffix(".png"))
