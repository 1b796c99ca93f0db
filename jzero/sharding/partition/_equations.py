# SPDX-License-Identifier: Apache-2.0
"""Ordinary equations, which hold no programs: partial sums, and one device's equation.

[Note: masks] Padding holds arbitrary values. Where a factor is reduced, the padding of each operand that has
it is replaced by the reduction's neutral element. In a product that is both operands, since 0 * NaN is NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jzero.ir import _rules
from jzero.ir._factors import SCATTER_REDUCES, Factor
from jzero.ir._layout import AxisCut, Dim, Layout, Partial
from jzero.ir._rules import Cost
from jzero.sharding.partition import _look_ups
from jzero.sharding.partition._choice import FactorChoice, is_looked_up_in_rows, is_reduced
from jzero.sharding.partition._frame import DeviceFrame
from jzero.sharding.partition._values import DeviceValue, followed, sized
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Var

# The dim of each chosen factor, by the factor's index: its cuts; if it is padded, its size and padding too.
FactorCuts = Mapping[int, Dim]


def passes_partial(eqn: Eqn) -> bool:
    """Whether a partial sum stays partial: the equation is linear, its result no larger, or small.

    It passes no cast to another dtype: a sum is reduced in the dtype in which the step wrote it.
    """
    name = eqn.primitive.name
    if _rules.costs(eqn, Cost.CAST):
        return _rules.keeps_dtype(eqn)
    if name in ("pad", "broadcast_in_dim", "slice"):
        x, out = eqn.invars[0].aval, eqn.outvars[0].aval
        if name == "slice":  # Of experts' queues all but the row for tokens without a place.
            return 2 * out.size > x.size
        return x.size == out.size or name == "pad" and _rules.size_in_bytes(out) <= SMALL
    if name == "scatter-add":  # Of a look-up the gradient, which is added to zeros.
        return eqn.outvars[0].aval.size <= eqn.invars[2].aval.size
    return _rules.costs(eqn, Cost.VIEW, Cost.COPY) or name in _PASS


AGAIN = "rematted_computation"  # JAX's scope of what a checkpoint recomputes
SMALL = 2**22  # bytes: gradients of slices of a small leaf are added up before they are summed
_PASS = {*_rules.ADDS, "sub", "neg", "reduce_sum", "split"}
# Views of state: their operand is gathered instead, unless it is larger. A table and its transpose share a
# gather.
_VIEWS = {"transpose", "convert_element_type", "broadcast_in_dim"}


def widens_for_loop(frame: DeviceFrame, eqn: Eqn) -> bool:
    """Whether it widens a value that a loop only accumulates: the loop then accumulates in the wide dtype."""
    return _widens(eqn) and eqn.outvars[0] in frame.accumulated


def partial_through(
    frame: DeviceFrame, eqn: Eqn, ins: Sequence[DeviceValue]
) -> tuple[Partial, ...]:
    """The partial sums that pass the equation; none if an operand must be reduced first."""
    partial = {k for k, v in enumerate(ins) if v.layout.partial}
    if not partial or not (passes_partial(eqn) or widens_for_loop(frame, eqn)):
        return ()
    if eqn.primitive.name == "slice":
        # One reduction before the slice serves other readers too. Looked-up rows are few.
        readers = frame.region.readers.get(_jaxpr.variable(eqn.invars[0]), ())
        if len(readers) > 1 or ins[0].looked_up:
            return ()
    found = [ins[k].layout.partial for k in sorted(partial)]
    zero = {k for k, v in enumerate(ins) if v.is_zero and k not in partial}
    same = all(p == found[0] for p in found)
    return found[0] if same and _rules.stays_partial(eqn, partial, zero) else ()


def time_partial_through(
    frame: DeviceFrame, eqn: Eqn, ins: Sequence[DeviceValue]
) -> tuple[Partial, ...]:
    """The partial sum over time that passes the equation, after those over devices are reduced.

    In a loop body it passes everything linear; outside, what partial sums over devices pass, and widening
    casts, since microbatches accumulate in the wide dtype. Sums over replicas pass casts too, and are reduced
    once. A cast in a body moves behind its loop if possible (`DeviceValue.cast`).
    """
    time = frame.shared.time
    partial = {k for k, v in enumerate(ins) if v.partial_axes & frame.over_time}
    others = [v for k, v in enumerate(ins) if k not in partial]
    if time is None or not partial or any(v.partial_axes for v in others):
        return ()
    passes = passes_partial(eqn) or widens_in_time(frame, eqn)
    zero = {k for k, v in enumerate(ins) if v.is_zero and k not in partial}
    rows = any(time.name in v.rows for v in others)
    linear = not rows and _rules.stays_partial(eqn, partial, zero)
    if not linear or not passes and frame.outer is None:
        return ()
    found = [p for v in ins for p in v.layout.partial if p.axis == time.name]
    if any(p != found[0] for p in found):
        return ()
    if _rules.is_float_cast(eqn):
        if not time.once:
            frame.scatter(ins[0])
        return ins[0].layout.partial
    for k in sorted(partial):
        frame.reduce(ins[k], keeps=frame.over_time)
    return (found[0],)


def widens_in_time(frame: DeviceFrame, eqn: Eqn) -> bool:
    """Whether it widens what each microbatch reduces, so that microbatches accumulate in the wide dtype."""
    time = frame.shared.time
    return time is not None and not time.once and _widens(eqn)


def _widens(eqn: Eqn) -> bool:
    if not _rules.is_float_cast(eqn):
        return False
    before, after = (atom.aval.dtype.itemsize for atom in (eqn.invars[0], eqn.outvars[0]))
    return before <= after


def ordinary(
    frame: DeviceFrame, eqn: Eqn, ins: Sequence[DeviceValue], factors: Sequence[Factor]
) -> list[DeviceValue]:
    partial = partial_through(frame, eqn, ins) or time_partial_through(frame, eqn, ins)
    if not partial:
        reduce_operands(frame, eqn, ins, factors)
    elif (alone := _added_to_zero(eqn, ins)) is not None:
        return [alone]
    if all(v.layout.is_replicated for v in ins):
        return _replicated(frame, eqn, ins)
    choice = FactorChoice(frame, eqn, ins, factors, partial)
    chosen = choice.run()
    written = _Written(frame, eqn, ins, factors, chosen, partial, choice.exchanged).run()
    lost = frozenset(a for v in ins for a in v.rows) - {p.axis for p in partial}
    lost -= {cut.axis for dim in chosen.values() for cut in dim.cuts}
    return [reshard(frame, v, ins, lost) for v in written] if lost else written


def reshard(
    frame: DeviceFrame, value: DeviceValue, ins: Sequence[DeviceValue], axes: frozenset[str]
) -> DeviceValue:
    """Reshards the result of a gathered operation, so that later ones stay data-parallel.

    The batch dim is one of the same size as an operand's over `axes`, preferably at the same position. A
    result with one number per row stays replicated: that costs nothing, and sorted numbers are often indexed.
    """
    layout, shape = value.layout, value.aval.shape
    for v in ins:
        for d, dim in enumerate(v.layout.dims):
            if not axes.intersection(v.rows, (cut.axis for cut in dim.cuts)):
                continue
            same = [e for e in (d, *range(len(shape))) if shape[e : e + 1] == (dim.true,)]
            if same and value.aval.size > dim.true:
                layout = followed(layout, v.layout, [(same[0], d)], axes & v.rows)
    if layout == value.layout:
        return value
    atoms = {**value.atoms, layout: frame.at(value, layout)}
    return dataclasses.replace(
        value, layout=layout, atoms=atoms, rows=value.rows | axes & layout.axes, make=None
    )


def reduce_operands(
    frame: DeviceFrame, eqn: Eqn, ins: Sequence[DeviceValue], factors: Sequence[Factor]
) -> None:
    """Reduces all partial operands, scattered to match the other operands' shards."""
    for k, v in enumerate(ins):
        if v.layout.partial:
            beside = _beside(frame, eqn, ins, factors, k)
            if v.scatter_to is None and _rules.costs(eqn, Cost.PRODUCT):
                v.scatter_to = _elsewhere(frame, eqn, k, v) or _alone(frame, eqn, ins, factors, k)
                exchanged = v.partial_axes & (v.scatter_to or frame.replicated(v.aval.shape)).axes
                frame.reduce(v, beside)
                v.exchanged |= exchanged & v.rows
            frame.reduce(v, beside)


