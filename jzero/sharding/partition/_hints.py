# SPDX-License-Identifier: Apache-2.0
"""Hints: in which layout what follows wants a value, so that a sum is scattered there and nowhere else.

They start from the layouts of the new state, and go back through all that keeps dims; products stop them.
With them goes the name of the leaf that is made of a value: of a sum, the one whose gradient it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jzero.ir import _dataflow, _rules
from jzero.ir._factors import Factor
from jzero.ir._layout import Dim, Layout
from jzero.ir._regions import Edge, EdgeKind, Region, ValueIn
from jzero.ir._rules import Cost
from jzero.sharding.partition._values import joined, put
from jzero.tracing import _jaxpr
from jzero.tracing._types import Eqn


class Hint(NamedTuple):
    """What follows a value.

    Attributes:
      layout: that it wants; without cuts if it asks for none.
      leaf: the leaf that it makes of the value, element by element.
    """

    layout: Layout
    leaf: str


_Hint = Hint | None
_THROUGH = (
    Cost.IDENTITY, Cost.COPY, Cost.VIEW, Cost.CAST, Cost.ELEMENTWISE, Cost.ALONG, Cost.PART, Cost.JOIN,
    Cost.REPEAT,
)  # fmt: skip


def hints_of(
    step: Region, outs: Sequence[Layout | None], leaves: Sequence[str]
) -> dict[ValueIn, _Hint]:
    """For each value of a step, what follows it; None for values that nobody has asked of.

    Args:
      step: the whole batch's.
      outs: the layouts of its results.
      leaves: their names, of those that are to be named.
    """
    wanted = dict[ValueIn, _Hint]()
    for atom, layout, leaf in zip(step.jaxpr.outvars, outs, leaves, strict=True):
        if not _jaxpr.is_literal(atom) and layout is not None:
            wanted[step, atom] = _join(wanted.get((step, atom)), _hint(layout, leaf))
    return _dataflow.backward(step, wanted, _before, _join, None, _across)


def _hint(layout: Layout, leaf: str) -> _Hint:
    """None where it says nothing. A scalar is of no leaf: what scales all gradients comes of all of them."""
    leaf = leaf if layout.dims else ""
    return Hint(layout, leaf) if leaf or _is_cut(layout) else None


def _is_cut(layout: Layout) -> bool:
    return any(dim.cuts for dim in layout.dims)


def _join(a: _Hint, b: _Hint) -> _Hint:
    """What both want, as far as it fits together; the first one's where it does not."""
    if a is None or b is None:
        return a or b
    return Hint(joined(a.layout, b.layout), a.leaf or b.leaf)


def _before(region: Region, eqn: Eqn, outs: Sequence[_Hint]) -> list[_Hint]:
    """Of an equation's operands."""
    if eqn.primitive.name == "optimization_barrier":
        return [*outs]
    out = outs[0] if outs else None
    if out is None or not _rules.costs(eqn, *_THROUGH):
        return [None for _ in eqn.invars]
    if eqn.primitive.name == "reshape":
        shape = eqn.invars[0].aval.shape
        if len(eqn.invars) == 1:
            out = Hint(out.layout.reshapable(shape).reshape(shape), out.leaf)
        return [_hint(*out)]
    factors = _rules.factors_of(eqn)
    return [_of_operand(eqn, k, out, factors) for k in range(len(eqn.invars))]


def _of_operand(eqn: Eqn, k: int, out: Hint, factors: Sequence[Factor]) -> _Hint:
    """The cuts of the result's dims that the operand has; the leaf if it has no other dims."""
    atom, to = eqn.invars[k], eqn.outvars[0].aval.shape
    found, others = Layout(tuple(map(Dim, atom.aval.shape)), out.layout.mesh), atom.aval.ndim
    for factor in factors:
        d, e = factor.ins[k], factor.outs[0]
        if d is None or e is None or atom.aval.shape[d] != to[e]:
            continue
        others -= 1
        for cut in out.layout.dims[e].cuts:
            found = put(found, d, out.layout.dims[e], cut) or found
    return _hint(found, "" if others else out.leaf)


def _across(eqn: Eqn, edge: Edge, hint: _Hint) -> _Hint:
    """A stack's slice wants the dims behind the first one, and the other way round."""
    if hint is None or edge.kind is EdgeKind.PREDICATE:
        return None
    layout, leaf = hint
    if edge.shift == -1:
        (_, atom) = edge.source
        layout = Layout((Dim(atom.aval.shape[0]), *layout.dims), layout.mesh)
    elif edge.shift == 1:
        layout = Layout(layout.dims[1:], layout.mesh)
    return _hint(layout, leaf)
