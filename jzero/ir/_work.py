# SPDX-License-Identifier: Apache-2.0
"""Flops of a step, and how many of them devices repeat, or spend on padding."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jax.typing import ArrayLike

from jzero.ir import _rules
from jzero.ir._products import COUNTS
from jzero.ir._regions import Region, trip_count
from jzero.ir._rows import NO_ROWS, RowDims, row_dims
from jzero.ir._rules import Cost
from jzero.tracing import _jaxpr
from jzero.tracing._rewrite import Flat, behind
from jzero.tracing._types import Eqn, Jaxpr

LEAST_SHARE = 0.01  # The time of a step varies by more than that.


class Repeated(NamedTuple):
    operation: str
    where: str  # The user's line, `file.py:12 (train_step)`.
    flops: float  # What a single device would need for it.
    extra: float  # What all devices together spend beyond that.
    loops: frozenset[int] = frozenset()  # Lengths of the loops around it.
    row_loops: frozenset[int] = frozenset()  # Lengths of those loops that slice rows.


# They move elements, without arithmetic. Communication is listed separately.
_MOVES = (
    Cost.IDENTITY, Cost.COPY, Cost.VIEW, Cost.PART, Cost.REPEAT, Cost.JOIN, Cost.CAST, Cost.SOURCE, Cost.DRAW,
    Cost.TRANSFER, Cost.COLLECTIVE,
)  # fmt: skip
_FACTORIZATION = _rules.RULES["cholesky"]  # and all others that take matrices


def flops(eqn: Eqn) -> float:
    """Operations of an equation without inner programs; rough, except for matrix products."""
    name, rule = eqn.primitive.name, _rules.rule_of(eqn)
    if rule is not None and rule.cost in _MOVES or "callback" in name:
        return 0
    if (count := COUNTS.get(name)) is not None:
        return float(2 * count(eqn))
    if name == "sort":
        sorted_dim = eqn.invars[0].aval.shape[eqn.params["dimension"]]
        return float(sum(x.aval.size for x in eqn.invars) * math.log2(max(2, sorted_dim)))
    if name == "triangular_solve":
        return float(eqn.outvars[0].aval.size * eqn.invars[0].aval.shape[-1])
    if rule is _FACTORIZATION:
        return float(eqn.invars[0].aval.size * eqn.invars[0].aval.shape[-1])
    if rule is not None and rule.cost is Cost.ELEMENTWISE:
        return float(eqn.outvars[0].aval.size)
    sizes = [getattr(atom.aval, "size", 0) for atom in (*eqn.invars, *eqn.outvars)]
    if rule is not None and rule.cost is Cost.LOOKUP:  # Count the elements looked up or written.
        return float(eqn.outvars[0].aval.size if len(eqn.invars) == 2 else sizes[2])
    return float(max(sizes, default=0))


# [Note: work done more than once]
# The whole batch's program and one device's name the same lines of the user's. For each primitive of each
# line, the work on rows is that of the equations with a batch dim. All others (an update, a mask) are the
# same on every device and do not count here. So all devices together do `num * (device's - others')` work on
# rows, and repeat what exceeds the whole batch's, for whatever reason.


def repeated(
    whole: Flat,
    device: Flat | Jaxpr,
    consts: Sequence[ArrayLike],
    dims: Sequence[RowDims],
    num: int,
) -> tuple[float, list[Repeated]]:
    """The flops of a step, and the repeated work on rows, largest first; [Note: work done more than once].

    `whole` is the traced step with `consts` and the batch dims `dims` of its inputs, `device` is the program
    of one of `num` devices (times microbatches).
    """
    program = Region(whole, [*consts])
    every = [*_equations(program, 1)]
    total, of_all = sum(work for *_, work in every), _by_line(every)
    of_device = _by_line([*_equations(Region(device, []), 1)])
    # An upper bound, which counts work that is the same on every device, too: cheap, and often enough.
    most = sum(max(0, num * of_device.get(key, 0) - work) for key, work in of_all.items())
    if most < LEAST_SHARE * total:
        return total, []
    has_rows = _Rows(program, dims)
    of_rows = _by_line([x for x in every if has_rows(*x[:2])])
    lines = {_key(eqn): (region, eqn) for region, eqn, _ in every}
    found: dict[tuple[str, str], Repeated] = {}
    for key, on_rows in of_rows.items():
        extra = num * (of_device.get(key, 0) - (of_all[key] - on_rows)) - on_rows
        if extra > 0:
            region, eqn = lines[key]
            named = eqn.primitive.name, region.at_line(eqn).removeprefix(" at ")
            old = found.get(named, Repeated(*named, 0, 0))
            around = [*_loops(region)]
            found[named] = old._replace(
                flops=old.flops + on_rows,
                extra=old.extra + extra,
                loops=old.loops | {trip_count(loop) or 0 for _, loop in around},
                row_loops=old.row_loops
                | {trip_count(loop) or 0 for outer, loop in around if has_rows.slices(outer, loop)},
            )
    return total, sorted(found.values(), key=lambda x: (-x.extra, x.where, x.operation))


def flops_by_pass(jaxpr: Jaxpr) -> dict[str, float]:
    """A program's flops by pass: 'forward', 'backward' or '' (neither). A `while` counts as one iteration."""
    found = {"forward": 0.0, "backward": 0.0, "": 0.0}
    for region, eqn, work in _equations(Region(jaxpr, []), 1):
        found[region.pass_of(eqn) or ""] += work
    return found


