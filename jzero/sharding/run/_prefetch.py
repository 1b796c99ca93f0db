"""Loops over layers, pipelined: each turn gathers what the next one needs while it computes.

The compiler cannot do this where it matters (docs/facts-compilers.md): it opens a loop's body with all
of its gathers, and every product of the body waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

import jax
from jax import lax

from jzero.sharding.analysis import _rules
from jzero.sharding.analysis._frames import split
from jzero.sharding.run import _collectives
from jzero.sharding.run._queue import PRODUCTS, GatherQueue, not_before
from jzero.sharding.run._values import Arrays
from jzero.tracing import _jaxpr, _rewrite

Index = int | jax.Array
State = tuple[
    Index, Arrays, Arrays, Arrays
]  # the turn, the carry, what was made, what was gathered for it
Carry = TypeVar("Carry")
Stacks = TypeVar("Stacks")
Made = TypeVar("Made")


def scan(
    body: Callable[[Carry, Stacks], tuple[Carry, Made]], init: Carry, xs: Stacks, queue: GatherQueue,
    *, length: int, reverse: bool,
) -> tuple[Carry, Made]:  # fmt: skip
    """`lax.scan`, with as many of each turn's gathers as `queue` allows moved into the turn before.

    It runs like this::

        ahead = gathers(xs[0])
        for i in range(length - 1):
            ahead, (carry, ys[i]) = gathers(xs[i + 1]), turn(carry, xs[i], ahead)
        carry, ys[-1] = turn(carry, xs[-1], ahead)

    No gather is added. The last turn stands after the loop for that, and slices are read from and
    written to whole stacks, so that none is copied to lose its first or last slice.
    """
    traced = _jaxpr.trace_here(body, init, jax.tree.map(_slice_of, xs))
    arrays, stacks = jax.tree.leaves(init), jax.tree.leaves(xs)
    ahead = _gathers_ahead(traced.jaxpr, len(arrays), queue.limit)
    if ahead:
        loop = _Loop(traced, stacks, len(arrays), length, reverse, ahead)
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


def _slice_of(stack: jax.Array) -> jax.ShapeDtypeStruct:
    """`[turns, n, d] -> [n, d]`."""
    weak = jax.typeof(stack).weak_type
    return jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype, weak_type=weak)


class _Loop:
    """A loop whose turns gather `ahead` for the turn after them."""

    def __init__(
        self, traced: _jaxpr.Traced, xs: Arrays, num_carry: int, length: int, reverse: bool,
        ahead: list[_jaxpr.Var],
    ):  # fmt: skip
        jaxpr = traced.jaxpr
        self.carried, sliced = split(jaxpr.invars, num_carry)
        self.made = jaxpr.outvars[num_carry:]
        self.known = dict(zip(jaxpr.constvars, traced.consts, strict=True))
        self.stacks = dict(zip(sliced, xs, strict=True))
        self.length, self.reverse, self.ahead = length, reverse, ahead
        self.gathers = _rewrite.excerpt(jaxpr, ahead, effects=False)
        turn = _rewrite.excerpt(jaxpr, jaxpr.outvars, ahead)
        # One function for the loop and for its last turn: it is traced and lowered once.
        self.turn = turn._replace(run=jax.jit(turn.run))

    def run(self, init: Arrays, queue: GatherQueue) -> tuple[Arrays, Arrays]:
        """The final carry, and the stacks of what the turns made."""
        tokens = queue.tokens(_nbytes(self.ahead))
        first = [not_before(x, tokens) for x in self.arguments(self.gathers, 0)]
        made = [lax.full((self.length, *y.aval.shape), 0, y.aval.dtype) for y in self.made]

        def step(state: State, _: None) -> tuple[State, None]:
            i, carry, made, gathered = state
            following = self.gathers.run(*self.arguments(self.gathers, i + 1))
            return (i + 1, *self.one_turn(i, carry, made, gathered), following), None

        state: State = (0, init, made, self.gathers.run(*first))
        (_, *last), _ = lax.scan(step, state, None, length=self.length - 1)
        carry, made = self.one_turn(self.length - 1, *last)
        # Else the compiler computes the stack with its last slice anew for every reader, into copies.
        return carry, list(lax.optimization_barrier(made))

    def one_turn(
        self, i: Index, carry: Arrays, made: Arrays, gathered: Arrays
    ) -> tuple[Arrays, Arrays]:
        """Carry and stacks `[turns, n, d]` after turn `i`, which writes its `[n, d]` there."""
        names = [*self.carried, *self.ahead]
        values = dict(zip(names, [*carry, *gathered], strict=True))
        outs = self.turn.run(*self.arguments(self.turn, i, values))
        carry, ys = split(outs, len(carry))
        at = self.position(i)
        return carry, [
            lax.dynamic_update_index_in_dim(stack, y, at, 0)
            for stack, y in zip(made, ys, strict=True)
        ]

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


def _gathers_ahead(jaxpr: _jaxpr.Jaxpr, num_carry: int, limit: int) -> list[_jaxpr.Var]:
    """The first gathers of a body that depend on nothing its turn computes.

    Those that fit in `limit` together, and all before the first product, which has none to hide behind.
    """
    late = set(jaxpr.invars[:num_carry])
    found: list[_jaxpr.Var] = []
    computing = limit == 0
    for eqn in jaxpr.eqns:
        computing |= eqn.primitive.name in PRODUCTS
        reads = [atom for atom in eqn.invars if not _jaxpr.is_literal(atom)]
        if _jaxpr.has_side_effects(eqn) or any(atom in late for atom in reads):
            late.update(eqn.outvars)
        elif _collectives.is_gather(eqn):
            if computing and _nbytes([*found, *eqn.outvars]) > limit:
                break
            found.extend(eqn.outvars)
    return found


def _nbytes(variables: Sequence[_jaxpr.Var]) -> int:
    return sum(_rules.size_in_bytes(var.aval) for var in variables)
