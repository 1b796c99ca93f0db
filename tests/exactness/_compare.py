"""Two trainings of one family, and how they differ."""

import contextlib
import dataclasses
import io
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero import _compare
from jzero._compare import TOLERANCES
from jzero.testing import Tolerance

from ._family import Family

# Float64 has digits to spare: whatever is further apart than this is another training, not another
# order of summation. Narrower floats are compared as everywhere in these tests, each by its own
# dtype: a float64 training may hold float8 histories.
DOUBLE = Tolerance(rtol=0.0, leaf_rtol=1e-10)
NUM_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Training:
    """What a training leaves behind, as NumPy arrays.

    Attributes:
      outputs: the outputs of each step.
      state: the state after the last one.
      calls: for each step, what its effects gave to the host, in order; with what was printed.
      rounded_to: the family's, see there.
    """

    outputs: list[Any]
    state: Any
    calls: list[Any]
    rounded_to: str | None = None


def train(
    family: Family, run: Callable[..., Any], dtype: Any, num_steps: int = NUM_STEPS
) -> Training:
    """Trains from the family's own start; `run(state, *args) -> (state, outputs)` is its step."""
    return train_on(family, run, family.batches(num_steps, dtype), dtype)


def train_on(family: Family, run: Callable[..., Any], batches: list[Any], dtype: Any) -> Training:
    """The same on given batches. Call it within `jax.enable_x64(True)` for float64."""
    with configured(family):
        state = family.init(dtype)
        outputs: list[Any] = []
        calls: list[Any] = []
        for args in batches:
            with recorded(family, calls):
                state, output = run(state, *args)
                outputs.append(to_host(output))
        return Training(
            outputs, to_host(getattr(run, "unshard", _same)(state)), calls, family.rounded_to
        )


def reference(family: Family) -> Callable[..., Any]:
    """One device with the whole batch: what every training must equal."""
    return jax.jit(family.reference or family.step)


def differences(expected: Training, actual: Training, dtype: Any) -> list[str]:
    """A sentence for each leaf and call that differs: where, in what, and by how much.

    Args:
      expected: the training of one device.
      actual: the one to judge.
      dtype: of both trainings; leaves of another one are compared by their own.
    """
    del dtype  # each leaf knows its own
    problems: list[str] = []
    rounded_to = expected.rounded_to
    for i, (wanted, found) in enumerate(zip(expected.outputs, actual.outputs, strict=True)):
        problems += _differences(wanted, found, f"step {i} outputs", rounded_to)
    problems += _differences(expected.state, actual.state, "state", rounded_to)
    for i, (wanted, found) in enumerate(zip(expected.calls, actual.calls, strict=True)):
        problems += _call_differences(wanted, found, f"step {i}")
    return problems


def largest_difference(expected: Training, actual: Training) -> float:
    """The largest of all leaves', each relative to its leaf's largest element; integers count whole."""
    pairs = [*zip(expected.outputs, actual.outputs, strict=True), (expected.state, actual.state)]
    largest = 0.0
    for a, b in pairs:
        wanted, found = _leaves(a, ""), _leaves(b, "")
        for path in wanted.keys() & found.keys():
            x, y = (_parts(leaf).astype(np.float64) for leaf in (wanted[path], found[path]))
            if x.shape != y.shape or not x.size:
                largest = max(largest, float(x.shape != y.shape))
                continue
            differ = (x != y) & ~(np.isnan(x) & np.isnan(y))
            apart = np.nan_to_num(np.abs(x[differ] - y[differ]), nan=1.0).max(initial=0.0)
            largest_x = np.abs(x[np.isfinite(x)]).max(initial=1e-30)
            largest = max(largest, float(apart / largest_x))
    return largest


@contextlib.contextmanager
def configured(family: Family) -> Iterator[None]:
    """The family's settings of JAX, and afterwards those from before."""
    before = {name: getattr(jax.config, name) for name in family.config}
    try:
        for name, value in family.config.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@contextlib.contextmanager
def recorded(family: Family, into: list[Any]) -> Iterator[None]:
    """Adds to `into` what the effects of one step do, if the family has any."""
    if family.calls is None:
        yield
        return
    family.calls.clear()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        yield
        jax.effects_barrier()
    into.append({"values": to_host(family.calls), "printed": printed.getvalue()})


def to_host(tree: Any) -> Any:
    """NumPy arrays that later donations cannot touch; typed keys become their key data."""
    return _compare.to_host(tree)


def _differences(
    expected: Any, actual: Any, name: str, rounded_to: str | None = None
) -> Iterator[str]:
    least = TOLERANCES[rounded_to] if rounded_to else None
    wanted, found = _leaves(expected, name), _leaves(actual, name)
    for path in {**wanted, **found}:
        if path not in found or path not in wanted:
            yield f"{path} is {'new' if path in found else 'missing'}"
            continue
        a, d = _parts(found[path]), _parts(wanted[path])
        yield from _compare.differences(a, d, path, DOUBLE if d.dtype == np.float64 else least)


def _call_differences(expected: Any, actual: Any, name: str) -> Iterator[str]:
    wanted, found = expected["values"], actual["values"]
    if len(wanted) != len(found):
        yield f"{name} has {len(found)} calls of the host instead of {len(wanted)}"
    else:
        yield from _differences(wanted, found, f"{name} calls")
    if expected["printed"] != actual["printed"]:
        yield f"{name} prints {actual['printed']!r} instead of {expected['printed']!r}"


def _leaves(tree: Any, name: str) -> dict[str, np.ndarray]:
    # Not the structures: theirs hold functions, of which a second `init` makes others.
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return {name + jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in pairs}


def _parts(leaf: np.ndarray) -> np.ndarray:
    """A complex array as real and imaginary parts: their errors are those of floats."""
    if not jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return leaf
    return np.stack([leaf.real, leaf.imag], axis=-1)


def _same(tree: Any) -> Any:
    return tree
