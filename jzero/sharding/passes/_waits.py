# SPDX-License-Identifier: Apache-2.0
"""Barriers by which a collective waits for earlier values, and predicates that passes share."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from jzero.ir import _rules
from jzero.ir._loops import CarryPort, Scan
from jzero.ir._regions import variables
from jzero.ir._writer import JaxprWriter
from jzero.sharding.analysis import _frames
from jzero.sharding.analysis._untiled import TILES
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Jaxpr, Var

# The equations that take time. Elementwise values are no measure of how far a pass has come: a mask or
# random bits may be there before anything else is.
PRODUCTS = _rules.named(_rules.Cost.PRODUCT) | {"pallas_call", "scan", "while"}
# Scopes that mark what passes have written, so that none writes it twice: barriers, and a loop's last
# iteration.
PREFETCH, ORDER, AFTER_LOOP, LAST_ITERATION, WHOLE_STACKS = (
    f"jzero.{name}"
    for name in ("prefetch", "order", "after_loop", "last_iteration", "whole_stacks")
)
OWNED = "jzero.owned"  # distributed updates, which are no part of a pass
QUANTIZED = "jzero.codes"
FIRST_STAGE = "jzero.first_hop"  # of a quantized reduction: the stage that the order counts
Makers: TypeAlias = Mapping[Var, Eqn]


def token_of(x: jax.Array) -> jax.Array:
    """One element of `x`: depends on it without keeping it alive."""
    return x[(0,) * x.ndim] if math.prod(x.shape) else jnp.zeros((), x.dtype)


def write_token(writer: JaxprWriter, x: Var) -> Atom:
    """Writes `token_of(x)`; without tracing it, since passes write as many as there are collectives."""
    return writer.first_element(x) if 0 not in x.aval.shape else _jaxpr.scalar(0, x.aval.dtype)


def write_behind(writer: JaxprWriter, x: Atom, tokens: Sequence[Atom]) -> Atom:
    """Writes `x`, which depends on `tokens`."""
    # Twice: XLA takes out of a barrier what has no other use, before or after it.
    for _ in range(2 if tokens else 0):
        ins = [x, *tokens]
        x = writer.add(lax.optimization_barrier_p, ins, [*map(_jaxpr.new_var, ins)])[0]
    return x


def bits_of(x: jax.Array) -> jax.Array:
    """An element of `x` as bits, opaque to the compiler before `x` exists."""
    element = jnp.real(token_of(x)).astype(jnp.float32)
    return lax.bitcast_convert_type(element, jnp.uint32)


def unless_never(x: jax.Array, bits: jax.Array) -> jax.Array:
    """`x`, depending on the bits; XLA does not see that it is always `x`."""
    never = lax.bitwise_or(bits, jnp.uint32(1)) == 0
    return lax.select(lax.broadcast(never, x.shape), lax.full_like(x, 0), x)


def waiting(
    eqn: Eqn, values: Iterable[Var], scope: str, laid_out: bool = False
) -> tuple[list[Eqn], Eqn]:
    """A collective that waits for `values`, and its barrier; `laid_out` as reductions along its dim read."""
    writer = JaxprWriter(_jaxpr.within_scope(eqn, scope))
    tokens = [write_token(writer, value) for value in values]
    (operand,) = eqn.invars
    if laid_out and eqn.params.get("scatter_dimension"):
        # A barrier ends what the compiler knows of the layout that the reduction reads
        # ([Note: layouts at rest]).
        (operand,) = writer.trace(_dim_first, operand, static=(eqn.params["scatter_dimension"],))
    shard = write_behind(writer, operand, tokens)
    return writer.eqns, eqn.replace(invars=[shard])


def _dim_first(dim: int, x: jax.Array) -> jax.Array:
    order = Layout((dim, *(d for d in range(x.ndim) if d != dim)))
    laid_out: jax.Array = with_layout_constraint(x, order)
    return laid_out


def waits_by(makers: Makers, atom: Atom, scope: str) -> bool:
    """Whether it is behind a barrier of this scope, possibly among other barriers."""
    while not _jaxpr.is_literal(atom) and (eqn := makers.get(atom)) is not None:
        if eqn.primitive.name != "optimization_barrier":
            return False
        if _jaxpr.in_scope(eqn, scope):
            return True
        atom = eqn.invars[place_of(eqn, atom)]
    return False


def place_of(eqn: Eqn, out: Var) -> int:
    return eqn.outvars.index(out)


def is_gather(eqn: Eqn) -> bool:
    return eqn.primitive.name in _frames.GATHERS


def is_reduction(eqn: Eqn) -> bool:
    return eqn.primitive.name == "reduce_scatter"


def reduces(eqn: Eqn) -> bool:
    """Whether it begins a reduction of the order: exact, or the first stage of a quantized one."""
    exchanges = eqn.primitive.name == "all_to_all"
    return is_reduction(eqn) or _jaxpr.in_scope(eqn, FIRST_STAGE) and exchanges


def nbytes(atoms: Iterable[Atom]) -> int:
    """Bytes of the variables among some atoms, each counted once."""
    return sum(_rules.size_in_bytes(var.aval) for var in variables(atoms))


def is_float(atom: Atom) -> bool:
    """Whether a token can be made of it: a float array on the device."""
    aval = atom.aval
    of_floats = not _jaxpr.is_literal(atom) and _is_floating(aval.dtype)
    return of_floats and not _jaxpr.is_on_host(aval)


@functools.cache
def _is_floating(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def done(eqn: Eqn) -> Var | None:
    """A result that says that the equation is done: the smallest, but none that a loop only passes on.

    Rather a loop's last carry than a stack, which may be on its way to the host slice by slice.
    """
    passed, stacks = set[Var](), set[Var]()
    if eqn.primitive.name == "scan":
        scan = Scan.of(eqn)
        passed = {port.out for port in scan.carries if port.after is port.before}
        stacks = {port.stack for port in scan.ys}
    found = [var for var in eqn.outvars if is_float(var) and var not in passed]
    return min(
        (v for v in found if not _jaxpr.is_dropped(v)), key=lambda v: (v in stacks, v.aval.size),
        default=None,
    )  # fmt: skip


def carried(scan: Scan) -> list[CarryPort]:
    """Float carries that the body does more with than add to them: its results depend on them."""
    found, ports = dict[Var, CarryPort](), {port.before: port for port in scan.carries}
    for eqn in scan.eqns:
        for var in variables(eqn.invars):
            port = ports.get(var)
            adds = eqn.primitive.name in _rules.ADDS and port is not None
            if port is not None and not (adds and eqn.outvars[0] is port.after):
                found[var] = port
    return [port for port in scan.carries if port.before in found and is_float(port.before)]


def num_readers(scan: Scan) -> dict[Var, int]:
    """How often each value of an iteration is read or returned."""
    found = dict[Var, int]()
    outs = [*(p.after for p in scan.carries), *(p.row for p in scan.ys)]
    for each in [*(eqn.invars for eqn in scan.eqns), outs]:
        for atom in each:
            if not _jaxpr.is_literal(atom):
                found[atom] = found.get(atom, 0) + 1
    return found


def takes_time(eqn: Eqn) -> bool:
    """Whether it is a product or loop, or contains one; rotations of quantized blocks do not count."""
    if _jaxpr.in_scope(eqn, QUANTIZED):
        return False
    return any(e.primitive.name in PRODUCTS for e in (eqn, *_jaxpr.inside(eqn)))


def gathers_inside(eqn: Eqn) -> bool:
    """Whether it is a loop with gathers; tiled products do not count."""
    loops = eqn.primitive.name in ("scan", "while") and not _jaxpr.in_scope(eqn, TILES)
    return loops and any(map(is_gather, _jaxpr.inside(eqn)))


def with_equations(jaxpr: Jaxpr, eqns: Sequence[Eqn], outvars: Sequence[Atom] = ()) -> Jaxpr:
    """The jaxpr with these equations; itself if they are its own."""
    if [*map(id, eqns)] == [*map(id, jaxpr.eqns)]:
        return jaxpr
    return _jaxpr.replaced(jaxpr, eqns=[*eqns], outvars=[*(outvars or jaxpr.outvars)])
