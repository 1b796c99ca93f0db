"""Figure 1 of the paper as a picture, and Table 1 with what was compiled."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measured
import paper
import theory
from experiments.shared import pictures

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
    with pictures.drawn(path, figsize=(9, 4)) as (_, axes):
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


STAGE_COLORS = {1: "#ffb300", 2: "#42a5f5", 3: "#0d47a1"}


def plot_table_1(
    path: Path, printed: Sequence[theory.Cell], compiled: Sequence[measured.Cell]
) -> None:
    """GB on each device by devices: the paper's lines, and compiled peaks on them."""
    names = list(dict.fromkeys(cell.model for cell in printed))
    with pictures.drawn(path, 1, len(names), font=12, figsize=(12, 4.2)) as (figure, panels):
        for axes, name in zip(panels, names, strict=True):
            for stage, color in STAGE_COLORS.items():
                line = [
                    (c.devices, c.found) for c in printed if (c.model, c.stage) == (name, stage)
                ]
                dots = [
                    (c.devices, c.peak / 1e9)
                    for c in compiled
                    if (c.model, c.stage) == (name, stage)
                ]
                axes.plot(*zip(*line, strict=True), color=color, label=f"stage {stage}, paper")
                if stage != 1:  # without microbatches the program of stage 2
                    axes.plot(
                        *zip(*dots, strict=True),
                        "o",
                        color=color,
                        label=f"stage {stage}, compiled peak",
                    )
            axes.axhline(measured.LIMIT / 1e9, color="gray", linewidth=1, linestyle=":")
            axes.set(xscale="log", yscale="log", title=f"{name} parameters", xlabel="devices")
            axes.set_xticks(list(paper.TABLE_1), [str(n) for n in paper.TABLE_1])
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        panels[0].set_ylabel("GB on each device")
        panels[0].annotate(
            "32 GB", (1, measured.LIMIT / 1e9), (0, -13), textcoords="offset points", color="gray"
        )
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
