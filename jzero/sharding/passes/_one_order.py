# SPDX-License-Identifier: Apache-2.0
"""For CPUs: a collective starts only after the loops with collectives in front of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jzero.ir._rules import size_in_bytes
from jzero.ir._writer import JaxprWriter
from jzero.sharding.analysis import _frames
from jzero.sharding.analysis._frames import split
from jzero.sharding.passes import _waits
from jzero.sharding.passes._waits import bits_of, unless_never
from jzero.tracing import _jaxpr, _traces
from jzero.tracing._types import Atom, Eqn, Jaxpr, Var

# [Note: one order of collectives]
# XLA:CPU starts the operations of a device in one order, but a loop counts as started when its first
# iteration waits for something. A gather behind it may then meet, on another device, a gather of the loop:
# all have one name. And it drops the optimization barriers by which `_prefetch.py` and `_order.py` order
# them. So on CPUs a loop, branch or call in which devices meet reads, in a way that no simplifier sees
# through, something of what the collectives before it have made, and each collective behind it something of
# its result (tests/test_one_order.py; docs/facts.md#loops-with-collectives-are-overtaken).


def one_order(jaxpr: Jaxpr) -> Jaxpr:
    """One device's program for CPUs, in which collectives keep their order."""
    loops = (e for e in _jaxpr.walk(jaxpr) if e.primitive.name in ("scan", "while", "cond"))
    return _in_order(jaxpr, {}) if any(map(_nests_collectives, loops)) else jaxpr


