"""The paper's tables from compiled programs, beside those that `theory.py` computes.

Every function asks a `Compiled` for its programs, and returns rows of plain values; bytes are of one device.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import paper
from compiled import Compiled, Program
from model import GPT

# Within 0.3 % of the paper's sizes. Heads have 128 dims, and 1024 devices divide every matrix.
MODELS = {
    "7.5B": GPT(65, 3072, 24),  # 7 521 835 008 parameters
    "128B": GPT(158, 8192, 64),  # 127 667 281 920
    "1T": GPT(127, 25600, 200),  # 1 000 072 089 600
}
LIMIT = 32 * 10**9  # of the paper's GPUs
# Of the paper's models; heads have 128 dims.
WIDTHS = (1536, 2048, 3072, 4096, 6144, 8192)
ACTIVATIONS_ROWS = 32
GPT_2_XL = GPT(48, 1600, 25, vocab=50_257)


def data(num_devices: int) -> tuple[tuple[str, int], ...]:
    return (("data", num_devices),)


class Cell(NamedTuple):
    """One program of Table 1."""

    model: str
    devices: int
    stage: int
    params: int
    at_rest: int
    within: int
    peak: int


def table_1(compiled: Compiled, stages: tuple[int, ...] = (3, 2, 1)) -> list[Cell]:
    """Parameters, optimizer state and the peak on each device; one sequence of 1024 tokens on each."""
    cells = []
    for stage in stages:
        for devices, row in paper.TABLE_1.items():
            for model in row:
                r = compiled(Program(MODELS[model], data(devices), stage))
                cells.append(Cell(model, devices, stage, r["params"], r["at_rest"], r["within"], r["peak"]))
    return cells  # fmt: skip


class Largest(NamedTuple):
    """The largest model whose peak is within `LIMIT`, at a number of devices and a stage."""

    devices: int
    stage: int
    gpt: GPT
    params: int
    at_rest: int
    peak: int


def largest(
    compiled: Compiled, devices: int, stage: int, widths: tuple[int, ...], limit: int = LIMIT
) -> Largest:
    """The largest of every width's largest."""
    found = [deepest(compiled, devices, stage, width, limit) for width in widths]
    return max((f for f in found if f is not None), key=lambda f: f.params)


def deepest(
    compiled: Compiled, devices: int, stage: int, width: int, limit: int
) -> Largest | None:
    """The most layers of a width that fit: peaks of a scanned model are a line in its layers."""

    def program(layers: int) -> Program:
        return Program(GPT(layers, width, width // 128), data(devices), stage)

    peaks: dict[int, int] = {}
    guess, low, high = 8, 0, None
    while high != low + 1:
        peaks[guess] = compiled(program(guess))["peak"]
        low = max((n for n, peak in peaks.items() if peak <= limit), default=0)
        high = min((n for n, peak in peaks.items() if peak > limit), default=None)
        if len(peaks) == 1:
            guess = 32 if low else 4
            continue
        (n, p), (m, q) = sorted(peaks.items(), key=lambda point: abs(point[1] - limit))[:2]
        line = n + (limit - p) * (m - n) // (q - p) if p != q else 2 * max(peaks)
        guess = max(line, low + 1) if high is None else min(max(line, low + 1), high - 1)
    if not low:
        return None
    r = compiled(program(low))
    return Largest(devices, stage, program(low).gpt, r["params"], r["at_rest"], r["peak"])


class Activations(NamedTuple):
    """Bytes within a step of one device: of 32 sequences, and what of them grows with the sequences."""

    recompute: str
    attention: str
    within: int
    activations: int
    without_logits: int


def activations(compiled: Compiled) -> list[Activations]:
    """GPT-2 XL. Logits are told by a model with a vocabulary of 64."""
    rows = []
    for attention in ("whole", "in parts"):
        for recompute in ("nothing", "all but products", "blocks"):
            within, growing = _growing(compiled, recompute, attention, GPT_2_XL.vocab)
            _, without_logits = _growing(compiled, recompute, attention, 64)
            rows.append(Activations(recompute, attention, within, growing, without_logits))
    return rows


def _growing(compiled: Compiled, recompute: str, attention: str, vocab: int) -> tuple[int, int]:
    gpt = GPT(48, 1600, 25, vocab=vocab, recompute=recompute, attention=attention)
    whole, half = (
        compiled(Program(gpt, data(1), 0, rows=n))["within"]
        for n in (ACTIVATIONS_ROWS, ACTIVATIONS_ROWS // 2)
    )
    return whole, 2 * (whole - half)


SMALL = GPT(4, 1024, 8, vocab=8192)
HYBRID = (("node", 2), ("local", 8))
# What is asked of the step, and the paper's Psi (or what follows from it), by collective.
TRAFFIC: tuple[tuple[str, tuple[tuple[str, int], ...], dict[str, Any]], ...] = (
    ("stage 0", data(8), {"stage": 0}),
    ("stage 1", data(8), {"stage": 1}),
    ("stage 2", data(8), {"stage": 2}),
    ("stage 3", data(8), {"stage": 3}),
    ("stage 3, keep", data(8), {"stage": 3, "gather": "keep"}),
    ("stage 0, k=4", data(8), {"stage": 0, "accumulate": 4}),
    ("stage 1, k=4", data(8), {"stage": 1, "accumulate": 4}),
    ("stage 2, k=4", data(8), {"stage": 2, "accumulate": 4}),
    ("stage 3, k=4", data(8), {"stage": 3, "accumulate": 4}),
    ("stage 3, k=4, keep", data(8), {"stage": 3, "accumulate": 4, "gather": "keep"}),
    ("stage 3, k=4, once_per_step", data(8),
     {"stage": 3, "accumulate": 4, "gather": "once_per_step"}),
    ("stage 3, k=4, reduce once", data(8), {"stage": 3, "accumulate": 4, "reduce": "once"}),
    ("stage 3, k=4, once_per_step, reduce once", data(8),
     {"stage": 3, "accumulate": 4, "gather": "once_per_step", "reduce": "once"}),
    ("stage 3, two axes", HYBRID, {"stage": 3}),
    ("stage 3, parameters over local", HYBRID, {"stage": 3, "param_axes": "local"}),
    ("stage 3, all over local", HYBRID,
     {"stage": 3, "param_axes": "local", "optimizer_axes": "local"}),
    ("stage 3, k=4, parameters over local", HYBRID,
     {"stage": 3, "accumulate": 4, "param_axes": "local"}),
    ("stage 3, k=4, all over local", HYBRID,
     {"stage": 3, "accumulate": 4, "param_axes": "local", "optimizer_axes": "local"}),
    ("stage 1, k=4, all over local", HYBRID,
     {"stage": 1, "accumulate": 4, "optimizer_axes": "local"}),
)  # fmt: skip


class Traffic(NamedTuple):
    """Bytes per parameter that a step moves, by collective and axes: as described, and as compiled."""

    name: str
    psi: Mapping[str, float]
    described: Mapping[str, float]
    moved: Mapping[str, float]
    equal: bool


def traffic(compiled: Compiled) -> list[Traffic]:
    rows = []
    for name, axes, given in TRAFFIC:
        options = dict(given)
        stage = options.pop("stage")
        r = compiled(Program(SMALL, axes, stage, options=tuple(options.items())))
        described, moved, psi = (
            {key: n / r["params"] for key, n in r[what].items()}
            for what in ("described", "moved", "described_elements")
        )
        rows.append(Traffic(name, psi, described, moved, r["described"] == r["moved"]))
    return rows
