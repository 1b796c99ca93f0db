"""What a family of steps is, and the table of them.

A family stands for all steps of its kind: whatever trains it exactly has no reason to fail the
others. Its reference is always the step itself, under `jax.jit`, on one device, with the whole batch.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

Step = Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A train step with its state and data, in the precision that the caller asks for.

    Attributes:
      init: `init(dtype)` builds the state; for each dtype a pure function that `jax.jit` accepts.
      batches: `batches(num_steps, dtype)` is a list of the positional arguments that follow the
        state. Rows are NumPy arrays, so that they stand for the whole batch on every process.
      step: `step(state, *args) -> (state, outputs)`.
      covers: the items of the findings and of issue 13 that the family stands for: 'A1 I2'.
      note: what is special, for a reader of the table; empty where the name says it.
      options: keyword arguments of `jzero.shard_train_step`.
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
    """

    init: Callable[[Any], Any]
    batches: Callable[[int, Any], list[tuple[Any, ...]]]
    step: Step
    covers: str
    note: str = ""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    row_dims: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    exact_dtypes: tuple[str, ...] = ("float32", "float64")
    rounded_to: str | None = None
    refused: str | None = None
    reference: Step | None = None
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    automatic: int = 1
    calls: list[Any] | None = None

    def in_specs(self, axes: Any) -> dict[str | int, Any]:
        """The option of this name, for data axes `axes` (a name or a tuple of names)."""
        return {
            name: jax.P() if dim is None else jax.P(*[None] * dim, axes)
            for name, dim in self.row_dims.items()
        }


_BUILDERS: dict[str, Callable[[], Family]] = {}
NAMES: list[str] = []
SLOW: set[str] = set()  # near relatives of other families: only for whole tables


def family(build: Callable[[], Family]) -> Callable[[], Family]:
    """Registers a family under its function's name; it is built when first asked for."""
    register(build.__name__, build)
    return build


def relative(build: Callable[[], Family]) -> Callable[[], Family]:
    """The same for a near relative of another family, or one that takes long to compile."""
    register(build.__name__, build, is_slow=True)
    return build


def register(name: str, build: Callable[[], Family], is_slow: bool = False) -> None:
    """The same, for families that are built in a loop."""
    assert name not in _BUILDERS, name
    _BUILDERS[name] = build
    NAMES.append(name)
    if is_slow:
        SLOW.add(name)


@functools.cache
def get(name: str) -> Family:
    return _BUILDERS[name]()


def module_of(name: str) -> str:
    """The theme under which a family is written: 'randomness'."""
    build = _BUILDERS[name]
    return getattr(build, "func", build).__module__.rpartition(".")[2]
