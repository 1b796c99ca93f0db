# SPDX-License-Identifier: Apache-2.0
"""Work that a step's devices do more than once: what causes it, what it costs, and what to do about it."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from jzero._errors import counted, message
from jzero._folded import listed
from jzero._quantities import readable_bytes
from jzero.ir._work import LEAST_SHARE, Repeated
from jzero.sharding.partition._saved import SavedValue
from jzero.sharding.plan._config import StepConfig
from jzero.tracing import _call

# Less than it takes to start a step: 0.1 ms of one CPU core, 1 us of a GPU.
LEAST_FLOPS = 1e6
AT_ONCE = "at once"  # the cause of what microbatches do not spare
LEAST_AT_ONCE = 2**20  # bytes of it that somebody would miss
UNEVEN = "uneven"  # the cause: rows that the devices do not divide
_SHOWN = 3  # lines of the user's that a warning names


class Extra(NamedTuple):
    """Work that is done more than once, by its cause."""

    cause: str  # tells it from others of the same step, whatever the sizes
    what: str  # the arguments, or the lines
    why: str  # what the devices do
    rule: str  # what they do in general
    fix: str  # what to do about it
    share: float  # of all that the devices compute in a step
    flops: float  # of each device, in a step

    def __str__(self) -> str:
        return f"{self.what}: {self.why}. {self.fix}"

    @property
    def costs(self) -> bool:
        return self.flops >= LEAST_FLOPS

    def warning(self, name: str) -> str:
        return message(
            _call.WHO, f"{name} repeats {self.share:.0%} of its work in vain, for {self.what}: {self.why}",
            self.rule, self.fix,
        )  # fmt: skip


def at_once_warning(name: str, num: int, made: Sequence[SavedValue]) -> str:
    """For a step that computes something from all its microbatches at once."""
    nbytes, lines = sum(each.nbytes for each in made), [*dict.fromkeys(x.where for x in made)]
    lines += [f"{len(lines) - _SHOWN} more"] * (len(lines) > _SHOWN)
    return message(
        _call.WHO, f"{name} computes {readable_bytes(nbytes)} on each device from all {num} microbatches at "
        f"once, at {', '.join(lines[:_SHOWN] + lines[_SHOWN:][-1:])}",
        "An operation that needs the rows of several microbatches runs once after all of them: microbatches= "
        "saves no memory there.", "Compute it per row, or by sums over the batch; or drop microbatches.",
    )  # fmt: skip


class RowsOf(NamedTuple):
    """The rows of an argument beside the state."""

    leaf: str  # `batch['x'] float32[16,8]`
    size: int  # how many
    parts: int  # into how many parts they are split, by devices and microbatches
    axes: tuple[str, ...]  # the data axes that split them
    spec: str = ""  # how the argument is sharded, along other dims too

    @property
    def num_dims(self) -> int:
        return self.leaf.rpartition("[")[2].count(",") + 1

    @property
    def argument(self) -> str:
        return re.split(r"[\[. ]", self.leaf)[0]


def extra_work(
    work: float, repeated: Sequence[Repeated], rows: Sequence[RowsOf], config: StepConfig
) -> tuple[Extra, ...]:
    ratios = defaultdict[str, float](lambda: 1)
    for x in rows:
        ratios[x.leaf] *= _padded(x) / x.size if x.size else 1
    ratio = max(ratios.values(), default=1)
    # What padding explains of a line's extra work are copies of rows; the rest has other reasons.
    padding = sum(min(x.extra, (ratio - 1) * x.flops) for x in repeated)
    others = [x._replace(extra=x.extra - (ratio - 1) * x.flops) for x in repeated]
    others = sorted((x for x in others if x.extra > 0), key=lambda x: -x.extra)
    whole = sum(x.extra for x in others)
    left = [axis for axis in config.axis_names if rows and all(axis not in x.axes for x in rows)]
    every = work + padding + whole
    devices = math.prod(config.axes.values())
    found = []
    if padding and padding >= LEAST_SHARE * every:
        uneven = [x for x in rows if x.size % x.parts]
        found.append(Extra(*_uneven(uneven, config), padding / every, padding / devices))
    if whole and whole >= LEAST_SHARE * every:
        texts = _unsplit(left, rows, config) if left else _run_whole(others, every, rows, config)
        found.append(Extra(*texts, whole / every, whole / devices))
    return tuple(found)


_Texts = tuple[str, str, str, str, str]


def _uneven(rows: Sequence[RowsOf], config: StepConfig) -> _Texts:
    num = rows[0].parts
    devices = math.prod(config.axes[axis] for axis in rows[0].axes)
    microbatches, sizes = num // devices, sorted({x.size for x in rows})
    each = [f"from {size} to {to}" for size, to in sorted({(x.size, _padded(x)) for x in rows})]
    over = counted(devices, "device", "devices")
    over += f" with {microbatches} microbatches each" * (microbatches > 1)
    better = [
        k for k in range(1, 2 * microbatches)
        if k != microbatches and not any(size % (devices * k) for size in sizes)
    ]  # fmt: skip
    nearest = min(better, key=lambda k: (abs(k - microbatches), -k), default=None)
    instead = "" if nearest is None else f", or microbatches={nearest}"
    return (
        UNEVEN,
        listed([*dict.fromkeys(x.leaf for x in rows)], 8),
        f"rows are padded {' and '.join(each)} on {over}",
        "The last row is repeated until all have as many.",
        f"Use a batch size that is a multiple of {num}{instead}.",
    )


def _padded(rows: RowsOf) -> int:
    return -(-rows.size // rows.parts) * rows.parts


def _unsplit(left: Sequence[str], rows: Sequence[RowsOf], config: StepConfig) -> _Texts:
    axes = tuple(config.axis_names)
    own = tuple(axis for axis in axes if axis not in left)
    return (
        "unsplit",
        listed([*dict.fromkeys(x.leaf for x in rows)], 8),
        f"in_specs shards nothing over {', '.join(map(repr, left))} ({rows[0].spec}), whose devices all "
        "compute the same",
        "Each data axis shards a dim of the batch: its rows, or another dim.",
        f"Write in_specs={{{rows[0].argument!r}: jax.P({axes!r})}}, or axes={own!r} to leave the "
        "other axes to XLA.",
    )


def _run_whole(
    lines: Sequence[Repeated], every: float, rows: Sequence[RowsOf], config: StepConfig
) -> _Texts:
    lines = [x for x in lines if x.extra / every >= LEAST_SHARE] or lines[:1]
    shown = [f"{x.operation} at {x.where} ({x.extra / every:.0%})" for x in lines[:_SHOWN]]
    more = len(lines) - len(shown)
    axes = tuple(config.axis_names)
    spec = f"jax.P(None, {axes if len(axes) > 1 else axes[0]!r})"
    rows = [x for x in rows if {*x.axes} == {*axes}]
    # A loop over minibatches has as many iterations as dim 0 has elements.
    lengths = frozenset[int]().union(*(x.loops for x in lines[:_SHOWN]))
    looped = [x for x in rows if x.size in lengths and x.num_dims > 1]
    # Consecutive slices are on few devices each; a slice with every n-th row has rows of all.
    slices = frozenset[int]().union(*(x.row_loops for x in lines[:_SHOWN]))
    devices = math.prod(config.axes.values())
    strides = [n for n in slices if rows and all(x.size % (n * devices) == 0 for x in rows)]
    instead = ""
    if looped:
        specs = f"in_specs={{{looped[0].argument!r}: {spec}}}"
        instead = f" If its loop is over minibatches, shard the rows of each: {specs}."
    elif strides:
        num = max(strides)
        instead = (
            f" If its loop takes {num} consecutive slices of the rows, every device keeps its own rows where "
            f"a slice is one row in {num}: x.reshape(-1, {num}, *x.shape[1:]).swapaxes(0, 1)."
        )
    return (
        "whole",
        ", ".join(shown) + f" and {more} more" * (more > 0),
        "every device computes all rows",
        "An operation that needs rows of other devices and is no sum over the batch runs on all rows.",
        "Compute it per row, or by sums over the batch." + instead,
    )