def _elsewhere(frame: DeviceFrame, eqn: Eqn, k: int, value: DeviceValue) -> Layout | None:
    """The layout, batch-sharded, that another reader of a product's partial operand wants."""
    region, layout = frame.region, frame.replicated(value.aval.shape)
    atom = _jaxpr.variable(eqn.invars[k])
    eqns = region.jaxpr.eqns
    for other in (eqns[i] for i in region.readers.get(atom, []) if i < len(eqns)):
        if not _rules.costs(other, Cost.PRODUCT, Cost.ELEMENTWISE):
            continue
        own, factors = other.invars.index(atom), _rules.factors_of(other)
        for j, x in enumerate(other.invars):
            beside = None if _jaxpr.is_literal(x) else frame.values.get(x)
            if beside is not None and beside.rows and not beside.layout.partial:
                dims = ((f.ins[own], f.ins[j]) for f in factors)
                layout = followed(layout, beside.layout, dims, beside.rows)
    return None if layout.is_replicated else layout


def _alone(
    frame: DeviceFrame, eqn: Eqn, ins: Sequence[DeviceValue], factors: Sequence[Factor], k: int
) -> Layout | None:
    """Where a partial sum of activations, read by a product with state, is scattered: its largest free dim.

    Each device then computes a part of the product; scatter and gather move as much as an all-reduce. Not in
    a backward pass, whose partial sums are gradients of the state, unless a batch-sharded value is beside
    them.
    """
    value, shape = ins[k], ins[k].aval.shape
    axes = [axis for axis in frame.mesh if axis in value.partial_axes - frame.over_time]
    if not value.is_activation or _is_backward(frame, eqn) or not axes:
        return None
    if any(v.rows or v.layout.partial for v in ins if v is not value):
        return None
    layout = frame.replicated(shape)
    alone = [f for f in factors if f.outs[0] is not None and f.ins.count(None) == len(ins) - 1]
    dims = [f.ins[k] for f in alone if not f.groups]
    free = [d for d in dims if d is not None and not value.layout.dims[d].cuts]
    for d in sorted(free, key=lambda d: -shape[d]):
        if shape[d] and shape[d] % layout.num(axes) == 0:
            return layout.shard(d, axes)
    return None


