"""The cut of one device's equations for parameters that rest beside the device: so many bytes at a time.

A *stretch* is some equations as one program, with the leaves that it reads; a *layer loop* is a `scan` over
stacks of leaves, of which each turn is a program: a layer is a device in time. What follows from leaves alone
(a gather, a cast) is computed again by every stretch that reads it, and never handed on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from jzero.sharding.analysis import _rules
from jzero.sharding.analysis._frames import split, variables
from jzero.sharding.cut._crossing import is_scalar
from jzero.sharding.cut._fused_loops import fused
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Jaxpr, Var

# How a loop's stack is there: a leaf on the host, a slice for each turn, or one array on the devices; a stack
# that is made may also be left on the host.
LEAF, SLICES, STACK, HOSTED, UNREAD = "leaf", "slices", "stack", "hosted", "unread"


@dataclasses.dataclass(frozen=True, eq=False)
class Stretch:
    """Some equations as one program.

    Attributes:
      eqns: them, in order, with what they compute again.
      leaves: the leaves that it fetches.
      reads: what else it takes.
      gives: what it hands on.
      nbytes: of its leaves on a device while it runs: as they are fetched, and gathered.
    """

    eqns: tuple[Eqn, ...]
    leaves: tuple[Var, ...]
    reads: tuple[Var, ...]
    gives: tuple[Var, ...]
    nbytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class LayerLoop:
    """A `scan`, each turn of which is a program.

    Attributes:
      eqn: the loop.
      xs: for each stack that it reads, how it is there: LEAF, SLICES or STACK.
      ys: for each stack that it makes, how it shall be: SLICES, STACK, HOSTED or UNREAD.
      nbytes: of a turn's leaves on a device: as they are fetched, and gathered.
    """

    eqn: Eqn
    xs: tuple[str, ...]
    ys: tuple[str, ...]
    nbytes: int

    @property
    def parts(self) -> _jaxpr.ScanParts:
        """The loop taken apart."""
        return _jaxpr.scan_parts(self.eqn)

    @property
    def operands(self) -> list[list[Atom]]:
        """What it closes over, begins with, and reads slice by slice."""
        return split(self.eqn.invars, self.parts.num_consts, self.parts.num_carry)

    @property
    def results(self) -> list[list[Var]]:
        """The last carry, and the stacks that it makes."""
        return split(self.eqn.outvars, self.parts.num_carry)

    @property
    def leaves(self) -> tuple[Var, ...]:
        """The stacks of leaves that it fetches slice by slice."""
        pairs = zip(self.operands[2], self.xs, strict=True)
        return tuple(_jaxpr.variable(atom) for atom, kind in pairs if kind == LEAF)

    @property
    def reads(self) -> tuple[Var, ...]:
        """What else it takes."""
        return tuple(v for v in variables(self.eqn.invars) if v not in self.leaves)


LayerPart = Stretch | LayerLoop


def without_barriers(jaxpr: Jaxpr, leaves: Collection[Var]) -> Jaxpr:
    """The jaxpr without barriers around what follows from leaves alone: parts run one after the other."""
    follows, same, eqns = set(leaves), dict[Var, Atom](), []
    for eqn in jaxpr.eqns:
        eqn = eqn.replace(
            invars=[a if _jaxpr.is_literal(a) else same.get(a, a) for a in eqn.invars]
        )
        if eqn.primitive.name == "optimization_barrier" and eqn.invars[0] in follows:
            same |= zip(eqn.outvars, eqn.invars, strict=True)
            continue
        if _follows(eqn, follows):
            follows.update(eqn.outvars)
        eqns.append(eqn)
    outvars = [a if _jaxpr.is_literal(a) else same.get(a, a) for a in jaxpr.outvars]
    live, needed = [], set(variables(outvars))
    for eqn in reversed(eqns):
        if _jaxpr.has_side_effects(eqn) or not needed.isdisjoint(eqn.outvars):
            live.append(eqn)
            needed.update(variables(eqn.invars))
    return _jaxpr.replaced(jaxpr, eqns=live[::-1], outvars=outvars)


def _follows(eqn: Eqn, leaves: Collection[Var]) -> bool:
    """Whether an equation reads nothing but leaves, what follows from them, and scalars."""
    large = [atom for atom in variables(eqn.invars) if not is_scalar(atom)]
    opens = _jaxpr.has_side_effects(eqn) or _jaxpr.inner_jaxprs(eqn)
    return bool(large) and not opens and all(atom in leaves for atom in large)


def _repeats(eqn: Eqn, cheap: Collection[Var]) -> bool:
    """Whether an equation makes many elements of a few."""
    large = [atom for atom in variables(eqn.invars) if not is_scalar(atom)]
    fits = eqn.primitive.name == "iota" or _rules.is_elementwise(eqn)
    return fits and all(atom in cheap for atom in large)


def cut(
    jaxpr: Jaxpr, leaves: Mapping[Var, int], hosted: Collection[Var], most: int
) -> tuple[LayerPart, ...]:
    """The parts of a jaxpr, in the order in which they run.

    Args:
      jaxpr: what one device computes, without calls.
      leaves: inputs that rest on the host, and the bytes of each on a device.
      hosted: outputs that go to the host.
      most: bytes of leaves that a stretch may have on a device; one equation may need more.
    """
    whole = fused(without_barriers(jaxpr, leaves), leaves)
    return _LayerCutter(whole, leaves, hosted, most).parts()


class _LayerCutter:
    def __init__(self, jaxpr: Jaxpr, leaves: Mapping[Var, int], hosted: Collection[Var], most: int):
        self._jaxpr, self._leaves, self._hosted, self._most = jaxpr, leaves, hosted, most
        self._loops = {id(eqn) for eqn in jaxpr.eqns if self._is_layer_loop(eqn)}
        read_by_loops = {
            atom for eqn in jaxpr.eqns if id(eqn) in self._loops for atom in variables(eqn.invars)
        }
        handed = {*read_by_loops, *variables(jaxpr.outvars)}
        self._again: dict[Var, Eqn] = {}  # what is computed where it is read
        follows, cheap = set(leaves), set[Var]()
        for eqn in jaxpr.eqns:
            if id(eqn) in self._loops or all(map(is_scalar, eqn.outvars)):
                continue
            if _follows(eqn, follows):
                follows.update(eqn.outvars)
            elif _repeats(eqn, cheap):
                cheap.update(eqn.outvars)
            else:
                continue
            if handed.isdisjoint(eqn.outvars):
                self._again |= dict.fromkeys(eqn.outvars, eqn)

    def _is_layer_loop(self, eqn: Eqn) -> bool:
        if eqn.primitive.name != "scan":
            return False
        parts = _jaxpr.scan_parts(eqn)
        xs = eqn.invars[parts.num_consts + parts.num_carry :]
        return any(not _jaxpr.is_literal(atom) and atom in self._leaves for atom in xs)

    # -- what runs where ---------------------------------------------------------------------------

    def parts(self) -> tuple[LayerPart, ...]:
        """Fills stretches until the next equation's leaves do not fit; a loop is a part of its own."""
        bins: list[list[Eqn]] = [[]]
        needs: list[set[Var]] = [set()]
        loop_at: set[int] = set()
        made: dict[Var, int] = {}
        order = {id(eqn): i for i, eqn in enumerate(self._jaxpr.eqns)}
        for eqn in self._jaxpr.eqns:
            if any(out in self._again for out in eqn.outvars):
                continue
            if id(eqn) in self._loops:
                bins += [[eqn], []]
                needs += [set(), set()]
                at = len(bins) - 2
                loop_at.add(at)
            else:
                mine = self._leaves_of(eqn)
                at = (
                    self._earliest(eqn, made, loop_at)
                    if self._moves_up(eqn, mine)
                    else len(bins) - 1
                )
                if mine and needs[at] and self._nbytes([*bins[at], eqn]) > self._most:
                    bins.append([])
                    needs.append(set())
                    at = len(bins) - 1
                bins[at].append(eqn)
                needs[at] |= mine
            made |= dict.fromkeys(eqn.outvars, at)
        groups = [sorted(eqns, key=lambda eqn: order[id(eqn)]) for eqns in bins]
        return self._typed([(i in loop_at, eqns) for i, eqns in enumerate(groups) if eqns])

    def _moves_up(self, eqn: Eqn, needs: Collection[Var]) -> bool:
        """Whether an equation runs as early as it can: gradients are reduced where they are made."""
        return not needs and _jaxpr.autodiff_pass(eqn) is None and not _jaxpr.has_side_effects(eqn)

    def _earliest(self, eqn: Eqn, made: Mapping[Var, int], loops: Collection[int]) -> int:
        """The first stretch in which an equation's operands are there."""
        reads = {v for a in variables(eqn.invars) for v in self._inputs_of(a)}
        at = max((made[v] for v in reads if v in made), default=0)
        return at + (at in loops)

    def _inputs_of(self, var: Var) -> set[Var]:
        """What a value is computed from, where it is read, that must be there."""
        if var not in self._again:
            return {var}
        return {v for a in variables(self._again[var].invars) for v in self._inputs_of(a)}

    def _leaves_of(self, eqn: Eqn) -> set[Var]:
        return {v for a in variables(eqn.invars) for v in self._inputs_of(a) if v in self._leaves}

    def _with_again(self, eqns: Sequence[Eqn]) -> list[Eqn]:
        """The equations, and before them what they compute again."""
        found: dict[int, Eqn] = {}

        def bring(var: Var) -> None:
            eqn = self._again.get(var)
            if eqn is not None and id(eqn) not in found:
                for atom in variables(eqn.invars):
                    bring(atom)
                found[id(eqn)] = eqn

        for eqn in eqns:
            for atom in variables(eqn.invars):
                bring(atom)
            found[id(eqn)] = eqn
        return [*found.values()]

    def _nbytes(self, eqns: Sequence[Eqn]) -> int:
        """Bytes of leaves that equations have on a device: as they are fetched, and gathered."""
        everything = self._with_again(eqns)
        fetched = {v for eqn in everything for v in variables(eqn.invars) if v in self._leaves}
        return sum(self._leaves[v] for v in fetched) + gathered_bytes(everything)

    # -- the parts, typed --------------------------------------------------------------------------

    def _typed(self, groups: Sequence[tuple[bool, list[Eqn]]]) -> tuple[LayerPart, ...]:
        eqns = [own if is_loop else self._with_again(own) for is_loop, own in groups]
        reads = [_read(group) for group in eqns]
        outvars = set(variables(self._jaxpr.outvars))
        later: list[set[Var]] = [outvars]
        for group in reversed(reads):
            later.append(later[-1] | group.keys())
        later = later[-2::-1]  # of each part, what the parts after it and the outputs read
        modes = self._modes(groups)
        parts: list[LayerPart] = []
        for (is_loop, own), everything, read, wanted in zip(
            groups, eqns, reads, later, strict=True
        ):
            if is_loop:
                parts.append(self._loop(own[0], modes, wanted))
                continue
            made = dict.fromkeys(out for eqn in everything for out in eqn.outvars)
            gives = tuple(v for v in made if v in wanted and v not in self._again)
            leaves = tuple(v for v in self._leaves if v in read)
            parts.append(Stretch(
                tuple(everything), leaves, tuple(v for v in read if v not in self._leaves), gives,
                self._nbytes(own)))  # fmt: skip
        return tuple(parts)

    def _modes(self, groups: Sequence[tuple[bool, list[Eqn]]]) -> dict[Var, str]:
        """How each stack that a loop makes shall be: in slices, if only loops read it slice by slice."""
        made = {
            out for is_loop, (eqn, *_) in groups if is_loop
            for out in eqn.outvars[_jaxpr.scan_parts(eqn).num_carry :]
        }  # fmt: skip
        sliced, whole = set[Var](), set[Var]()
        for is_loop, eqns in groups:
            for eqn in eqns:
                parts = _jaxpr.scan_parts(eqn) if is_loop else None
                num = len(eqn.invars) if parts is None else parts.num_consts + parts.num_carry
                whole.update(variables(eqn.invars[:num]))
                sliced.update(variables(eqn.invars[num:]))
        for eqn in self._again.values():
            whole.update(variables(eqn.invars))
        returned = set(variables(self._jaxpr.outvars))
        hosted = {v for v in made & returned - whole - sliced if v in self._hosted}
        kept = (made & returned - hosted) | (made & whole)
        return (
            dict.fromkeys(made, UNREAD)
            | dict.fromkeys(made & sliced, SLICES)
            | dict.fromkeys(hosted, HOSTED)
            | dict.fromkeys(kept, STACK)
        )

    def _loop(self, eqn: Eqn, modes: Mapping[Var, str], wanted: Collection[Var]) -> LayerLoop:
        parts = _jaxpr.scan_parts(eqn)
        xs = eqn.invars[parts.num_consts + parts.num_carry :]
        kinds = []
        for atom in xs:
            var = None if _jaxpr.is_literal(atom) else atom
            kinds.append(LEAF if var in self._leaves else modes.get(var, STACK) if var else STACK)
        ys = tuple(modes[out] for out in eqn.outvars[parts.num_carry :])
        fetched = {a for a, kind in zip(xs, kinds, strict=True) if kind == LEAF}
        slices = sum(self._leaves[_jaxpr.variable(a)] // parts.length for a in fetched)
        held = sum(self._leaves.get(a, 0) for a in variables(eqn.invars[: -len(xs) or None]))
        return LayerLoop(eqn, tuple(kinds), ys, slices + held + gathered_bytes(parts.body.eqns))


def gathered_bytes(eqns: Iterable[Eqn]) -> int:
    """Bytes that equations gather over the devices; of a loop inside, in a turn."""
    return sum(
        _rules.size_in_bytes(eqn.outvars[0].aval)
        if eqn.primitive.name == "all_gather"
        else sum(gathered_bytes(inner.eqns) for inner in map(_inner, _jaxpr.inner_jaxprs(eqn)))
        for eqn in eqns
    )


def _inner(jaxpr: Any) -> Jaxpr:
    return _jaxpr.open_jaxpr(jaxpr)[0]


def _read(eqns: Sequence[Eqn]) -> dict[Var, None]:
    """What equations read that they do not make, in the order in which they do."""
    made = {out for eqn in eqns for out in eqn.outvars}
    return {v: None for eqn in eqns for v in variables(eqn.invars) if v not in made}
