# SPDX-License-Identifier: Apache-2.0
"""Loops over layers, pipelined: each turn gathers and fetches what the next one needs while it computes.

The compiler cannot do this where it matters (docs/facts-compilers.md): it opens a loop's body with all
of its gathers, and every product of the body waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jzero.ir import _memory_spaces
from jzero.sharding.analysis._frames import split
from jzero.sharding.passes._turns import latest_use
from jzero.sharding.passes._waits import PRODUCTS, nbytes, not_before, token_of
from jzero.sharding.run import _collectives
from jzero.sharding.run._queue import GatherQueue
from jzero.sharding.run._values import Arrays
from jzero.tracing import _jaxpr, _rewrite

# [Note: a backward loop begins with its carry]
# With remat, XLA else computes the first turn's forward part, with all that it gathers, while the logits and
# the gathered table are still there: nothing in it reads a cotangent
# (test_prefetch.py::test_a_backward_loop_begins_when_its_carry_is_there).

Index = int | jax.Array
State = tuple[
    Index, Arrays, Arrays, Arrays
]  # the turn, the carry, what was made, what was gathered for it
Carry = TypeVar("Carry")
Stacks = TypeVar("Stacks")
Made = TypeVar("Made")


def scan(
    body: Callable[[Carry, Stacks], tuple[Carry, Made]], init: Carry, xs: Stacks,
    queue: GatherQueue | None, balance: float, *, length: int, reverse: bool,
) -> tuple[Carry, Made]:  # fmt: skip
    """`lax.scan`, with as many of each turn's gathers as `queue` allows moved into the turn before.

    And with all copies of its slices from the host to the device: those of one turn are ahead.

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
    if ahead:
        loop = _Loop(traced, stacks, len(arrays), length, reverse, ahead, balance)
        carry, made = loop.run(arrays, queue)
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
    """A loop whose turns gather and fetch `ahead` for the turn after them."""

    def __init__(
        self, traced: _jaxpr.Traced, xs: Arrays, num_carry: int, length: int, reverse: bool,
        ahead: list[_jaxpr.Var], balance: float,
    ):  # fmt: skip
        jaxpr = traced.jaxpr
        self.carried, sliced = split(jaxpr.invars, num_carry)
        self.made = jaxpr.outvars[num_carry:]
        self.known = dict(zip(jaxpr.constvars, traced.consts, strict=True))
        self.stacks = dict(zip(sliced, xs, strict=True))
        self.length, self.reverse, self.ahead = length, reverse, ahead
        self.gathers = _rewrite.excerpt(jaxpr, ahead, effects=False)
        self.awaited = latest_use(jaxpr, ahead, balance)
        turn = _rewrite.excerpt(jaxpr, [*jaxpr.outvars, *self.awaited], ahead)
        self.reduces = any(map(_collectives.is_reduction, jaxpr.eqns))
        # One function for the loop and for its last turn: it is traced and lowered once.
        self.turn = turn._replace(run=jax.jit(turn.run))

    def run(self, init: Arrays, queue: GatherQueue | None) -> tuple[Arrays, Arrays]:
        """The final carry, and the stacks of what the turns made."""
        tokens = [] if queue is None else queue.tokens(nbytes(self.ahead))
        made = [_memory_spaces.empty_stack(self.length, y.aval) for y in self.made]

        def step(state: State, _: None) -> tuple[State, None]:
            i, carry, made, gathered = state
            carry, made, tokens = self.one_turn(i, carry, made, gathered)
            return (i + 1, carry, made, self.gathered(i + 1, tokens)), None

        state: State = (0, init, made, self.begun(init, self.gathered(0, tokens)))
        (_, *last), _ = lax.scan(step, state, None, length=self.length - 1)
        carry, made, _ = self.one_turn(self.length - 1, *last)
        return carry, _settled(made)

    def begun(self, init: Arrays, gathered: Arrays) -> Arrays:
        """`gathered`, but not before the carry is there ([Note: a backward loop begins with its carry])."""
        if not self.reduces:
            return gathered
        ready = [
            token_of(x)
            for x in init
            if jnp.issubdtype(x.dtype, jnp.floating) and not _memory_spaces.on_host(x)
        ]
        return [x if _memory_spaces.on_host(x) else not_before(x, ready) for x in gathered]

    def one_turn(
        self, i: Index, carry: Arrays, made: Arrays, gathered: Arrays
    ) -> tuple[Arrays, Arrays, Arrays]:
        """Carry and stacks `[turns, n, d]` after turn `i`, which writes its `[n, d]` there.

        And tokens, for which gathers for the next turn wait.
        """
        names = [*self.carried, *self.ahead]
        values = dict(zip(names, [*carry, *gathered], strict=True))
        outs = self.turn.run(*self.arguments(self.turn, i, values))
        carry, ys = split(outs, len(carry))
        ys, awaited = split(ys, len(made))
        at = self.position(i)
        made = [
            lax.dynamic_update_index_in_dim(stack, y, at, 0)
            for stack, y in zip(made, ys, strict=True)
        ]
        return carry, made, list(map(token_of, awaited))

    def gathered(self, i: Index, tokens: Arrays) -> Arrays:
        """What is gathered and fetched ahead for turn `i`, when `tokens` are there."""
        shards = [
            x if _memory_spaces.on_host(x) else not_before(x, tokens)
            for x in self.arguments(self.gathers, i)
        ]
        return self.gathers.run(*shards)

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
    computing, full, total = limit == 0, limit is None, 0
    for eqn in jaxpr.eqns:
        computing |= eqn.primitive.name in PRODUCTS
        reads = _jaxpr.variables_read(eqn)
        if _jaxpr.has_side_effects(eqn) or any(atom in late for atom in reads):
            late.update(eqn.outvars)
        elif _memory_spaces.is_fetch(eqn):
            fetched.extend(eqn.outvars)
        elif _collectives.is_gather(eqn) and limit is not None:
            total += nbytes(eqn.outvars)
            full |= computing and total > limit
            gathered.extend([] if full else eqn.outvars)
    return [*gathered, *fetched]
