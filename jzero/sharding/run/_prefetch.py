# SPDX-License-Identifier: Apache-2.0
"""Loops over layers, pipelined: each turn gathers and fetches what the next one needs while it computes.

The compiler cannot do this where it matters (docs/facts-compilers.md): it opens a loop's body with all
of its gathers, and every product of the body waits for them.

[Note: a turn later] It moves reduce-scatters behind the next turn's products by itself, and exchanges of
codes not. So the codes of a turn's gradients wait in the carry, and the next turn exchanges and sums them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

import jax
from jax import lax

from jzero.sharding.analysis import _rules
from jzero.sharding.analysis._frames import split, variables
from jzero.sharding.run import _coded, _collectives, _memory_spaces
from jzero.sharding.run._queue import PRODUCTS, GatherQueue, not_before
from jzero.sharding.run._values import Arrays
from jzero.tracing import _jaxpr, _rewrite

Index = int | jax.Array
State = tuple[
    Index, Arrays, Arrays, Arrays
]  # the turn, the carry, what was made, what was gathered for it
BehindState = tuple[Index, Arrays, Arrays, Arrays, Arrays]  # and what was handed on
Carry = TypeVar("Carry")
Stacks = TypeVar("Stacks")
Made = TypeVar("Made")


def scan(
    body: Callable[[Carry, Stacks], tuple[Carry, Made]], init: Carry, xs: Stacks,
    queue: GatherQueue | None, *, length: int, reverse: bool, behind: bool = False,
) -> tuple[Carry, Made]:  # fmt: skip
    """`lax.scan`, with as many of each turn's gathers as `queue` allows moved into the turn before.

    And with all copies of its slices from the host to the device: those of one turn are ahead. With `behind`,
    exchanges of codes come a turn later.

    It runs like this::

        ahead = gathers(xs[0])
        for i in range(length - 1):
            ahead, (carry, ys[i]) = gathers(xs[i + 1]), turn(carry, xs[i], ahead)
        carry, ys[-1] = turn(carry, xs[-1], ahead)

    No gather is added, and without a `queue` none is moved. The last turn stands after the loop for that,
    and slices are read from and written to whole stacks, so that none is copied to lose its first or last
    slice.
    """
    traced = _jaxpr.trace_here(body, init, jax.tree.map(_jaxpr.slice_type, xs))
    arrays, stacks = jax.tree.leaves(init), jax.tree.leaves(xs)
    ahead = _ahead(traced.jaxpr, len(arrays), None if queue is None else queue.limit)
    late = _late(traced.jaxpr, len(arrays)) if behind else []
    if ahead or late:
        loop = _Loop(traced, stacks, len(arrays), length, reverse, ahead, late)
        carry, made = loop.run_behind(arrays, queue) if late else loop.run(arrays, queue)
    else:
        carry, made = _plain(traced, arrays, stacks, length, reverse)
    out: tuple[Carry, Made] = jax.tree.unflatten(traced.out_tree, [*carry, *made])
    return out


def _plain(
    traced: _jaxpr.Traced, init: Arrays, stacks: Arrays, length: int, reverse: bool
) -> tuple[Arrays, Arrays]:
    """`lax.scan` of the body, which is traced already."""
    whole = _rewrite.excerpt(traced.jaxpr, traced.jaxpr.outvars)
    known = dict(zip(traced.jaxpr.constvars, traced.consts, strict=True))

    def body(carry: Arrays, slices: Arrays) -> tuple[Arrays, Arrays]:
        values = known | dict(zip(traced.jaxpr.invars, [*carry, *slices], strict=True))
        new, made = split(whole.run(*(values[var] for var in whole.reads)), len(init))
        return new, made

    carry, made = lax.scan(body, init, stacks, length=length, reverse=reverse)
    return carry, made


class _Loop:
    """A loop whose turns gather and fetch `ahead` for the turn after them, and make what is `late` in it."""

    def __init__(
        self, traced: _jaxpr.Traced, xs: Arrays, num_carry: int, length: int, reverse: bool,
        ahead: list[_jaxpr.Var], late: list[_jaxpr.Var],
    ):  # fmt: skip
        jaxpr = traced.jaxpr
        self.carried, sliced = split(jaxpr.invars, num_carry)
        self.made = jaxpr.outvars[num_carry:]
        self.late = [i for i, y in enumerate(self.made) if y in late]
        self.early = [i for i in range(len(self.made)) if i not in self.late]
        self.known = dict(zip(jaxpr.constvars, traced.consts, strict=True))
        self.stacks = dict(zip(sliced, xs, strict=True))
        self.length, self.reverse, self.ahead = length, reverse, ahead
        self.gathers = _rewrite.excerpt(jaxpr, ahead, effects=False)
        self.handed = _handed(jaxpr, {*sliced, *jaxpr.constvars}) if late else []
        made = [self.made[i] for i in self.early]
        turn = _rewrite.excerpt(jaxpr, [*jaxpr.outvars[:num_carry], *made, *self.handed], ahead)
        outs = [self.made[i] for i in self.late]
        finish = _rewrite.excerpt(jaxpr, outs, self.handed, effects=False)
        # One function for the loop and for its last turn: it is traced and lowered once.
        self.turn = turn._replace(run=jax.jit(turn.run))
        self.finish = finish._replace(run=jax.jit(finish.run))

    def run(self, init: Arrays, queue: GatherQueue | None) -> tuple[Arrays, Arrays]:
        """The final carry, and the stacks of what the turns made."""
        first, made = self._start(queue)

        def step(state: State, _: None) -> tuple[State, None]:
            i, carry, made, gathered = state
            following = self.gathers.run(*self.arguments(self.gathers, i + 1))
            carry, made = self.one_turn(i, carry, made, gathered)[:2]
            return (i + 1, carry, made, following), None

        state: State = (0, init, made, self.gathers.run(*first))
        (_, *last), _ = lax.scan(step, state, None, length=self.length - 1)
        carry, made = self.one_turn(self.length - 1, *last)[:2]
        return carry, _settled(made)

    def run_behind(self, init: Arrays, queue: GatherQueue | None) -> tuple[Arrays, Arrays]:
        """As `run`, with what is late made in the turn after: [Note: a turn later].

        ahead = gathers(xs[0])
        following, (carry, ys[0], late) = gathers(xs[1]), turn(carry, xs[0], ahead)
        for i in range(1, length - 1):
            ahead, ys[i - 1] = gathers(xs[i + 1]), finish(late)
            carry, ys[i], late = turn(carry, xs[i], ahead)
        ...
        """
        first, made = self._start(queue)
        gathered = self.gathers.run(*first)
        following = self.gathers.run(*self.arguments(self.gathers, 1))
        carry, made, handed = self.one_turn(0, init, made, gathered)

        def step(state: BehindState, _: None) -> tuple[BehindState, None]:
            i, carry, made, gathered, handed = state
            following = self.gathers.run(*self.arguments(self.gathers, i + 1))
            made = self.finished(i - 1, made, handed)
            carry, made, handed = self.one_turn(i, carry, made, gathered)
            return (i + 1, carry, made, following, handed), None

        state: BehindState = (1, carry, made, following, handed)
        state, _ = lax.scan(step, state, None, length=self.length - 2)
        _, carry, made, gathered, handed = state
        made = self.finished(self.length - 2, made, handed)
        carry, made, handed = self.one_turn(self.length - 1, carry, made, gathered)
        return carry, _settled(self.finished(self.length - 1, made, handed))

    def _start(self, queue: GatherQueue | None) -> tuple[Arrays, Arrays]:
        """What the first gathers read, when it is their turn, and empty stacks."""
        tokens = [] if queue is None else queue.tokens(_nbytes(self.ahead))
        first = [
            x if _memory_spaces.on_host(x) else not_before(x, tokens)
            for x in self.arguments(self.gathers, 0)
        ]
        return first, [_memory_spaces.empty_stack(self.length, y.aval) for y in self.made]

    def one_turn(
        self, i: Index, carry: Arrays, made: Arrays, gathered: Arrays
    ) -> tuple[Arrays, Arrays, Arrays]:
        """After turn `i`: carry, stacks `[turns, n, d]` in which its `[n, d]` are, and what it hands on."""
        names = [*self.carried, *self.ahead]
        values = dict(zip(names, [*carry, *gathered], strict=True))
        outs = self.turn.run(*self.arguments(self.turn, i, values))
        carry, ys, handed = split(outs, len(carry), len(self.early))
        return carry, self.written(made, self.early, ys, i), handed

    def finished(self, i: Index, made: Arrays, handed: Arrays) -> Arrays:
        """Stacks with what turn `i` has left to the turn after it."""
        values = dict(zip(self.handed, handed, strict=True))
        ys = self.finish.run(*self.arguments(self.finish, i, values))
        return self.written(made, self.late, ys, i)

    def written(self, made: Arrays, places: Sequence[int], ys: Arrays, i: Index) -> Arrays:
        """Stacks `[turns, n, d]`, of which those at `places` have turn `i`'s `[n, d]`."""
        at, new = self.position(i), list(made)
        for place, y in zip(places, ys, strict=True):
            new[place] = lax.dynamic_update_index_in_dim(made[place], y, at, 0)
        return new

    def arguments(
        self,
        part: _rewrite.Excerpt,
        i: Index,
        values: Mapping[_jaxpr.Var, jax.Array] = MappingProxyType({}),
    ) -> Arrays:
        """What a part reads in turn `i`: constants, slices `[n, d]` of stacks, and `values`."""
        known, at = self.known | dict(values), self.position(i)
        return [
            known[var] if var in known
            else lax.dynamic_index_in_dim(self.stacks[var], at, 0, keepdims=False)
            for var in part.reads
        ]  # fmt: skip

    def position(self, i: Index) -> Index:
        """Where in the stacks turn `i` reads and writes."""
        return self.length - 1 - i if self.reverse else i


