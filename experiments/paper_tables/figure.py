"""Figure 1 of the paper as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

import paper

# By role, in the order in which the formulas name them.
COLORS = {"parameter": "#0d47a1", "gradient": "#ffb300", "optimizer state": "#90caf9"}
FORMULAS = {
    0: "2Ψ + 2Ψ + KΨ",
    1: "2Ψ + 2Ψ + KΨ/N",
    2: "2Ψ + (2 + K)Ψ/N",
    3: "(2 + 2 + K)Ψ/N",
}


def plot(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Stacked bars of `theory.figure_1()`'s rows, in GB on each device."""
    with plt.rc_context({"font.size": 13, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
        names = [f"stage {row['stage']}: {paper.STAGES[row['stage']]}\n{FORMULAS[row['stage']]}"
                 for row in rows]  # fmt: skip
        left = [0.0] * len(rows)
        for role, color in COLORS.items():
            sizes = [row["roles"][role] for row in rows]
            axes.barh(names, sizes, left=left, color=color, label=role, height=0.62)
            left = [old + new for old, new in zip(left, sizes, strict=True)]
        for i, row in enumerate(rows):
            axes.annotate(f"{paper.rounded(row['total'], 1)} GB", (row["total"], i), (6, 0),
                          textcoords="offset points", va="center")  # fmt: skip
        axes.invert_yaxis()
        axes.set(
            xlim=(0, 138), xlabel="GB of model states on each device",
            title=f"Ψ = {paper.FIGURE_1_MODEL} parameters, N = {paper.FIGURE_1_DEVICES} devices, "
            "K = 12 (Adam)",
        )  # fmt: skip
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
        axes.legend(loc="lower right")
        figure.savefig(path, dpi=120)
        plt.close(figure)
