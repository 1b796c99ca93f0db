"""What an entry of the zoo is, and how one device imitates several.

Most steps are linear in their batch: the mean of the gradients of equal sub-batches is the gradient
of the whole batch, so the step itself, on one device, is the reference. Where it is not so (batch
statistics, dropout keys that differ between devices, branches on the local batch), the reference
runs the step on each device's part of the batch under `jax.vmap` with a named axis, and takes the
means where n devices take them. Such a step is written once, as `make_step(mean)`: the user's step
is `make_step(identity)`.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jzero._compare import TOLERANCES
from jzero.testing import Tolerance

Step = Callable[..., Any]
SHARDS = "shards"  # the vmapped axis on which one device imitates several


# Sums over the batch are taken in another order on n devices. Set once; an entry with another one
# says why. The one that jzero.testing has for float32, here for all dtypes.
FP32 = TOLERANCES["float32"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A train step with a state, data, and what one device must compute for n devices.

    Attributes:
      init: builds the state; a pure function that `jax.jit` accepts.
      batches: `batches(num_steps)` is a list of the positional arguments that follow the state.
      step: `step(state, *batch) -> (state, metrics)`.
      reference: `reference(n)` is the function of one device and the whole batch that n devices
        must equal; None where it is `step` itself, for every n.
      options: keyword arguments of `jzero.shard_train_step`.
      returns_metrics: False where the step returns the state alone.
    """

    init: Callable[[], Any]
    batches: Callable[[int], list[tuple[Any, ...]]]
    step: Step
    reference: Callable[[int], Step] | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    returns_metrics: bool = True
    tolerance: Tolerance = FP32


_BUILDERS: dict[str, Callable[[], Entry]] = {}
NAMES: list[str] = []


def entry(build: Callable[[], Entry]) -> Callable[[], Entry]:
    """Registers an entry under its function's name; it is built when first asked for."""
    _BUILDERS[build.__name__] = build
    NAMES.append(build.__name__)
    return build


@functools.cache
def get(name: str) -> Entry:
    return _BUILDERS[name]()


def identity(tree: Any) -> Any:
    return tree


def mean_over_shards(tree: Any) -> Any:
    """The mean of the float leaves over the imitated devices; the others are equal on all."""

    def mean(leaf):
        return jax.lax.pmean(leaf, SHARDS) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(mean, tree)


def on_shards(step: Step, num_shards: int, axis_name: str = SHARDS) -> Step:
    """One device computing what `num_shards` devices compute, each on its part of the batch.

    Every output must be the same on all of them: `step` takes its means over `axis_name` itself.
    """

    def run(state, *batch):
        parts = jax.tree.map(lambda leaf: _part_per_shard(leaf, num_shards), batch)
        in_axes = (None, *[0] * len(parts))
        outputs = jax.vmap(step, in_axes=in_axes, axis_name=axis_name)(state, *parts)
        return jax.tree.map(lambda leaf: leaf[0], outputs)

    return run


def split_reference(make_step: Callable[..., Step]) -> Callable[[int], Step]:
    """`reference` of a step that is written as `make_step(mean)`."""
    return lambda num_shards: on_shards(make_step(mean_over_shards), num_shards)


def _part_per_shard(leaf: jax.Array, num_shards: int) -> jax.Array:
    """What the devices receive, stacked: keys folded with the index, whole scalars, split rows."""
    if is_key(leaf):
        # One device has nothing to tell apart, and keeps the key that the user passed.
        keys = [jax.random.fold_in(leaf, i) if num_shards > 1 else leaf for i in range(num_shards)]
        return jnp.stack(keys)
    if leaf.ndim == 0:
        return jnp.stack([leaf] * num_shards)
    return leaf.reshape(num_shards, leaf.shape[0] // num_shards, *leaf.shape[1:])


def is_key(leaf: jax.Array) -> bool:
    """A typed key, or one of the old style (uint32[2])."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf.ndim == 0
    return leaf.dtype == jnp.uint32 and leaf.shape == (2,)
