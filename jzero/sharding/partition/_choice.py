# SPDX-License-Identifier: Apache-2.0
"""Chooses the factor of an equation that each mesh axis shards, by cost.

[Note: rows stay, the state moves] The candidates of a mesh axis are the factors whose dim an operand has
sharded over the axis; the one that moves the fewest bytes is taken. If an operand is batch-sharded over the
axis, moving state to it costs nothing, whatever the sizes: this makes it ZeRO.

[Note: columns of tables] A table of the state that is sharded along its columns need not be gathered for a
look-up: all indices are gathered, each device looks up its columns, and an all-to-all makes batch-sharded
rows of them. The gradient takes the same way back. Both move rows, which are few beside the table. If
anything else reads the table replicated, the look-up reads the gathered table too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from jzero.ir import _rules
from jzero.ir._factors import Factor
from jzero.ir._layout import AxisCut, Dim, Partial, fits
from jzero.ir._regions import Region, edges, trip_count
from jzero.ir._rules import BY_DEVICES, Cost
from jzero.sharding.partition import _look_ups
from jzero.sharding.partition._frame import DeviceFrame
from jzero.sharding.partition._values import DeviceValue, next_outer, place_of
from jzero.sharding.partition._writer import OF_STATE
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn


class _Candidate(NamedTuple):
    cost: int
    elsewhere: bool  # Ties go to factors that stay, then to the first.
    order: int
    factor: int
    dim: Dim
    moves_rows: bool


@dataclasses.dataclass
class FactorChoice:
    frame: DeviceFrame
    eqn: Eqn
    ins: Sequence[DeviceValue]
    factors: Sequence[Factor]
    partial: tuple[Partial, ...]
    exchanged: frozenset[str] = frozenset()

    def run(self) -> dict[int, Dim]:
        """The chosen factors. Sets `exchanged`: axes whose rows are along another dim of the result."""
        if (alike := self._alike()) is not None:
            cuts = [(cut.axis, i) for i, dim in alike.items() for cut in dim.cuts]
            self.exchanged = frozenset(
                axis for axis, i in cuts if self._is_exchanged(axis, i, alike[i])
            )
            return alike
        in_pass = self.frame.region.pass_of(self.eqn) is not None
        if in_pass and not self.frame.shared.has_rows and not self.partial:
            return {}  # Nothing is batch-sharded: each device computes everything on gathered state.
        self.chosen: dict[int, Dim] = {}
        partial = {p.axis for p in self.partial}
        for axis in self.frame.mesh:
            if (columns := self._columns(axis)) is not None:
                self.chosen[columns[0]] = columns[1]
                self.frame.reason, self.frame.leaf = OF_STATE, self._table()
            elif axis not in partial and (best := self._best(axis)) is not None:
                self.chosen[best.factor] = best.dim
                if self._is_exchanged(axis, best.factor, best.dim, best.elsewhere):
                    self.exchanged |= {axis}
        return self.chosen

    def _is_exchanged(self, axis: str, i: int, dim: Dim, elsewhere: bool = False) -> bool:
        """Whether the result's rows over the axis are along another dim than the batch dim."""
        if not any(v.exchanged for v in self.ins):
            return elsewhere and any(axis in v.rows for v in self.ins)
        if elsewhere:
            return not any(axis in v.exchanged for v in self.ins)
        outer = next(cut.outer for cut in dim.cuts if cut.axis == axis)
        each = zip(self.ins, self.factors[i].ins, strict=True)
        here = [v for v, d in each if axis in v.rows and place_of(v.layout, axis) == (d, outer)]
        return bool(here) and all(axis in v.exchanged for v in here)

    def _table(self) -> str:
        table, _, *updates = self.ins
        return self.frame.leaf_of(self.eqn.outvars[0]) if updates else self.frame.name(table)

    def _columns(self, axis: str) -> tuple[int, Dim] | None:
        """The factor of a table's columns, [Note: columns of tables]; None if a gather is cheaper."""
        if not is_looked_up_in_rows(self.eqn, self.ins, axis):
            return None
        table, indices, *updates = self.ins
        if not updates and not table.is_state:
            return None
        if self._table() in (self.frame.shared.automatic or ()):
            return (
                None  # Along Auto axes each device moves only its part of the table, but all rows.
            )
        out, n = self.eqn.outvars[0], self.frame.mesh[axis]
        hint = self.frame.hint_of(out)
        layout = (hint and hint.layout) if updates else table.layout
        if layout is None or (place := layout.place(axis)) is None:
            return None
        d, outer = place
        kept = ((i, f) for i, f in enumerate(self.factors) if f.reduces is None)
        each = ((i, f) for i, f in kept if (f.ins[0], f.ins[1]) == (d, None))
        i, factor = next(each, (0, None))
        dim = factor and self._cut(i, layout.dims[d], AxisCut(axis, outer))
        if factor is None or dim is None:
            return None
        rows, size = self.frame.price(indices, axis, None), _rules.size_in_bytes(out.aval)
        if updates:
            rows += self.frame.price(updates[0], axis, factor.ins[2], outer)
            part = size / layout.num(layout.axes - {axis}) * (n - 1) / n
            moved = self.frame.wire(axis, "scatter", part)
        else:
            part = size / indices.layout.num(indices.rows) * (n - 1) / n
            rows += self.frame.wire(axis, "exchange", part)
            moved = self.frame.price(table, axis, None)
        gathered = not updates and is_read_replicated(self.frame.region, self.eqn.invars[0])
        return (i, dim) if rows < moved and not gathered else None

    def _alike(self) -> dict[int, Dim] | None:
        """Fast path: elementwise equations whose operands have equal layouts or are replicated."""
        if not _rules.costs(self.eqn, Cost.ELEMENTWISE, Cost.CAST, Cost.COPY):
            return None
        hard = [v.layout for v in self.ins if v.make is None and not v.layout.is_replicated]
        shape = self.eqn.outvars[0].aval.shape
        if not hard or hard[0].shape != shape or any(x.dims != hard[0].dims for x in hard[1:]):
            return None
        dims, outs = hard[0].dims, [f.outs[0] for f in self.factors]
        return {i: dims[d] for i, d in enumerate(outs) if d is not None and dims[d].cuts}

    def _best(self, axis: str) -> _Candidate | None:
        holders = [v for v in self.ins if v.layout.place(axis) is not None]
        hard = [v for v in holders if v.make is None] or holders
        # The gradient of a mean over tokens is lazy and batch-sharded: it leads too.
        rows = [v for v in hard if axis in v.rows] or [v for v in holders if axis in v.rows]
        lead = rows or hard
        found: dict[tuple[int, Dim], _Candidate] = {}
        for value in lead:
            d, outer = place_of(value.layout, axis)
            for i, factor in enumerate(self.factors):
                if any(v is value and at == d for v, at in zip(self.ins, factor.ins, strict=True)):
                    self._consider(axis, i, value.layout.dims[d], outer, bool(rows), found)
        best = min(found.values(), default=None)
        may = axis not in self.frame.over_time  # Microbatches cannot exchange rows.
        if may and lead and (best is None or rows and self._may_exchange(axis, best, rows)):
            self._exchanges(axis, lead, bool(rows), found)
            best = min(found.values(), default=None)
        return (
            None if best is None or best.cost and self._is_cheaper_replicated(axis, best) else best
        )

    def _is_cheaper_replicated(self, axis: str, best: _Candidate) -> bool:
        """Whether an equation of state alone is cheaper on gathered operands."""
        if any(v.rows for v in self.ins):
            return False
        distinct = dict.fromkeys(v if v.view is None else v.view[1] for v in self.ins)
        return best.cost >= sum(self.frame.price(v, axis, None) for v in distinct)

    def _exchanges(
        self, axis: str, lead: Sequence[DeviceValue], rows: bool,
        found: dict[tuple[int, Dim], _Candidate],
    ) -> None:  # fmt: skip
        """Considers, by an all-to-all, factors of other dims of operands that are sharded over the axis."""
        for value in lead:
            here, _ = place_of(value.layout, axis)
            for i, factor in enumerate(self.factors):
                ds = [d for v, d in zip(self.ins, factor.ins, strict=True) if v is value]
                d = next((d for d in ds if d is not None), None)
                if d is None or d == here or factor.outs[0] is None or factor.groups:
                    continue
                own = self.chosen.get(i, Dim(value.aval.shape[d]))
                if self._is_kept_for_another(axis, factor, own):
                    continue
                outer = next_outer(value.layout, own)
                if outer is not None and own.pad is None:
                    self._consider(axis, i, own._replace(cuts=()), outer, rows, found, True)

    def _is_kept_for_another(self, axis: str, factor: Factor, own: Dim) -> bool:
        """Whether the dim has rows of a later axis, which would move if this axis cut it first."""
        cuts = {c for v, d in zip(self.ins, factor.ins, strict=True) if d is not None and v.rows
                for c in v.layout.dims[d].cuts}  # fmt: skip
        return any(cut.axis != axis and cut not in own.cuts for cut in cuts)

    def _may_exchange(self, axis: str, best: _Candidate, rows: Sequence[DeviceValue]) -> bool:
        """Whether the best choice without all-to-all moves rows, or leaves activations partial."""
        if best.cost == 0:
            return False
        if any(axis in v.exchanged for v in rows):
            return True
        if _look_ups.is_look_up(self.eqn, self.factors[best.factor]):
            return True
        others = any(b != axis for v in rows for b in v.rows)
        cut = self._axes_of_result()
        cut_rows = any(b != axis and b in cut for v in self.ins for b in v.rows)
        summed = is_reduced(self.factors[best.factor]) and others and cut_rows
        return best.moves_rows or summed

    def _consider(
        self, axis: str, i: int, own: Dim, outer: int, rows: bool,
        found: dict[tuple[int, Dim], _Candidate], elsewhere: bool = False,
    ) -> None:  # fmt: skip
        factor = self.factors[i]
        dim = self._cut(i, own, AxisCut(axis, outer))
        if dim is None or (i, dim) in found:
            return
        if is_reduced(factor) and factor.reduces not in BY_DEVICES:
            return
        looks_up = _look_ups.is_look_up(self.eqn, factor)
        in_shards = looks_up or _look_ups.is_update(self.eqn, factor)
        if in_shards and _look_ups.shards_of(dim, self.ins[0].layout) is None:
            return
        cost, moves_rows, lost = 0, False, False
        for value, d in zip(self.ins, factor.ins, strict=True):
            if rows and axis not in value.rows | value.partial_axes:
                continue
            price = self.frame.price(value, axis, d, outer)
            moved = price > 0 and axis in value.rows
            moves_rows, lost = moves_rows or moved, lost or moved and axis not in value.exchanged
            cost += price
        # A look-up in columns ends with an all-to-all to rows, as do rows along another dim.
        columns = self.eqn.primitive.name in ("gather", "scatter-add") and factor.ins[1] is None
        if is_reduced(factor):
            cost += self._sum_price(axis, dim.true)
        elif elsewhere and columns or lost and any(axis in v.exchanged for v in self.ins):
            cost += self._end_price(axis)
        if looks_up and cost > self.frame.price(self.ins[0], axis, None):
            return
        found[i, dim] = _Candidate(cost, elsewhere, len(found), i, dim, moves_rows)

    def _end_price(self, axis: str) -> int:
        """The price of an all-to-all of the results back to batch-sharded."""
        n, num = self.frame.mesh[axis], self.ins[0].layout.num(self._axes_of_result())
        total = sum(_rules.size_in_bytes(var.aval) for var in self.eqn.outvars) / num
        return self.frame.wire(axis, "exchange", total * (n - 1) / n / n)

    def _sum_price(self, axis: str, size: int) -> int:
        """The price of the reduction. Of several axes, each reduces the part that earlier axes leave."""
        n, total, cut = self.frame.mesh[axis], 0.0, self._axes_of_result()
        summed = {p.axis for p in self.partial} | {
            cut.axis for dim in self.chosen.values() for cut in dim.cuts
        }
        for var in self.eqn.outvars:
            scattered = self.frame.hint_of(var) is not None or self._is_scattered(axis, size)
            own = _rules.size_in_bytes(var.aval) / self.ins[0].layout.num(cut | summed)
            total += own * (n - 1) / n * (1 if scattered else 2)
        return self.frame.wire(axis, "reduce", total)

    def _is_scattered(self, axis: str, size: int) -> bool:
        """Whether a partial sum of activations, over a dim of that size, is scattered along another one."""
        cut, shape = self._axes_of_result(), self.eqn.outvars[0].aval.shape
        taken = {self.factors[i].outs[0] for i in self.chosen}
        alike = size > 1 and any(n == size and d not in taken for d, n in enumerate(shape))
        rows = any(axis in v.rows for v in self.ins) and any(cut & v.rows for v in self.ins)
        return alike and rows and not self.partial

    def _axes_of_result(self) -> set[str]:
        kept = [dim for i, dim in self.chosen.items() if not is_reduced(self.factors[i])]
        return {cut.axis for dim in kept for cut in dim.cuts}

    def _cut(self, i: int, own: Dim, cut: AxisCut) -> Dim | None:
        """A factor's cuts with one more axis; None if the axis cannot shard it."""
        factor, now = self.factors[i], self.chosen.get(i)
        sizes = _sizes(self.eqn, factor)
        n = self.frame.mesh[cut.axis]
        if factor.groups:
            cuts = (cut,) if now is None else (*now.cuts, cut)
            outer = self.ins[0].layout.num([each.axis for each in cuts[:-1]])
            even = all(size % (outer * n) == 0 for size in (*sizes, factor.groups))
            fit = own.pad is None and cut.outer == outer and even
            return Dim(sizes[0], cuts) if fit else None
        if any(size != own.true for size in sizes):
            return None
        base = own._replace(cuts=()) if now is None else now
        if base[::2] != own[::2]:
            return None
        new = base.put(cut)
        return new if fits(new.size, self.ins[0].layout.digits(new.cuts)) else None


