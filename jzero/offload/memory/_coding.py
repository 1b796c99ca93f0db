# SPDX-License-Identifier: Apache-2.0
"""Encodes leaves as rows of codes and decodes them; each device its own part."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.sharding.passes._quantize import dequantize_rows, quantize_rows
from jzero.sharding.plan._quantized_form import QuantizedForm


def encoded(
    x: jax.Array, form: QuantizedForm, sharding: NamedSharding
) -> tuple[jax.Array, jax.Array]:
    """A leaf on the devices, in its padded parts, as rows in their `sharding`; and its error.

    Returns `uint8[form.rows_shape]` and float[4], over the leaf's finite elements: the sum of squares of
    rounding errors, that of the elements, the largest rounding error, and the largest element.
    """
    rows, error = _encoder(form, sharding)(x)
    return rows, error


@functools.cache
def _encoder(form: QuantizedForm, sharding: NamedSharding) -> Any:
    axes = axes_of(form, sharding)

    def local(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = quantize_rows(x, form.part, form.blocks)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        finite = jnp.isfinite(x)
        exact = jnp.where(finite, x, 0).astype(wide)
        lost = jnp.where(finite, x.astype(wide) - _own(rows, form).astype(wide), 0)
        sums = jnp.stack([jnp.sum(lost**2), jnp.sum(exact**2)])
        most = jnp.stack([jnp.max(jnp.abs(lost)), jnp.max(jnp.abs(exact))])
        if axes:
            sums, most = lax.psum(sums, axes), lax.pmax(most, axes)
        return rows, jnp.concatenate([sums, most])

    return jax.jit(_over(sharding, local, _spec(form, sharding), (sharding.spec, P())))


def decoded(rows: jax.Array, form: QuantizedForm, sharding: NamedSharding) -> jax.Array:
    """Rows on the devices as the leaf `[..., n, d]`, with padding, each device its part."""
    x: jax.Array = _decoder(form, sharding)(rows)
    return x


@functools.cache
def _decoder(form: QuantizedForm, sharding: NamedSharding) -> Any:
    def local(rows: jax.Array) -> jax.Array:
        return _own(rows, form)

    return jax.jit(_over(sharding, local, sharding.spec, _spec(form, sharding)))


def _own(rows: jax.Array, form: QuantizedForm) -> jax.Array:
    """One device's rows, decoded."""
    return dequantize_rows(rows, form.part, form.dim, form.dtype, form.blocks)


def axes_of(form: QuantizedForm, sharding: NamedSharding) -> tuple[str, ...]:
    if form.rows_dim is None or form.rows_dim >= len(sharding.spec):
        return ()
    entry = sharding.spec[form.rows_dim]
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def plain_sharding(form: QuantizedForm, sharding: NamedSharding) -> NamedSharding:
    """The sharding, in the devices' memory, of the padded leaf whose rows have this one."""
    return NamedSharding(sharding.mesh, _spec(form, sharding))


def _spec(form: QuantizedForm, sharding: NamedSharding) -> P:
    axes = axes_of(form, sharding)
    return P(*[None] * form.dim, axes) if axes and form.dim is not None else P()


def _over(sharding: NamedSharding, fn: Any, in_specs: P, out_specs: Any) -> Any:
    return jax.shard_map(
        fn, mesh=sharding.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
