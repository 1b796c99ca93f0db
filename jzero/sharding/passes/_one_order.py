# SPDX-License-Identifier: Apache-2.0
"""Programs for CPUs: no collective starts before a loop with collectives in front of it is over."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jzero.sharding.analysis import _frames
from jzero.sharding.analysis._frames import split
from jzero.sharding.passes._waits import bits_of, unless_never
from jzero.tracing import _jaxpr
from jzero.tracing._types import Jaxpr, Var

# [Note: one order of collectives]
# XLA:CPU starts the operations of a device in one order, but a loop counts as started when its first turn
# waits for something. A gather behind it may then meet, on another device, a gather of the loop: all have
# one name. And it drops the optimization barriers by which `_queue.py` orders them. So on CPUs a loop, branch
# or call in which devices meet reads, in a way that no simplifier sees through, something of what the
# collectives before it have made, and each collective behind it something of its result
# (tests/test_one_order.py; docs/facts-compilers.md).


def one_order(
    jaxpr: Jaxpr, consts: Sequence[Any], mesh: Mesh, axes: Collection[str] | None = None
) -> _jaxpr.Traced:
    """One device's program, with explicit collectives over axes of a mesh, by default all, for CPUs."""
    types = [_abstract(var) for var in jaxpr.invars]
    ordered = in_one_order(lambda *args: _jaxpr.evaluate(jaxpr, consts, *args))
    return _jaxpr.trace_on(mesh, ordered, types, mesh.axis_names if axes is None else axes)


def _abstract(var: Var) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype, weak_type=var.aval.weak_type)


