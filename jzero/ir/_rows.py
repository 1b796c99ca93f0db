# SPDX-License-Identifier: Apache-2.0
"""Which dims of a step's values are the batch's, by dataflow analysis of the traced step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from jzero.ir import _rules
from jzero.ir._dataflow import forward
from jzero.ir._factors import SCATTER_REDUCES, Factor
from jzero.ir._regions import Edge, EdgeKind, Region, ValueIn, trip_count
from jzero.ir._rules import BY_DEVICES, Cost
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn

# A value's batch dims. In a loop over rows each value belongs to one row: minus the loop's depth stands for
# it.
RowDims = frozenset[int]
NO_ROWS: RowDims = frozenset()


Unsure = Callable[[Region, Eqn], object]


def row_dims(
    program: Region, dims: Sequence[RowDims], unsure: Unsure = lambda region, eqn: None
) -> dict[ValueIn, RowDims]:
    """The batch dims of all values that have some, from `dims`, those of the inputs.

    Calls `unsure` for each equation after which batch dims are a guess: it mixes or selects rows, or is a
    branch or loop that rows decide.
    """
    start: dict[ValueIn, RowDims] = {
        (program, var): own for var, own in zip(program.jaxpr.invars, dims, strict=True) if own
    }
    through = functools.partial(_through, unsure)
    across = functools.partial(_across, unsure)
    return forward(program, start, through, frozenset.union, NO_ROWS, across)


def _depth(region: Region) -> int:
    return 0 if region.around is None else 1 + _depth(region.around[0])


def _across(unsure: Unsure, eqn: Eqn, edge: Edge, dims: RowDims) -> RowDims:
    """Batch dims across an edge; see `RowDims` for loops over rows."""
    if not dims:
        return NO_ROWS
    if edge.kind is EdgeKind.PREDICATE:
        unsure(edge.source[0], eqn)
        return NO_ROWS
    found = set[int]()
    inside = -_depth(edge.source[0])
    for dim in dims:
        if dim >= 0:
            if sliced := dim + edge.shift < 0:
                unsure(edge.source[0], eqn)
            found.add(-_depth(edge.target[0]) if sliced else dim + edge.shift)
        elif edge.kind is not EdgeKind.OUT or dim != inside:
            found.add(dim)
        elif edge.shift == 1:
            found.add(0)
    return frozenset(found)


def _through(unsure: Unsure, region: Region, eqn: Eqn, ins: Sequence[RowDims]) -> Sequence[RowDims]:
    outs = [set[int]() for _ in eqn.outvars]
    if not any(ins):
        return [NO_ROWS] * len(outs)
    if eqn.primitive.name == "optimization_barrier":
        return ins
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
        if has_rows and factor.outs[0] is None and not _is_sum(region, eqn, factor):
            unsure(region, eqn)
    if any(left):
        unsure(region, eqn)
    reduces = _rules.costs(eqn, Cost.PRODUCT, Cost.REDUCTION)
    for atom, dims in zip(eqn.invars, left, strict=True):
        for dim in dims:
            for out, var in zip(outs, eqn.outvars, strict=True):
                # For an operation along the dim, or an unknown one: a dim of the same size at the same place.
                if dim < 0 or not reduces and _size(var, dim) == _size(atom, dim):
                    out.add(dim)
    return [frozenset(out) for out in outs]


def _is_sum(region: Region, eqn: Eqn, factor: Factor) -> bool:
    """Whether devices can reduce the results of their rows: a scatter's operand must be zeros."""
    if factor.reduces not in BY_DEVICES or eqn.primitive.name not in SCATTER_REDUCES:
        return factor.reduces in BY_DEVICES
    made = region.makers.get(_jaxpr.variable(eqn.invars[0]))
    starts = made is not None and region.jaxpr.eqns[made].primitive.name == "broadcast_in_dim"
    return starts and not _jaxpr.variables_read(region.jaxpr.eqns[made or 0])


def _without(eqn: Eqn, ins: Sequence[RowDims]) -> Sequence[RowDims]:
    """A collective over an axis of `jax.vmap` reduces a dim."""
    gone = {axis for axis in eqn.params["axes"] if isinstance(axis, int)}
    return [frozenset(d - sum(g < d for g in gone if d >= 0) for d in dims - gone) for dims in ins]


def _size(atom: object, dim: int) -> int | None:
    shape: Sequence[int] = getattr(getattr(atom, "aval", None), "shape", ())
    return shape[dim] if dim < len(shape) else None


_Inputs = frozenset[int]


def looped_inputs(program: Region) -> _Inputs:
    """Indices of the inputs over whose dim 0 a loop of the program runs: an iteration takes one index."""
    inputs = program.jaxpr.invars
    start: dict[ValueIn, _Inputs] = {
        (program, var): _Inputs([i]) for i, var in enumerate(inputs) if var.aval.shape
    }

    def across(eqn: Eqn, edge: Edge, inputs: _Inputs) -> _Inputs:
        return _Inputs() if edge.shift or edge.kind is EdgeKind.PREDICATE else inputs

    found = forward(program, start, _of_dim_0, frozenset.union, _Inputs(), across)
    looped = [
        found.get((region, atom), _Inputs())
        for region, eqn in program.walk()
        for atom in _sliced_by_index(region, eqn)
    ]
    return _Inputs().union(*looped)


def _of_dim_0(region: Region, eqn: Eqn, ins: Sequence[_Inputs]) -> Sequence[_Inputs]:
    """The inputs whose whole dim 0 is that of a result."""
    if not any(ins):
        return [_Inputs()] * len(eqn.outvars)
    if eqn.primitive.name == "optimization_barrier":
        return ins
    factors = [factor for factor in _rules.factors_of(eqn) if 0 in factor.ins]

    def of_result(k: int) -> _Inputs:
        return _Inputs().union(*(
            own for factor in factors for atom, dim, own in zip(eqn.invars, factor.ins, ins, strict=True)
            if dim == factor.outs[k] == 0 and _size(atom, 0) == _size(eqn.outvars[k], 0)
        ))  # fmt: skip

    return [of_result(k) for k in range(len(eqn.outvars))]


def _sliced_by_index(region: Region, eqn: Eqn) -> Sequence[Atom]:
    """The stacks of a `scan`; in a loop, an operand of which each iteration looks up one index."""
    if eqn.primitive.name == "scan":
        return _jaxpr.scan_stacks(eqn)
    sizes = eqn.params["slice_sizes"] if eqn.primitive.name in ("dynamic_slice", "gather") else ()
    if region.around is None or not sizes or sizes[0] != 1:
        return []
    return eqn.invars[:1] if trip_count(region.around[1]) == _size(eqn.invars[0], 0) else []
