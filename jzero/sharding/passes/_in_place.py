# SPDX-License-Identifier: Apache-2.0
"""Gathers large results of a step slice by slice, into the donated arguments whose buffers they take.

XLA gathers along any dim but the first into another layout than that of stored arrays, and starts all such
gathers of an update together: a second copy of all parameters would be alive at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

import jax
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AbstractMesh, Mesh

from jzero.ir._regions import region_of
from jzero.ir._writer import JaxprWriter
from jzero.sharding.passes import _waits
from jzero.tracing import _jaxpr, _traces
from jzero.tracing._types import Eqn, Jaxpr, Var

# Bytes: enough for the wire to be busy. Leaves up to this size are gathered in one piece when a step ends.
GATHERED_AT_ONCE = 2**27


def in_place(
    jaxpr: Jaxpr, olds: Sequence[int | None], mesh: Mesh | AbstractMesh, axes: Collection[str],
    nbytes: int,
) -> Jaxpr:  # fmt: skip
    """One device's program in which large results are gathered in slices, each into its place.

    `olds`: for each result the argument that it takes the place of, which is donated; None for others.
    `nbytes`: the most bytes of a slice; smaller results are gathered at once.
    """
    makers = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    readers, returned = region_of(jaxpr.eqns).readers, Counter(map(id, jaxpr.outvars))
    writer, moved, outs = JaxprWriter(jaxpr.eqns[0]), dict[int, Var](), [*jaxpr.outvars]
    for k, (out, old) in enumerate(zip(jaxpr.outvars, olds, strict=True)):
        if old is None or _jaxpr.is_literal(out) or (eqn := makers.get(out)) is None:
            continue
        is_read = readers.get(out) or returned[id(out)] > 1
        if not is_read and _goes_into(jaxpr.invars[old], eqn, nbytes):
            moved[id(eqn)] = jaxpr.invars[old]
            outs[k] = _written(writer, eqn, jaxpr.invars[old], mesh, axes, nbytes)
    if not moved:
        return jaxpr
    assert not writer.consts, "a slice has no constants"
    eqns = [eqn for eqn in jaxpr.eqns if id(eqn) not in moved]
    return _waits.with_equations(jaxpr, [*eqns, *writer.eqns], outs)


def _goes_into(old: Var, eqn: Eqn, nbytes: int) -> bool:
    """Whether it is a large gather of the same type along another dim than the first."""
    new = eqn.outvars[0].aval
    same = (old.aval.shape, old.aval.dtype) == (new.shape, new.dtype)
    large = same and _waits.is_gather(eqn) and _waits.nbytes([old]) > nbytes
    return bool(large and eqn.params["tiled"] and eqn.params["all_gather_dimension"])


def _written(
    writer: JaxprWriter, eqn: Eqn, old: Var, mesh: Mesh | AbstractMesh, own: Collection[str],
    nbytes: int,
) -> Var:  # fmt: skip
    axes, dim = eqn.params["axis_name"], eqn.params["all_gather_dimension"]

    def into(whole: jax.Array, shard: jax.Array) -> jax.Array:
        def gathered(_: jax.Array, mine: jax.Array) -> jax.Array:
            return row_major(lax.all_gather(mine, axes, axis=dim, tiled=True))

        return slices_into(whole, shard, nbytes, gathered)

    ins = [old, _jaxpr.variable(eqn.invars[0])]
    types = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in ins]
    traced = _traces.trace_on(mesh, into, types, own)
    (out,) = writer.write(traced.jaxpr, traced.consts, ins, eqn)
    return _jaxpr.variable(out)


def row_major(x: jax.Array) -> jax.Array:
    laid_out: jax.Array = with_layout_constraint(x, Layout(tuple(range(x.ndim))))
    return laid_out


def slices_into(
    whole: jax.Array, shard: jax.Array, nbytes: int,
    make_slice: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:  # fmt: skip
    """Writes `shard [m, n/k]` into `whole [m, n]` in slices of `nbytes`, each `make_slice(old, of_shard)`."""
    # The layout that the gather wants must not reach the update, which makes the shard.
    shard = lax.optimization_barrier(shard)
    rows, row_bytes = whole.shape[0], whole.nbytes // whole.shape[0]
    size = max(1, min(rows, nbytes // row_bytes))

    def iteration(whole: jax.Array, start: jax.Array | int, size: int) -> jax.Array:
        old, mine = (lax.dynamic_slice_in_dim(x, start, size, 0) for x in (whole, shard))
        return lax.dynamic_update_slice_in_dim(whole, make_slice(old, mine), start, 0)

    whole = lax.fori_loop(0, rows // size, lambda i, x: iteration(x, i * size, size), whole)
    done = rows // size * size
    return iteration(whole, done, rows - done) if done < rows else whole
