"""What an entry of the zoo is, and how one device imitates several.

Several devices train what one device trains with the whole batch, so that a step is its own
reference. A step with collectives of its own (`axis_name=`) is written for one device's part of the
batch: its reference runs it on each of the parts, under `jax.vmap` with a named axis.
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

# Sums over the batch are taken in another order on n devices. Set once; an entry with another one
# says why. The one that jzero.testing has for float32, here for all dtypes.
FP32 = TOLERANCES["float32"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A train step with a state and data.

    Attributes:
      init: builds the state; a pure function that `jax.jit` accepts.
      batches: `batches(num_steps)` is a list of the positional arguments that follow the state.
      step: `step(state, *batch) -> (state, metrics)`.
      options: keyword arguments of `jzero.shard_train_step`.
      returns_metrics: False where the step returns the state alone.
      alone: how a script trains on one device by itself, where its own step is no function of a state:
        (state, metrics) after each of the given batches.
    """

    init: Callable[[], Any]
    batches: Callable[[int], list[tuple[Any, ...]]]
    step: Step
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    returns_metrics: bool = True
    tolerance: Tolerance = FP32
    alone: Callable[[list[tuple[Any, ...]]], list[Any]] | None = None

    @property
    def axis_name(self) -> str | None:
        """The name of the data axis in a step with collectives of its own."""
        return self.options.get("axis_name")

    def reference(self, num_shards: int) -> Step:
        """What one device must compute with the whole batch, for a step run on parts of it."""
        return on_shards(self.step, num_shards, self.axis_name) if self.axis_name else self.step


_BUILDERS: dict[str, Callable[[], Entry]] = {}
NAMES: list[str] = []
SCRIPTS: list[str] = []  # train steps of real scripts (test_scripts.py)


def entry(build: Callable[[], Entry]) -> Callable[[], Entry]:
    """Registers an entry under its function's name; it is built when first asked for."""
    _BUILDERS[build.__name__] = build
    NAMES.append(build.__name__)
    return build


def script(build: Callable[[], Entry]) -> Callable[[], Entry]:
    """The same, of a train step as a real script has it."""
    _BUILDERS[build.__name__] = build
    SCRIPTS.append(build.__name__)
    return build


@functools.cache
def get(name: str) -> Entry:
    return _BUILDERS[name]()


def on_shards(step: Step, num_shards: int, axis_name: str) -> Step:
    """One device computing what `num_shards` devices compute, each on its part of the batch.

    Every output must be the same on all of them: `step` takes its means over `axis_name` itself.
    """

    def run(state, *batch):
        parts = jax.tree.map(lambda leaf: _part_per_shard(leaf, num_shards), batch)
        in_axes = (None, *[0] * len(parts))
        outputs = jax.vmap(step, in_axes=in_axes, axis_name=axis_name)(state, *parts)
        return jax.tree.map(lambda leaf: leaf[0], outputs)

    return run


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
