# SPDX-License-Identifier: Apache-2.0
"""Finds the leaves of the new state that each value becomes, along operations that keep its dims.

A scalar that scales or selects values has no dims, so updates that are clipped, or skipped, together still
become one leaf each.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterator, Sequence

from jzero.ir import _rules
from jzero.sharding.analysis._frames import Frame
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Var

LeafSets = dict[Var, int]  # A bit mask of leaves.


def new_leaves(frame: Frame, num: int, stops: Collection[int]) -> LeafSets:
    """For each variable the outputs, of the first `num`, that it becomes without equations `stops`."""
    found: LeafSets = {}
    for i, var in enumerate(frame.jaxpr.outvars[:num]):
        _add(found, var, 1 << i)
    _note(frame, found, stops)
    return found


def told_apart(sets: Sequence[int]) -> list[int]:
    """Removes from each set the leaves that are another one's only leaf: {a, b}, {b} -> {a}, {b}."""
    while True:
        taken = 0
        for each in sets:
            taken |= each if each.bit_count() == 1 else 0
        fewer = [(each & ~taken) or each for each in sets]
        if fewer == list(sets):
            return fewer
        sets = fewer


def bits(leaves: int) -> Iterator[int]:
    """The indices of the bits of a mask."""
    while leaves:
        least = leaves & -leaves
        yield least.bit_length() - 1
        leaves ^= least


def _note(frame: Frame, found: LeafSets, stops: Collection[int]) -> None:
    for i, eqn in reversed(list(enumerate(frame.jaxpr.eqns))):
        if i in stops or frame.pass_of(eqn) is not None:
            continue
        outs = [found.get(out, 0) for out in eqn.outvars]
        if not any(outs):
            continue
        children = frame.inner(eqn)
        if children and (eqn.primitive.name == "cond" or _jaxpr.call_parts(eqn) is not None):
            for child in children:
                inner: LeafSets = {}
                for var, leaves in zip(child.jaxpr.outvars, outs, strict=True):
                    _add(inner, var, leaves)
                _note(child, inner, ())
                operands = eqn.invars[len(eqn.invars) - len(child.jaxpr.invars) :]
                for atom, var in zip(operands, child.jaxpr.invars, strict=True):
                    _add(found, atom, inner.get(var, 0))
            continue
        for atom, leaves in _passed_on(eqn, outs):
            _add(found, atom, leaves)


def _passed_on(eqn: Eqn, outs: Sequence[int]) -> Iterator[tuple[Atom, int]]:
    """Operands whose dims an equation keeps, each with the leaves that it becomes."""
    maps = _rules.dims_of(eqn)
    leaves: dict[tuple[int, ...], int] = {}  # By the results' shapes.
    for out, each in zip(eqn.outvars, outs, strict=True):
        if len(shape := getattr(out.aval, "shape", ())) > 1:
            leaves[shape] = leaves.get(shape, 0) | each
    if maps is not None:
        every = functools.reduce(operator.or_, leaves.values(), 0)
        for atom, dims in zip(eqn.invars, maps, strict=True):
            if any(dim is not None for dim in dims):
                yield atom, every
    # A loop may keep the dims of an operand of the same shape.
    elif eqn.primitive.name in ("scan", "while") or eqn.primitive.name in _rules.IDENTITIES:
        for atom in eqn.invars:
            yield atom, leaves.get(getattr(atom.aval, "shape", ()), 0)


def _add(found: LeafSets, atom: Atom, leaves: int) -> None:
    if leaves and not _jaxpr.is_literal(atom) and getattr(atom.aval, "ndim", 0) > 1:
        found[atom] = found.get(atom, 0) | leaves
