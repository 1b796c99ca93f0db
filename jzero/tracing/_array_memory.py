# SPDX-License-Identifier: Apache-2.0
"""The memory of `jax.Array`s: deletes arrays, views them under other shardings, registers array classes."""

from __future__ import annotations

import collections
import functools
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jzero.tracing._internals import ArrayImpl, PRNGKeyArray, core, dtypes, internal, xla

# Whether JAX marks an array as deleted when a program has donated it.
DELETES_DONATED = jax.__version_info__ >= (0, 11)


def let_go(xs: Sequence[Any]) -> None:
    """Deletes arrays that a step has consumed, so that JAX raises `Array has been deleted` at later uses.

    [Note: what JAX 0.10 leaves alive] JAX 0.11 deletes the arrays that it donates, except for those that a
    view keeps alive, wholly or on some devices. JAX 0.10 leaves donated arrays as they are, and the process
    crashes where a program of several devices takes one (tests/test_donate.py). Deleting costs little, but
    crashes if another thread is reading the array, because JAX reads without the interpreter's lock and
    without holding the buffer. So beside other threads the array is replaced in place by a deleted one, which
    holds a second array that keeps the memory alive (tests/test_calls.py).
    """
    if len(sys._current_frames()) > 1:
        plain = [x._base_array if isinstance(x, PRNGKeyArray) else x for x in xs]
        whole = [x for x in plain if isinstance(x, ArrayImpl) and _is_whole(x)]
        _vacate(whole)
        ids = set(map(id, whole))
        xs = [
            x for x in plain if id(x) not in ids and (DELETES_DONATED or type(x) is not ArrayImpl)
        ]
    # Every step pays for this: a loop, or a method looked up for each array, takes longer.
    delete = (
        ArrayImpl.delete if set(map(type, xs)) == {ArrayImpl} else operator.methodcaller("delete")
    )
    collections.deque(map(delete, xs), maxlen=0)


def _is_whole(x: Any) -> bool:
    """Whether no device has deleted its part."""
    if (
        not DELETES_DONATED
    ):  # A deleted array has no traceback, and any other question ends the process.
        return x.traceback is not None
    return not x.is_deleted() and not any(shard.is_deleted() for shard in x._arrays)


def _vacate(xs: Sequence[Any]) -> None:
    """Replaces arrays by deleted ones, without freeing memory that another thread may be reading."""
    if not xs:
        return
    kept = [_alike(x.sharding) for x in xs]
    copies = xla.batched_copy_array_to_devices_with_sharding(
        xs, [s._internal_device_list for s in kept], kept,
        [xla.ArrayCopySemantics.REUSE_INPUT] * len(xs))  # fmt: skip
    for x, copy_of in zip(xs, copies, strict=True):
        x._vacated = copy_of
        # Both in one C call, because Ctrl-C may come in between. JAX 0.11 refuses a deleted array here.
        if DELETES_DONATED:
            other = functools.partial(x._replace_with, _zeros(x.shape, x.dtype, x.sharding))
            collections.deque(map(operator.call, (other, x.delete)), maxlen=0)
        else:
            x._replace_with(_vacant(x.sharding, x.aval))


@functools.cache
def _alike(sharding: Sharding) -> NamedSharding:
    """Another sharding over the same devices; for the array's own one JAX returns the array itself."""
    mesh = Mesh(np.array(sharding._device_assignment), ("jzero",))
    return NamedSharding(mesh, P(), memory_kind=sharding.memory_kind)


@functools.cache
def _vacant(sharding: NamedSharding, aval: Any) -> jax.Array:
    """A deleted array that claims this sharding and type, and never had an element."""
    x: Any = _zeros((0,) * len(sharding.spec), np.float32, sharding)
    x.delete()
    x.aval = aval
    return x


def _zeros(shape: tuple[int, ...], dtype: Any, sharding: Sharding) -> jax.Array:
    whole = np.broadcast_to(np.zeros((), dtype), shape)
    with jax.transfer_guard("allow"):  # The user's guard is not about these zeros.
        return jax.make_array_from_callback(shape, sharding, lambda index: whole[index])


def forget_views(x: Any) -> None:
    """Makes an array and its shards drop the NumPy views of themselves that JAX 0.11 keeps."""
    if jax.__version_info__[:2] != (0, 11):
        return
    whole = [x._fully_replicated_shard()] if x.is_fully_replicated else []
    for y in (*(shard.data for shard in x.addressable_shards), *whole, x):
        y._replace_with(view(y, y.sharding))


def retyped(sharding: Any, mesh: Any) -> Any:
    """A NamedSharding over the same axes as `mesh`, with their types there; any other sharding as it is."""
    if not isinstance(sharding, NamedSharding) or sharding.mesh.shape_tuple != mesh.shape_tuple:
        return sharding
    if sharding.mesh.axis_types == mesh.axis_types:
        return sharding
    own = sharding.mesh.update(axis_types=mesh.axis_types)
    return NamedSharding(own, sharding.spec, memory_kind=sharding.memory_kind)


def view(x: Any, sharding: Any) -> Any:
    """A view of a JAX array under an equivalent sharding; consuming either consumes both."""
    if isinstance(x, PRNGKeyArray):
        return PRNGKeyArray(x._impl, view(x._base_array, sharding))
    if not isinstance(x, ArrayImpl):
        return x
    parts = [shard.data for shard in x.addressable_shards]
    made = jax.make_array_from_single_device_arrays(x.shape, sharding, parts, dtype=x.dtype)
    if not x.weak_type:
        return made
    return ArrayImpl(made.aval.update(weak_type=True), sharding, parts, committed=True)


def strong_view(x: Any) -> Any:
    """A view of an array without its weak type, as in `view`; an uncommitted one is copied."""
    if not isinstance(x, ArrayImpl) or not x.committed:
        return jnp.asarray(x, x.dtype)
    parts = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts, dtype=x.dtype)


def register_array(cls: type, plain: Callable[[Any], jax.Array]) -> None:
    """Has JAX accept `cls` as an array of its `shape`, `dtype` and `sharding`; `plain` makes that array.

    Everything that traces or runs functions of arrays then takes it: `jax.jit`, `grad`, `vmap`, `device_put`.
    """

    def aval(x: Any) -> Any:
        sharding = retyped(x.sharding, jax.sharding.get_abstract_mesh())
        return internal.update_aval_with_sharding(core.ShapedArray(x.shape, x.dtype), sharding)

    internal.pytype_aval_mappings[cls] = aval
    dtypes.register_canonicalize_value_handler(cls, plain)
