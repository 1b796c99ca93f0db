# SPDX-License-Identifier: Apache-2.0
"""Equations with inner jaxprs: loops, branches, and calls, which are inlined.

A loop's carry has one layout in all iterations: the body is written until it returns the layouts that it
takes. A carry that the body only adds to may be a partial sum, which is reduced once, behind the loop.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jzero.ir import _rules
from jzero.ir._errors import cannot
from jzero.ir._layout import AxisCut, Layout, Partial, fits
from jzero.ir._regions import Region
from jzero.sharding.analysis._frames import split
from jzero.sharding.partition._carries import added_to, source_of, sum_of
from jzero.sharding.partition._equations import ordinary
from jzero.sharding.partition._frame import DeviceFrame
from jzero.sharding.partition._loops_in_time import ends_loop
from jzero.sharding.partition._movement import ITERATIONS_DEPEND
from jzero.sharding.partition._values import DeviceValue, common
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Aval, Eqn, Jaxpr, Var

RunRegion = Callable[[DeviceFrame, Region, Sequence[DeviceValue]], list[DeviceValue]]
_ATTEMPTS = 8  # From the third on, a carry keeps only the cuts that it had before.


def run_inner(
    frame: DeviceFrame, region: Region, eqn: Eqn, ins: list[DeviceValue], run: RunRegion
) -> list[DeviceValue]:
    name = eqn.primitive.name
    if name == "scan":
        rows = _RowScanWriter(frame, region, eqn, ins, run)
        return (rows if rows.can_write() else _ScanWriter(frame, region, eqn, ins, run)).write()
    if name == "while":
        return _WhileWriter(frame, region, eqn, ins, run).write()
    if name == "cond":
        return _cond(frame, region, eqn, ins, run)
    if _jaxpr.is_rematted(eqn) and _jaxpr.prevents_cse(eqn):
        ins = barrier(frame, ins)
    (body,) = region.inner(eqn)
    return run(frame, body, ins)


def barrier(frame: DeviceFrame, ins: Sequence[DeviceValue]) -> list[DeviceValue]:
    """An optimization barrier around the values; lazy ones pass by it."""
    for value in ins:
        if not value.partial_axes & frame.over_time:
            frame.reduce(value)
    kept = [k for k, value in enumerate(ins) if value.make is None]
    outs = [*ins]
    if kept:
        atoms = frame.barrier([frame.at(ins[k], ins[k].layout) for k in kept])
        for k, x in zip(kept, atoms, strict=True):
            outs[k] = dataclasses.replace(
                ins[k], atoms={ins[k].layout: x}, scopes={}, casts={}, outer=None, view=None
            )
    return outs


def _new(aval: Aval, layout: Layout, rows: frozenset[str] = frozenset()) -> DeviceValue:
    x = _jaxpr.var_like(aval, layout.local_shape)
    return DeviceValue(aval, layout, {layout: x}, rows & layout.axes)


def _vars(values: Sequence[DeviceValue]) -> list[Any]:
    return [v.atoms[v.layout] for v in values]


# -- loops ---------------------------------------------------------------------------------------------------
class _CarryLayout(NamedTuple):
    layout: Layout
    rows: frozenset[str]


@dataclasses.dataclass
class _LoopWriter:
    """A loop; its body is written again until the layouts of its carries are stable."""

    frame: DeviceFrame
    region: Region
    eqn: Eqn
    ins: list[DeviceValue]
    run: RunRegion
    init: list[DeviceValue] = dataclasses.field(init=False)  # of the carries

    @functools.cached_property
    def effect_tokens(self) -> list[Atom]:
        """The token that a loop with ordered effects carries, [Note: the order of effects]."""
        return [self.frame.effect_token] if _jaxpr.has_ordered_effects(self.eqn) else []

    def enter_effects(self, inner: DeviceFrame) -> list[Var]:
        found = [*map(_jaxpr.new_var, self.effect_tokens)]
        inner.effect_token = found[0] if found else inner.effect_token
        return found

    def end_effects(self, ended: Sequence[Var]) -> None:
        for token in ended:
            self.frame.end_effects_of(token)

    def hoists(self) -> bool:
        """Whether gathers are hoisted out of the loop: in a pass of `jax.grad` one serves all iterations."""
        inside = self.frame.outer is not None and self.frame.hoists
        return self.region.pass_of(self.eqn) is not None or inside

    def inner(self, body: Region) -> DeviceFrame:
        return DeviceFrame(self.eqn, self.frame.shared, body, self.frame, self.hoists())

    def reduce(self, values: Sequence[DeviceValue]) -> None:
        for value in values:
            self.frame.reduce(value)

    def layouts(self) -> list[_CarryLayout]:
        return [
            _CarryLayout(self.frame.replicated(v.aval.shape) if own else v.layout, v.rows)
            for v, own in zip(self.init, self.is_own(), strict=False)
        ]

    def is_own(self) -> list[bool]:
        return [bool(self.frame.own(self.region, var)) for var in self.eqn.outvars]

    def carried(self, carries: Sequence[_CarryLayout]) -> list[DeviceValue]:
        return [_new(v.aval, c.layout, c.rows) for c, v in zip(carries, self.init, strict=True)]

    def after(
        self, attempt: int, before: Sequence[_CarryLayout], outs: Sequence[DeviceValue]
    ) -> list[_CarryLayout]:
        """The layouts that a body returns. From the third attempt on they only lose cuts, so that it ends."""
        found = []
        for old, value, own in zip(before, outs, self.is_own(), strict=False):
            layout = old.layout if value.make is not None or own else value.layout
            if attempt >= 2 and layout != old.layout:
                layout = common(layout, old.layout)
            found.append(_CarryLayout(layout, (old.rows | value.rows) & layout.axes))
        return found


@dataclasses.dataclass
class _ScanWriter(_LoopWriter):
    def __post_init__(self) -> None:
        self.parts = _jaxpr.scan_parts(self.eqn)
        (self.body,) = self.region.inner(self.eqn)
        first, num = self.parts.num_consts, self.parts.num_carry
        self.consts, self.init, self.xs = split(self.ins, first, num)
        self.reduce(self.xs)

    def write(self) -> list[DeviceValue]:
        self.accumulates = [self._waits(j) and self.sums(j) for j in range(len(self.init))]
        self.reduce([v for v, kept in zip(self.init, self.accumulates, strict=True) if not kept])
        # Devices do not divide iterations: each has its shard of every slice.
        self.stacks = [*map(self._stack, self.xs)]
        carries = self.layouts()
        # The first attempt takes zeros for a partial sum: its program must not be used.
        least = 1 if any(map(self._from_zero, range(len(carries)))) else 0
        for attempt in range(_ATTEMPTS):
            ins, inner, outs = self._iteration(attempt, carries)
            ends = outs[: len(carries)]
            for v, kept in zip(ends, self._may_be_partial(), strict=True):
                if not kept:
                    inner.reduce(v)
            new = self.after(attempt, carries, ends)
            if new == carries and attempt >= least:
                return self._written(inner, ins, carries, outs)
            carries = new
        raise cannot("its carry has no layout that stays", self.eqn, self.region)

    def sums(self, j: int) -> bool:
        """Whether the body only adds to a carry: nothing else in it reads or returns it."""
        jaxpr = self.body.jaxpr
        out, carry = jaxpr.outvars[j], jaxpr.invars[self.parts.num_consts + j]
        once = sum(atom is out for atom in jaxpr.outvars) == 1
        return once and sum_of(self.body, carry) is out

    def _stack(self, value: DeviceValue) -> Layout:
        """The layout that iterations slice; of state in an inner loop, as gathered before the outer one."""
        if value.is_state and self.frame.outer is not None and self.frame.hoists:
            return self.frame.replicated(value.aval.shape)
        return _of_iterations(value)

    def _waits(self, j: int) -> bool:
        """Whether a sum over iterations may stay partial until the last one.

        Gradients of the step's own loop over microbatches may not, from stage 2 on: each iteration reduces
        them. With jzero's microbatches they do, since iterations cannot reduce over time.
        """
        is_of_pass = self.region.pass_of(self.eqn) is not None
        once = self.frame.shared.once or is_of_pass or bool(self.frame.over_time)
        return once or self.frame.hint_of(self.eqn.outvars[j]) is None

    def _is_accumulated(self, var: Var) -> bool:
        """Whether the enclosing loop only accumulates it, so that it stays partial until that loop's end."""
        out = added_to(self.region, var)
        return out is not None and out in self.frame.accumulated

    def _from_zero(self, j: int) -> bool:
        """Whether a carry that the body only adds to begins as zeros."""
        return self.accumulates[j] and self.init[j].is_zero

    def _may_be_partial(self) -> list[bool]:
        each = enumerate(zip(self.accumulates, self.init, strict=True))
        return [self._from_zero(j) or kept and bool(v.layout.partial) for j, (kept, v) in each]

    def _iteration(
        self, attempt: int, carries: Sequence[_CarryLayout]
    ) -> tuple[list[Var], DeviceFrame, list[DeviceValue]]:
        inner = self.inner(self.body)
        stacks = map(self._is_accumulated, self.eqn.outvars[len(carries) :])
        ends = zip(self.body.jaxpr.outvars, [*self._may_be_partial(), *stacks], strict=True)
        inner.accumulated = frozenset(x for x, waits in ends if waits)
        carried, tokens = self.carried(carries), self.enter_effects(inner)
        for j, value in enumerate(carried):
            # Zeros become a partial sum when a partial sum is added to them.
            value.fill = self.init[j].fill if attempt == 0 and self._from_zero(j) else None
        slices = [*map(self._slice, self.xs, self.stacks)]
        values = [inner.entered(v) for v in self.consts]
        outs = self.run(inner, self.body, [*values, *carried, *slices])
        return [*_vars(carried), *tokens, *_vars(slices)], inner, outs

    def _slice(self, value: DeviceValue, stack: Layout) -> DeviceValue:
        layout = dataclasses.replace(stack, dims=stack.dims[1:])
        row = _new(_jaxpr.var_like(value.aval, layout.shape).aval, layout, value.rows)
        row.exchanged = value.exchanged & layout.axes
        row.origin = value.origin
        return row

    def _written(
        self, inner: DeviceFrame, ins: list[Var], carries: list[_CarryLayout], outs: list[DeviceValue]
    ) -> list[DeviceValue]:  # fmt: skip
        num, frame, inner.source = len(carries), self.frame, self.eqn
        ends = [inner.at(v, c.layout) for v, c in zip(outs[:num], carries, strict=True)]
        stacks, accumulated = self.eqn.outvars[num:], [*map(self._is_accumulated, self.eqn.outvars)]
        rows, tokens = list[DeviceValue](), [inner.effect_token for _ in self.effect_tokens]
        for v, waits in zip(outs[num:], accumulated[num:], strict=True):
            if not waits:
                inner.reduce_at_exit(v, opened=inner.is_opened())
            rows.append(v if waits else _before_casts(v))
        body = inner.function(
            self.parts.body, ins, [*ends, *tokens, *(inner.at(v, v.layout) for v in rows)]
        )
        frame.source = self.eqn
        starts = [frame.at(v, c.layout) for v, c in zip(self.init, carries, strict=True)]
        frame.reason = ITERATIONS_DEPEND if any(map(_is_of_rows, self.xs)) else ""
        sliced = [frame.at(v, stack) for v, stack in zip(self.xs, self.stacks, strict=True)]
        found = self.carried(carries)
        found += [self._stacked(var, v) for var, v in zip(stacks, rows, strict=True)]
        ended = [*map(_jaxpr.new_var, tokens)]
        frame.eqns.append(
            _jaxpr.scan_like(
                _without_consts(self.eqn, "jaxpr", body), body,
                [*inner.imports, *starts, *self.effect_tokens, *sliced],
                [*_vars(found[:num]), *ended, *_vars(found[num:])], len(inner.imports),
                num + len(ended), self.parts.length, self.parts.reverse,
            )
        )  # fmt: skip
        self.end_effects(ended)
        for j in (j for j in range(num, len(outs)) if not accumulated[j]):
            found[j] = self._cast(self.eqn.outvars[j], found[j], outs[j])
        return found

    def _stacked(self, var: Var, row: DeviceValue) -> DeviceValue:
        first = self.frame.replicated(var.aval.shape[:1]).dims
        layout = dataclasses.replace(row.layout, dims=(*first, *row.layout.dims))
        stack = _new(_jaxpr.var_like(row.aval, var.aval.shape).aval, layout, row.rows)
        stack.exchanged = row.exchanged & layout.axes
        stack.origin = None if row.rows else row.origin
        return stack

    def _cast(self, var: Var, value: DeviceValue, row: DeviceValue) -> DeviceValue:
        """Casts a stack as its slices were cast: iterations stack partial sums before their casts."""
        hint = self.frame.hint_of(var)
        for cast in _casts(row):
            value.hint = hint
            out = _jaxpr.var_like(cast.outvars[0].aval, var.aval.shape)
            eqn = cast.replace(invars=[_jaxpr.var_like(value.aval)], outvars=[out])
            (value,) = ordinary(self.frame, eqn, [value], _rules.factors_of(eqn))
        return value


