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

import jax.numpy as jnp

from jzero._errors import message
from jzero.sharding.analysis import _rules
from jzero.sharding.analysis._frames import COLLECTIVES, REDUCTIONS, Frame, axes_of
from jzero.sharding.analysis._kinds import (
    COLLECTED,
    CutError,
    Kind,
    equations,
    kinds_of,
    literal_kind,
    reduces,
)
from jzero.sharding.cut._kept import Keeper, Loops
from jzero.tracing import _jaxpr, _rewrite

# Its products may run so many times as often as in one loop: 1.3 for CLIP, 2 for a count in every layer's
# loss, and as many times as there are layers for BatchNorm (tests/test_collected_rows.py).
MOST_REPEATS = 4
_MOVES = frozenset(
    {"reshape", "broadcast_in_dim", "squeeze", "expand_dims", "transpose", "copy", "copy_p"}
)
_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})


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
    kept: tuple[_jaxpr.Var, ...]
    sums: tuple[_jaxpr.Var, ...]
    lasts: tuple[_jaxpr.Var, ...]
    stacks: tuple[_jaxpr.Var, ...]


@dataclasses.dataclass(frozen=True)
class Cut:
    """The phases of a step, in order, and what is to be said of their loops."""

    phases: tuple[Phase, ...]
    loops: Loops


