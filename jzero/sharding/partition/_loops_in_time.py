# SPDX-License-Identifier: Apache-2.0
"""Splits a program into loops over microbatches: which equations run in which loop, and which once.

A reduction over the time axis ends a loop, and so does a gather over it, or a loop or branch with such ends
inside, which is opened. Equations that differ between microbatches run in the loop whose end depends on them;
later loops recompute them, or read saved values (`sharding/partition/_saved.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from jzero._errors import STEP, message
from jzero.ir import _dataflow, _rules
from jzero.ir._errors import CannotPartitionError
from jzero.ir._products import products
from jzero.ir._regions import Region, ValueIn, variables
from jzero.ir._rules import Cost
from jzero.sharding.partition._saved import Loops, RematPolicy
from jzero.sharding.passes._waits import is_gather
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._types import Eqn, Var

# How often products may run, as a multiple of a single loop's: 1.3 for CLIP, 2 for a count in every layer's
# loss, the number of layers for BatchNorm (tests/test_collected_rows.py).
MOST_REPEATS = 4
REDUCES = {"psum": "sum", "pmax": "max", "pmin": "min"}


class LoopInTime(NamedTuple):
    eqns: tuple[int, ...]  # of an iteration, by index, in order
    reads: tuple[Var, ...]  # each microbatch's values of earlier loops that it reads
    sums: tuple[Eqn, ...]  # the reductions over time whose operands it makes
    lasts: tuple[Var, ...]  # results that are equal in all microbatches
    stacks: tuple[Var, ...]  # results that are returned for each microbatch
    silent: frozenset[int]  # recomputed equations, whose side effects an earlier loop had


class LoopsInTime(NamedTuple):
    loops: list[LoopInTime]  # in order; a loop may be empty
    # For each loop, the equations that run before it, by index; and those behind the last one.
    once: list[list[int]]
    saved: list[Var]  # results that are returned for later loops only
    said: Loops  # the report


def loops_in_time(
    region: Region, differs: Collection[Var], axis: str, num: int, devices: int, gather_once: bool
) -> LoopsInTime:
    """The loops of a program of one device and one microbatch; `differs` are values that do between these."""
    levels = _Levels(region, differs, axis)
    inside = levels.loop | _sunk(levels, gather_once)
    eqns, (lasts, own) = region.jaxpr.eqns, _results(levels)
    acts = [i for i in levels.loop if _jaxpr.has_side_effects(eqns[i])]
    ends = [levels.of[var] + 1 for var in (*lasts, *own)]
    ends += [levels.of_eqns[i] + 1 for i in acts]
    last = max([*levels.of_eqns, *ends, 0])
    waited = _waited_for(levels, levels.loop)
    policy, loops = _remat_policy(levels, inside, waited, num, devices), list[LoopInTime]()
    _put_off(levels, policy, [levels.maker[var] for var in (*lasts, *own)], acts, last)
    for level in range(last):
        sums = tuple(eqns[i] for i in levels.sums if levels.of_eqns[i] == level + 1)
        mine = tuple(var for var in lasts if levels.of[var] == level)
        stacks = tuple(var for var in own if levels.of[var] == level)
        made = [*variables(atom for eqn in sums for atom in eqn.invars), *mine, *stacks]
        makers = [levels.maker[var] for var in made if levels.maker.get(var) in inside]
        makers += [i for i in acts if levels.of_eqns[i] == level]
        run, recomputed, reads = policy.loop(level, makers, stacks)
        loops.append(LoopInTime(run, reads, sums, mine, stacks, recomputed))
    num_loops = sum(bool(loop.eqns) for loop in loops)
    begun = [i for i in (*levels.sums, *levels.stacked) if waited.intersection(eqns[i].outvars)]
    said = policy.loops(num_loops, sorted(begun), _at_once(levels))
    if said.repeats > MOST_REPEATS:
        raise _many_loops(said)
    once = [[i for i in levels.once if levels.of_eqns[i] == level] for level in range(last + 1)]
    return LoopsInTime(loops, once, [*policy.saved], said)


class _Levels:
    """The level of a value: the number of loops that must run before it can be computed."""

    def __init__(self, region: Region, differs: Collection[Var], axis: str):
        self.frame, self._axis = region, axis
        self.differs = {*differs}
        self.maker = region.makers
        self.of = dict.fromkeys([*region.jaxpr.constvars, *region.jaxpr.invars], 0)
        self.of_eqns = list[int]()
        self.loop = set[int]()  # equations that run for each microbatch
        self.sums = dict[int, None]()  # reductions over time, in order
        self.stacked = dict[int, None]()  # gathers over time and opened equations, in order
        for index, eqn in enumerate(region.jaxpr.eqns):
            self._place(index, eqn)

    def _place(self, index: int, eqn: Eqn) -> None:
        read = variables(eqn.invars)
        level = max((self.of[var] for var in read), default=0)
        # [Note: effects in microbatches]
        acts_once = self.differs.isdisjoint((*read, *eqn.outvars)) and _jaxpr.has_side_effects(eqn)
        if is_sum(eqn, self._axis):
            self.sums[index] = None
            level += 1
        elif is_stacked(eqn, self._axis) or acts_once:
            if is_stacked(eqn, self._axis):
                self.stacked[index] = None
            level = max((self.of[var] + self.is_made_in_loop(var) for var in read), default=0)
        elif any(var in self.differs for var in (*read, *eqn.outvars)) or any(
            self.is_made_in_loop(var) and self.of[var] == level for var in read
        ):
            self.loop.add(index)
        self.of_eqns.append(level)
        self.of |= dict.fromkeys(eqn.outvars, level)

    @property
    def once(self) -> list[int]:
        num = len(self.frame.jaxpr.eqns)
        return [i for i in range(num) if i not in self.loop and i not in self.sums]

    def is_local(self, var: Var) -> bool:
        return var in self.differs

    def is_made_in_loop(self, var: Var) -> bool:
        return self.maker.get(var) in self.loop


def is_sum(eqn: Eqn, axis: str) -> bool:
    return eqn.primitive.name in REDUCES and is_over(eqn, axis)


def is_stacked(eqn: Eqn, axis: str) -> bool:
    """Whether it needs the values of all microbatches: a gather over time, or an equation to be opened."""
    gathers = is_gather(eqn) and is_over(eqn, axis)
    return gathers or any(ends_loop(each, axis) for each in _jaxpr.inside(eqn))


def ends_loop(eqn: Eqn, axis: str) -> bool:
    """Whether it is a reduction or a gather over time."""
    return (eqn.primitive.name in REDUCES or is_gather(eqn)) and is_over(eqn, axis)


def is_over(eqn: Eqn, axis: str) -> bool:
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return axis in (axes if isinstance(axes, tuple) else (axes,))


def differing(region: Region, given: Iterable[Var], axis: str) -> Mapping[ValueIn, bool]:
    def step(_: Region, eqn: Eqn, facts: Sequence[bool]) -> list[bool]:
        if eqn.primitive.name == "optimization_barrier":
            return [*facts]
        differs = any(facts) and not ends_loop(eqn, axis)
        index = eqn.primitive.name == "axis_index" and is_over(eqn, axis)
        return [differs or index] * len(eqn.outvars)

    start: dict[ValueIn, bool] = {(region, var): True for var in given}
    return _dataflow.forward(region, start, step, lambda a, b: a or b, False)


def _many_loops(said: Loops) -> CannotPartitionError:
    return CannotPartitionError(message(
        STEP,
        [f"microbatches > 1, and {line} begins a loop over the microbatches" for line in said.begun_by],
        f"What needs all rows waits for a loop of its own, which computes again what it reads; in "
        f"{said.num} loops the products would run {said.repeats:.1f} times as often, and "
        f"{MOST_REPEATS} times is the most.",
        "Drop microbatches; or normalise each row (LayerNorm, GroupNorm), or groups of rows with "
        "jzero.groups.", things="reductions", shown=8))  # fmt: skip


def _at_once(levels: _Levels) -> list[int]:
    """Products of values gathered over time, by index: their results take memory for all microbatches."""
    gathered, region, found = set[Var](), levels.frame, list[int]()
    for index in levels.once:
        eqn = region.jaxpr.eqns[index]
        if index in levels.stacked or not gathered.isdisjoint(variables(eqn.invars)):
            gathered.update(eqn.outvars)
            if index not in levels.stacked and products(region, eqn):
                found.append(index)
    return found


def _sunk(levels: _Levels, gather_once: bool) -> set[int]:
    """Equations that run in loops to free results early: gathers of state, and cheap ones only loops read."""
    region, num, sunk = levels.frame, len(levels.frame.jaxpr.eqns), set[int]()
    for index, eqn in reversed([*enumerate(region.jaxpr.eqns)]):
        if index in levels.loop or index in levels.sums or index in levels.stacked:
            continue
        readers = {i for out in eqn.outvars for i in region.readers.get(out, ())}
        inside = {i for i in readers if i in levels.loop or i in levels.sums or i in sunk}
        alone = inside == readers and num not in readers and _is_cheap(eqn)
        if inside and (alone or is_gather(eqn) and not gather_once):
            sunk.add(index)
    return sunk


def _is_cheap(eqn: Eqn) -> bool:
    moves = _rules.keeps_dims(eqn) and not _rules.costs(eqn, Cost.REDUCTION, Cost.ALONG)
    return moves or _rules.costs(eqn, Cost.SOURCE, Cost.IDENTITY)


def _results(levels: _Levels) -> tuple[list[Var], list[Var]]:
    """Values of loops that are read outside: those equal in all microbatches, and each microbatch's own."""
    jaxpr = levels.frame.jaxpr
    read = (atom for i in levels.once for atom in jaxpr.eqns[i].invars)
    found = [v for v in variables([*read, *jaxpr.outvars]) if levels.is_made_in_loop(v)]
    return (
        [var for var in found if not levels.is_local(var)],
        [var for var in found if levels.is_local(var)],
    )


