# SPDX-License-Identifier: Apache-2.0
"""Needs: two questions put to every value backwards, to a fixed point in loops.

*Needs full*: does some consumer need the whole value? It decides only costs: a value nobody needs whole is
cut as early as possible, an enlarging operation on a value that is needed whole gathers first. *Feeds
batch*: does it flow into compute that differs between devices? That is what makes a leaf a parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence

import numpy as np

from jzero.ir import _rules
from jzero.sharding.analysis._frames import Frame, split
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Var

DType = np.dtype[np.generic]


def note_needs_full(
    frame: Frame, owned: Collection[Var] = (), copied: Collection[Var] = ()
) -> None:
    """Fills `needs_full` of the frame and those below; outputs need nothing.

    Args:
      frame: of the step.
      owned: the first results of calls that owners run in parts, which need nothing either.
      copied: what the update part computes for itself. A norm by dot product needs its operand whole, in the
        grad part: it alone must gather it.
    """
    full = _Needs(
        lambda f: f.needs_full, lambda f, e: not _rules.keeps_dims(e) or _spreads(f, e), owned
    )
    full.flow(frame, [False] * len(frame.jaxpr.outvars))
    frame.needs_full.difference_update(copied)


def note_feeds_batch(frame: Frame) -> None:
    """Fills `feeds_batch` of the frame and those below."""
    _Needs(lambda f: f.feeds_batch, _is_of_a_pass).flow(frame, [False] * len(frame.jaxpr.outvars))


def _spreads(frame: Frame, eqn: Eqn) -> bool:
    return any(frame.varies(out) for out in eqn.outvars)


def _is_of_a_pass(frame: Frame, eqn: Eqn) -> bool:
    # A weight that only a penalty reads, and no row, is a parameter too.
    return _spreads(frame, eqn) or frame.pass_of(eqn) is not None


def read_dtype(frame: Frame, var: Var, indices: Collection[int] | None = None) -> DType | None:
    """The dtype to which all readers of `var` cast it first, so that it can be cast before a gather.

    Args:
      frame: where `var` is read.
      var: one of its variables.
      indices: only these equations count.

    Returns:
      The dtype, or None if some reader reads `var` as it is.
    """
    found = set[DType | None]()
    for index in frame.readers.get(var, ()):
        if indices is not None and index not in indices:
            continue
        if index == len(frame.jaxpr.eqns):  # It is returned.
            return None
        eqn = frame.jaxpr.eqns[index]
        for place, atom in enumerate(eqn.invars):
            if atom is var:
                found |= _dtypes_at(frame, index, eqn, place)
    return found.pop() if len(found) == 1 else None


def _dtypes_at(frame: Frame, index: int, eqn: Eqn, place: int) -> set[DType | None]:
    name, children = eqn.primitive.name, frame.children.get(index, [])
    if name == "convert_element_type":
        return {eqn.params["new_dtype"]}
    if name == "optimization_barrier":
        return {read_dtype(frame, eqn.outvars[place])}
    if name == "scan":
        scan = _jaxpr.scan_parts(eqn)
        if scan.num_consts <= place < scan.num_consts + scan.num_carry:
            return {None}
    elif name == "while" or (name == "cond" and place == 0) or not children:
        return {None}
    inner = place - 1 if name == "cond" else place
    return {read_dtype(child, child.jaxpr.invars[inner]) for child in children}


@dataclasses.dataclass
class _Needs:
    """One backward question: `forces` says which equations put it to all their operands.

    `noted` is where a frame keeps the variables that were asked.
    """

    noted: Callable[[Frame], set[Var]]
    forces: Callable[[Frame, Eqn], bool]
    owned: Collection[Var] = ()

    def flow(self, frame: Frame, outs: Sequence[bool]) -> list[bool]:
        noted = self.noted(frame)

        def note(atoms: Sequence[Atom], needs: Sequence[bool]) -> None:
            pairs = zip(atoms, needs, strict=True)
            noted.update(atom for atom, need in pairs if need and not _jaxpr.is_literal(atom))

        note(frame.jaxpr.outvars, outs)
        for index, eqn in reversed(list(enumerate(frame.jaxpr.eqns))):
            asked = [out in noted for out in eqn.outvars]
            note(eqn.invars, self._operands(frame, index, eqn, asked))
        return [var in noted for var in frame.jaxpr.invars]

    def _operands(self, frame: Frame, index: int, eqn: Eqn, outs: list[bool]) -> Sequence[bool]:
        name, children = eqn.primitive.name, frame.children.get(index, [])
        asked = self.forces(frame, eqn) or any(outs)
        if name == "scan":
            return self._scan(eqn, children[0], outs)
        if name == "while":
            return self._while(eqn, children, outs, asked)
        if name == "cond":
            needs = [self.flow(child, outs) for child in children]
            diverges = bool(frame.reads(eqn)[0])
            return [asked, *(diverges or any(need) for need in zip(*needs, strict=True))]
        if children:
            inner = self.flow(children[0], outs)
            owned = any(out in self.owned for out in eqn.outvars[:1])  # A call may have no results.
            return [False] * len(inner) if owned else inner
        if name in _rules.IDENTITIES or name == "optimization_barrier":
            return outs
        return [asked] * len(eqn.invars)

    def _scan(self, eqn: Eqn, body: Frame, outs: list[bool]) -> list[bool]:
        scan = _jaxpr.scan_parts(eqn)
        carry, ys = split(outs, scan.num_carry)
        while True:
            ins = self.flow(body, [*carry, *ys])
            _, before, _ = split(ins, scan.num_consts, scan.num_carry)
            if not any(b and not c for b, c in zip(before, carry, strict=True)):
                return ins
            carry = [b or c for b, c in zip(before, carry, strict=True)]

    def _while(self, eqn: Eqn, children: list[Frame], outs: list[bool], asked: bool) -> list[bool]:
        loop, (cond, body), carry = _jaxpr.while_parts(eqn), children, outs
        while True:
            in_cond, cond_carry = split(self.flow(cond, [asked]), loop.num_cond_consts)
            in_body, body_carry = split(self.flow(body, carry), loop.num_body_consts)
            new = [any(needs) for needs in zip(carry, cond_carry, body_carry, strict=True)]
            if new == carry:
                return [*in_cond, *in_body, *carry]
            carry = new