def _loops(region: Region) -> Iterator[tuple[Region, Eqn]]:
    """The equations around a region, each with its region."""
    while region.around is not None:
        yield region.around
        region, _ = region.around


_Counted = tuple[Region, Eqn, float]
_SameLine = tuple[str, int]


def _equations(region: Region, times: int) -> Iterator[_Counted]:
    """Equations without programs, and their flops; a `while` counts as one iteration.

    Equations whose results nobody reads are left out: XLA drops them.
    """
    for eqn in behind(region.jaxpr.eqns, region.jaxpr.outvars)[0]:
        inner = () if _rules.rule_of(eqn) is not None else region.inner(eqn)
        if not inner:
            yield region, eqn, times * flops(eqn)
        for each in inner:
            yield from _equations(each, times * (trip_count(eqn) or 1))


def _key(eqn: Eqn) -> _SameLine:
    return eqn.primitive.name, id(eqn.source_info.traceback)


def _by_line(equations: Sequence[_Counted]) -> Mapping[_SameLine, float]:
    found: dict[_SameLine, float] = defaultdict(float)
    for _, eqn, work in equations:
        if work:
            found[_key(eqn)] += work
    return found


class _Rows:
    def __init__(self, program: Region, dims: Sequence[RowDims]):
        self._of_state = {
            var.aval.shape for var, own in zip(program.jaxpr.invars, dims, strict=True) if not own
        }
        self._found = row_dims(program, dims)

    def __call__(self, region: Region, eqn: Eqn) -> bool:
        """Whether an equation is work on rows, and not an elementwise update of parameters."""
        atoms = [x for x in (*eqn.invars, *eqn.outvars) if not _jaxpr.is_literal(x)]
        dims = NO_ROWS.union(*(self._found.get((region, atom), NO_ROWS) for atom in atoms))
        if not _rules.is_elementwise(eqn):
            return bool(dims)
        # A loop over minibatches updates the parameters in each iteration.
        return max(dims, default=-1) >= 0 and eqn.outvars[0].aval.shape not in self._of_state

    def slices(self, region: Region, eqn: Eqn) -> bool:
        """Whether it is a loop whose iterations take slices along a batch dim."""
        stacks = _jaxpr.scan_stacks(eqn) if eqn.primitive.name == "scan" else []
        return any(0 in self._found.get((region, stack), NO_ROWS) for stack in stacks)