def _of_iterations(value: DeviceValue) -> Layout:
    """A stack's layout with dim 0 not divided; cuts of dim 0 by rows move to dim 1 where they fit."""
    cuts = value.layout.dims[0].cuts
    layout = value.layout.without([cut.axis for cut in cuts])
    if len(layout.dims) < 2 or not value.rows.intersection(cut.axis for cut in layout.dims[1].cuts):
        return layout
    for axis in (cut.axis for cut in cuts if cut.axis in value.rows):
        dim = layout.dims[1]
        behind = dim.cuts[-1].outer * layout.num([dim.cuts[-1].axis])
        each = [dim.put(AxisCut(axis, outer)) for outer in (1, behind) if dim.pad is None]
        fit = [new for new in each if fits(new.size, layout.digits(new.cuts))]
        layout = layout.with_dims({1: fit[0]} if fit else {})
    return layout


def _casts(v: DeviceValue) -> list[Eqn]:
    """The last casts of a value that is still partial."""
    if v.cast is None or v.cast[1].layout != v.layout:
        return []
    eqn, before = v.cast
    return [*_casts(before), eqn]


def _before_casts(v: DeviceValue) -> DeviceValue:
    return _before_casts(v.cast[1]) if v.cast is not None and _casts(v) else v


@dataclasses.dataclass
class _RowScanWriter(_ScanWriter):
    """A `scan` along the batch: each device runs the iterations of its own rows, and nothing communicates."""

    def can_write(self) -> bool:
        """Whether all axes shard the rows that it slices, and no other operand is batch-sharded."""
        self.rows = [*dict.fromkeys(v.layout.dims[0] for v in self.xs if _is_of_rows(v))]
        if len(self.rows) != 1 or self.rows[0].pad is not None:
            return False
        if _jaxpr.has_side_effects(self.eqn):  # Each device would have only those of its rows.
            return False
        axes = {cut.axis for cut in self.rows[0].cuts}
        others = [*self.consts, *self.init, *(v for v in self.xs if not _is_of_rows(v))]
        if axes != {axis for axis, n in self.frame.mesh.items() if n > 1} or any(
            v.rows for v in others
        ):
            return False
        return all(self._stays(j) or self.sums(j) for j in range(len(self.init)))

    def _stays(self, j: int) -> bool:
        jaxpr = self.body.jaxpr
        return source_of(self.body, jaxpr.outvars[j]) is jaxpr.invars[self.parts.num_consts + j]

    def write(self) -> list[DeviceValue]:
        inner, frame, (rows,) = self.inner(self.body), self.frame, self.rows
        num, axes = len(self.init), frozenset(cut.axis for cut in rows.cuts)
        self.reduce(self.consts)
        ins = [inner.entered(frame.as_replicated(v)) for v in self.consts]
        own = [
            _new(var.aval, frame.replicated(var.aval.shape))
            for var in self.body.jaxpr.invars[len(ins) :]
        ]
        outs = self.run(inner, self.body, [*ins, *own])
        inner.source = self.eqn
        ends = [*map(inner.replica, outs)]
        body = inner.function(self.parts.body, _vars(own), ends)
        frame.source = self.eqn
        sums = [*map(Partial, sorted(axes))]
        layouts = [frame.replicated(v.aval.shape) for v in self.init]
        layouts = [
            layout if self._stays(j) else layout.with_partial(*sums)
            for j, layout in enumerate(layouts)
        ]
        starts = [frame.at(v, layout) for v, layout in zip(self.init, layouts, strict=True)]
        slices = [frame.at(v, frame.sharded(v.aval.shape, {0: rows})) for v in self.xs]
        layouts += [frame.sharded(var.aval.shape, {0: rows}) for var in self.eqn.outvars[num:]]
        found = [_new(var.aval, c, axes) for var, c in zip(self.eqn.outvars, layouts, strict=True)]
        frame.eqns.append(
            _jaxpr.scan_like(
                _without_consts(self.eqn, "jaxpr", body), body, [*inner.imports, *starts, *slices],
                _vars(found), len(inner.imports), num, self.parts.length // frame.replicated(()).num(axes),
                self.parts.reverse,
            )
        )  # fmt: skip
        return [self.init[j] if j < num and self._stays(j) else v for j, v in enumerate(found)]