def cut(
    frame: Frame, axes: Collection[str], num: int, examples: Sequence[bool],
    apart: Collection[int] = frozenset(),
    handed_out: Mapping[_jaxpr.Var, _jaxpr.Eqn | None] = MappingProxyType({}),
) -> Cut:  # fmt: skip
    """The phases of a step; the last one's loop may be empty.

    Args:
      frame: the root frame, without calls (`_rewrite.flatten_calls`).
      axes: the names of the data axes, as the step has them.
      num: of microbatches on each device.
      examples: for each output of the frame, whether it has one entry per example.
      apart: equations that run after all phases, elsewhere; phases only hand out what they read.
      handed_out: what that is, and an equation that reads it. Nothing else reads it before it is summed up.

    Raises:
      CutError: the step uses what it reduces inside the loop that makes it, needs rows of the whole batch in
        such a place, or would run its products many times.
    """
    _check_collectives(frame, frozenset(axes))
    found = _Cutter(frame, num, apart, handed_out).cut(examples)
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
    """One forward walk over the root frame that gives every variable a kind and a level.

    The level is the number of loops that must have run before the value can be computed.
    """

    def __init__(
        self, frame: Frame, num: int, apart: Collection[int],
        handed_out: Mapping[_jaxpr.Var, _jaxpr.Eqn | None],
    ):  # fmt: skip
        self._frame, self._num = frame, num
        self._apart, self._handed_out = apart, handed_out
        self._kinds: dict[_jaxpr.Var, Kind] = {}
        self._levels: dict[_jaxpr.Var, int] = {}
        self._lasts: set[_jaxpr.Var] = set()
        self._maker: dict[_jaxpr.Var, int] = {}
        self._loop: set[int] = set()
        self._unfinished: set[int] = set()
        self._level: list[int] = []  # of equations
        for var in [*frame.jaxpr.constvars, *frame.jaxpr.invars]:
            self._kinds[var] = Kind.LOCAL if frame.varies(var) else Kind.SAME
            self._levels[var] = 0
        for index, eqn in enumerate(frame.jaxpr.eqns):
            self._place(index, eqn)

    def _place(self, index: int, eqn: _jaxpr.Eqn) -> None:
        frame = self._frame
        atoms = [a for a in eqn.invars if not _jaxpr.is_literal(a)]
        is_apart = index in self._apart
        outs = None if is_apart else self._kinds_while_summing(index, eqn, atoms)
        if outs is not None:
            self._unfinished.add(id(eqn))
        level = max((self._levels[a] + self._is_due(eqn, a) for a in atoms), default=0)
        kinds = [
            self._kind(a) if _jaxpr.is_literal(a) or not self._is_due(eqn, a) else Kind.SAME
            for a in eqn.invars
        ]
        in_loop = not is_apart and (
            outs is not None
            or Kind.LOCAL in kinds
            or any(frame.varies(out) for out in eqn.outvars)
            or any(a in self._lasts and self._levels[a] == level for a in atoms)
            or any(reduces(f, e) for f, e in equations(frame, index, eqn))
        )
        outs = kinds_of(frame, index, eqn, kinds) if outs is None else outs
        for out, kind in zip(eqn.outvars, outs, strict=True):
            self._kinds[out], self._levels[out], self._maker[out] = kind, level, index
            if in_loop and kind in (Kind.SAME, Kind.ZERO):
                self._lasts.add(out)
        if in_loop:
            self._loop.add(index)
        self._level.append(level)

    def _kinds_while_summing(
        self, index: int, eqn: _jaxpr.Eqn, atoms: list[_jaxpr.Var]
    ) -> list[Kind] | None:
        """Kinds of the results if the equation may run on partial sums, inside their loop.

        What AD adds up (tied weights) then is one sum, and a loop may go on adding to it.
        """
        kinds = [self._kind(a) for a in eqn.invars]
        adds = eqn.primitive.name in ("add", "add_any") or _rules.is_linear(eqn)
        if Kind.PARTIAL not in kinds or not (adds or Kind.LOCAL in kinds):
            return None
        if any(a in self._handed_out and self._kinds[a] is Kind.PARTIAL for a in atoms):
            return None
        partial = {self._levels[_jaxpr.variable(a)]
                   for a, k in zip(eqn.invars, kinds, strict=True) if k is Kind.PARTIAL}  # fmt: skip
        if partial != {max(self._levels[a] for a in atoms)}:
            return None
        try:
            return kinds_of(self._frame, index, eqn, kinds)
        except CutError:
            return None

    def _kind(self, atom: _jaxpr.Atom) -> Kind:
        return literal_kind(atom) if _jaxpr.is_literal(atom) else self._kinds[atom]

    def _is_due(self, eqn: _jaxpr.Eqn, atom: _jaxpr.Var) -> bool:
        """Whether `eqn` reads what is complete only when the loop that makes it is done."""
        return (
            self._finished(eqn, atom)
            or self._is_collected(eqn, atom)
            or (eqn.primitive.name in COLLECTED and atom in self._lasts)
        )

    def _is_collected(self, eqn: _jaxpr.Eqn, atom: _jaxpr.Var) -> bool:
        """Whether `eqn` reads of `atom` what every microbatch has."""
        return eqn.primitive.name in COLLECTED and self._kinds[atom] is Kind.LOCAL

    def _finished(self, eqn: _jaxpr.Eqn | None, atom: _jaxpr.Atom) -> bool:
        """Whether `eqn` reads what a loop summed up."""
        if _jaxpr.is_literal(atom):
            return False
        due = self._kinds[atom] is Kind.PARTIAL
        return due and (eqn is None or id(eqn) not in self._unfinished)

    # -- phases ----------------------------------------------------------------------------------

    def cut(self, examples: Sequence[bool]) -> Cut:
        """The phases, given which outputs have one entry per example."""
        eqns = self._frame.jaxpr.eqns
        groups = self._handed_out_by_loops(examples)
        sums, _, stacks = groups
        inside = self._loop | self._sunk()
        levels = max([*self._levels.values(), *self._level, 0]) + 1
        if any(self._levels[var] == levels - 1 for var in sums):
            levels += 1

        def inputs(index: int) -> list[_jaxpr.Var]:
            atoms = [a for a in eqns[index].invars if not self._finished(eqns[index], a)]
            return [a for a in atoms if not _jaxpr.is_literal(a) and self._maker.get(a) in inside]

        keeper = Keeper(
            self._frame, self._num, self._gathered_bytes(), inputs, self._is_local,
            self._compared() | self._moved_into(stacks),
        )  # fmt: skip
        phases = []
        for level in range(levels):
            ours = [tuple(v for v in group if self._levels[v] == level) for group in groups]
            here = [i for i in range(len(eqns)) if self._level[i] == level]
            before = [i for i in here if i not in inside and i not in self._apart]
            # What a loop does besides computing values: jax.debug.print.
            effects = [i for i in here if i in self._loop and eqns[i].effects]
            makers = [self._maker[v] for group in ours for v in group if v in self._maker]
            loop, again, kept = keeper.loop(level, [*makers, *effects], ours[-1])
            phases.append(Phase(tuple(before), loop, again, kept, *ours))
        for var, level in keeper.kept.items():
            phases[level] = dataclasses.replace(phases[level], stacks=(*phases[level].stacks, var))
        num = sum(bool(phase.loop) for phase in phases)
        return Cut(tuple(phases), keeper.loops(num, self._waited_for([*sums, *stacks])))

    def _is_local(self, var: _jaxpr.Var) -> bool:
        return self._kinds[var] is Kind.LOCAL

    def _handed_out_by_loops(self, examples: Sequence[bool]) -> list[list[_jaxpr.Var]]:
        """What phases hand out, under these names: sums, lasts, and stacks but the kept."""
        # Ordered sets.
        sums: dict[_jaxpr.Var, None] = {}
        lasts: dict[_jaxpr.Var, None] = {}
        stacks: dict[_jaxpr.Var, None] = {}
        for index, eqn, atom in self._reads():
            if self._finished(eqn, atom):
                sums[atom] = None
            elif atom in self._lasts and index not in self._loop:
                lasts[atom] = None
            elif eqn is not None and self._is_collected(eqn, atom):
                stacks[atom] = None
        for out, example in zip(self._frame.jaxpr.outvars, examples, strict=True):
            if example and not _jaxpr.is_literal(out) and self._is_local(out):
                stacks[out] = None
        made = [var for var in stacks if var in self._maker]  # Arguments are there.
        return [list(sums), list(lasts), made]

    def _compared(self) -> set[_jaxpr.Var]:
        """Local values that are compared with what is complete only when the loop that makes them is done."""
        eqns, outs = self._frame.jaxpr.eqns, [*self._frame.jaxpr.outvars, *self._handed_out]
        # AD leaves comparisons that nothing reads, of the place of a maximum.
        read = set(map(id, _rewrite.without_unread(eqns, outs, _compares)))
        return {
            atom
            for index, eqn in enumerate(eqns)
            if _compares(eqn) and index in self._loop and id(eqn) in read
            for atom in eqn.invars
            if not _jaxpr.is_literal(atom) and self._maker.get(atom) in self._loop
            and self._is_local(atom) and self._levels[atom] < self._level[index]
            and jnp.issubdtype(atom.aval.dtype, jnp.inexact)
        }  # fmt: skip

    def _moved_into(self, stacks: Sequence[_jaxpr.Var]) -> set[_jaxpr.Var]:
        """What is gathered in another shape: a row then has the bits that others see of it."""
        found: set[_jaxpr.Var] = set()
        for var in stacks:
            while self._maker.get(var) in self._loop:
                eqn = self._frame.jaxpr.eqns[self._maker[var]]
                if eqn.primitive.name not in _MOVES or _jaxpr.is_literal(eqn.invars[0]):
                    break
                var = eqn.invars[0]
                if self._maker.get(var) in self._loop and self._is_local(var):
                    found.add(var)
        return found

    def _gathered_bytes(self) -> int:
        """Bytes of what is gathered of all rows."""
        eqns = [eqn for eqn in self._frame.jaxpr.eqns if eqn.primitive.name in COLLECTED]
        return sum(_rules.size_in_bytes(out.aval) for eqn in eqns for out in eqn.outvars)

    def _waited_for(self, complete: Sequence[_jaxpr.Var]) -> list[int]:
        """Equations of what is complete when a loop is done, if a later loop depends on it."""
        waits: set[_jaxpr.Var] = set()
        for index, eqn in reversed(list(enumerate(self._frame.jaxpr.eqns))):
            atoms = [a for a in eqn.invars if not _jaxpr.is_literal(a)]
            if index in self._loop:
                waits.update(
                    a for a in atoms
                    if self._finished(eqn, a) or self._maker.get(a) not in self._loop
                )  # fmt: skip
            elif not waits.isdisjoint(eqn.outvars):
                waits.update(atoms)
        return sorted(self._maker[v] for v in complete if v in waits and v in self._maker)

    def _reads(self) -> list[tuple[int, _jaxpr.Eqn | None, _jaxpr.Var]]:
        """What is read, by which equation; by (-1, None) if it is an output."""
        reads: list[tuple[int, _jaxpr.Eqn | None, _jaxpr.Atom]] = [
            *((i, eqn, a) for i, eqn in enumerate(self._frame.jaxpr.eqns) for a in eqn.invars),
            *((-1, None, a) for a in self._frame.jaxpr.outvars),
            *((-1, eqn, var) for var, eqn in self._handed_out.items()),
        ]
        return [(i, eqn, a) for i, eqn, a in reads if not _jaxpr.is_literal(a)]

    def _sunk(self) -> set[int]:
        """Cheap equations that only loops read: run inside them, lest their results be kept alive."""
        readers: dict[_jaxpr.Var, set[int]] = {}
        for index, eqn in enumerate(self._frame.jaxpr.eqns):
            for atom in eqn.invars:
                if not _jaxpr.is_literal(atom):
                    readers.setdefault(atom, set()).add(index)
        outputs = {a for a in self._frame.jaxpr.outvars if not _jaxpr.is_literal(a)}
        sunk: set[int] = set()
        for index, eqn in reversed(list(enumerate(self._frame.jaxpr.eqns))):
            rule = _rules.rule_for(eqn)
            name = eqn.primitive.name
            cheap = name == "iota" or name in _rules.IDENTITIES
            cheap = cheap or (rule is not None and rule.reduces is None)
            if index in self._loop or index in self._apart or not cheap or self._level[index] > 0:
                continue
            inside = self._loop | sunk
            if all(o not in outputs and readers.get(o, set()) <= inside for o in eqn.outvars):
                sunk.add(index)
        return sunk


