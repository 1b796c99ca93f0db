# SPDX-License-Identifier: Apache-2.0
"""Moves equations around loops over layers into the loops, if they work on the loops' stacks slice by slice.

Then a loop can run iteration by iteration, with one slice of each stack `[iterations, ...]` on the device.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from jzero.ir import _rules
from jzero.ir._regions import region_of, variables
from jzero.ir._rules import Cost
from jzero.ir._writer import JaxprWriter
from jzero.sharding.cut import _over_iterations
from jzero.sharding.cut._growing_loop import GrowingLoop, MadeInLoop, Source, is_loop, stacks_made
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Jaxpr, Var


def fused(jaxpr: Jaxpr, leaves: Collection[Var]) -> Jaxpr:
    return absorb(sink(jaxpr, leaves), leaves)


def sink(jaxpr: Jaxpr, leaves: Collection[Var]) -> Jaxpr:
    """Makes loops slice `leaves`, and derive from the slices what they sliced before.

    ::

        for x in cast(stack): body(x)   ->   for x in stack: body(cast(x))

    It applies to casts of all parameters, to residuals derived only from parameters, and to stacks of equal
    slices (the zeros with which sums begin). Each loop recomputes them, and none is stored.

    All elements are equal to the bit, if the compiler rounds alike in loops and outside. (XLA divides by a
    scalar outside, and multiplies by its reciprocal in a loop.)
    """
    leaves, eqns = set(leaves), list(jaxpr.eqns)
    for eqn in [e for e in eqns if is_loop(e)]:
        derived, roots = _derived(eqns, leaves, _jaxpr.scan_parts(eqn).length)
        sinking = [v for v in variables(_jaxpr.scan_stacks(eqn)) if v in roots]
        if sinking:
            loop = GrowingLoop(eqn, derived)
            for stack in sinking:
                loop.make(stack)
            eqns = _replaced(eqns, eqn, loop, ())
    return _without_unread(jaxpr, _in_order(eqns))


def absorb(jaxpr: Jaxpr, leaves: Collection[Var]) -> Jaxpr:
    """Makes loops over stacks of `leaves` run the equations that read the stacks that they make, or slice.

    ::

        for ...: ys[i] = y                for ...: norm += sum(cast(y) ** 2)
        norm = sum(cast(ys) ** 2)   ->

    It applies to equations that treat the iterations apart (casts, squares), and to those that reduce them.
    What also needs a result of the whole loop, such as a gradient clipped by the norm, stays outside; so do
    stacks of a scalar for each iteration.

    Reductions become reductions of the iterations' results. All other elements are equal to the bit, if the
    compiler rounds alike in loops and outside.
    """
    leaves = set(leaves)
    loops = [loop for loop in _loops_over(jaxpr.eqns, leaves) if loop.outvars]
    eqns = list(_slices_apart(jaxpr.eqns, loops))
    # By its first result, which identifies a loop while it grows.
    for first in [loop.outvars[0] for loop in loops]:
        (eqn,) = [e for e in eqns if e.outvars and e.outvars[0] is first]
        eqns = _Absorbing(eqns, eqn, leaves, jaxpr.outvars).run()
    return _without_unread(jaxpr, eqns)


class _Absorbing:
    def __init__(self, eqns: list[Eqn], eqn: Eqn, leaves: set[Var], outvars: Sequence[Atom]):
        self._eqns, self._eqn, self._outvars = eqns, eqn, outvars
        self._derived, roots = _derived(eqns, leaves, _jaxpr.scan_parts(eqn).length)
        self._loop = GrowingLoop(eqn, self._derived)
        taken = set(self._loop.stacks) & leaves
        self._leaves = leaves | {v for v, found in roots.items() if found}
        # Values derived from stacks that the loop slices; for these it may have to slice others, too.
        self._taken = taken | {v for v, found in roots.items() if found & taken}
        self._later, self._earlier = _following(eqns, eqn.outvars), _before(eqns, eqn.invars)
        self._inside = set(self._loop.made)

    def run(self) -> list[Eqn]:
        moved = self._worth(self._movable())
        for eqn in moved:
            self._loop.run(eqn)
            if _over_iterations.combines(eqn) is None:
                for out in eqn.outvars:
                    self._loop.return_stack(out)  # `_without_unread` drops it if nobody reads it.
        gone = {id(e) for e in moved}
        left = [e for e in self._eqns if id(e) not in gone and e is not self._eqn]
        gone |= self._return_reduced(left)
        return _in_order(_replaced(self._eqns, self._eqn, self._loop, gone))

    def _movable(self) -> list[Eqn]:
        """The equations that the loop could run in each iteration."""
        movable = []
        for eqn in self._eqns:
            read = variables(eqn.invars)
            if eqn is self._eqn or not any(v in self._inside or v in self._taken for v in read):
                continue
            if any(out in self._derived for out in eqn.outvars):
                continue  # It is recomputed where it is read.
            combine = _over_iterations.combines(eqn)
            gives = _over_iterations.stacked(eqn, self._loop.length)
            if combine is not None:
                shapes = [a.aval.shape for a in eqn.invars]
                fits = all(shape[0] % self._loop.length == 0 for shape in shapes)
                gives = [True for _ in shapes] if fits else None
            if gives is None or not self._known(eqn, gives):
                continue
            if not self._inside.intersection(read):
                # The loop cannot run what it depends on.
                if self._earlier.intersection(eqn.outvars):
                    continue
                self._later |= _following(self._eqns, eqn.outvars)
            movable.append(eqn)
            if combine is None:
                self._inside.update(eqn.outvars)
        return movable

    def _known(self, eqn: Eqn, gives: Sequence[bool]) -> bool:
        """Whether an iteration has all operands of an equation, and none of them is a whole stack."""
        for atom, given in zip(eqn.invars, gives, strict=True):
            if _jaxpr.is_literal(atom):
                continue
            later = atom in self._later and not (given and atom in self._inside)
            if later or (atom in self._leaves and not given):
                return False
        return True

    def _worth(self, movable: Sequence[Eqn]) -> list[Eqn]:
        """The equations that read more than a scalar per iteration, and those that they need."""
        chosen: list[Eqn] = []
        needed: set[Var] = set()
        for eqn in reversed(movable):
            stacks = [v for v in variables(eqn.invars) if v in self._inside or v in self._taken]
            large = any(math.prod(v.aval.shape) > self._loop.length for v in stacks)
            if large or needed.intersection(eqn.outvars):
                chosen.append(eqn)
                needed.update(stacks)
        return chosen[::-1]

    def _return_reduced(self, left: Sequence[Eqn]) -> set[int]:
        """Makes the loop return reductions of derived stacks that equations outside read.

        Returns the ids of the equations that it replaces.
        """
        reduced: set[Var] = set()
        read = set(variables(self._outvars))
        for eqn in left:
            made = [v for v in eqn.outvars if v in self._derived]
            if not made:
                read.update(variables(eqn.invars))
            elif _rules.costs(eqn, Cost.REDUCTION) or reduced.intersection(variables(eqn.invars)):
                reduced.update(made)
        gone = set()
        for eqn in left:
            if len(eqn.outvars) != 1 or eqn.outvars[0] not in reduced & read & self._taken:
                continue
            (out,) = eqn.outvars
            if out not in self._later and out not in _before(self._eqns, self._loop.reads):
                self._loop.return_stack(out)
                self._later |= _following(self._eqns, [out])
                gone.add(id(eqn))
        return gone


def _derived(
    eqns: Sequence[Eqn], leaves: set[Var], length: int
) -> tuple[dict[Var, Source], dict[Var, frozenset[Var]]]:
    """Values that any loop of `length` iterations can derive, and the stacks of leaves that each needs.

    Cheap equations derive them from slices, or from nothing, if all slices are equal.
    """
    stacks = {v for v in leaves if v.aval.shape[:1] == (length,)}
    derived: dict[Var, Source] = {}
    roots = {v: frozenset([v]) for v in stacks}

    def found(eqn: Eqn, gives: Sequence[bool]) -> frozenset[Var] | None:
        """The stacks of leaves that an equation derives from; None if it reads others, or a whole one."""
        read: frozenset[Var] = frozenset()
        for atom, given in zip(eqn.invars, gives, strict=True):
            if not _jaxpr.is_literal(atom):
                if given != (atom in roots) and (given or roots[atom]):
                    return None
                read |= roots[atom] if given else frozenset()
        return read

    for eqn in eqns:
        if eqn.primitive.name == "scan" and _jaxpr.scan_parts(eqn).length == length:
            for out, source, read in _made_of_slices(eqn, roots):
                derived[out], roots[out] = source, read
            continue
        gives = _over_iterations.stacked(eqn, length) if _over_iterations.is_cheap(eqn) else None
        follows = None if gives is None else found(eqn, gives)
        if follows is not None:
            derived |= dict.fromkeys(eqn.outvars, eqn)
            roots |= dict.fromkeys(eqn.outvars, follows)
    return derived, {v: read for v, read in roots.items() if v not in stacks}


def _made_of_slices(
    eqn: Eqn, roots: dict[Var, frozenset[Var]]
) -> Iterable[tuple[Var, MadeInLoop, frozenset[Var]]]:
    """The stacks that a loop derives from slices of leaves by cheap equations."""
    scan = _jaxpr.scan_parts(eqn)
    num_before = scan.num_consts + scan.num_carry
    consts = dict(zip(scan.body.invars[: scan.num_consts], eqn.invars, strict=False))
    slices = dict(zip(scan.body.invars[num_before:], eqn.invars[num_before:], strict=True))
    known = {v: a for v, a in slices.items() if not _jaxpr.is_literal(a) and a in roots}
    makers: dict[Var, Eqn] = {}
    for inner in scan.body.eqns:
        read = variables(inner.invars)
        is_known = all(v in known or v in consts or v in makers for v in read)
        if is_known and _over_iterations.is_cheap(inner):
            makers |= dict.fromkeys(inner.outvars, inner)
    stacked = zip(scan.body.outvars[scan.num_carry :], stacks_made(eqn), strict=True)
    for out, made in stacked:
        if _jaxpr.is_literal(out) or out not in makers:
            continue
        used, wanted = [], {out}
        for inner in reversed(scan.body.eqns):
            if wanted.intersection(inner.outvars) and inner.outvars[0] in makers:
                used.append(inner)
                wanted.update(variables(inner.invars))
        taken = {v: a for v, a in known.items() if v in wanted}
        read_whole = {v: a for v, a in consts.items() if v in wanted}
        follows = frozenset().union(*(roots[_jaxpr.variable(a)] for a in taken.values()))
        yield made, MadeInLoop(used[::-1], out, taken, read_whole), follows


def _loops_over(eqns: Sequence[Eqn], leaves: set[Var]) -> list[Eqn]:
    """Loops that slice leaves, or stacks that such loops make."""
    stacks, loops = set(leaves), []
    for eqn in filter(is_loop, eqns):
        if stacks.intersection(variables(_jaxpr.scan_stacks(eqn))):
            loops.append(eqn)
            stacks.update(stacks_made(eqn))
    return loops


def _slices_apart(eqns: Sequence[Eqn], loops: Sequence[Eqn]) -> Iterable[Eqn]:
    """Splits a slice of a loop's stack in two, along the other dims first and then along dim 0.

    The loop can run the first one. Such slices occur because fetches wait for an element of a loop's result.
    """
    made = {v for loop in loops for v in stacks_made(loop)}
    for eqn in eqns:
        if eqn.primitive.name != "slice" or eqn.params["strides"] or eqn.invars[0] not in made:
            yield eqn
            continue
        (x,), (out,) = eqn.invars, eqn.outvars
        (length, *row), (num, *cut) = x.aval.shape, out.aval.shape
        if length == num or row == cut:
            yield eqn
            continue
        (start, *starts), (limit, *limits) = (
            eqn.params[name] for name in ("start_indices", "limit_indices")
        )
        writer = JaxprWriter(eqn)
        some = writer.slice(x, (0, *starts), (length, *limits))
        writer.slice(some, (start, *(0 for _ in cut)), (limit, *cut), out)
        yield from writer.eqns


def _following(eqns: Sequence[Eqn], start: Sequence[Var]) -> set[Var]:
    """All values that depend on `start`, inclusive."""
    found = set(start)
    for eqn in eqns:
        if found.intersection(variables(eqn.invars)):
            found.update(eqn.outvars)
    return found


def _before(eqns: Sequence[Eqn], atoms: Iterable[Atom]) -> set[Var]:
    """All values on which `atoms` depend, inclusive."""
    found = set(variables(atoms))
    for eqn in reversed(eqns):
        if found.intersection(eqn.outvars):
            found.update(variables(eqn.invars))
    return found


def _replaced(eqns: Sequence[Eqn], eqn: Eqn, loop: GrowingLoop, gone: Collection[int]) -> list[Eqn]:
    new = []
    for each in eqns:
        if each is eqn:
            new += loop.equations()
        elif id(each) not in gone:
            new.append(each)
    return new


def _in_order(eqns: Sequence[Eqn]) -> list[Eqn]:
    """The equations in topological order, otherwise as they are."""
    makers = region_of(eqns).makers
    ordered: list[Eqn] = []
    done: set[int] = set()
    begun: set[int] = set()
    for eqn in eqns:
        waiting = [eqn]
        while waiting:
            last = waiting[-1]
            if id(last) in done:
                waiting.pop()
            elif id(last) in begun:
                done.add(id(last))
                ordered.append(waiting.pop())
            else:
                begun.add(id(last))
                needs = [eqns[makers[v]] for v in variables(last.invars) if v in makers]
                needs = [e for e in needs if id(e) not in done]
                assert begun.isdisjoint(map(id, needs)), "equations that wait for each other"
                waiting += needs[::-1]
    return ordered


def _without_unread(jaxpr: Jaxpr, eqns: Sequence[Eqn]) -> Jaxpr:
    """The jaxpr with these equations, without unread ones and without unread stacks of loops."""
    read, kept = set(variables(jaxpr.outvars)), []
    for eqn in reversed(eqns):
        if not _jaxpr.has_side_effects(eqn) and not read.intersection(eqn.outvars):
            continue
        if is_loop(eqn) and not read.issuperset(stacks_made(eqn)):
            loop = GrowingLoop(eqn, {})
            loop.keep(read)
            (eqn,) = loop.equations()
        kept.append(eqn)
        read.update(variables(eqn.invars))
    return _jaxpr.replaced(jaxpr, eqns=kept[::-1])