def _late(jaxpr: _jaxpr.Jaxpr, num_carry: int) -> list[_jaxpr.Var]:
    """What is made of exchanges of codes, and may come a turn later: nothing if the next turn reads some."""
    late = _after_exchanges(jaxpr)
    carried, made = split(jaxpr.outvars, num_carry)
    acts = any(
        _jaxpr.has_side_effects(eqn) for eqn in jaxpr.eqns if not late.isdisjoint(eqn.outvars)
    )
    if acts or not late.isdisjoint(variables(carried)):
        return []
    return [y for y in variables(made) if y in late]


def _handed(jaxpr: _jaxpr.Jaxpr, known: Collection[_jaxpr.Var]) -> list[_jaxpr.Var]:
    """What a turn has made of which the next one makes what is late: codes, before their exchange."""
    after, read = _after_exchanges(jaxpr), dict[_jaxpr.Var, None]()
    for eqn in jaxpr.eqns:
        if not after.isdisjoint(eqn.outvars):
            read |= dict.fromkeys(variables(eqn.invars))
    return [var for var in read if var not in after and var not in known]


def _after_exchanges(jaxpr: _jaxpr.Jaxpr) -> set[_jaxpr.Var]:
    """What follows from exchanges of codes."""
    after: set[_jaxpr.Var] = set()
    for eqn in jaxpr.eqns:
        if _coded.is_exchange(eqn) or not after.isdisjoint(variables(eqn.invars)):
            after.update(eqn.outvars)
    return after


