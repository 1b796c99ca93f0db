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
from jzero.sharding.partition._values import Hint, joined, put
from jzero.tracing import _jaxpr
from jzero.tracing._types import Eqn

_THROUGH = (
    Cost.IDENTITY, Cost.COPY, Cost.VIEW, Cost.CAST, Cost.ELEMENTWISE, Cost.ALONG, Cost.REDUCTION, Cost.PART,
    Cost.JOIN, Cost.REPEAT,
)  # fmt: skip
_ADDS = {*_rules.ADDS, "sub"}
_HELD = (Cost.IDENTITY, Cost.COPY, Cost.CAST, Cost.ELEMENTWISE)


def hints_of(
    step: Region, ins: Sequence[Layout | None], outs: Sequence[Layout | None]
) -> dict[ValueIn, Hint | None]:  # fmt: skip
    """For each value of a step, how it is wanted; nothing for values that nobody has asked of.

    `ins` and `outs` are the layouts of the state, before and after.
    """
    wanted = dict[ValueIn, Hint | None]()
    for atom, layout in zip(step.jaxpr.outvars, outs, strict=True):
        if not _jaxpr.is_literal(atom) and layout is not None and _is_cut(layout):
            wanted[step, atom] = _join(wanted.get((step, atom)), Hint(layout))
    held = _held(step, ins)

    def before(region: Region, eqn: Eqn, hints: Sequence[Hint | None]) -> list[Hint | None]:
        if eqn.primitive.name in _ADDS and hints[0] is None:
            hints = [_of_state(region, eqn, held)]
        return _before(eqn, hints)

    return _dataflow.backward(step, wanted, before, _join, None, _across)


def _held(step: Region, ins: Sequence[Layout | None]) -> dict[ValueIn, Layout | None]:
    """In which layouts the state is, and what is elementwise in it."""
    pairs = zip(step.jaxpr.invars, ins, strict=True)
    starts: dict[ValueIn, Layout | None] = {
        (step, v): x for v, x in pairs if x is not None and _is_cut(x)
    }
    first = lambda a, b: a or b  # noqa: E731
    return _dataflow.forward(step, starts, _after, first, None, _state_across)


def _after(region: Region, eqn: Eqn, facts: Sequence[Layout | None]) -> list[Layout | None]:
    if not _rules.costs(eqn, *_HELD):
        return [None for _ in eqn.outvars]
    shape = eqn.outvars[0].aval.shape
    return [next((x for x in facts if x is not None and x.shape == shape), None)]


def _of_state(
    region: Region, eqn: Eqn, held: dict[ValueIn, Layout | None]
) -> Hint | None:  # fmt: skip
    """Where something is added to state: as a gradient is, in the inner step of a step."""
    shape = eqn.outvars[0].aval.shape
    each = (held.get((region, x)) for x in eqn.invars if not _jaxpr.is_literal(x))
    return next((Hint(x) for x in each if x is not None and x.shape == shape), None)


def _is_cut(layout: Layout) -> bool:
    return any(dim.cuts for dim in layout.dims)


def _join(a: Hint | None, b: Hint | None) -> Hint | None:
    """What both want, as far as it fits together; the firm one's, or the first one's, where it does not."""
    if a is None or b is None:
        return a or b
    if a.is_firm != b.is_firm:
        return a if a.is_firm else b
    return Hint(joined(a.layout, b.layout), a.is_firm)


def _before(eqn: Eqn, outs: Sequence[Hint | None]) -> list[Hint | None]:
    """Of an equation's operands."""
    if eqn.primitive.name == "optimization_barrier":
        return [*outs]
    out = outs[0] if outs else None
    if out is not None and not out.is_firm and _rules.costs(eqn, Cost.REPEAT):
        return [None for _ in eqn.invars]  # A statistic of rows, which all of them read.
    if out is None or not _rules.costs(eqn, *_THROUGH):
        return [None for _ in eqn.invars]
    is_firm = out.is_firm and not _rules.costs(eqn, Cost.REDUCTION)
    if eqn.primitive.name == "reshape":
        shape = eqn.invars[0].aval.shape
        one = len(eqn.invars) == 1
        found = out.layout.reshapable(shape).reshape(shape) if one else out.layout
        return [Hint(found, is_firm) if _is_cut(found) else None]
    factors = _rules.factors_of(eqn)
    layouts = [_of_operand(eqn, k, out.layout, factors) for k in range(len(eqn.invars))]
    return [None if layout is None else Hint(layout, is_firm) for layout in layouts]


def _of_operand(eqn: Eqn, k: int, out: Layout, factors: Sequence[Factor]) -> Layout | None:
    """The cuts of the result's dims that the operand has."""
    atom, to = eqn.invars[k], eqn.outvars[0].aval.shape
    found = Layout(tuple(map(Dim, atom.aval.shape)), out.mesh)
    for factor in factors:
        d, e = factor.ins[k], factor.outs[0]
        if d is None or e is None or atom.aval.shape[d] != to[e]:
            continue
        for cut in out.dims[e].cuts:
            found = put(found, d, out.dims[e], cut) or found
    return found if _is_cut(found) else None


def _across(eqn: Eqn, edge: Edge, hint: Hint | None) -> Hint | None:
    """A stack's slice wants the dims behind the first one, and the other way round."""
    if hint is None or edge.kind is EdgeKind.PREDICATE:
        return None
    layout = hint.layout
    if edge.shift == -1:
        (_, atom) = edge.source
        layout = Layout((Dim(atom.aval.shape[0]), *layout.dims), layout.mesh)
    elif edge.shift == 1:
        layout = Layout(layout.dims[1:], layout.mesh)
    return hint._replace(layout=layout) if _is_cut(layout) else None


def _state_across(eqn: Eqn, edge: Edge, layout: Layout | None) -> Layout | None:
    if layout is None or edge.kind is EdgeKind.PREDICATE:
        return None
    if edge.shift == 1:
        (_, atom) = edge.target
        return Layout((Dim(atom.aval.shape[0]), *layout.dims), layout.mesh)
    return Layout(layout.dims[1:], layout.mesh) if edge.shift == -1 else layout
