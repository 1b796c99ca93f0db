"""The paper's tables from compiled programs, beside those that `theory.py` computes.

Every function asks a `Compiled` for its programs, and returns rows of plain values; bytes are of one device.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jzero
import paper
import theory
from compiled import Compiled, Program
from model import GPT

# Within 0.3 % of the paper's sizes. Heads have 128 dims, and 1024 devices divide every matrix.
MODELS = {
    "7.5B": GPT(65, 3072, 24),  # 7 521 835 008 parameters
    "128B": GPT(158, 8192, 64),  # 127 667 281 920
    "1T": GPT(127, 25600, 200),  # 1 000 072 089 600
}
LIMIT = 32 * 10**9  # of the paper's GPUs
# Hidden sizes by devices that share the batch, stage and degree of model parallelism; those of degree 1 are
# the paper's. The search is over layers. Heads have 128 dims, and the degree divides them.
WIDTHS = {
    (8, 0, 1): 1536, (8, 2, 1): 3072, (8, 3, 1): 4096,
    (64, 0, 1): 1536, (64, 2, 1): 3072, (64, 3, 1): 8192,
    (64, 0, 2): 2048, (64, 2, 2): 4096, (64, 3, 2): 10240,
    (64, 0, 4): 3072, (64, 2, 4): 6144, (64, 3, 4): 14336,
    (64, 0, 8): 4096, (64, 2, 8): 8192, (64, 3, 8): 18432,
    (64, 0, 16): 6144, (64, 2, 16): 10240, (64, 3, 16): 24576,
}  # fmt: skip
ACTIVATIONS_ROWS = 32


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


def table_1(compiled: Compiled) -> list[Cell]:
    """Parameters, optimizer state and the peak on each device; one sequence of 1024 tokens on each."""
    cells = []
    for devices, row in paper.TABLE_1.items():
        for model in row:
            for stage in (1, 2, 3):
                r = compiled(table_1_program(model, devices, stage))
                at_rest, within, peak = r["at_rest"], r["within"], r["peak"]
                cells.append(Cell(model, devices, stage, r["params"], at_rest, within, peak))
    return cells


def table_1_program(model: str, devices: int, stage: int) -> Program:
    """Stages 1 and 2 differ by microbatches only; one device has nothing to shard."""
    return Program(MODELS[model], data(devices), 3 if devices == 1 else max(stage, 2))


class Largest(NamedTuple):
    """The largest model whose peak is within `LIMIT`, by devices that share the batch, stage and degree."""

    devices: int
    stage: int
    degree: int
    gpt: GPT
    params: int
    at_rest: int
    peak: int


def largest(
    compiled: Compiled, devices: int, stage: int, degree: int = 1, limit: int = LIMIT
) -> Largest:
    """The most layers that fit, found by compiling: peaks of a scanned model are a line in its layers."""
    asked, stage = stage, 2 if stage == 1 else stage  # The same program without microbatches.
    width = WIDTHS[devices, stage, degree]
    axes = (*data(devices), *([("model", degree)] if degree > 1 else []))

    def program(layers: int) -> Program:
        gpt = GPT(layers, width, width // 128, model_parallel=degree > 1)
        return Program(gpt, axes, stage)

    # First where theory would have the model fill two thirds and three quarters of the memory.
    bound = theory.largest(stage, devices, f"{limit}", degree) * 1e9 / (12 * width**2)
    first, second = max(1, int(bound * 0.66)), max(2, int(bound * 0.75))
    peaks = {n: compiled(program(n))["peak"] for n in (first, second)}
    while True:
        low = max((n for n, peak in peaks.items() if peak <= limit), default=0)
        high = min((n for n, peak in peaks.items() if peak > limit), default=None)
        if high == low + 1:
            break
        (n, p), (m, q) = sorted(peaks.items(), key=lambda point: abs(point[1] - limit))[:2]
        line = n + (limit - p) * (m - n) // (q - p) if p != q else 2 * max(peaks)
        guess = max(line, low + 1) if high is None else min(max(line, low + 1), high - 1)
        peaks[guess] = compiled(program(guess))["peak"]
    if not low:
        raise LookupError(f"no model of width {width} fits on {devices} devices at stage {stage}")
    r = compiled(program(low))
    return Largest(devices, asked, degree, program(low).gpt, r["params"], r["at_rest"], r["peak"])


class Activations(NamedTuple):
    """Bytes within a step of one device, 32 sequences; among them gradients of 2 bytes per parameter."""

    attention: str
    recompute: str
    vocab: int
    within: int
    gradients: int


def activations(compiled: Compiled) -> list[Activations]:
    """GPT-2 XL; last without logits (a vocabulary of 64), which the paper does not count."""
    cases = [
        (attention, recompute, 50_257)
        for attention in ("whole", "in parts")
        for recompute in ("nothing", "all but products", "blocks")
    ]
    rows = []
    for attention, recompute, vocab in (*cases, ("in parts", "blocks", 64)):
        gpt = GPT(48, 1600, 25, vocab=vocab, recompute=recompute, attention=attention)
        r = compiled(Program(gpt, data(1), 0, rows=ACTIVATIONS_ROWS))
        rows.append(Activations(attention, recompute, vocab, r["within"], 2 * r["params"]))
    return rows


class Kept(NamedTuple):
    """What one device holds and moves where activations are cut over the axis 'model', and are not."""

    kept_in_parts: bool
    at_rest: int
    within: int
    peak: int
    over_model: Mapping[str, int]  # bytes of whole values, by collective
    over_data: int


def kept(compiled: Compiled) -> list[Kept]:
    """A GPT of 81B on 64 x 8 H200s at stage 3, eight sequences for each eight devices."""
    rows = []
    for in_parts in (False, True):
        gpt = GPT(100, 8192, 64, model_parallel=True, kept_in_parts=in_parts)
        r = compiled(Program(gpt, (*data(64), ("model", 8)), 3, rows=8))
        moved = {op.partition(" over model")[0]: n for op, n in r["moved"].items()
                 if op.endswith(" over model")}  # fmt: skip
        over_data = sum(n for op, n in r["moved"].items() if op.endswith(" over data"))
        rows.append(Kept(in_parts, r["at_rest"], r["within"], r["peak"], moved, over_data))
    return rows


SMALL = GPT(4, 1024, 8, vocab=8192)
HYBRID = (("node", 2), ("local", 8))
FOUR, FOUR_REDUCED_ONCE = jzero.Microbatches(4), jzero.Microbatches(4, reduce="once")
KEEP, ONCE = jzero.Comm(gather="keep"), jzero.Comm(gather="once_per_step")
LOCAL = jzero.Axes(params="local")
ALL_LOCAL = jzero.Axes(params="local", optimizer="local")
# What is asked of the step, and the paper's Psi (or what follows from it), by collective.
TRAFFIC: tuple[tuple[str, tuple[tuple[str, int], ...], dict[str, Any]], ...] = (
    ("stage 0", data(8), {"stage": 0}),
    ("stage 1", data(8), {"stage": 1}),
    ("stage 2", data(8), {"stage": 2}),
    ("stage 3", data(8), {"stage": 3}),
    ("stage 3, keep", data(8), {"stage": 3, "comm": KEEP}),
    ("stage 0, k=4", data(8), {"stage": 0, "microbatches": FOUR}),
    ("stage 1, k=4", data(8), {"stage": 1, "microbatches": FOUR}),
    ("stage 2, k=4", data(8), {"stage": 2, "microbatches": FOUR}),
    ("stage 3, k=4", data(8), {"stage": 3, "microbatches": FOUR}),
    ("stage 3, k=4, keep", data(8), {"stage": 3, "microbatches": FOUR, "comm": KEEP}),
    ("stage 3, k=4, once_per_step", data(8), {"stage": 3, "microbatches": FOUR, "comm": ONCE}),
    ("stage 3, k=4, reduce once", data(8), {"stage": 3, "microbatches": FOUR_REDUCED_ONCE}),
    ("stage 3, k=4, once_per_step, reduce once", data(8),
     {"stage": 3, "microbatches": FOUR_REDUCED_ONCE, "comm": ONCE}),
    ("stage 3, two axes", HYBRID, {"stage": 3}),
    ("stage 3, parameters over local", HYBRID, {"stage": 3, "shards": LOCAL}),
    ("stage 3, all over local", HYBRID, {"stage": 3, "shards": ALL_LOCAL}),
    ("stage 3, k=4, parameters over local", HYBRID,
     {"stage": 3, "microbatches": FOUR, "shards": LOCAL}),
    ("stage 3, k=4, all over local", HYBRID,
     {"stage": 3, "microbatches": FOUR, "shards": ALL_LOCAL}),
    ("stage 1, k=4, all over local", HYBRID,
     {"stage": 1, "microbatches": FOUR, "shards": jzero.Axes(optimizer="local")}),
)  # fmt: skip


class Traffic(NamedTuple):
    """Bytes per parameter that a step moves, by collective and axes: as described, and as compiled."""

    name: str
    psi: Mapping[str, float]
    described: Mapping[str, float]
    moved: Mapping[str, float]
    more: int  # bytes compiled than described, in all

    @property
    def elements(self) -> float:
        """In units of Psi, as the paper counts: an all-reduce is a reduce-scatter and an all-gather."""
        return sum(n * (2 if key.startswith("all-reduce") else 1) for key, n in self.psi.items())


def traffic(compiled: Compiled) -> list[Traffic]:
    rows = []
    for name, axes, given in TRAFFIC:
        r = compiled(Program(SMALL, axes, **given))
        described, moved, psi = (
            {key: n / r["params"] for key, n in r[what].items()}
            for what in ("described", "moved", "described_elements")
        )
        more = sum(r["moved"].values()) - sum(r["described"].values())
        assert r["moved"].keys() == r["described"].keys()
        rows.append(Traffic(name, psi, described, moved, more))
    return rows
