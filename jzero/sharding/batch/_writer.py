# SPDX-License-Identifier: Apache-2.0
"""Equations of one device's step while they are written: those of small functions, and collectives."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jzero.ir import _rules
from jzero.ir._sent import SENT_AS, cast, fenced, from_ordered, ordered_integers
from jzero.ir._writer import JaxprWriter, Traceable
from jzero.sharding.batch._rows import Rows, is_padded, local_shape
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Aval, Eqn, Var


class EquationWriter(JaxprWriter):
    """Writes equations for one of `num` devices along `axes`."""

    def __init__(self, axes: tuple[str, ...], num: int, source: Eqn):
        super().__init__(source)
        self.axes, self.num = axes, num
        self._index: Atom | None = None

    def inline(self, fn: Traceable, static: tuple[Hashable, ...], *ins: Atom) -> list[Atom]:
        """Writes the equations of `fn(*static, *ins)`."""
        return self.trace(fn, *ins, static=static)

    def _collective(
        self, name: str, ins: Sequence[Atom], out: Var, **params: int | str | tuple[str, ...] | None
    ) -> Var:
        primitive = _jaxpr.PRIMITIVES[name]
        self.eqns.append(_jaxpr.equation(primitive, ins, [out], self.source, **params))
        return out

    def _as_type(self, dtype: str, x: Atom, moved: Callable[[Atom], Atom]) -> Atom:
        """`moved(x)`, but moved in another dtype."""
        (wide,) = self.inline(cast, (dtype,), x)
        return self.inline(cast, (x.aval.dtype,), moved(wide))[0]

    def reduce(self, x: Atom, kind: str) -> Atom:
        """The sum, maximum or minimum of `x` over the devices."""
        wide = "int32" if x.aval.dtype == np.bool_ else SENT_AS.get(str(x.aval.dtype))
        if wide is not None:  # Sums of integers wrap alike in both.
            return self._as_type(wide, x, lambda x: self.reduce(x, kind))
        if kind != "sum" and jnp.issubdtype(x.aval.dtype, jnp.floating):
            # [Note: extremes of floats]
            (ordered,) = self.inline(ordered_integers, (kind,), x)
            static = (kind, x.aval.dtype)
            return self.inline(from_ordered, static, self.reduce(ordered, kind))[0]
        if kind != "sum" and jnp.issubdtype(x.aval.dtype, jnp.complexfloating):
            return self.inline(_extreme, (kind,), self.all_gather(x))[0]
        out = _jaxpr.var_like(x.aval, x.aval.shape, x.aval.dtype)
        name = {"sum": "psum", "max": "pmax", "min": "pmin"}[kind]
        return self._collective(name, [x], out, axes=self.axes, axis_index_groups=None)

    def all_gather(self, x: Atom) -> Atom:
        """`x` of all devices, along a new first dim."""
        if (wide := SENT_AS.get(str(x.aval.dtype))) is not None:
            return self._as_type(wide, x, self.all_gather)
        out = _jaxpr.var_like(None, (self.num, *x.aval.shape), x.aval.dtype)
        return self._collective(
            "all_gather", [x], out, all_gather_dimension=0, axis_name=self.axes,
            axis_index_groups=None, axis_size=self.num, tiled=False,
        )  # fmt: skip

    def reduce_scatter(self, x: Atom, rows: Rows) -> Atom:
        """The sum of `x` over the devices, of which each keeps its rows; these are even, in one block."""
        wide = "int32" if x.aval.dtype == np.bool_ else SENT_AS.get(str(x.aval.dtype))
        if wide is not None:
            return self._as_type(wide, x, lambda x: self.reduce_scatter(x, rows))
        out = _jaxpr.var_like(x.aval, local_shape(x.aval.shape, rows), x.aval.dtype)
        return self._collective(
            "psum_scatter", [x], out, scatter_dimension=int(rows.dim), axis_name=self._axis_name,
            axis_index_groups=None, axis_size=self.num, tiled=True,
        )  # fmt: skip

    def all_to_all(self, x: Atom, cut: int, joined: int) -> Atom:
        """Each device cuts `x` along a dim, sends each its part, and joins what it gets along another."""
        if (wide := SENT_AS.get(str(x.aval.dtype))) is not None:
            return self._as_type(wide, x, lambda x: self.all_to_all(x, cut, joined))
        sizes = {cut: x.aval.shape[cut] // self.num, joined: x.aval.shape[joined] * self.num}
        shape = [sizes.get(d, n) for d, n in enumerate(x.aval.shape)]
        return self._collective(
            "all_to_all", [x], _jaxpr.var_like(x.aval, shape, x.aval.dtype), split_axis=int(cut),
            concat_axis=int(joined), axis_name=self._axis_name, axis_index_groups=None, tiled=True,
        )  # fmt: skip

    @property
    def _axis_name(self) -> str | tuple[str, ...]:
        return self.axes if len(self.axes) > 1 else self.axes[0]

    @property
    def index(self) -> Atom:
        """This device's place among all."""
        if self._index is None:
            out = _jaxpr.var_like(None, (), np.dtype(np.int32))
            self._index = self._collective("axis_index", [], out, axis_name=self._axis_name)
        return self._index

    def gather(self, x: Atom, rows: Rows, aval: Aval) -> Atom:
        """The whole of a value of which `x` are this device's rows."""
        joined = (rows, aval.shape[rows.dim])
        return self._as_data(x, lambda x: self.inline(_joined, joined, self.all_gather(x))[0])

    def exchange(self, x: Atom, old: Rows, new: Rows) -> Atom:
        """Rows of another dim of a value of which `x` are this device's rows; see `may_exchange`."""

        def moved(x: Atom) -> Atom:
            if new.outer > 1:
                (x,) = self.inline(_devices_first, (new, self.num), x)
            x = self.all_to_all(x, new.dim, old.dim)
            return self.inline(_blocks_first, (old, self.num), x)[0] if old.outer > 1 else x

        return self._as_data(x, moved)

    def _as_data(self, x: Atom, moved: Callable[[Atom], Atom]) -> Atom:
        """`moved(x)`; of keys, their words are."""
        if not jnp.issubdtype(x.aval.dtype, jax.dtypes.prng_key):
            return moved(x)
        (words,) = self.inline(jax.random.key_data, (), x)
        return self.inline(_jaxpr.wrapped_keys, (x.aval.dtype,), moved(words))[0]

    def take(self, whole: Atom, rows: Rows) -> Atom:
        """This device's rows of a whole value."""
        return self.inline(_taken, (rows, self.num), whole, self.index)[0]

    def mask(self, x: Atom, rows: Rows, size: int, neutral: str) -> Atom:
        """`x`, with what changes no 'sum', 'max' or 'min' where it holds padding."""
        if not is_padded(rows, size, self.num):
            return x
        return self.inline(masked, (rows, size, self.num, neutral), x, self.index)[0]