def in_one_order(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` of one device's values, whose collectives keep their order on XLA:CPU."""

    @functools.wraps(fn)
    def ordered(*args: Any) -> Any:
        traced = _jaxpr.trace_here(fn, *args)
        here = jax.sharding.get_abstract_mesh()
        jaxpr = _traces.in_mesh(one_order(traced.jaxpr), here)
        outs = _jaxpr.evaluate(jaxpr, traced.consts, *jax.tree.leaves(args))
        return jax.tree.unflatten(traced.out_tree, outs)

    return ordered


def _nests_collectives(eqn: Eqn) -> bool:
    return any(e.primitive.name in _MEETING for e in _jaxpr.inside(eqn))


_MEETING = _frames.COLLECTIVES - {"axis_index"}


def _in_order(jaxpr: Jaxpr, bodies: dict[int, tuple[Jaxpr, Jaxpr]]) -> Jaxpr:
    """A jaxpr in order; inner jaxprs that occur twice stay one."""
    if id(jaxpr) not in bodies:
        new = jaxpr
        if any(e.primitive.name in _MEETING for e in _jaxpr.walk(jaxpr)):
            sequence = _Sequence(JaxprWriter(jaxpr.eqns[0]), bodies)
            for eqn in jaxpr.eqns:
                sequence.add(eqn)
            writer = sequence.writer
            outs = [*map(writer.read, jaxpr.outvars)]
            new = _waits.with_equations(jaxpr, writer.eqns, outs)
        bodies[id(jaxpr)] = jaxpr, new
    return bodies[id(jaxpr)][1]


class _Sequence:
    """Equations that one device starts one after the other: of a program, of a loop's body, of a branch."""

    def __init__(self, writer: JaxprWriter, bodies: dict[int, tuple[Jaxpr, Jaxpr]]):
        self.writer, self._bodies = writer, bodies
        self._over: list[Atom] = []  # Bits of what the latest loop or branch has made,
        self._since: list[Atom] = []  # and of what each collective after it has.

    def add(self, eqn: Eqn) -> None:
        writer, nests = self.writer, _nests_collectives(eqn)
        writer.source = eqn
        if nests and self._opens(eqn):
            return
        new = writer.renamed(eqn)
        if not nests and eqn.primitive.name not in _MEETING:
            writer.eqns.append(new)
            return
        # A result that nothing else reads shows, too, that the equation is done.
        kept = [_jaxpr.new_var(x) if _jaxpr.is_dropped(x) else x for x in eqn.outvars]
        new = new.replace(outvars=kept)
        if before := self._over + self._since if nests else self._over:
            new = new.replace(invars=self._after(new, before))
        writer.eqns.append(_jaxpr.with_inner(new, lambda body: _in_order(body, self._bodies)))
        made = [writer.trace(bits_of, x)[0] for x in _last(kept)]
        if nests and made:
            self._over, self._since = made, []
        else:
            self._since += made

    def _opens(self, eqn: Eqn) -> bool:
        """Inlines a call or a loop of one iteration, as XLA does; False for others."""
        call = None if _jaxpr.is_rematted(eqn) else _jaxpr.call_parts(eqn)
        if call is not None and not call[1]:
            self._write(eqn, call[0], [*map(self.writer.read, eqn.invars)], eqn.outvars)
            return True
        if eqn.primitive.name != "scan":
            return False
        scan = _jaxpr.scan_parts(eqn)
        if scan.length != 1 or scan.body_consts:
            return False
        writer = self.writer
        ins = [*map(writer.read, eqn.invars)]
        known, stacks = split(ins, scan.num_consts + scan.num_carry)
        slices = [writer.trace(_first, x)[0] for x in stacks]
        carry, ys = split(eqn.outvars, scan.num_carry)
        rows = [_jaxpr.var_like(y.aval, y.aval.shape[1:]) for y in ys]
        self._write(eqn, scan.body, [*known, *slices], [*carry, *rows])
        writer.source = eqn
        stacked = [writer.trace(_stacked, writer.read(row))[0] for row in rows]
        writer.names |= zip(ys, stacked, strict=True)
        return True

    def _write(self, outer: Eqn, jaxpr: Jaxpr, ins: Sequence[Atom], outs: Sequence[Var]) -> None:
        writer, names = self.writer, self.writer.names
        writer.names = dict(zip(jaxpr.invars, ins, strict=True))
        for eqn in jaxpr.eqns:
            fresh = [*map(_jaxpr.new_var, eqn.outvars)]
            self.add(_jaxpr.within_scope(eqn.replace(outvars=fresh), outer=outer))
            writer.names |= zip(eqn.outvars, map(writer.read, fresh), strict=True)
        results = [*map(writer.read, jaxpr.outvars)]
        writer.names = names
        writer.names |= zip(outs, results, strict=True)

    def _after(self, eqn: Eqn, before: Sequence[Atom]) -> list[Atom]:
        """The operands, one of which (no scalar, if possible) depends on these bits."""
        writer = self.writer
        can = [i for i, a in enumerate(eqn.invars) if _is_plain(a) and not _jaxpr.is_literal(a)]
        # The counter of a loop stays what XLA knows how to count.
        i = min(can, key=lambda i: _size(eqn.invars[i]), default=None)
        if i is None:
            return [*eqn.invars]
        bits = functools.reduce(lambda a, b: writer.trace(lax.bitwise_or, a, b)[0], before)
        waits = writer.trace(unless_never, eqn.invars[i], bits)[0]
        return [waits if j == i else x for j, x in enumerate(eqn.invars)]


def _size(atom: Atom) -> tuple[bool, int]:
    return not atom.aval.shape, size_in_bytes(atom.aval)


def _first(x: jax.Array) -> jax.Array:
    return lax.index_in_dim(x, 0, keepdims=False)


def _stacked(x: jax.Array) -> jax.Array:
    return lax.expand_dims(x, (0,))


def _last(atoms: Sequence[Var]) -> list[Var]:
    """The result on which followers depend: a float, since XLA knows counters without their loop."""
    plain = [x for x in atoms if _is_plain(x) and x.aval.size]
    floats = [x for x in plain if jnp.issubdtype(x.aval.dtype, jnp.inexact)]
    found = min(floats or plain, key=lambda x: size_in_bytes(x.aval), default=None)
    return [] if found is None else [found]


def _is_plain(atom: Atom) -> bool:
    dtype = getattr(atom.aval, "dtype", jax.dtypes.extended)
    return not _jaxpr.is_on_host(atom.aval) and not jnp.issubdtype(dtype, jax.dtypes.extended)