def _is_of_rows(v: DeviceValue) -> bool:
    return any(cut.axis in v.rows for cut in v.layout.dims[0].cuts)


@dataclasses.dataclass
class _WhileWriter(_LoopWriter):
    """A `while`. All devices decide alike, since the predicate is replicated.

    [Note: loops of single rows] Under `jax.vmap` a predicate has an element for each row, and a row that is
    done keeps its carry. If nothing in the loop communicates, each device stops when its own rows are done;
    otherwise the rows are gathered. Padding counts as done.
    """

    def __post_init__(self) -> None:
        self.parts = _jaxpr.while_parts(self.eqn)
        self.cond, self.body = self.region.inner(self.eqn)
        first = self.parts.num_cond_consts
        last = first + self.parts.num_body_consts
        self.reduce(self.ins)
        # Devices that leave it at different times must not communicate in it.
        self.diverges = bool(self.frame.own(self.cond, self.cond.jaxpr.outvars[0]))
        if self.diverges:
            self.ins = [*map(self.frame.as_replicated, self.ins)]
        self.cond_consts, self.body_consts = self.ins[:first], self.ins[first:last]
        self.init = self.ins[last:]

    def write(self) -> list[DeviceValue]:
        self.of_rows = self.cond.jaxpr.outvars[0].aval.ndim
        self._note_rows([v.layout for v in self.init])
        self.alone = self.of_rows > 0 and not _jaxpr.has_side_effects(self.eqn)
        found = None
        if self.alone or not self.of_rows:
            found = self._attempt(self._with_rows if self.of_rows else lambda carry: carry)
        if found is None:
            self.alone = False
            found = self._attempt(self._with_gathered_rows, replicated=True)
        assert found is not None
        return found

    def inner(self, body: Region) -> DeviceFrame:
        inner = super().inner(body)
        inner.diverges |= self.diverges
        return inner

    def hoists(self) -> bool:
        """A loop that each device leaves by itself must not gather, and hoists too."""
        return self.alone or super().hoists()

    def _note_rows(self, carries: Sequence[Layout]) -> None:
        each = (layout.dims[: self.of_rows] for layout in carries)
        self.rows = next((dims for dims in each if any(dim.cuts for dim in dims)), ())

    def _with_rows(self, carry: _CarryLayout) -> _CarryLayout:
        """In a loop of single rows, all carries are batch-sharded as the first one that is."""
        layout = carry.layout.without([c.axis for dim in self.rows for c in dim.cuts])
        layout = layout.with_dims(dict(enumerate(self.rows)))
        return _CarryLayout(layout, carry.rows | {c.axis for dim in self.rows for c in dim.cuts})

    def _with_gathered_rows(self, carry: _CarryLayout) -> _CarryLayout:
        layout = carry.layout
        layout = layout.without([c.axis for d in layout.dims[: self.of_rows] for c in d.cuts])
        return _CarryLayout(layout, carry.rows & layout.axes)

    def _attempt(
        self, pinned: Callable[[_CarryLayout], _CarryLayout], replicated: bool = False
    ) -> list[DeviceValue] | None:
        """The loop; None if devices leave it by themselves, and would have to communicate in it."""
        carries = [*map(pinned, self.layouts())]
        for attempt in range(_ATTEMPTS):
            inner, carried = self.inner(self.body), self.carried(carries)
            vars = [*_vars(carried), *self.enter_effects(inner)]
            outs = self.run(inner, self.body, [*map(inner.entered, self.body_consts), *carried])
            for v in outs:
                inner.reduce(v)
            returned = self.after(attempt, carries, outs)
            if not self.rows:
                self._note_rows([carry.layout for carry in returned])
            new = [*map(pinned, returned)]
            if new == carries:
                return self._written(inner, vars, carries, outs, replicated)
            carries = new
        raise cannot("its carry has no layout that stays", self.eqn, self.region)

    def _written(
        self, inner: DeviceFrame, vars: list[Var], carries: list[_CarryLayout], outs: list[DeviceValue],
        replicated: bool,
    ) -> list[DeviceValue] | None:  # fmt: skip
        frame, inner.source = self.frame, self.eqn
        ends = [inner.at(v, c.layout) for v, c in zip(outs, carries, strict=True)]
        ended_tokens = [inner.effect_token for _ in self.effect_tokens]
        body = inner.function(self.parts.body, vars, [*ends, *ended_tokens])
        test, cond, go = self._predicate(carries, replicated)
        if self.of_rows and not replicated:
            alike = all(c.layout.dims[: self.of_rows] == go.layout.dims for c in carries)
            eqns = [*_jaxpr.walk(cond), *_jaxpr.walk(body)]
            meet = any(each.outvars and each.outvars[0] in frame.moves for each in eqns)
            in_time = any(ends_loop(each, a) for each in eqns for a in frame.over_time)
            if not alike or meet or in_time:
                return None
        frame.source = self.eqn
        starts = [frame.at(v, c.layout) for v, c in zip(self.init, carries, strict=True)]
        found = self.carried(carries)
        like = _without_consts(self.eqn, "cond_jaxpr", cond)
        like = _without_consts(like, "body_jaxpr", body)
        params = like.params | dict(cond_nconsts=len(test.imports), body_nconsts=len(inner.imports))
        like = _jaxpr.with_effects_of_programs(like.replace(params=params))
        ended = [*map(_jaxpr.new_var, ended_tokens)]
        operands = [*test.imports, *inner.imports, *starts, *self.effect_tokens]
        frame.clone(like, operands, [*_vars(found), *ended])
        self.end_effects(ended)
        return found

    def _predicate(
        self, carries: Sequence[_CarryLayout], replicated: bool
    ) -> tuple[DeviceFrame, Jaxpr, DeviceValue]:
        test, carried = self.inner(self.cond), self.carried(carries)
        vars = [*_vars(carried), *self.enter_effects(test)]
        (go,) = self.run(test, self.cond, [*map(test.entered, self.cond_consts), *carried])
        test.source = self.eqn
        test.reduce(go)
        layout = go.layout if go.aval.ndim and not replicated else test.replicated(go.aval.shape)
        goes_on = test.at(go, layout)
        for d in range(go.aval.ndim):
            goes_on = test.masked(goes_on, layout, d, "or")
        return test, test.function(self.parts.cond, vars, [goes_on]), go


