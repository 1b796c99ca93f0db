"""Loops over layers, pipelined: each turn gathers what the next one needs while it computes.

The compiler cannot do this where it matters (docs/facts-compilers.md): it opens a loop's body with all
of its gathers, and every product of the body waits for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax import lax

from jzero.sharding.run import _collectives
from jzero.sharding.run._queue import PRODUCTS, GatherQueue
from jzero.tracing import _jaxpr, _rewrite

Arrays = list[Any]


def scan(
    body: Callable[[Arrays, Arrays], tuple[Arrays, Arrays]], init: Arrays, xs: Arrays, queue: GatherQueue,
    *, length: int, reverse: bool,
) -> tuple[Arrays, Arrays]:  # fmt: skip
    """`lax.scan`, with as many of each turn's gathers as `queue` allows moved into the turn before.

    It runs like this::

        ahead = gathers(xs[0])
        for i in range(length - 1):
            ahead, (carry, ys[i]) = gathers(xs[i + 1]), turn(carry, xs[i], ahead)
        carry, ys[-1] = turn(carry, xs[-1], ahead)

    No gather is added. The last turn stands after the loop for that, and slices are read from and
    written to whole stacks, so that none is copied to lose its first or last slice.
    """
    slices = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype, weak_type=_is_weak(x)) for x in xs]
    traced = _jaxpr.trace_here(body, init, slices)
    ahead = _gathers_ahead(traced.jaxpr, len(init), queue.limit)
    if ahead:
        return _Loop(traced, xs, len(init), length, reverse, ahead).run(init, queue)
    whole = _rewrite.excerpt(traced.jaxpr, traced.jaxpr.outvars)
    known = dict(zip(traced.jaxpr.constvars, traced.consts, strict=True))

    def again(carry: Arrays, x: Arrays) -> tuple[Arrays, Arrays]:
        values = known | dict(zip(traced.jaxpr.invars, [*carry, *x], strict=True))
        return _split(whole.run(*(values[var] for var in whole.reads)), len(init))

    return lax.scan(again, init, xs, length=length, reverse=reverse)


class _Loop:
    """A loop whose turns gather `ahead` for the turn after them."""

    def __init__(
        self, traced: _jaxpr.Traced, xs: Arrays, num_carry: int, length: int, reverse: bool,
        ahead: list[_jaxpr.Var],
    ):  # fmt: skip
        jaxpr = traced.jaxpr
        self.carried, sliced = _split(jaxpr.invars, num_carry)
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
        tokens = queue.tokens(sum(map(_nbytes, self.ahead)))
        first = [_collectives.not_before(x, tokens) for x in self.arguments(self.gathers, 0)]
        made = [lax.full((self.length, *y.aval.shape), 0, y.aval.dtype) for y in self.made]

        def step(state: Any, _: None) -> tuple[Any, None]:
            i, carry, made, gathered = state
            following = self.gathers.run(*self.arguments(self.gathers, i + 1))
            return (i + 1, *self.one_turn(i, carry, made, gathered), following), None

        state = (0, init, made, self.gathers.run(*first))
        (_, *last), _ = lax.scan(step, state, None, length=self.length - 1)
        carry, made = self.one_turn(self.length - 1, *last)
        # Else the compiler computes the stack with its last slice anew for every reader, into copies.
        return carry, list(lax.optimization_barrier(made))

    def one_turn(
        self, i: Any, carry: Arrays, made: Arrays, gathered: Arrays
    ) -> tuple[Arrays, Arrays]:
        """Carry and stacks after turn `i`."""
        names = [*self.carried, *self.ahead]
        values = dict(zip(names, [*carry, *gathered], strict=True))
        outs = self.turn.run(*self.arguments(self.turn, i, values))
        carry, ys = _split(outs, len(carry))
        at = self.position(i)
        return carry, [
            lax.dynamic_update_index_in_dim(stack, y, at, 0)
            for stack, y in zip(made, ys, strict=True)
        ]

    def arguments(
        self,
        part: _rewrite.Excerpt,
        i: Any,
        values: Mapping[_jaxpr.Var, Any] = MappingProxyType({}),
    ) -> Arrays:
        """What a part reads in turn `i`: constants, slices, and `values`."""
        known, at = self.known | dict(values), self.position(i)
        return [
            known[var] if var in known
            else lax.dynamic_index_in_dim(self.stacks[var], at, 0, keepdims=False)
            for var in part.reads
        ]  # fmt: skip

    def position(self, i: Any) -> Any:
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
            if computing and sum(map(_nbytes, [*found, *eqn.outvars])) > limit:
                break
            found.extend(eqn.outvars)
    return found


def _nbytes(var: _jaxpr.Var) -> int:
    return math.prod(var.aval.shape) * var.aval.dtype.itemsize


def _split(items: Sequence[Any], size: int) -> tuple[Arrays, Arrays]:
    return list(items[:size]), list(items[size:])


def _is_weak(x: Any) -> bool:
    return jax.typeof(x).weak_type