def _beside(
    frame: DeviceFrame, eqn: Eqn, ins: Sequence[DeviceValue], factors: Sequence[Factor], k: int
) -> Layout | None:
    """An operand's layout that matches the others; of other than elementwise ones, batch-sharded ones."""
    elementwise = _rules.costs(eqn, Cost.ELEMENTWISE)
    if not elementwise and not _rules.costs(eqn, Cost.JOIN, Cost.PRODUCT):
        return None
    layout = frame.replicated(ins[k].aval.shape)
    others = [v for v in ins if not v.layout.partial and (elementwise or v.rows)]
    for other in sorted(others, key=lambda v: v.make is not None):
        j = next(j for j, v in enumerate(ins) if v is other)
        layout = followed(layout, other.layout, ((f.ins[k], f.ins[j]) for f in factors))
    return layout


def _is_backward(frame: DeviceFrame, eqn: Eqn) -> bool:
    """Whether it is part of a backward pass, and not recomputed by a checkpoint."""
    return frame.region.pass_of(eqn) == "backward" and not _jaxpr.in_scope(eqn, AGAIN)


def met(
    frame: DeviceFrame, eqn: Eqn, ins: Sequence[DeviceValue], factors: Sequence[Factor]
) -> Layout:
    """The result's layout if no operand is converted; partial sums do not count, lazy operands come last."""
    layout = frame.replicated(eqn.outvars[0].aval.shape)
    order = sorted(range(len(ins)), key=lambda k: ins[k].make is not None)
    for k in (k for k in order if not ins[k].layout.partial):
        layout = followed(layout, ins[k].layout, ((f.outs[0], f.ins[k]) for f in factors))
    return layout