def is_looked_up_in_rows(eqn: Eqn, ins: Sequence[DeviceValue], axis: str) -> bool:
    """Whether batch-sharded indices look up in a table, or add to one of zeros."""
    if eqn.primitive.name not in ("gather", "scatter-add") or axis not in ins[1].rows:
        return False
    table, _, *updates = ins
    if updates:
        return table.is_zero and axis in updates[0].rows
    return table.make is None


def is_read_replicated(region: Region, atom: Atom) -> bool:
    """Whether a reader of a table is neither a look-up nor elementwise, and so needs it replicated."""
    passed = (Cost.IDENTITY, Cost.CAST, Cost.COPY)
    while not _jaxpr.is_literal(atom) and (i := region.makers.get(atom)) is not None:
        if not _rules.costs(region.jaxpr.eqns[i], *passed):
            break
        atom = region.jaxpr.eqns[i].invars[0]
    return _is_read_replicated(region, atom)


def _is_read_replicated(region: Region, atom: Atom) -> bool:
    readers = [] if _jaxpr.is_literal(atom) else region.readers.get(atom, [])
    for eqn in (region.jaxpr.eqns[i] for i in readers if i < len(region.jaxpr.eqns)):
        if eqn.primitive.name == "optimization_barrier":
            if _is_read_replicated(region, eqn.outvars[eqn.invars.index(atom)]):
                return True
        elif trip_count(eqn) == 1 and (ways := edges(region, eqn)):
            inside = [edge.target for edge in ways if edge.source == (region, atom)]
            if any(_is_read_replicated(*target) for target in inside):
                return True
        elif _rules.costs(eqn, Cost.IDENTITY, Cost.CAST, Cost.COPY):
            if any(_is_read_replicated(region, out) for out in eqn.outvars):
                return True
        elif eqn.primitive.name != "gather" and not _rules.costs(eqn, Cost.ELEMENTWISE):
            return True
    return False


def is_reduced(factor: Factor) -> bool:
    return factor.reduces is not None and factor.outs[0] is None


def _sizes(eqn: Eqn, factor: Factor) -> list[int]:
    ends = [*zip(eqn.invars, factor.ins, strict=True), *zip(eqn.outvars, factor.outs, strict=True)]
    return [atom.aval.shape[d] for atom, d in ends if d is not None]
