# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of a step, and how much of it is done more than once: by every device, or on padding."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jax.typing import ArrayLike

from jzero.ir import _rules
from jzero.ir._dataflow import forward
from jzero.ir._products import COUNTS
from jzero.ir._regions import Edge, EdgeKind, Region, ValueIn, turns
from jzero.ir._rules import Cost
from jzero.tracing import _jaxpr
from jzero.tracing._rewrite import Flat, without_unread
from jzero.tracing._types import Eqn, Jaxpr

# What is less costs nothing that anybody would see: the time of a step varies by more.
LEAST_SHARE = 0.01


class Repeated(NamedTuple):
    """Work on the batch that the devices do more than once.

    Attributes:
      operation: the primitive.
      where: the user's line, `file.py:12 (train_step)`.
      flops: that one device would need for it.
      extra: flops of all devices together beyond that.
    """

    operation: str
    where: str
    flops: float
    extra: float


# Dims of the batch; inside of a loop over rows, whose values are each of one row, minus its depth.
_Dims = frozenset[int]
_NONE: _Dims = frozenset()
# Of these no arithmetic is counted: they move elements. What they move between devices is listed as such.
_MOVES = (
    Cost.IDENTITY, Cost.COPY, Cost.VIEW, Cost.PART, Cost.REPEAT, Cost.JOIN, Cost.CAST, Cost.SOURCE, Cost.DRAW,
    Cost.TRANSFER, Cost.COLLECTIVE,
)  # fmt: skip
_FACTORIZATION = _rules.RULES["cholesky"]  # and all others that take matrices


def flops(eqn: Eqn) -> float:
    """Operations of an equation that holds no programs, to the order of what matters beside products."""
    if _rules.costs(eqn, *_MOVES) or "callback" in eqn.primitive.name:
        return 0
    sizes = [getattr(atom.aval, "size", 0) for atom in (*eqn.invars, *eqn.outvars)]
    if (count := COUNTS.get(eqn.primitive.name)) is not None:
        return float(2 * count(eqn))
    if (each := _EACH.get(eqn.primitive.name)) is not None:
        return each(eqn)
    if _rules.rule_of(eqn) is _FACTORIZATION:
        return float(eqn.invars[0].aval.size * eqn.invars[0].aval.shape[-1])
    if _rules.costs(eqn, Cost.LOOKUP):  # What is looked up or written, and not the table.
        return float(eqn.outvars[0].aval.size if len(eqn.invars) == 2 else sizes[2])
    return float(max(sizes, default=0))


def _of_sort(eqn: Eqn) -> float:
    sorted_dim = eqn.invars[0].aval.shape[eqn.params["dimension"]]
    return float(sum(x.aval.size for x in eqn.invars) * math.log2(max(2, sorted_dim)))


def _of_solve(eqn: Eqn) -> float:
    return float(eqn.outvars[0].aval.size * eqn.invars[0].aval.shape[-1])


_EACH = {
    "sort": _of_sort,
    "triangular_solve": _of_solve,
}


# [Note: work done more than once]
# The whole batch's program and one device's have the same user's lines, whatever wrote the second. Of each
# primitive of each line, the work on rows is that of the equations with a dim of the batch; all others (an
# update, a mask) are the same on every device, and no matter here: stages share out what they can. So the
# work on rows that all devices do is `num * (device's - others')`, and what it is more than the whole
# batch's is done in vain. It asks for no reason why, and of the rewriting for nothing.


def repeated(
    whole: Flat,
    device: Flat | Jaxpr,
    consts: Sequence[ArrayLike],
    dims: Sequence[int | None],
    num: int,
) -> tuple[float, list[Repeated]]:
    """Work on rows that is done more than once; [Note: work done more than once].

    Args:
      whole: the step of the whole batch, calls replaced by their equations.
      device: the same as one of `num` devices runs it.
      consts: of `whole`.
      dims: the dim of each input of `whole` that is the batch's; None for what has none.
      num: of devices, or of devices times microbatches.

    Returns:
      The flops of the step, and what of them is done more than once, the most first.
    """
    program = Region(whole, [*consts])
    every = [*_equations(program, 1)]
    total, of_all = sum(work for *_, work in every), _by_line(every)
    of_device = _by_line([*_equations(Region(device, []), 1)])
    # What is the same on every device, an update above all, counts here too: it is not known yet.
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
            found[named] = old._replace(flops=old.flops + on_rows, extra=old.extra + extra)
    return total, sorted(found.values(), key=lambda x: (-x.extra, x.where, x.operation))


_Counted = tuple[Region, Eqn, float]
_SameLine = tuple[str, int]