def _settled(made: Arrays) -> Arrays:
    """Finished stacks. XLA would compute one with its last slice anew for every reader, into copies."""
    on_device = iter(lax.optimization_barrier([x for x in made if not _memory_spaces.on_host(x)]))
    return [x if _memory_spaces.on_host(x) else next(on_device) for x in made]


def _ahead(jaxpr: _jaxpr.Jaxpr, num_carry: int, limit: int | None) -> list[_jaxpr.Var]:
    """The first gathers, and all fetches, of a body that depend on nothing its turn computes.

    Gathers that fit in `limit` together, and all before the first product, which has none to hide behind.
    """
    late = set(jaxpr.invars[:num_carry])
    gathered: list[_jaxpr.Var] = []
    fetched: list[_jaxpr.Var] = []
    computing, full = limit == 0, limit is None
    for eqn in jaxpr.eqns:
        computing |= eqn.primitive.name in PRODUCTS
        reads = [atom for atom in eqn.invars if not _jaxpr.is_literal(atom)]
        if _jaxpr.has_side_effects(eqn) or any(atom in late for atom in reads):
            late.update(eqn.outvars)
        elif _memory_spaces.is_fetch(eqn):
            fetched.extend(eqn.outvars)
        elif _collectives.is_gather(eqn) and limit is not None:
            full |= computing and _nbytes([*gathered, *eqn.outvars]) > limit
            gathered.extend([] if full else eqn.outvars)
    return [*gathered, *fetched]


def _nbytes(variables: Sequence[_jaxpr.Var]) -> int:
    return sum(_rules.size_in_bytes(var.aval) for var in variables)