def _remat_policy(
    levels: _Levels, inside: set[int], waited: set[Var], num: int, devices: int
) -> RematPolicy:
    """What later loops read of earlier ones. Its budget is the bytes that are gathered between loops."""
    eqns = levels.frame.jaxpr.eqns

    def inputs(index: int) -> list[Var]:
        return [var for var in variables(eqns[index].invars) if levels.maker.get(var) in inside]

    gathers = [eqns[i] for i in levels.stacked if waited & {*eqns[i].outvars}]
    rows = sum(_rules.size_in_bytes(out.aval) for eqn in gathers for out in eqn.outvars)
    operands = variables(atom for eqn in gathers for atom in eqn.invars)
    bits = _compared(levels) | _moved_into(levels, operands)
    return RematPolicy(levels.frame, num, rows * devices, inputs, levels.is_local, bits)


def _put_off(
    levels: _Levels, policy: RematPolicy, results: Iterable[int], acts: Iterable[int], last: int
) -> None:
    """Moves sums and results that nothing waits for into the last loop, where only that runs their products.

    The gradient of a loss that is divided by a count waits for the count: the first loop only counts, and the
    last one makes the loss beside its gradient.
    """
    region, eqns, once = levels.frame, levels.frame.jaxpr.eqns, {*levels.once}
    acting = {i for i in once if _jaxpr.has_side_effects(eqns[i])}
    waited = _waited_for(levels, {*levels.loop, *levels.sums, *levels.stacked, *acting})
    held = {i for i in levels.sums if waited & {*eqns[i].outvars}} | {*acts}
    held |= {
        i for i in results if any(once & {*region.readers.get(v, ())} for v in eqns[i].outvars)
    }
    ends = [*dict.fromkeys((*levels.sums, *results, *acts))]
    made = [
        [i for i in ends if levels.of_eqns[i] - (i in levels.sums) == level]
        for level in range(last)
    ]
    for makers in made[:-1]:
        runs = policy.products_behind([i for i in makers if i in held])
        for i in makers:
            mine = policy.products_behind([i])
            if i not in held and not mine <= runs and mine <= policy.products_behind(made[-1]):
                levels.of |= dict.fromkeys(eqns[i].outvars, last - (i not in levels.sums))
    for i in sorted({*once, *levels.sums}):  # They, and what is computed from them.
        read = (*variables(eqns[i].invars), *eqns[i].outvars)
        levels.of_eqns[i] = max([levels.of_eqns[i], *(levels.of[var] for var in read)])
        levels.of |= dict.fromkeys(eqns[i].outvars, levels.of_eqns[i])