def row_numbers(rows: Rows, num: int, index: jax.Array) -> jax.Array:
    """Which rows of the whole dim this device has: int32[rows.size]."""
    blocks = jnp.arange(rows.outer, dtype=jnp.int32)[:, None] * (num * rows.inner)
    return (blocks + index * rows.inner + jnp.arange(rows.inner, dtype=jnp.int32)[None]).reshape(-1)


def _taken(rows: Rows, num: int, x: jax.Array, index: jax.Array) -> jax.Array:
    dim, outer, inner = rows
    more = outer * num * inner - x.shape[dim]
    if more:  # The last rows again, and not zeros, which a step may divide by.
        last = lax.slice_in_dim(x, x.shape[dim] - 1, x.shape[dim], axis=dim)
        x = lax.concatenate([x, *[last] * more], dim)
    if outer == 1:
        return lax.dynamic_slice_in_dim(x, index * inner, inner, dim)
    shape = x.shape
    parts = x.reshape(*shape[:dim], outer, num, inner, *shape[dim + 1 :])
    own: jax.Array = lax.dynamic_index_in_dim(parts, index, dim + 1, keepdims=False)
    return fenced(own.reshape(*shape[:dim], rows.size, *shape[dim + 1 :]))


def _joined(rows: Rows, size: int, parts: jax.Array) -> jax.Array:
    num, *shape = parts.shape
    dim, outer, inner = rows
    blocks = parts.reshape(num, *shape[:dim], outer, inner, *shape[dim + 1 :])
    whole = jnp.moveaxis(blocks, 0, dim + 1)
    whole = whole.reshape(*shape[:dim], num * rows.size, *shape[dim + 1 :])
    return fenced(lax.slice_in_dim(whole, 0, size, axis=dim))


def _devices_first(rows: Rows, num: int, x: jax.Array) -> jax.Array:
    """A whole dim, in the order in which the devices have its rows."""
    shape, dim = x.shape, rows.dim
    parts = x.reshape(*shape[:dim], rows.outer, num, rows.inner, *shape[dim + 1 :])
    return jnp.moveaxis(parts, dim + 1, dim).reshape(shape)


def _blocks_first(rows: Rows, num: int, x: jax.Array) -> jax.Array:
    """A whole dim in its own order, from that in which the devices have its rows."""
    shape, dim = x.shape, rows.dim
    parts = x.reshape(*shape[:dim], num, rows.outer, rows.inner, *shape[dim + 1 :])
    return fenced(jnp.moveaxis(parts, dim, dim + 1).reshape(shape))


def masked(
    rows: Rows, size: int, num: int, neutral: str, x: jax.Array, index: jax.Array
) -> jax.Array:
    """`x` with what changes no 'sum', 'max' or 'min' where it holds padding."""
    if not is_padded(rows, size, num):
        return x
    fill = _rules.neutral(neutral, x.dtype)
    inside = lax.broadcast_in_dim(row_numbers(rows, num, index) < size, x.shape, (rows.dim,))
    return jnp.where(inside, x, jnp.asarray(fill, x.dtype))


def _extreme(kind: str, parts: jax.Array) -> jax.Array:
    return jnp.max(parts, axis=0) if kind == "max" else jnp.min(parts, axis=0)
