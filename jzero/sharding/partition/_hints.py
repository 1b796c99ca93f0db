# SPDX-License-Identifier: Apache-2.0
"""Hints: the layout in which the readers of a value want it, to which a partial sum is reduce-scattered.

A backward dataflow from the layouts of the new state, through operations that keep dims; products stop it.
Hints also carry the name of the leaf that a value becomes: of a partial sum, the leaf whose gradient it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jzero.ir import _dataflow, _rules
from jzero.ir._factors import Factor
from jzero.ir._layout import Dim, Layout
from jzero.ir._regions import Edge, EdgeKind, Region, ValueIn
from jzero.ir._rules import Cost
from jzero.sharding.partition._values import Hint, followed, joined
from jzero.tracing import _jaxpr
from jzero.tracing._types import Eqn, Var

_THROUGH = (
    Cost.IDENTITY, Cost.COPY, Cost.VIEW, Cost.CAST, Cost.ELEMENTWISE, Cost.ALONG, Cost.REDUCTION, Cost.PART,
    Cost.JOIN, Cost.REPEAT,
)  # fmt: skip
_ADDS = {*_rules.ADDS, "sub"}
_HELD = (Cost.IDENTITY, Cost.COPY, Cost.CAST, Cost.ELEMENTWISE)


def hints_of(
    step: Region, ins: Sequence[Layout | None], outs: Sequence[Layout | None],
    reduced: Sequence[Hint | None] = (), read: Mapping[Var, Hint] = {},
) -> dict[ValueIn, Hint | None]:  # fmt: skip
    """The hints of a step's values.

    ins: layouts of the arguments that are state; outs: of the results.
    reduced: for the first results, the hints of the gradients that they depend on.
    read: hints of values inside.
    """
    wanted = dict[ValueIn, Hint | None]()
    returned = [None if x is None else _hint(x, "") for x in outs]
    returned[: len(reduced)] = [a or b for a, b in zip(reduced, returned, strict=False)]
    for atom, hint in zip(step.jaxpr.outvars, returned, strict=True):
        if not _jaxpr.is_literal(atom):
            wanted[step, atom] = _join(wanted.get((step, atom)), hint)
    for var, hint in read.items():
        wanted[step, var] = _join(wanted.get((step, var)), hint)
    held = _held(step, ins)

    def before(region: Region, eqn: Eqn, hints: Sequence[Hint | None]) -> list[Hint | None]:
        out = hints[0] if hints else None
        asks = out is not None and out.layout.axes
        if eqn.primitive.name in _ADDS and not asks:
            found = _of_state(region, eqn, held)
            if found is not None:
                hints = [found if out is None else found._replace(leaf=out.leaf)]
        return _before(eqn, hints)

    return _dataflow.backward(step, wanted, before, _join, None, _across)


def _held(step: Region, ins: Sequence[Layout | None]) -> dict[ValueIn, Layout | None]:
    """Layouts of the state, and of values that are elementwise in it."""
    pairs = zip(step.jaxpr.invars, ins, strict=True)
    starts: dict[ValueIn, Layout | None] = {
        (step, v): x for v, x in pairs if x is not None and x.axes
    }
    return _dataflow.forward(step, starts, _after, lambda a, b: a or b, None, _state_across)


def _after(region: Region, eqn: Eqn, facts: Sequence[Layout | None]) -> list[Layout | None]:
    if not _rules.costs(eqn, *_HELD):
        return [None for _ in eqn.outvars]
    shape = eqn.outvars[0].aval.shape
    return [next((x for x in facts if x is not None and x.shape == shape), None)]


def _of_state(region: Region, eqn: Eqn, held: dict[ValueIn, Layout | None]) -> Hint | None:
    """The hint of a value that is added to state, as an inner optimizer step adds gradients."""
    shape = eqn.outvars[0].aval.shape
    each = (held.get((region, x)) for x in eqn.invars if not _jaxpr.is_literal(x))
    return next((Hint(x) for x in each if x is not None and x.shape == shape), None)


def _hint(layout: Layout, leaf: str, is_direct: bool = True) -> Hint | None:
    """None for an empty hint. A scalar has no leaf: a factor of all gradients depends on all of them."""
    leaf = leaf if layout.dims else ""
    return Hint(layout, is_direct, leaf) if leaf or layout.axes else None


def _join(a: Hint | None, b: Hint | None) -> Hint | None:
    """Both hints as far as they fit together; where not, the direct one, or the first."""
    if a is None or b is None:
        return a or b
    leaf = a.leaf or b.leaf
    if a.is_direct != b.is_direct and a.layout.axes and b.layout.axes:
        return (a if a.is_direct else b)._replace(leaf=leaf)
    asks = [x for x in (a, b) if x.layout.axes]
    direct = not asks or any(x.is_direct for x in asks)
    return Hint(joined(a.layout, b.layout), direct, leaf)


def _before(eqn: Eqn, outs: Sequence[Hint | None]) -> list[Hint | None]:
    if eqn.primitive.name == "optimization_barrier":
        return [*outs]
    out = outs[0] if outs else None
    if out is not None and not out.is_direct and _rules.costs(eqn, Cost.REPEAT):
        return [None for _ in eqn.invars]  # A batch statistic, which all rows read.
    if out is None or not _rules.costs(eqn, *_THROUGH):
        return [None for _ in eqn.invars]
    is_direct = out.is_direct and not _rules.costs(eqn, Cost.REDUCTION)
    if eqn.primitive.name == "reshape":
        shape = eqn.invars[0].aval.shape
        if len(eqn.invars) == 1:
            out = out._replace(layout=out.layout.reshapable(shape).reshape(shape))
        return [_hint(out.layout, out.leaf, is_direct)]
    factors = _rules.factors_of(eqn)
    out = out._replace(is_direct=is_direct)
    return [_of_operand(eqn, k, out, factors) for k in range(len(eqn.invars))]


def _of_operand(eqn: Eqn, k: int, out: Hint, factors: Sequence[Factor]) -> Hint | None:
    """The result's cuts of dims the operand has; the leaf if it has no other dims, or is joined in it."""
    atom, to = eqn.invars[k], eqn.outvars[0].aval.shape
    if atom.aval.shape == to and _rules.is_elementwise(eqn):
        return out
    if not atom.aval.shape:
        return None
    dims = [(f.ins[k], f.outs[0]) for f in factors]
    found = followed(Layout(tuple(map(Dim, atom.aval.shape)), out.layout.mesh), out.layout, dims)
    same = [d for d, e in dims if d is not None and e is not None and atom.aval.shape[d] == to[e]]
    is_whole = len(same) == atom.aval.ndim or _rules.costs(eqn, Cost.JOIN)
    return _hint(found, out.leaf if is_whole else "", out.is_direct)


def _across(eqn: Eqn, edge: Edge, hint: Hint | None) -> Hint | None:
    """A slice of a stack has its dims but the first, and the other way round."""
    if hint is None or edge.kind is EdgeKind.PREDICATE:
        return None
    layout = hint.layout
    if edge.shift == -1:
        (_, atom) = edge.source
        layout = Layout((Dim(atom.aval.shape[0]), *layout.dims), layout.mesh)
    elif edge.shift == 1:
        layout = Layout(layout.dims[1:], layout.mesh)
    return _hint(layout, hint.leaf, hint.is_direct)


def _state_across(eqn: Eqn, edge: Edge, layout: Layout | None) -> Layout | None:
    if layout is None or edge.kind is EdgeKind.PREDICATE:
        return None
    if edge.shift == 1:
        (_, atom) = edge.target
        return Layout((Dim(atom.aval.shape[0]), *layout.dims), layout.mesh)
    return Layout(layout.dims[1:], layout.mesh) if edge.shift == -1 else layout