def _compares(eqn: _jaxpr.Eqn) -> bool:
    return eqn.primitive.name in _COMPARISONS


_NEEDS = {
    "all_gather": "a gather of the batch's rows",
    "all_gather_invariant": "a gather of the batch's rows",
    "pmax": "a maximum",
    "pmin": "a minimum",
}


def _check_collectives(frame: Frame, everywhere: frozenset[str]) -> None:
    """Refuses collectives that microbatches which run one after the other cannot take."""
    for inner, _, eqn in frame.walk():
        name = eqn.primitive.name
        if name not in COLLECTIVES or name == "axis_index":
            continue
        whole = set(axes_of(eqn)) == everywhere and not eqn.params.get("axis_index_groups")
        if whole and (name in REDUCTIONS or (name in COLLECTED and inner is frame)):
            continue
        inside = whole and name in COLLECTED
        raise CutError(message(
            "shard_train_step",
            f"accumulate > 1, and {_NEEDS.get(name, f'a {name}')} over {axes_of(eqn)} is needed"
            f"{_jaxpr.at_line(eqn)}{', inside a loop, branch or jax.checkpoint' * inside}",
            "Microbatches run one after the other: " + (
                "what needs the rows of all of them must stand between two loops over them." if inside
                else "what all of them give to a collective is summed up, or gathered.")
            + " jzero.per_example covers callbacks, FFI calls and kernels, and no effects."
            * _jaxpr.in_scope(eqn, _jaxpr.PER_EXAMPLE),
            "Drop accumulate, move it out of there, or compute it for each row, or from sums over the batch."
            if inside else
            "Drop accumulate, or use psum, pmean, all_gather, pmax or pmin over all data axes."))  # fmt: skip