# -- branches ------------------------------------------------------------------------------------------------
def _cond(
    frame: DeviceFrame, region: Region, eqn: Eqn, ins: Sequence[DeviceValue], run: RunRegion
) -> list[DeviceValue]:
    """Conversions of operands are written in the branches, which return equal layouts."""
    index, *operands = ins
    inner = region.inner(eqn)
    if _jaxpr.branch_of_steps(eqn) is not None:
        return run(frame, inner[eqn.params["branches_platforms"].index(None)], operands)
    for value in ins:
        frame.reduce(value)
    predicate = frame.replica(index)
    if index.own:  # Devices in different branches must not communicate in them.
        operands = [*map(frame.as_replicated, operands)]
    frames, returned = list[DeviceFrame](), list[list[DeviceValue]]()
    ordered = _jaxpr.has_ordered_effects(eqn)
    for branch in inner:
        each = DeviceFrame(eqn, frame.shared, branch, frame, hoists=False)
        each.diverges |= bool(index.own)
        each.effect_token = each.brought(frame.effect_token) if ordered else each.effect_token
        outs = run(each, branch, [each.entered(v) for v in operands])
        each.source = eqn
        frames.append(each)
        returned.append(outs)
    opened = any(each.is_opened() for each in frames)
    for each, outs in zip(frames, returned, strict=True):
        for value in outs:
            each.reduce_at_exit(value, opened)
    layouts = [_of_branches(values) for values in zip(*returned, strict=True)]
    ends = [
        [each.at(v, layout) for v, layout in zip(outs, layouts, strict=True)]
        for each, outs in zip(frames, returned, strict=True)
    ]
    frame.source = eqn
    if ordered:
        ends = [[*own, each.effect_token] for each, own in zip(frames, ends, strict=True)]
    return _branches(frame, eqn, predicate, frames, returned, layouts, ends)


