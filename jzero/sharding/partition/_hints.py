# SPDX-License-Identifier: Apache-2.0
"""Hints: in which layout what follows wants a value, so that a sum is scattered there and nowhere else.

They start from the layouts of the new state, and go back through all that keeps dims; products stop them.
"""

from __future__ import annotations

from collections.abc import Sequence

from jzero.ir import _dataflow, _rules
from jzero.ir._factors import Factor
from jzero.ir._layout import Dim, Layout
from jzero.ir._regions import Edge, EdgeKind, Region, ValueIn
from jzero.ir._rules import Cost
from jzero.sharding.partition._values import joined, put
from jzero.tracing import _jaxpr
from jzero.tracing._types import Eqn

Hint = Layout | None
_THROUGH = (
    Cost.IDENTITY, Cost.COPY, Cost.VIEW, Cost.CAST, Cost.ELEMENTWISE, Cost.ALONG, Cost.REDUCTION, Cost.PART,
    Cost.JOIN, Cost.REPEAT,
)  # fmt: skip


def hints_of(step: Region, outs: Sequence[Layout | None]) -> dict[ValueIn, Hint]:
    """For each value of a step, the layout that is wanted; nothing for values that nobody has asked of."""
    wanted = dict[ValueIn, Hint]()
    for atom, layout in zip(step.jaxpr.outvars, outs, strict=True):
        if not _jaxpr.is_literal(atom) and layout is not None and _is_cut(layout):
            wanted[step, atom] = _join(wanted.get((step, atom)), layout)
    return _dataflow.backward(step, wanted, _before, _join, None, _across)


def _is_cut(layout: Layout) -> bool:
    return bool(layout.axes)


def _join(a: Hint, b: Hint) -> Hint:
    """What both want, as far as it fits together; the first one's where it does not."""
    if a is None or b is None:
        return a or b
    return joined(a, b)


def _before(region: Region, eqn: Eqn, outs: Sequence[Hint]) -> list[Hint]:
    """Of an equation's operands."""
    if eqn.primitive.name == "optimization_barrier":
        return [*outs]
    out = outs[0] if outs else None
    if out is None or not _rules.costs(eqn, *_THROUGH):
        return [None for _ in eqn.invars]
    if eqn.primitive.name == "reshape":
        shape = eqn.invars[0].aval.shape
        found = out.reshapable(shape).reshape(shape) if len(eqn.invars) == 1 else out
        return [found if _is_cut(found) else None]
    factors = _rules.factors_of(eqn)
    return [_of_operand(eqn, k, out, factors) for k in range(len(eqn.invars))]


def _of_operand(eqn: Eqn, k: int, out: Layout, factors: Sequence[Factor]) -> Hint:
    """The cuts of the result's dims that the operand has."""
    atom, to = eqn.invars[k], eqn.outvars[0].aval.shape
    if atom.aval.shape == to and _rules.is_elementwise(eqn):
        return out
    if not atom.aval.shape:
        return None
    found = Layout(tuple(map(Dim, atom.aval.shape)), out.mesh)
    for factor in factors:
        d, e = factor.ins[k], factor.outs[0]
        if d is None or e is None or atom.aval.shape[d] != to[e]:
            continue
        for cut in out.dims[e].cuts:
            found = put(found, d, out.dims[e], cut) or found
    return found if _is_cut(found) else None


def _across(eqn: Eqn, edge: Edge, hint: Hint) -> Hint:
    """A stack's slice wants the dims behind the first one, and the other way round."""
    if hint is None or edge.kind is EdgeKind.PREDICATE:
        return None
    if edge.shift == -1:
        (_, atom) = edge.source
        hint = Layout((Dim(atom.aval.shape[0]), *hint.dims), hint.mesh)
    elif edge.shift == 1:
        hint = Layout(hint.dims[1:], hint.mesh)
    return hint if _is_cut(hint) else None
