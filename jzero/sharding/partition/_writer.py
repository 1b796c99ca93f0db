# SPDX-License-Identifier: Apache-2.0
"""`DeviceWriter`: one device's equations, with layout conversions (replicated, sharded, partial).

All collectives of a step are written here. A cut of a dim views it as `[outer, n, inner]`; a conversion
reshapes the dims that it touches so that the devices have a dim of their own, and back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jzero.ir import _rules
from jzero.ir._factors import with_size
from jzero.ir._layout import LOCAL, Dim, Layout, LayoutStep, Prices, conversion, permutation
from jzero.ir._sent import SENT_AS, cast, fenced, from_ordered, ordered_integers
from jzero.ir._writer import JaxprWriter
from jzero.sharding.partition._values import place_of
from jzero.tracing import _jaxpr, _keys, _lines
from jzero.tracing._types import Atom, Aval, Eqn, Var

DimParts = tuple[int, int, int]  # `[outer, n, inner]`: how a dim is read.
OUTPUT = "output"  # In place of a primitive, for conversions of results.
OF_STATE, OF_SUM = "state", "sum"  # The reasons of ZeRO's own gathers and reductions.
_SCOPES = {
    "gather": "gather",
    "scatter": "reduce_scatter",
    "reduce": "all_reduce",
    "exchange": "all_to_all",
}


class DeviceMove(NamedTuple):
    """One conversion that communicates."""

    kind: str  # of the collective, as in `LayoutStep`
    axes: tuple[str, ...]
    nbytes: int  # that reach each device, in all iterations of the enclosing loops
    of: int | None  # the input that is moved, or a view of it, by index
    line: str  # the user's line of the operation that needs it; of a result, its number
    why: str  # `OF_STATE`, `OF_SUM`, or the reason for moving rows
    operation: str  # the primitive that needs it, or `OUTPUT`
    value: str  # its type, `float32[16,64]`
    local_bytes: int  # of the converted value on a device
    leaf: str = ""  # whose gradient, or part of the state, it is; '' for an intermediate value
    times: int = 1  # how often it runs; once in a loop of unknown length


class DeviceWriter(JaxprWriter):
    """Writes one device's equations. Conversions must not communicate along the axis `still`."""

    def __init__(
        self,
        source: Eqn,
        mesh: Mapping[str, int],
        moves: dict[Var, DeviceMove],
        prices: Prices = (),
        still: str = "",
    ):
        super().__init__(source)
        # `moves` records each collective, by its result.
        self.mesh, self.moves, self.prices = mesh, moves, prices
        self.still = still
        self._index: dict[tuple[str, ...], Atom] = {}
        self._inside: dict[Dim, Atom] = {}
        self._positions: dict[Dim, Atom] = {}

    def inline(self, fn: Callable[..., object], static: tuple[Hashable, ...], *ins: Atom) -> Atom:
        (out,) = self.trace(fn, *ins, static=static)  # type: ignore[arg-type]
        return out

    def index(self, axes: Sequence[str]) -> Atom:
        (first, *others), axes = axes, tuple(axes)
        if axes not in self._index and others:
            each = [self.index([axis]) for axis in axes]
            sizes = tuple(self.mesh[axis] for axis in others)
            self._index[axes] = self.inline(_joint_index, (sizes,), *each)
        elif axes not in self._index:
            out = _jaxpr.var_like(None, (), np.dtype(np.int32))
            self._index[axes] = self._collective("axis_index", [], out, axis_name=first)
        return self._index[axes]

    # -- conversions --------------------------------------------------------------------------------------
    def convert(
        self, x: Atom, source: Layout, target: Layout, of: int | None = None, why: str = "",
        leaf: str = "",
    ) -> Atom:  # fmt: skip
        """`x` from layout `source` to `target`; profiles name the collectives after `leaf`."""
        if 0 in source.shape and not jnp.issubdtype(x.aval.dtype, jax.dtypes.prng_key):
            return self.full(0, _jaxpr.var_like(x.aval, target.local_shape).aval)  # Nothing moves.
        user = self.source
        for step in self.steps(x.aval, source, target):
            if step.kind in LOCAL:
                x = self.step(x, step)
                continue
            if leaf:
                scope = f"jzero.{_SCOPES.get(step.kind, step.kind)}[{leaf}]"
                self.source = _jaxpr.within_scope(user, scope)
            x = self.step(x, step)
            self.source = user
            self.moves[self._moved] = DeviceMove(
                step.kind, step.axes, sum(n for _, n in step.received), of, self._line(),
                why or _reason(step), self._operation(),
                f"{x.aval.dtype}[{','.join(map(str, target.shape))}]",
                math.prod(step.after.local_shape) * getattr(x.aval.dtype, "itemsize", 4), leaf,
            )  # fmt: skip
        return x

    def steps(self, aval: Aval, source: Layout, target: Layout) -> tuple[LayoutStep, ...]:
        itemsize = getattr(aval.dtype, "itemsize", 4)
        return conversion(source, target, itemsize, self.prices, self.still)

    def _line(self) -> str:
        return _lines.summary(self.source)

    def _operation(self) -> str:
        return self.source.primitive.name

    def step(self, x: Atom, step: LayoutStep) -> Atom:
        """PRNG keys are converted as their words."""
        convert: Callable[[Atom, LayoutStep], Atom] = getattr(self, f"_{step.kind}")
        if not jnp.issubdtype(x.aval.dtype, jax.dtypes.prng_key):
            return convert(x, step)
        words = self.inline(jax.random.key_data, (), x)
        return self.inline(_keys.wrapped_keys, (x.aval.dtype,), convert(words, step))

    def _gather(self, x: Atom, step: LayoutStep) -> Atom:
        d, outer, _ = _place(step.before, step.axes)
        num, size = step.before.num(step.axes), x.aval.shape[d]
        parts = outer, 1, size // outer

        def gather(y: Atom) -> Atom:
            along = d if outer == 1 else d + 1
            shape = with_size(y.aval.shape, along, y.aval.shape[along] * num)
            return self._sent(y, shape, "all_gather", all_gather_dimension=along, tiled=True,
                              axis_name=_name(step.axes), axis_index_groups=None, axis_size=num)  # fmt: skip

        return self._among(x, d, parts, gather, (outer, num, size // outer))

    def _scatter(self, x: Atom, step: LayoutStep) -> Atom:
        d, outer, inner = _place(step.after, step.axes)
        num = step.before.num(step.axes)

        def scatter(y: Atom) -> Atom:
            along = d if outer == 1 else d + 1
            shape = with_size(y.aval.shape, along, y.aval.shape[along] // num)
            return self._sent(y, shape, "psum_scatter", scatter_dimension=along, tiled=True,
                              axis_name=_name(step.axes), axis_index_groups=None, axis_size=num)  # fmt: skip

        return self._among(x, d, (outer, num, inner), scatter, (outer, 1, inner))

    def _exchange(self, x: Atom, step: LayoutStep) -> Atom:
        """Splits the dim to shard among the devices, and concatenates along the dim that was sharded."""
        num, joined = step.before.num(step.axes), place_of(step.before, step.axes[0])
        cut = place_of(step.after, step.axes[0])
        shape, where = _split_for_exchange(x.aval.shape, step.before, joined, cut, num)
        y: Atom = self.reshape(x, shape)
        new = with_size(with_size(shape, where[0], 1), where[1], num)
        y = self._sent(y, new, "all_to_all", split_axis=where[0], concat_axis=where[1],
                       axis_name=_name(step.axes), axis_index_groups=None, tiled=True)  # fmt: skip
        after = (*step.after.local_shape, *x.aval.shape[len(step.after.dims) :])
        return self.inline(_reshaped, (after,), y)

    def _reduce(self, x: Atom, step: LayoutStep) -> Atom:
        (op,) = {p.op for p in step.before.partial if p.axis in step.axes}
        if op != "sum" and jnp.issubdtype(x.aval.dtype, jnp.floating):  # [Note: extremes of floats]
            ordered = self.inline(ordered_integers, (op,), x)
            return self.inline(from_ordered, (op, x.aval.dtype), self._reduce(ordered, step))
        if op != "sum" and jnp.issubdtype(x.aval.dtype, jnp.complexfloating):
            return self.inline(_extreme, (op,), self._each(x, step.axes))
        name = {"sum": "psum", "max": "pmax", "min": "pmin"}[op]
        axes = tuple(axis for axis, _ in step.before.mesh if axis in step.axes)
        return self._sent(x, x.aval.shape, name, axes=axes, axis_index_groups=None)

    def _each(self, x: Atom, axes: Sequence[str]) -> Atom:
        """`x` of all devices along the axes, along a new first dim."""
        num = math.prod(self.mesh[axis] for axis in axes)
        return self._sent(x, (num, *x.aval.shape), "all_gather", all_gather_dimension=0, tiled=False,
                          axis_name=_name(axes), axis_index_groups=None, axis_size=num)  # fmt: skip

    def _permute(self, x: Atom, step: LayoutStep) -> Atom:
        return self._sent(x, x.aval.shape, "ppermute", axis_name=_name(step.axes),
                          perm=tuple(permutation(step)))  # fmt: skip

    def _slice(self, x: Atom, step: LayoutStep) -> Atom:
        d, outer, inner = _place(step.after, step.axes)
        parts = d, outer, step.after.num(step.axes), inner
        return self.inline(_taken, parts, x, self.index(step.axes))

    def _mask(self, x: Atom, step: LayoutStep) -> Atom:
        (new,) = (p for p in step.after.partial if p.axis in step.axes)
        return self.inline(_first_only, (new.op,), x, self.index(step.axes))

    def _pad(self, x: Atom, step: LayoutStep) -> Atom:
        (d,) = (d for d, dim in enumerate(step.after.dims) if dim != step.before.dims[d])
        pad = step.after.dims[d].pad
        assert pad is not None
        outer = step.after.local_outer(d, pad.outer)
        return self.inline(_padded, (d, outer, step.after.dims[d].size // pad.outer), x)

    def _unpad(self, x: Atom, step: LayoutStep) -> Atom:
        (d,) = (d for d, dim in enumerate(step.after.dims) if dim != step.before.dims[d])
        pad = step.before.dims[d].pad
        assert pad is not None
        return self.inline(_unpadded, (d, step.before.local_outer(d, pad.outer), pad.true), x)

    def masked(self, x: Atom, layout: Layout, dim: int, reduces: str) -> Atom:
        """`x`, with the reduction's neutral element in the padding of a dim."""
        if layout.dims[dim].pad is None:
            return x
        neutral = _rules.neutral(reduces, x.aval.dtype)
        return self.filled(x, layout, dim, _jaxpr.scalar(neutral, x.aval.dtype))

    def filled(self, x: Atom, layout: Layout, dim: int, fill: Atom) -> Atom:
        """`x`, with a scalar in the padding of a dim."""
        own = layout.dims[dim]
        assert own.pad is not None
        if own not in self._inside:
            line = Layout((own,), layout.mesh)
            replicated = self.inline(_inside, (own.size, own.size // own.pad.outer, own.pad.true))
            self._inside[own] = self.convert(replicated, line.without_cuts(), line)
        return self.inline(_where_inside, (dim,), self._inside[own], x, fill)

    def positions(self, dim: Dim) -> Atom:
        """The global positions of a device's elements of a dim; padding repeats the last of its block."""
        if dim not in self._positions:
            line = Layout((dim,), tuple(self.mesh.items()))
            replicated = self.inline(_places, (dim._replace(cuts=()),))
            self._positions[dim] = self.convert(replicated, line.without_cuts(), line)
        return self._positions[dim]

    # -- collectives --------------------------------------------------------------------------------------
    def _among(
        self, x: Atom, dim: int, parts: DimParts, moved: Callable[[Atom], Atom], after: DimParts
    ) -> Atom:
        """`moved(x)` with a dim split into `parts`; merges `after`, the parts of the result's dim."""
        if parts[0] == 1:
            return moved(x)
        shape = x.aval.shape
        y = moved(self.reshape(x, (*shape[:dim], *parts, *shape[dim + 1 :])))
        return self.inline(_reshaped, (with_size(shape, dim, math.prod(after)),), y)

    def _sent(self, x: Atom, shape: Sequence[int], name: str, **params: object) -> Atom:
        """A collective; dtypes that devices cannot send or sum are widened."""
        sums = name in ("psum", "psum_scatter")
        wide = "int32" if sums and x.aval.dtype == np.bool_ else SENT_AS.get(str(x.aval.dtype))
        if wide is not None:
            y = self._sent(self.inline(cast, (wide,), x), shape, name, **params)
            return self.inline(cast, (x.aval.dtype,), y)
        return self._collective(name, [x], _jaxpr.var_like(x.aval, shape), **params)

    def _collective(self, name: str, ins: Sequence[Atom], out: Var, **params: object) -> Var:
        self.eqns.append(
            _jaxpr.equation(_jaxpr.PRIMITIVES[name], ins, [out], self.source, **params)
        )
        self._moved = out
        return out

    def barrier(self, ins: Sequence[Atom]) -> list[Var]:
        outs = [_jaxpr.new_var(x) for x in ins]
        return self.add(lax.optimization_barrier_p, ins, outs)


def _reason(step: LayoutStep) -> str:
    if step.kind in ("scatter", "reduce"):
        return OF_SUM
    gathers = "it needs rows of other devices"
    return gathers if step.kind == "gather" else "rows along another dim"


def _name(axes: Sequence[str]) -> str | tuple[str, ...]:
    return tuple(axes) if len(axes) > 1 else axes[0]


def _place(layout: Layout, axes: Sequence[str]) -> DimParts:
    """The dim that adjacent axes cut, its local number of outer blocks, and the size of an inner one."""
    dim, outer = place_of(layout, axes[0])
    here = layout.local_outer(dim, outer)
    return dim, here, layout.local_shape[dim] // here


def _split_for_exchange(
    shape: Sequence[int], before: Layout, joined: tuple[int, int], cut: tuple[int, int], num: int
) -> tuple[tuple[int, ...], tuple[int, int]]:
    """A shape with a dim of `num` to split and one of size 1 to concatenate along; the indices of both."""
    parts: list[tuple[int, ...]] = [(n,) for n in shape]
    (a, _), (b, _) = joined, cut
    to_join, to_cut = before.local_outer(*joined), before.local_outer(*cut)
    if a != b:
        parts[a] = to_join, 1, shape[a] // to_join
        parts[b] = to_cut, num, shape[b] // (to_cut * num)
        places = 1, 1
    elif joined[1] < cut[1]:
        parts[a] = to_join, 1, to_cut // to_join, num, shape[a] // (to_cut * num)
        places = 3, 1
    else:
        parts[a] = to_cut, num, to_join // (to_cut * num), 1, shape[a] // to_join
        places = 1, 3
    starts = [sum(map(len, parts[:d])) for d in (b, a)]
    flat = tuple(n for part in parts for n in part)
    return flat, (starts[0] + places[0], starts[1] + places[1])


# -- traced ------------------------------------------------------------------------------------------------
def _reshaped(shape: tuple[int, ...], x: jax.Array) -> jax.Array:
    return fenced(x.reshape(shape))


def _joint_index(sizes: tuple[int, ...], first: jax.Array, *others: jax.Array) -> jax.Array:
    """A linear index over several axes, outermost first (JAX 0.10.2 lowers the index of one axis only)."""
    for size, index in zip(sizes, others, strict=True):
        first = first * jnp.int32(size) + index
    return first


def _taken(dim: int, outer: int, num: int, inner: int, x: jax.Array, index: jax.Array) -> jax.Array:
    if outer == 1:
        return lax.dynamic_slice_in_dim(x, index * inner, inner, dim)
    shape = x.shape
    parts = x.reshape(*shape[:dim], outer, num, inner, *shape[dim + 1 :])
    own: jax.Array = lax.dynamic_index_in_dim(parts, index, dim + 1, keepdims=False)
    return fenced(own.reshape(*shape[:dim], outer * inner, *shape[dim + 1 :]))


def _extreme(op: str, parts: jax.Array) -> jax.Array:
    return jnp.max(parts, axis=0) if op == "max" else jnp.min(parts, axis=0)


def _first_only(op: str, x: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.where(index == 0, x, jnp.asarray(_rules.neutral(op, x.dtype), x.dtype))


def _padded(dim: int, outer: int, step: int, x: jax.Array) -> jax.Array:
    """Repeats the last element of each block: zeros would be divided by."""
    shape = x.shape
    x = x.reshape(*shape[:dim], outer, shape[dim] // outer, *shape[dim + 1 :])
    last = lax.slice_in_dim(x, x.shape[dim + 1] - 1, x.shape[dim + 1], axis=dim + 1)
    more = lax.concatenate([x, *[last] * (step - x.shape[dim + 1])], dim + 1)
    more = more.reshape(*shape[:dim], outer * step, *shape[dim + 1 :])
    return more if outer == 1 else fenced(more)


def _unpadded(dim: int, outer: int, true: int, x: jax.Array) -> jax.Array:
    shape = x.shape
    if outer == 1:
        return lax.slice_in_dim(x, 0, true, axis=dim)
    x = x.reshape(*shape[:dim], outer, shape[dim] // outer, *shape[dim + 1 :])
    x = lax.slice_in_dim(x, 0, true, axis=dim + 1)
    return fenced(x.reshape(*shape[:dim], outer * true, *shape[dim + 1 :]))


def _inside(size: int, step: int, true: int) -> jax.Array:
    return lax.rem(lax.iota(jnp.int32, size), jnp.int32(step)) < true


def _where_inside(dim: int, inside: jax.Array, x: jax.Array, fill: jax.Array) -> jax.Array:
    return jnp.where(lax.broadcast_in_dim(inside, x.shape, (dim,)), x, fill)


def _places(dim: Dim) -> jax.Array:
    at = lax.iota(jnp.int32, dim.size)
    if dim.pad is None:
        return at
    step = jnp.int32(dim.size // dim.pad.outer)
    inside = lax.min(lax.rem(at, step), jnp.int32(dim.pad.true - 1))
    found: jax.Array = lax.div(at, step) * jnp.int32(dim.pad.true) + inside
    return found
