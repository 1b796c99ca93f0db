"""Loops over layers, pipelined: each turn gathers what the next one needs while it computes.

The compiler cannot do this where it matters (docs/design.md, section 7): it opens a loop's body with all
of its gathers, and every product of the body waits for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from jzero import _jaxpr
from jzero.sharding import _collectives
from jzero.sharding._queue import GatherQueue

Arrays = list[Any]


def scan(
    body: Callable[[Arrays, Arrays], tuple[Arrays, Arrays]], init: Arrays, xs: Arrays, queue: GatherQueue,
    *, length: int, reverse: bool,
) -> tuple[Arrays, Arrays]:  # fmt: skip
    """`lax.scan`, with as many of each turn's gathers as `queue` allows moved into the turn before::

        ahead = gathers(xs[0])
        for i in range(length - 1):
            ahead, (carry, ys[i]) = gathers(xs[i + 1]), turn(carry, xs[i], ahead)
        carry, ys[-1] = turn(carry, xs[-1], ahead)

    No gather is added. The last turn stands after the loop for that, and slices are read from and
    written to whole stacks, so that none is copied to lose its first or last slice.
    """
    slices = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype, weak_type=_is_weak(x)) for x in xs]
    traced = _jaxpr.trace_here(body, init, slices)
    jaxpr, num_carry = traced.jaxpr, len(init)
    ahead = _gathers_ahead(jaxpr, num_carry, queue.limit)
    carried, sliced = jaxpr.invars[:num_carry], jaxpr.invars[num_carry:]
    if not ahead:
        turn = _jaxpr.part(jaxpr, [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars)
        return lax.scan(
            lambda carry, x: _split(turn(*traced.consts, *carry, *x), num_carry),
            init, xs, length=length, reverse=reverse,
        )  # fmt: skip
    gathers = _jaxpr.part(jaxpr, [*jaxpr.constvars, *sliced], ahead, effects=False)
    # One function for the loop and for its last turn: it is traced and lowered once.
    turn = jax.jit(
        _jaxpr.part(jaxpr, [*jaxpr.constvars, *carried, *sliced, *ahead], jaxpr.outvars)
    )
    nth = (lambda i: length - 1 - i) if reverse else (lambda i: i)

    def run(i: Any, carry: Arrays, stacks: Arrays, gathered: Arrays) -> tuple[Arrays, Arrays]:
        outs = turn(*traced.consts, *carry, *_slices(xs, nth(i)), *gathered)
        carry, ys = _split(outs, num_carry)
        return carry, [
            lax.dynamic_update_index_in_dim(stack, y, nth(i), 0)
            for stack, y in zip(stacks, ys, strict=True)
        ]

    def step(state: Any, _: None) -> tuple[Any, None]:
        i, carry, stacks, gathered = state
        following = gathers(*traced.consts, *_slices(xs, nth(i + 1)))
        return (i + 1, *run(i, carry, stacks, gathered), following), None

    token = queue.token(sum(map(_nbytes, ahead)))
    first = _slices(xs, nth(0))
    if token is not None:
        first = [_collectives.keep_apart(x, token) for x in first]
    stacks = [
        lax.full((length, *atom.aval.shape), 0, atom.aval.dtype)
        for atom in jaxpr.outvars[num_carry:]
    ]
    state = (0, init, stacks, gathers(*traced.consts, *first))
    (_, *state), _ = lax.scan(step, state, None, length=length - 1)
    return run(length - 1, *state)


def _gathers_ahead(jaxpr: _jaxpr.Jaxpr, num_carry: int, limit: int) -> list[_jaxpr.Var]:
    """The first gathers of a body that depend on nothing its turn computes, up to so many bytes."""
    late = set(jaxpr.invars[:num_carry])
    found: list[_jaxpr.Var] = []
    for eqn in jaxpr.eqns:
        reads = [atom for atom in eqn.invars if not _jaxpr.is_literal(atom)]
        if _jaxpr.has_side_effects(eqn) or any(atom in late for atom in reads):
            late.update(eqn.outvars)
        elif _collectives.is_gather(eqn):
            if sum(map(_nbytes, [*found, *eqn.outvars])) > limit:
                break
            found.extend(eqn.outvars)
    return found


def _nbytes(var: _jaxpr.Var) -> int:
    return math.prod(var.aval.shape) * var.aval.dtype.itemsize


def _slices(stacks: Arrays, index: Any) -> Arrays:
    return [lax.dynamic_index_in_dim(x, index, 0, keepdims=False) for x in stacks]


def _split(items: Sequence[Any], size: int) -> tuple[Arrays, Arrays]:
    return list(items[:size]), list(items[size:])


def _is_weak(x: Any) -> bool:
    return jax.typeof(x).weak_type
