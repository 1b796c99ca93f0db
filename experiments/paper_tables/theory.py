"""The paper's tables from `jzero.estimate`: numbers alone, nothing is compiled or run.

Every function returns rows of plain values. A part that compiles a real model returns the same rows, to
stand beside these.
"""

from typing import Any, NamedTuple

import jzero
import paper

GB = 10**9


class Cell(NamedTuple):
    """One figure: what the paper prints, and the number found, in the table's unit."""

    model: str
    devices: int
    stage: int
    printed: str
    found: float


def table_1() -> list[Cell]:
    """GB of model states on each device."""
    return [
        Cell(model, devices, stage, printed, jzero.estimate(model, devices=devices, stage=stage).total / GB)
        for devices, row in paper.TABLE_1.items()
        for model, cells in row.items()
        for stage, printed in zip((1, 2, 3), cells, strict=True)
    ]  # fmt: skip


def figure_1() -> list[dict[str, Any]]:
    """GB on each device by role, and what the paper prints for the sum."""
    rows = []
    for stage, printed in paper.FIGURE_1.items():
        found = jzero.estimate(paper.FIGURE_1_MODEL, devices=paper.FIGURE_1_DEVICES, stage=stage)
        roles = {row.role: row.per_device / GB for row in found.memory}
        rows.append({"stage": stage, "printed": printed, "total": found.total / GB, "roles": roles})
    return rows


def table_2() -> list[Cell]:
    """Billions of parameters of the largest model on 64 GPUs of 32 GB, by degree of model parallelism."""
    devices, memory = paper.TABLE_2_DEVICES, paper.TABLE_2_MEMORY
    return [
        Cell("largest", devices * degree, stage, printed, largest(stage, devices, memory, degree))
        for degree, row in paper.TABLE_2_THEORY.items()
        for stage, printed in row.items()
    ]


def eight_devices(memory: str) -> list[Cell]:
    """Billions of parameters of the largest model on 8 devices; `printed` was trained, not computed."""
    return [
        Cell("largest", 8, stage, reported, largest(stage, 8, memory))
        for stage, reported in paper.EIGHT_REPORTED.items()
    ]


def largest(stage: int, devices: int, memory: str, degree: int = 1) -> float:
    found = jzero.estimate(1, devices=devices, stage=stage, model_parallel=degree)
    return found.largest_model(memory) / 1e9