def _waited_for(levels: _Levels, by: Collection[int]) -> set[Var]:
    """Values that are computed outside of loops, and that some equations depend on."""
    found = set[Var]()
    for index, eqn in reversed([*enumerate(levels.frame.jaxpr.eqns)]):
        if index in by or not found.isdisjoint(eqn.outvars):
            found.update(v for v in variables(eqn.invars) if not levels.is_made_in_loop(v))
    return found


# [Note: bit-stable values]
# A recomputed value may differ in its last bit. Then no row might be the largest (`losses == losses.max()`),
# or a row might have a distance from itself. So values that are compared with results of all rows are saved
# whatever their size, and so are values that are gathered in another shape
# (test_collected_rows.py::test_what_is_the_largest_of_all_rows_is_so_in_every_loop).
_MOVES = (Cost.COPY, Cost.VIEW, Cost.REPEAT)


def _compared(levels: _Levels) -> set[Var]:
    """Local values that are compared with values of a later level."""
    jaxpr = levels.frame.jaxpr
    # AD leaves unused comparisons behind, of the position of a maximum.
    read = set(map(id, _rewrite.without_unread(jaxpr.eqns, jaxpr.outvars, _rules.compares)))
    return {
        var
        for index, eqn in enumerate(jaxpr.eqns)
        if _rules.compares(eqn) and index in levels.loop and id(eqn) in read
        for var in variables(eqn.invars)
        if levels.is_made_in_loop(var) and levels.is_local(var)
        and levels.of[var] < levels.of_eqns[index]
        and jnp.issubdtype(var.aval.dtype, jnp.inexact)
    }  # fmt: skip


def _moved_into(levels: _Levels, stacks: Iterable[Var]) -> set[Var]:
    """Values that are gathered in another shape, so that a row has the bits that others see of it."""
    found: set[Var] = set()
    for var in stacks:
        while levels.is_made_in_loop(var):
            eqn = levels.frame.jaxpr.eqns[levels.maker[var]]
            if not _rules.costs(eqn, *_MOVES) or _jaxpr.is_literal(eqn.invars[0]):
                break
            var = eqn.invars[0]
            if levels.is_made_in_loop(var) and levels.is_local(var):
                found.add(var)
    return found