def _added_to_zero(eqn: Eqn, ins: Sequence[DeviceValue]) -> DeviceValue | None:
    """The other operand of an addition to zero."""
    if eqn.primitive.name not in _rules.ADDS:
        return None
    out = eqn.outvars[0].aval
    for value, other in (ins, ins[::-1]):
        same = (value.aval.shape, value.aval.dtype) == (out.shape, out.dtype)
        if other.is_zero and same and value.aval.weak_type == out.weak_type:
            return value
    return None


def _replicated(frame: DeviceFrame, eqn: Eqn, ins: Sequence[DeviceValue]) -> list[DeviceValue]:
    return [*map(frame.value, frame.clone(eqn, [*map(frame.replica, ins)]))]


@dataclasses.dataclass
class _Written:
    frame: DeviceFrame
    eqn: Eqn
    ins: Sequence[DeviceValue]
    factors: Sequence[Factor]
    chosen: FactorCuts
    partial: tuple[Partial, ...]
    exchanged: frozenset[str]

    def run(self) -> list[DeviceValue]:
        reduced = {i: dim for i, dim in self.chosen.items() if is_reduced(self.factors[i])}
        atoms = [self._operand(k, v, reduced) for k, v in enumerate(self.ins)]
        layouts = [self._layout(var.aval.shape, j) for j, var in enumerate(self.eqn.outvars)]
        outs: list[Any] = [
            _jaxpr.var_like(var.aval, layout.local_shape)
            for var, layout in zip(self.eqn.outvars, layouts, strict=True)
        ]
        params = self._params(layouts)
        shards = [i for i in reduced if _look_ups.is_look_up(self.eqn, self.factors[i])]
        updates = [i for i in self.chosen if _look_ups.is_update(self.eqn, self.factors[i])]
        if shards:
            outs = [self._looked_up(shards, atoms, outs, params)]
        elif updates:
            dims = [d for i in updates if (d := self.factors[i].outs[0]) is not None]
            outs = [_look_ups.updated(self.frame, self.eqn, layouts[0], dims, atoms, params)]
        else:
            self.frame.clone(self.eqn, atoms, outs, params=params)
        if reduced:
            return self._reduced(outs, layouts, reduced)
        values = [self._value(j, x, layouts[j]) for j, x in enumerate(outs)]
        axes = {cut.axis for i in self.chosen for cut in self.chosen[i].cuts}
        if any(is_looked_up_in_rows(self.eqn, self.ins, axis) for axis in axes):
            self._end_in_rows(values[0])
        elif self.eqn.primitive.name == "gather" and self.ins[0].rows & self.exchanged:
            self._end_along_indices(values[0])
        return values

    def _looked_up(
        self, shards: Sequence[int], atoms: Sequence[Atom], outs: Sequence[Var], params: dict[str, Any]
    ) -> Atom:  # fmt: skip
        (operand, indices), value = atoms, self.ins[0]
        dims = {self.factors[i].ins[0]: self.chosen[i] for i in self.chosen}
        own = {d: sized(dim, value.aval.shape[d]) for d, dim in dims.items() if d is not None}
        layout = self.frame.sharded(value.aval.shape, own)
        params |= {"indices_are_sorted": False, "unique_indices": False}

        def write(indices: Atom) -> Atom:
            self.frame.clone(self.eqn, [operand, indices], outs, params=params)
            return outs[0]

        at = [d for d in (self.factors[i].ins[0] for i in shards) if d is not None]
        return _look_ups.looked_up(self.frame, self.eqn, layout, at, operand, indices, write)

    def _end_in_rows(self, value: DeviceValue) -> None:
        """Look-ups in columns become batch-sharded, gradients do not, [Note: columns of tables]."""
        indices, numbers = self.ins[1], self.eqn.params["dimension_numbers"]
        window = self._columns() & indices.rows
        if len(self.ins) > 2:
            value.rows -= window
        elif window:
            places = [d for d in range(value.aval.ndim) if d not in numbers.offset_dims]
            dims = zip(places, range(len(places)), strict=True)
            layout = followed(value.layout.without(window), indices.layout, dims, window)
            self.frame.at(value, layout)
            value.layout, value.rows = layout, (value.rows | window) & layout.axes

    def _end_along_indices(self, value: DeviceValue) -> None:
        """Shards look-ups along their indices, if an all-to-all had moved rows to columns."""
        axes = self.ins[0].rows & self.exchanged & self._columns()
        line = Dim(1, tuple(AxisCut(axis, 1) for axis in self.frame.mesh if axis in axes))
        layout = axes and _look_ups.along_indices(self.eqn, value.layout.without(axes), line)
        if layout:
            self.frame.at(value, layout)
            value.layout, value.exchanged = layout, value.exchanged - axes

    def _columns(self) -> frozenset[str]:
        dims = [dim for i, dim in self.chosen.items() if self.factors[i].ins[1] is None]
        return frozenset(cut.axis for dim in dims for cut in dim.cuts)

    def _reduced(
        self, outs: Sequence[Atom], layouts: Sequence[Layout], reduced: FactorCuts
    ) -> list[DeviceValue]:
        """Nothing is linear in maxima and minima: they are reduced at once. Sums stay partial."""
        more = [
            Partial(cut.axis, self.factors[i].reduces or "")
            for i, dim in reduced.items()
            for cut in dim.cuts
        ]
        partial = tuple(sorted((*self.partial, *more)))
        extremes = {p.axis for p in partial if p.op != "sum"}
        found = []
        for j, (x, layout) in enumerate(zip(outs, layouts, strict=True)):
            terms = dataclasses.replace(layout, partial=partial)
            now = terms.reduced(extremes)
            found.append(self._value(j, self.frame.convert(x, terms, now), now))
        return found

    def _operand(self, k: int, value: DeviceValue, reduced: FactorCuts) -> Atom:
        dims = {}
        for i, dim in self.chosen.items():
            d = self.factors[i].ins[k]
            if d is not None:
                dims[d] = sized(dim, value.aval.shape[d])
        waits = self.partial and (value.layout.partial or value.is_zero)
        layout = self.frame.sharded(value.aval.shape, dims, self.partial if waits else ())
        atom = self.frame.at(value, layout)
        scatters = self.eqn.primitive.name in SCATTER_REDUCES
        if scatters and k == 0 and reduced and not value.is_zero:
            (op,) = {self.factors[i].reduces or "" for i in reduced}
            partial = tuple(Partial(cut.axis, op) for dim in reduced.values() for cut in dim.cuts)
            return self.frame.convert(atom, layout, layout.with_partial(*partial))
        for i in reduced:
            d, op = self.factors[i].ins[k], self.factors[i].reduces or ""
            looked_up = _look_ups.is_look_up(self.eqn, self.factors[i])
            if d is not None and not looked_up and not (scatters and k == 1):
                atom = self.frame.masked(atom, layout, d, op)
        return atom

    def _layout(self, shape: Sequence[int], j: int) -> Layout:
        dims = {}
        for i, dim in self.chosen.items():
            d = self.factors[i].outs[j]
            if d is not None:
                dims[d] = sized(dim, shape[d])
        return self.frame.sharded(shape, dims, self.partial)

    def _params(self, layouts: Sequence[Layout]) -> dict[str, Any]:
        params = dict[str, Any]()
        for i, dim in self.chosen.items():
            factor, n = self.factors[i], self.ins[0].layout.num([c.axis for c in dim.cuts])
            out = next(
                (layouts[j].local_shape[d] for j, d in enumerate(factor.outs) if d is not None), 0
            )
            for name, new in factor.local(out or dim.size // n, n).items():
                old = params.get(name)
                params[name] = new if old is None else tuple(map(min, old, new))
        return self.eqn.params | params

    def _value(self, j: int, x: Atom, layout: Layout) -> DeviceValue:
        aval, axes = self.eqn.outvars[j].aval, layout.axes
        rows = frozenset(a for v in self.ins for a in v.rows)
        found = DeviceValue(aval, layout, {layout: x}, rows & axes)
        (first, *others), name = self.ins, self.eqn.primitive.name
        found.scatter_to, found.exchanged = self._scatter_to(layout), self.exchanged & axes
        found.looked_up = self._is_looked_up()
        found.is_activation = not _is_backward(self.frame, self.eqn)
        if self.partial:
            found.is_activation = any(v.is_activation and v.layout.partial for v in self.ins)
        if found.partial_axes & self.frame.over_time and _rules.is_float_cast(self.eqn):
            found.cast = self.eqn, first
        if not others and not rows:
            found.origin = first.origin
        if name in ("transpose", "convert_element_type"):
            found.fill = first.fill
        if name in _VIEWS and first.is_state and first.make is None:
            if _rules.size_in_bytes(first.aval) <= _rules.size_in_bytes(aval):
                found.view = self.eqn, first
        return found

    def _is_looked_up(self) -> bool:
        if self.partial:
            return any(v.looked_up and v.layout.partial for v in self.ins)
        axes = {
            cut.axis
            for i, dim in self.chosen.items()
            for cut in dim.cuts
            if _look_ups.is_look_up(self.eqn, self.factors[i])
        }
        return bool(axes & self.ins[0].rows)

    def _scatter_to(self, layout: Layout) -> Layout | None:
        """Where a partial sum over the batch is scattered: along a dim of its size (keys, queries)."""
        if self.partial:
            return scatter_to_through(self.eqn, self.ins[0].scatter_to)
        if not any(is_reduced(self.factors[i]) for i in self.chosen):
            return None
        found = self.frame.replicated(layout.shape)
        for i, dim in self.chosen.items():
            if _look_ups.is_look_up(self.eqn, self.factors[i]):
                return _look_ups.along_indices(self.eqn, layout, dim)
        if not any(layout.axes & v.rows for v in self.ins):
            return None  # A gradient of state, not of activations.
        for i, dim in self.chosen.items():
            axes = {cut.axis for cut in dim.cuts}
            if not is_reduced(self.factors[i]) or not any(axes <= v.rows for v in self.ins):
                continue
            alike = [d for d, n in enumerate(layout.shape) if n == dim.true > 1]
            free = [d for d in alike if not layout.dims[d].cuts]
            found = found.with_dims({free[0]: dim} if free else {})
        return None if found.is_replicated else found


def scatter_to_through(eqn: Eqn, before: Layout | None) -> Layout | None:
    """`DeviceValue.scatter_to` of the result of an equation that the partial sum passes."""
    shape = eqn.outvars[0].aval.shape
    if before is None or before.shape == shape and _rules.is_elementwise(eqn):
        return before
    if eqn.primitive.name == "reshape":
        return before.reduced([p.axis for p in before.partial]).reshapable(shape).reshape(shape)
    dims = ((f.outs[0], f.ins[0]) for f in _rules.factors_of(eqn))
    found = followed(Layout(tuple(map(Dim, shape)), before.mesh), before, dims)
    return None if found.is_replicated else found
