# SPDX-License-Identifier: Apache-2.0
"""Clamps the starts of a step's slices, so that XLA may merge them with slices that jzero adds.

[Note: starts in bounds]
`lax.dynamic_slice` clamps its start to `[0, n - size]`, and a `lax.gather` of windows clamps too. XLA's
algebraic simplifier turns a slice of a slice into one slice at the sum of both starts; with JAX 0.10.2 it
forgets the clamps when it does so, and a device gets rows that the step never selected
(docs/facts.md#a-slice-of-a-slice-forgets-to-clamp). Where jzero takes a part of a value (`_writer.take`,
`take_shard`, tiles, XLA's partitioner behind `init`) its own start is always in bounds. So the step's own
starts are clamped by an equation each, as soon as the step is traced: no place that takes a part has to know
what made the value (test_starts.py::test_a_slice_of_a_clamped_slice).
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax

from jzero.ir._factors import CLAMPED
from jzero.ir._writer import JaxprWriter
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Jaxpr


def in_bounds(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr with an equation that clamps each slice's start, also in loops and calls.

    Returns `jaxpr` itself if nothing changes: no slices, or only constant starts in bounds.
    """
    return _Clamps().of(jaxpr)


class _Clamps:
    """Rewrites each jaxpr once, so that a function that is called twice stays one jaxpr."""

    def __init__(self) -> None:
        # By the old jaxpr's id; keeping the old one ensures that no other gets its id.
        self._done: dict[int, tuple[Jaxpr, Jaxpr]] = {}

    def of(self, jaxpr: Jaxpr) -> Jaxpr:
        if id(jaxpr) not in self._done:
            eqns = [new for eqn in jaxpr.eqns for new in self._equations(eqn)]
            same = [*map(id, eqns)] == [*map(id, jaxpr.eqns)]
            new = jaxpr if same else _jaxpr.replaced(jaxpr, eqns=eqns)
            self._done[id(jaxpr)] = jaxpr, new
        return self._done[id(jaxpr)][1]

    def _equations(self, eqn: Eqn) -> list[Eqn]:
        name = eqn.primitive.name
        if name == "dynamic_slice":
            return _slice_in_bounds(eqn)
        if name == "gather":
            return _windows_in_bounds(eqn)
        if name == "pallas_call":  # XLA does not simplify what is inside a kernel.
            return [eqn]
        return [_jaxpr.with_inner(eqn, self.of)]


def _slice_in_bounds(eqn: Eqn) -> list[Eqn]:
    operand, *starts = eqn.invars
    last = [n - size for n, size in zip(operand.aval.shape, eqn.params["slice_sizes"], strict=True)]
    writer = JaxprWriter(eqn)
    clamped = [_clamped(x, most, writer) for x, most in zip(starts, last, strict=True)]
    if all(new is old for new, old in zip(clamped, starts, strict=True)):
        return [eqn]
    writer.clone(eqn, [operand, *clamped], eqn.outvars)
    return writer.eqns


def _clamped(start: Atom, last: int, writer: JaxprWriter) -> Atom:
    dtype = start.aval.dtype
    if _jaxpr.is_literal(start):
        value = int(_jaxpr.literal(start))
        inside = min(max(value, 0), last)
        return start if inside == value else _jaxpr.scalar(inside, dtype)
    if last == 0:
        return _jaxpr.scalar(0, dtype)
    least, most = [_jaxpr.scalar(bound, dtype) for bound in (0, _most(last, dtype))]
    return writer.add(lax.clamp_p, [least, start, most], [_jaxpr.var_like(start.aval)])[0]


def _most(last: int, dtype: Any) -> int:
    """`last`, or the dtype's largest number, which no start can exceed."""
    return min(last, int(np.iinfo(dtype).max))


def _windows_in_bounds(eqn: Eqn) -> list[Eqn]:
    """Like `_slice_in_bounds`, for a gather. Windows of one element cannot be partly out of bounds."""
    operand, indices = eqn.invars
    sizes, dims = eqn.params["slice_sizes"], eqn.params["dimension_numbers"].start_index_map
    if eqn.params["mode"] not in CLAMPED or all(sizes[d] == 1 for d in dims):
        return [eqn]
    last = [operand.aval.shape[d] - sizes[d] for d in dims]
    writer = JaxprWriter(eqn)
    (new,) = writer.trace(_clamped_indices, indices, static=(tuple(last),))
    writer.clone(eqn, [operand, new], eqn.outvars)
    return writer.eqns


def _clamped_indices(last: tuple[int, ...], indices: jax.Array) -> jax.Array:
    """`[..., d]` indices, each of the d clamped to its own maximum."""
    columns = [
        lax.clamp(np.asarray(0, x.dtype), x, np.asarray(_most(most, x.dtype), x.dtype))
        for x, most in zip(lax.split(indices, [1] * len(last), indices.ndim - 1), last, strict=True)
    ]
    return lax.concatenate(columns, indices.ndim - 1)