def _equations(region: Region, times: int) -> Iterator[_Counted]:
    """Equations that hold no programs, and their flops; of loops of unknown length those of one iteration.

    Without those that nobody reads: XLA drops them.
    """
    for eqn in without_unread(region.jaxpr.eqns, region.jaxpr.outvars, lambda _: True):
        inner = () if _rules.rule_of(eqn) is not None else region.inner(eqn)
        if not inner:
            yield region, eqn, times * flops(eqn)
        for each in inner:
            yield from _equations(each, times * (turns(eqn) or 1))


def _key(eqn: Eqn) -> _SameLine:
    return eqn.primitive.name, id(eqn.source_info.traceback)


def _by_line(equations: Sequence[_Counted]) -> Mapping[_SameLine, float]:
    found: dict[_SameLine, float] = defaultdict(float)
    for _, eqn, work in equations:
        if work:
            found[_key(eqn)] += work
    return found


class _Rows:
    """Which values of a program have a dim of the batch."""

    def __init__(self, program: Region, dims: Sequence[int | None]):
        start: dict[ValueIn, _Dims] = {
            (program, var): frozenset({dim})
            for var, dim in zip(program.jaxpr.invars, dims, strict=True)
            if dim is not None
        }
        self._of_state = {
            var.aval.shape
            for var, dim in zip(program.jaxpr.invars, dims, strict=True)
            if dim is None
        }
        self._found = forward(program, start, _through, frozenset.union, _NONE, _across)

    def __call__(self, region: Region, eqn: Eqn) -> bool:
        """Whether it is work on rows: not what updates parameters by rows, element by element."""
        atoms = [x for x in (*eqn.invars, *eqn.outvars) if not _jaxpr.is_literal(x)]
        dims = _NONE.union(*(self._found.get((region, atom), _NONE) for atom in atoms))
        if not _rules.is_elementwise(eqn):
            return bool(dims)
        # A loop over minibatches updates in each iteration.
        return max(dims, default=-1) >= 0 and eqn.outvars[0].aval.shape not in self._of_state


def _depth(region: Region) -> int:
    return 0 if region.around is None else 1 + _depth(region.around[0])


def _across(eqn: Eqn, edge: Edge, dims: _Dims) -> _Dims:
    """Dims across an edge: in a loop over rows a value is of one of them, until the loop ends."""
    if edge.kind is EdgeKind.PREDICATE or not dims:
        return _NONE
    found = set[int]()
    inside = -_depth(edge.source[0])
    for dim in dims:
        if dim >= 0:
            sliced = dim + edge.shift < 0
            found.add(-_depth(edge.target[0]) if sliced else dim + edge.shift)
        elif edge.kind is not EdgeKind.OUT or dim != inside:
            found.add(dim)
        elif edge.shift == 1:
            found.add(0)
    return frozenset(found)


def _through(region: Region, eqn: Eqn, ins: Sequence[_Dims]) -> Sequence[_Dims]:
    outs = [set[int]() for _ in eqn.outvars]
    if not any(ins):
        return [_NONE] * len(outs)
    if eqn.primitive.name in ("psum", "pmax", "pmin"):
        return _without(eqn, ins)
    left = [set(dims) for dims in ins]
    for factor in _rules.factors_of(eqn):
        places = [(i, dim) for i, dim in enumerate(factor.ins) if dim is not None]
        has_rows = any(dim in ins[i] for i, dim in places)
        for i, dim in places:
            left[i].discard(dim)
        for out, to in zip(outs, factor.outs, strict=True):
            if has_rows and to is not None:
                out.add(to)
    reduces = _rules.costs(eqn, Cost.PRODUCT, Cost.REDUCTION)
    for atom, dims in zip(eqn.invars, left, strict=True):
        for dim in dims:
            for out, var in zip(outs, eqn.outvars, strict=True):
                # Of what runs along the dim, and of what is not known, a dim as long at the same place.
                if dim < 0 or not reduces and _size(var, dim) == _size(atom, dim):
                    out.add(dim)
    return [frozenset(out) for out in outs]


def _without(eqn: Eqn, ins: Sequence[_Dims]) -> Sequence[_Dims]:
    """A collective over an axis that `jax.vmap` has made a dim reduces that dim."""
    gone = {axis for axis in eqn.params["axes"] if isinstance(axis, int)}
    return [frozenset(d - sum(g < d for g in gone if d >= 0) for d in dims - gone) for dims in ins]


def _size(atom: object, dim: int) -> int | None:
    shape: Sequence[int] = getattr(getattr(atom, "aval", None), "shape", ())
    return shape[dim] if dim < len(shape) else None