def _of_branches(values: Sequence[DeviceValue]) -> Layout:
    known = [v for v in values if v.make is None] or [*values]
    layout = known[0].layout
    for v in known[1:]:
        layout = common(layout, v.layout)
    # If one branch returns a partial sum, all do: the first device has all of another branch's value.
    partial = {p.axis: p for v in known for p in v.layout.partial}
    return dataclasses.replace(layout, partial=tuple(partial.values()))


def _branches(
    frame: DeviceFrame, eqn: Eqn, predicate: Atom, frames: Sequence[DeviceFrame],
    returned: Sequence[Sequence[DeviceValue]], layouts: Sequence[Layout], ends: Sequence[Sequence[Atom]],
) -> list[DeviceValue]:  # fmt: skip
    order = [*dict.fromkeys(x for each in frames for x in each.imports)]
    branches = []
    for closed, each, outs in zip(eqn.params["branches"], frames, ends, strict=True):
        own = [each.brought(x) for x in order]
        body = each.function(_jaxpr.open_jaxpr(closed)[0], [], outs)
        branches.append(_closed(closed, _jaxpr.replaced(body, invars=own)))
    rows = [frozenset(a for v in values for a in v.rows) for values in zip(*returned, strict=True)]
    found = [*map(_new, (var.aval for var in eqn.outvars), layouts, rows)]
    ended = [*map(_jaxpr.new_var, ends[0][len(found) :])]
    params = eqn.params | dict(branches=tuple(branches))
    like = _jaxpr.with_effects_of_programs(eqn.replace(params=params))
    frame.clone(like, [predicate, *order], [*_vars(found), *ended])
    for token in ended:
        frame.end_effects_of(token)
    return found


def _without_consts(eqn: Eqn, param: str, body: Jaxpr) -> Eqn:
    """The equation with another program, which has no constants of its own."""
    return eqn.replace(params=eqn.params | {param: _closed(eqn.params[param], body)})


def _closed(like: Any, body: Jaxpr) -> Any:
    return like.replace(jaxpr=body, consts=[])
