# SPDX-License-Identifier: Apache-2.0
"""Orders gradient reductions in groups: each group waits for the one before."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from jzero.ir._loops import Scan
from jzero.ir._regions import variables
from jzero.ir._writer import JaxprWriter
from jzero.sharding.passes import _waits
from jzero.sharding.passes._waits import ORDER as SCOPE
from jzero.tracing import _jaxpr
from jzero.tracing._types import Eqn, Jaxpr, Var

# [Note: groups of reductions]
# The compiler combines the reductions of a pass, or of a loop's body, into one at its end: all gradients
# wait for it, whole. One after the other each would take a latency, which grows with the devices. So they
# run in two groups, of about half of the bytes each, or in more of up to `nbytes`. Outside of loops two
# groups and what was made meanwhile are alive: each has up to half of it, or a sixteenth of the bytes if that
# is more, but at most `nbytes`. Those of a group do not wait for each other, so that the compiler
# combines them, but for all of the group before: it would else combine one that nothing waits for with those
# of a later group. A group of few bytes goes on, and few more join a full one: a bias before, between or
# after matrices would else take a latency of its own.

SMALLEST_GROUP = 2**22  # bytes; so many keep the wire busy on their own
WAITS_THROUGH_LOOPS = 2**26  # bytes of a gradient


def order(jaxpr: Jaxpr, nbytes: int) -> Jaxpr:
    """One device's program with its reductions behind the products that make what they reduce, in order.

    `nbytes`: the most bytes of whole gradients that are reduced together; with 0 each reduction waits for the
      one before.
    """
    return _ordered(jaxpr, nbytes, in_loop=False)


def _ordered(jaxpr: Jaxpr, nbytes: int, in_loop: bool) -> Jaxpr:
    eqns = list[Eqn]()
    for eqn in jaxpr.eqns:
        inside = functools.partial(
            _ordered, nbytes=nbytes, in_loop=in_loop or eqn.primitive.name in ("scan", "while")
        )
        eqns.append(_jaxpr.with_inner(eqn, inside))
    jaxpr = _waits.with_equations(jaxpr, eqns)
    found = _gradients(jaxpr)
    if len(found) < 2 or any(_jaxpr.in_scope(eqn, SCOPE) for eqn in jaxpr.eqns):
        return jaxpr
    return _in_groups(jaxpr, found, nbytes, in_loop)


def _gradients(jaxpr: Jaxpr) -> dict[int, list[Eqn]]:
    """Reductions that no product depends on, by the equation that makes their operand."""
    made = {out: i for i, eqn in enumerate(jaxpr.eqns) for out in eqn.outvars}
    feeds, found = set[Var](), dict[int, list[Eqn]]()
    for eqn in reversed(jaxpr.eqns):
        if _waits.reduces(eqn) and feeds.isdisjoint(eqn.outvars):
            found.setdefault(made.get(_jaxpr.variable(eqn.invars[0]), -1), []).insert(0, eqn)
        elif not feeds.isdisjoint(eqn.outvars) or (
            _waits.takes_time(eqn) and not _jaxpr.in_scope(eqn, _waits.OWNED)
        ):
            feeds.update(variables(eqn.invars))
    return dict(sorted(found.items()))


def _in_groups(jaxpr: Jaxpr, found: dict[int, list[Eqn]], nbytes: int, in_loop: bool) -> Jaxpr:
    reductions = [eqn for each in found.values() for eqn in each]
    moved = {id(eqn) for eqn in reductions}
    group_of = groups([_size(eqn) for eqn in reductions], nbytes, in_loop)
    places = {id(eqn): group for eqn, group in zip(reductions, group_of, strict=True)}
    shards: list[list[Eqn]] = [[] for _ in range(group_of[-1] + 1)]
    tokens: dict[int, list[Var]] = {0: []}
    begins, large = _begins(jaxpr)[::-1], list[Var]()  # The next loop stands last.
    writer = JaxprWriter(_jaxpr.within_scope(jaxpr.eqns[0], SCOPE))
    for i in range(-1, len(jaxpr.eqns)):
        if i >= 0 and id(jaxpr.eqns[i]) not in moved:
            writer.eqns.append(writer.renamed(jaxpr.eqns[i]))
        for eqn in found.get(i, ()):
            group, eqn = places[id(eqn)], writer.renamed(eqn)
            if group not in tokens:
                tokens[group] = _token(writer.eqns, shards[group - 1])
            if tokens[group]:
                written, eqn = _waits.waiting(eqn, tokens[group], SCOPE, laid_out=True)
                writer.eqns += written
            writer.eqns.append(eqn)
            shards[group].append(eqn)
            if _size(eqn) > WAITS_THROUGH_LOOPS:
                large += eqn.outvars
        while begins and begins[-1].loop <= i:
            begins.pop()
        if large and begins and begins[-1].made <= i:
            _begin_behind(writer, begins[-1].carry, large)
            large = []
    outs = [*map(writer.read, jaxpr.outvars)]
    return _waits.with_equations(jaxpr, writer.eqns, outs)


class _Begin(NamedTuple):
    carry: Var  # of a loop
    made: int  # the index of the equation that makes it
    loop: int  # and of the loop


def _begins(jaxpr: Jaxpr) -> list[_Begin]:
    made = {out: i for i, eqn in enumerate(jaxpr.eqns) for out in eqn.outvars}
    found = list[_Begin]()
    for i, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name == "scan":
            inits = variables([port.init for port in _waits.carried(Scan.of(eqn))])
            carry = next(iter(inits), None)
            found += [_Begin(carry, made.get(carry, -1), i)] if carry is not None else []
    return found


def _begin_behind(writer: JaxprWriter, carry: Var, values: Sequence[Var]) -> None:
    """A loop begins when these are reduced: XLA would else reduce them behind the loop.

    What the loop gathers for its first iteration waits for it too, so that none of it is there beside these.
    """
    tokens = [_waits.write_token(writer, value) for value in values]
    held = _waits.write_behind(writer, writer.read(carry), tokens)
    writer.names[carry] = held


def _size(eqn: Eqn) -> int:
    return _waits.nbytes(eqn.invars)


def _token(eqns: list[Eqn], group: Sequence[Eqn]) -> list[Var]:
    """One token of the large reductions of a group, or of all if none is large."""
    large = [eqn for eqn in group if _size(eqn) > SMALLEST_GROUP / 8]
    writer = JaxprWriter(_jaxpr.within_scope(group[0], SCOPE))
    first, *others = [_waits.write_token(writer, eqn.outvars[0]) for eqn in large or group]
    token = _waits.write_behind(writer, first, others)
    eqns += writer.eqns
    return [_jaxpr.variable(token)]


def groups(sizes: Sequence[int], nbytes: int, in_loop: bool) -> list[int]:
    """The group number of each reduction, [Note: groups of reductions]."""
    total = sum(sizes)
    half, least = total / 2, min(SMALLEST_GROUP, nbytes / 2)
    # Matrices that just fit still do with their biases.
    most = (nbytes if in_loop else min(nbytes, max(nbytes / 2, total / 16))) + least / 8
    found, group, held, late = list[int](), 0, 0, 0
    for size in sizes:
        full = held + size / 2 > half or held + size > most
        if full and held and held >= least:
            late += size
            if late > least / 8:
                group, held, late, half = group + 1, 0, 0, math.inf
        held += size
        found.append(group)
    return found
