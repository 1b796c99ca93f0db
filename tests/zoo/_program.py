"""What a program is, and the table of them.

A program stands for all steps of its kind: whatever trains it exactly has no reason to fail the others. Its
reference is always the step itself, under `jax.jit`, on one device, with the whole batch.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jzero._compare import TOLERANCES
from jzero.testing import Tolerance

Step = Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A train step with its state and data, in the precision that the caller asks for.

    Attributes:
      init: `init(dtype)` builds the state; for each dtype a pure function that `jax.jit` accepts.
      batches: `batches(num_steps, dtype)` is a list of the positional arguments that follow the
        state. Rows are NumPy arrays, so that they stand for the whole batch on every process. Whoever leaves
        the dtype of either out means float32; a program that has no other one need not take it.
      step: `step(state, *args) -> (state, outputs)`.
      covers: the items of the findings and of issue 13 that the program stands for: 'A1 I2'.
      note: what is special, for a reader of the table; empty where the name says it.
      options: keyword arguments of `jzero.shard_train_step`, by single names (`small.grouped`).
      row_dims: for the arguments whose rows do not lie along dim 0 of each leaf, by name: the dim;
        None for those without rows.
      exact_dtypes: the dtypes in which the step is to be compared.
      rounded_to: the narrow float in which the step itself sums over rows, if it does: its sums
        depend on the order, and all floats are compared as this dtype's.
      refused: a regular expression for the text with which jzero refuses the step; None where it
        must train it.
      reference: what one device runs in place of `step`, where that is not possible.
      config: settings of `jax.config` under which both trainings run.
      automatic: devices along a second mesh axis that is not a data axis and stays XLA's, 'model'.
      calls: where the step's effects leave what the host was given; None for a step without effects.
      returns_metrics: False where the step returns the state alone.
      alone: how a script trains on one device by itself, where its own step is no function of a state:
        (state, outputs) after each of the given batches.
    """

    init: Callable[..., Any]
    batches: Callable[..., list[tuple[Any, ...]]]
    step: Step
    covers: str = ""
    note: str = ""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    row_dims: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    exact_dtypes: tuple[str, ...] = ()
    rounded_to: str | None = None
    refused: str | None = None
    reference: Step | None = None
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    automatic: int = 1
    calls: list[Any] | None = None
    returns_metrics: bool = True
    alone: Callable[[list[tuple[Any, ...]]], list[Any]] | None = None

    def __post_init__(self) -> None:
        init, batches = _of_a_dtype(self.init, 0), _of_a_dtype(self.batches, 1)
        dtypes = self.exact_dtypes or (("float32", "float64") if init is None else ("float32",))
        object.__setattr__(self, "exact_dtypes", dtypes)
        object.__setattr__(self, "init", init or _or_float32(self.init, 0))
        object.__setattr__(self, "batches", batches or _or_float32(self.batches, 1))

    @property
    def axis_name(self) -> str | None:
        """The name of the data axis in a step with collectives of its own."""
        return self.options.get("axis_name")

    @property
    def tolerance(self) -> Tolerance:
        """Of floats that are not float64."""
        return TOLERANCES[self.rounded_to or "float32"]

    def in_specs(self, axes: Any) -> dict[str | int, Any]:
        """The option of this name, for data axes `axes` (a name or a tuple of names)."""
        return {
            name: jax.P() if dim is None else jax.P(*[None] * dim, axes)
            for name, dim in self.row_dims.items()
        }

    def alone_on(self, num_shards: int = 1) -> Step:
        """What one device must compute with the whole batch, for a step run on so many parts of it."""
        if self.axis_name and self.reference is None:
            return on_shards(self.step, num_shards, self.axis_name)
        return self.reference or self.step


def _of_a_dtype(make: Callable[..., Any], place: int) -> Callable[..., Any] | None:
    """`make` for any dtype, of what takes none."""
    parameters = inspect.signature(make).parameters.values()
    if len(parameters) > place or any(x.kind is x.VAR_POSITIONAL for x in parameters):
        return None
    return lambda *args: make(*args[:place])


def _or_float32(make: Callable[..., Any], place: int) -> Callable[..., Any]:
    return lambda *args: make(*args) if len(args) > place else make(*args, jnp.dtype("float32"))


_BUILDERS: dict[str, Callable[[], Program]] = {}
NAMES: list[str] = []
SLOW: set[str] = (
    set()
)  # near relatives of other programs, for whole tables only; and no row of golden


def program(build: Callable[[], Program]) -> Callable[[], Program]:
    """Registers a program under its function's name; it is built when first asked for."""
    register(build.__name__, build)
    return build


def relative(build: Callable[[], Program]) -> Callable[[], Program]:
    """The same for a near relative of another program, or one that takes long to compile."""
    register(build.__name__, build, is_slow=True)
    return build


def register(name: str, build: Callable[[], Program], is_slow: bool = False) -> None:
    """The same, for programs that are built in a loop."""
    assert name not in _BUILDERS, name
    _BUILDERS[name] = build
    NAMES.append(name)
    if is_slow:
        SLOW.add(name)


@functools.cache
def get(name: str) -> Program:
    return _BUILDERS[name]()


def module_of(name: str) -> str:
    """The theme under which a program is written: 'randomness'."""
    build = _BUILDERS[name]
    return getattr(build, "func", build).__module__.rpartition(".")[2]


# -- several devices on one ---------------------------------------------------------------------------
def on_shards(step: Step, num_shards: int, axis_name: str) -> Step:
    """One device computing what `num_shards` devices compute, each on its part of the batch.

    Every output must be the same on all of them: `step` takes its means over `axis_name` itself.
    """

    def run(state: Any, *batch: Any) -> Any:
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
