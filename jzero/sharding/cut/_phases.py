# SPDX-License-Identifier: Apache-2.0
"""The cut: what of a step runs for every microbatch, and what once, on what all of them share.

A microbatch is a device in time: what differs between devices differs between microbatches, and a
reduction sums over both. So the equations of a step fall into phases. A phase first runs equations on
values that all microbatches share, then loops over the microbatches with the equations that depend on
the batch, until the reductions, which the loop sums up, and the gathers, for which it hands out what each
microbatch has. An ordinary step has one loop and then its optimizer. A step whose second gradient needs the
first one (SAM), whose loss needs a count over the whole batch, or the embeddings of all rows, has more; a
later loop computes again what it needs of an earlier one, or reads what was kept (`_kept.py`), so that
little more than one microbatch is alive.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from jzero._errors import message
from jzero.ir import _rules
from jzero.ir._regions import variables
from jzero.ir._rules import Cost
from jzero.sharding.analysis._frames import COLLECTIVES, REDUCTIONS, Frame
from jzero.sharding.analysis._kinds import COLLECTED, CutError
from jzero.sharding.cut._bits import compared, moved_into
from jzero.sharding.cut._kept import Keeper, Loops
from jzero.sharding.cut._levels import Levels
from jzero.tracing import _jaxpr
from jzero.tracing._types import Eqn, Var

# Its products may run so many times as often as in one loop: 1.3 for CLIP, 2 for a count in every layer's
# loss, and as many times as there are layers for BatchNorm (tests/test_collected_rows.py).
MOST_REPEATS = 4


@dataclasses.dataclass(frozen=True)
class Phase:
    """Some equations of the root frame, by index, and what its loop hands out.

    Attributes:
      before: equations that run once, before the loop; gathers and maxima of what earlier loops handed out.
      loop: equations that run for each microbatch.
      again: those of them that an earlier loop has run.
      kept: what the loop reads of earlier ones.
      sums: what the loop sums over the microbatches (and the devices, as reductions do).
      lasts: values that every microbatch computes alike.
      stacks: local values that are handed out as every microbatch has them: outputs of the step with one
        entry per example, what is gathered after the loop, and what later loops read.
    """

    before: tuple[int, ...]
    loop: tuple[int, ...]
    again: frozenset[int]
    kept: tuple[Var, ...]
    sums: tuple[Var, ...]
    lasts: tuple[Var, ...]
    stacks: tuple[Var, ...]


@dataclasses.dataclass(frozen=True)
class Cut:
    """The phases of a step, in order, and what is to be said of their loops."""

    phases: tuple[Phase, ...]
    loops: Loops


def cut(
    frame: Frame, axes: Collection[str], num: int, examples: Sequence[bool],
    apart: Collection[int] = frozenset(),
    boundary: Mapping[Var, Eqn | None] = MappingProxyType({}),
) -> Cut:  # fmt: skip
    """The phases of a step; the last one's loop may be empty.

    Args:
      frame: the root frame, without calls (`_rewrite.flatten_calls`).
      axes: the names of the data axes, as the step has them.
      num: of microbatches on each device.
      examples: for each output of the frame, whether it has one entry per example.
      apart: equations that run after all phases, elsewhere; phases only hand out what they read.
      boundary: what that is, and an equation that reads it. Nothing else reads it before it is summed up.

    Raises:
      CutError: the step uses what it reduces inside the loop that makes it, needs rows of the whole batch in
        such a place, or would run its products many times.
    """
    _check_collectives(frame, frozenset(axes))
    found = _Cutter(frame, num, apart, boundary).cut(examples)
    if found.loops.repeats > MOST_REPEATS:
        raise CutError(message(
            "shard_train_step",
            [f"accumulate > 1, and {line} begins a loop over the microbatches" for line in
             dict.fromkeys(found.loops.begun_by)],
            f"What needs all rows waits for a loop of its own, which computes again what it reads; in "
            f"{found.loops.num} loops the products would run {found.loops.repeats:.1f} times as often, and "
            f"{MOST_REPEATS} times is the most.",
            "Drop accumulate; or normalise each row (LayerNorm, GroupNorm), or groups of rows with "
            "jzero.groups.", things="reductions", shown=8))  # fmt: skip
    return found


class _Cutter:
    """Puts the equations of the root frame into phases, by their levels."""

    def __init__(
        self, frame: Frame, num: int, apart: Collection[int], boundary: Mapping[Var, Eqn | None]
    ):
        self._frame, self._num = frame, num
        self._apart, self._boundary = apart, boundary
        self._levels = Levels(frame, apart, boundary)

    def cut(self, examples: Sequence[bool]) -> Cut:
        """The phases, given which outputs have one entry per example."""
        levels, eqns = self._levels, self._frame.jaxpr.eqns
        groups = self._handed_out(examples)
        sums, _, stacks = groups
        inside = levels.loop | self._sunk()
        num_levels = max([*levels.of.values(), *levels.of_eqns, 0]) + 1
        if any(levels.of[var] == num_levels - 1 for var in sums):
            num_levels += 1
        keeper = self._keeper(inside, stacks)
        phases = []
        for level in range(num_levels):
            ours = [tuple(v for v in group if levels.of[v] == level) for group in groups]
            here = [i for i in range(len(eqns)) if levels.of_eqns[i] == level]
            before = [i for i in here if i not in inside and i not in self._apart]
            # What a loop does besides computing values: jax.debug.print.
            effects = [i for i in here if i in levels.loop and eqns[i].effects]
            makers = [levels.maker[v] for group in ours for v in group if v in levels.maker]
            loop, again, kept = keeper.loop(level, [*makers, *effects], ours[-1])
            phases.append(Phase(tuple(before), loop, again, kept, *ours))
        for var, level in keeper.kept.items():
            phases[level] = dataclasses.replace(phases[level], stacks=(*phases[level].stacks, var))
        num = sum(bool(phase.loop) for phase in phases)
        return Cut(tuple(phases), keeper.loops(num, self._waited_for([*sums, *stacks])))

    def _keeper(self, inside: Collection[int], stacks: Sequence[Var]) -> Keeper:
        """Decides what loops read of earlier ones, where the equations `inside` are theirs."""
        levels, eqns = self._levels, self._frame.jaxpr.eqns

        def inputs(index: int) -> list[Var]:
            eqn = eqns[index]
            unfinished = [v for v in variables(eqn.invars) if not levels.is_finished(eqn, v)]
            return [v for v in unfinished if levels.maker.get(v) in inside]

        bits = compared(levels, self._boundary) | moved_into(levels, stacks)
        # As many bytes as the step gathers of all rows.
        collected = [eqn for eqn in eqns if eqn.primitive.name in COLLECTED]
        room = sum(_rules.size_in_bytes(out.aval) for eqn in collected for out in eqn.outvars)
        return Keeper(self._frame, self._num, room, inputs, levels.is_local, bits)

    def _handed_out(self, examples: Sequence[bool]) -> list[list[Var]]:
        """What phases hand out, under these names: sums, lasts, and stacks but the kept."""
        levels = self._levels
        # Ordered sets.
        sums: dict[Var, None] = {}
        lasts: dict[Var, None] = {}
        stacks: dict[Var, None] = {}
        for index, eqn, var in self._reads():
            if levels.is_finished(eqn, var):
                sums[var] = None
            elif var in levels.lasts and index not in levels.loop:
                lasts[var] = None
            elif eqn is not None and levels.is_collected(eqn, var):
                stacks[var] = None
        for out, example in zip(self._frame.jaxpr.outvars, examples, strict=True):
            if example and not _jaxpr.is_literal(out) and levels.is_local(out):
                stacks[out] = None
        made = [var for var in stacks if var in levels.maker]  # Arguments are there.
        return [list(sums), list(lasts), made]

    def _reads(self) -> list[tuple[int, Eqn | None, Var]]:
        """What is read, by which equation; by (-1, None) if it is an output."""
        jaxpr = self._frame.jaxpr
        return [
            *((i, eqn, var) for i, eqn in enumerate(jaxpr.eqns) for var in variables(eqn.invars)),
            *((-1, None, var) for var in variables(jaxpr.outvars)),
            *((-1, eqn, var) for var, eqn in self._boundary.items()),
        ]

    def _waited_for(self, complete: Sequence[Var]) -> list[int]:
        """Equations of what is complete when a loop is done, if a later loop depends on it."""
        levels, waits = self._levels, set[Var]()
        for index, eqn in reversed(list(enumerate(self._frame.jaxpr.eqns))):
            read = variables(eqn.invars)
            if index in levels.loop:
                waits.update(
                    var for var in read
                    if levels.is_finished(eqn, var) or not levels.is_made_in_loop(var)
                )  # fmt: skip
            elif not waits.isdisjoint(eqn.outvars):
                waits.update(read)
        return sorted(levels.maker[v] for v in complete if v in waits and v in levels.maker)

    def _sunk(self) -> set[int]:
        """Cheap equations that only loops read: run inside them, lest their results be kept alive."""
        levels, jaxpr = self._levels, self._frame.jaxpr
        readers: dict[Var, set[int]] = {}
        for index, eqn in enumerate(jaxpr.eqns):
            for var in variables(eqn.invars):
                readers.setdefault(var, set()).add(index)
        outputs = set(variables(jaxpr.outvars))
        sunk: set[int] = set()
        for index, eqn in reversed(list(enumerate(jaxpr.eqns))):
            stays = index in levels.loop or index in self._apart or levels.of_eqns[index] > 0
            if stays or not _is_cheap(eqn):
                continue
            inside = levels.loop | sunk
            if all(o not in outputs and readers.get(o, set()) <= inside for o in eqn.outvars):
                sunk.add(index)
        return sunk


def _is_cheap(eqn: Eqn) -> bool:
    """Whether an equation only moves elements, or treats each by itself."""
    moves = _rules.keeps_dims(eqn) and not _rules.costs(eqn, Cost.REDUCTION)
    return moves or _rules.costs(eqn, Cost.SOURCE, Cost.IDENTITY)


_NEEDS = {
    "all_gather": "a gather of the batch's rows",
    "all_gather_invariant": "a gather of the batch's rows",
    "pmax": "a maximum",
    "pmin": "a minimum",
}


def _check_collectives(frame: Frame, everywhere: frozenset[str]) -> None:
    """Refuses collectives that microbatches which run one after the other cannot take."""
    for inner, eqn in frame.walk():
        name = eqn.primitive.name
        if name not in COLLECTIVES or name == "axis_index":
            continue
        whole = set(_jaxpr.axes_of(eqn)) == everywhere and not eqn.params.get("axis_index_groups")
        if whole and (name in REDUCTIONS or (name in COLLECTED and inner is frame)):
            continue
        inside = whole and name in COLLECTED
        raise CutError(message(
            "shard_train_step",
            f"accumulate > 1, and {_NEEDS.get(name, f'a {name}')} over {_jaxpr.axes_of(eqn)} is needed"
            f"{inner.at_line(eqn)}{', inside a loop, branch or jax.checkpoint' * inside}",
            "Microbatches run one after the other: " + (
                "what needs the rows of all of them must stand between two loops over them." if inside
                else "what all of them give to a collective is summed up, or gathered.")
            + " jzero.per_example covers callbacks, FFI calls and kernels, and no effects."
            * _jaxpr.in_scope(eqn, _jaxpr.PER_EXAMPLE),
            "Drop accumulate, move it out of there, or compute it for each row, or from sums over the batch."
            if inside else
            "Drop accumulate, or use psum, pmean, all_gather, pmax or pmin over all data axes."))  # fmt: skip