def in_one_order(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` of one device's values, with what it computes; its collectives keep their order on XLA:CPU."""

    @functools.wraps(fn)
    def ordered(*args: Any) -> Any:
        traced = _jaxpr.trace_here(fn, *args)
        outs = _Sequence({}).run(traced.jaxpr, traced.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(traced.out_tree, outs)

    return ordered


def nests_collectives(eqn: _jaxpr.Eqn) -> bool:
    """Whether it is a loop, branch or call in which devices meet."""
    return any(e.primitive.name in MEETING for e in _jaxpr.inside(eqn))


def overtaken(jaxpr: Jaxpr) -> bool:
    """Whether it has, at any depth, a loop or branch in which devices meet: XLA:CPU lets others pass it."""
    return any(
        eqn.primitive.name in ("scan", "while", "cond") and nests_collectives(eqn)
        for eqn in _jaxpr.walk(jaxpr)
    )


MEETING = _frames.COLLECTIVES - {"axis_index"}


class _Sequence:
    """Equations that one device starts one after the other: of a program, of a loop's body, of a branch."""

    def __init__(self, bodies: dict[int, tuple[Any, Any]], *before: jax.Array):
        self._bodies = bodies  # Of the whole program: a body that stands in it twice stays one.
        self._over = [*before]  # Tokens of what the latest loop or branch has made,
        self._since: list[jax.Array] = []  # and of what each collective after it has.

    def token(self) -> jax.Array:
        """Bits that nobody knows before all collectives up to here are done."""
        bits: jax.Array = functools.reduce(lax.bitwise_or, self._over + self._since, jnp.uint32(0))
        return bits

    def run(self, jaxpr: _jaxpr.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """The results of a jaxpr."""
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

        def read(atom: _jaxpr.Atom) -> Any:
            return _jaxpr.literal(atom) if _jaxpr.is_literal(atom) else known[atom]

        for eqn in jaxpr.eqns:
            known |= zip(eqn.outvars, self._one(eqn, [*map(read, eqn.invars)]), strict=True)
        return [*map(read, jaxpr.outvars)]

    def _one(self, eqn: _jaxpr.Eqn, ins: list[Any]) -> list[Any]:
        nests = nests_collectives(eqn)
        if nests and (call := _jaxpr.call_parts(eqn)) is not None and not _jaxpr.is_rematted(eqn):
            return self._call(eqn, *call, ins)
        if nests and eqn.primitive.name == "scan" and _jaxpr.scan_parts(eqn).length == 1:
            return self._only_turn(eqn, ins)
        if not nests and eqn.primitive.name not in MEETING:
            return _jaxpr.evaluate_one(eqn, ins)
        if before := self._over + self._since if nests else self._over:
            ins = _after(eqn, ins, functools.reduce(lax.bitwise_or, before))
        outs = _jaxpr.evaluate_one(eqn, ins, self._body)
        made = _tokens(eqn.outvars, outs)
        if nests and made:
            self._over, self._since = made, []
        else:
            self._since += made
        return outs

    def _call(
        self, eqn: _jaxpr.Eqn, jaxpr: _jaxpr.Jaxpr, consts: list[Any], ins: list[Any]
    ) -> list[Any]:
        """What a call makes. XLA puts its equations among all others: a token goes in, one result waits."""
        if id(jaxpr) not in self._bodies:

            def run(before: jax.Array, *args: Any) -> list[Any]:
                inner = _Sequence(self._bodies, before)
                outs = inner.run(jaxpr, consts, args)
                read = _last(jaxpr.outvars, outs)
                return [
                    unless_never(x, inner.token()) if i == read else x for i, x in enumerate(outs)
                ]

            run.__name__ = str(eqn.params.get("name", eqn.primitive.name))
            self._bodies[id(jaxpr)] = jaxpr, jax.jit(run)
        with _jaxpr.source_of(eqn):
            outs: list[Any] = self._bodies[id(jaxpr)][1](self.token(), *ins)
        self._over, self._since = _tokens(eqn.outvars, outs) or [self.token()], []
        return outs

    def _only_turn(self, eqn: _jaxpr.Eqn, ins: list[Any]) -> list[Any]:
        """What a loop of one turn makes: XLA takes it apart, so it is in order with its neighbours."""
        scan = _jaxpr.scan_parts(eqn)
        known, stacks = split(ins, scan.num_consts + scan.num_carry)
        slices = [lax.index_in_dim(x, 0, keepdims=False) for x in stacks]
        with _jaxpr.source_of(eqn):
            outs = self.run(scan.body, scan.body_consts, [*known, *slices])
        carry, made = split(outs, scan.num_carry)
        return [*carry, *(lax.expand_dims(y, (0,)) for y in made)]

    def _body(self, body: Any) -> Any:
        """The jaxpr of a loop or branch, in order."""
        jaxpr, consts = _jaxpr.open_jaxpr(body)
        if not any(map(nests_collectives, jaxpr.eqns)):
            return body
        if id(body) not in self._bodies:
            inner, avals = _Sequence(self._bodies), [var.aval for var in jaxpr.invars]
            new = jax.make_jaxpr(lambda *args: inner.run(jaxpr, consts, args))(*avals)
            closed = body is not jaxpr or not hasattr(new, "jaxpr")
            self._bodies[id(body)] = body, new if closed else new.jaxpr
        return self._bodies[id(body)][1]


def _after(eqn: _jaxpr.Eqn, ins: Sequence[Any], token: jax.Array) -> list[Any]:
    """The operands, of which one, that is no scalar if there is such, waits for the token."""
    can = [i for i, a in enumerate(eqn.invars) if _is_plain(a) and not _jaxpr.is_literal(a)]
    # The counter of a loop stays what XLA knows how to count.
    i = min(can, key=lambda i: (not ins[i].ndim, ins[i].nbytes), default=None)
    return [unless_never(x, token) if j == i else x for j, x in enumerate(ins)]


def _last(atoms: Sequence[_jaxpr.Atom], outs: Sequence[Any]) -> int | None:
    """Which result says that all are there: one of floats, since XLA knows counters without their loop."""
    plain = [i for i, atom in enumerate(atoms) if _is_plain(atom) and outs[i].size]
    floats = [i for i in plain if jnp.issubdtype(outs[i].dtype, jnp.inexact)]
    return min(floats or plain, key=lambda i: outs[i].nbytes, default=None)


def _tokens(atoms: Sequence[_jaxpr.Atom], outs: Sequence[Any]) -> list[jax.Array]:
    """Bits of an element of the result that says that all are there, if one does."""
    last = _last(atoms, outs)
    if last is None:
        return []
    return [bits_of(outs[last])]


def _is_plain(atom: _jaxpr.Atom) -> bool:
    """Whether it is an array of numbers on the device."""
    dtype = getattr(atom.aval, "dtype", jax.dtypes.extended)
    return not _jaxpr.is_on_host(atom.aval) and not jnp.issubdtype(dtype, jax.dtypes.extended)
