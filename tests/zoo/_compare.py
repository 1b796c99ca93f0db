"""Two trainings of one program, and how they differ."""

import contextlib
import dataclasses
import io
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jzero
from jzero import _compare
from jzero._compare import to_host
from jzero.testing import Tolerance

from ._program import Program, get
from ._setting import Setting, sharded

# Float64 has digits to spare: whatever is further apart than this is another training, not another
# order of summation. Narrower floats are compared as everywhere in these tests, each by its own
# dtype: a float64 training may hold float8 histories.
DOUBLE = Tolerance(rtol=0.0, leaf_rtol=1e-10)
NUM_STEPS = 3

# Programs that are refused in microbatches, some only where these do not divide the rows, and the text.
_UPDATES_INSIDE = (
    r"accumulate > 1, and .* uses a gradient, loss or sum of the whole batch inside a loop"
)
_ROWS_INSIDE = r"accumulate > 1, and a (gather of the batch's rows|maximum) over .* inside a loop"
NOT_IN_MICROBATCHES = {
    **dict.fromkeys(
        ("several_updates_in_one_step", "ppo_over_time_and_rows", "armijo",
         "optax_backtracking_linesearch", "optax_lbfgs", "conjugate_gradients",
         "fixed_point_of_the_batch"), _UPDATES_INSIDE),
    **dict.fromkeys(
        ("while_until_all_rows_converge", "cond_for_each_row", "drawn_from_many_distributions",
         "tied_loss_in_chunks_of_tokens"), _ROWS_INSIDE),
    "resnet_with_batch_norm": r"begins a loop over the microbatches(?s:.*)4 times is the most",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Training:
    """What a training leaves behind, as NumPy arrays.

    Attributes:
      outputs: the outputs of each step.
      state: the state after the last one.
      calls: for each step, what its effects gave to the host, in order; with what was printed.
    """

    outputs: list[Any]
    state: Any
    calls: list[Any]


def train(
    program: Program, run: Callable[..., Any], dtype: Any, num_steps: int = NUM_STEPS
) -> Training:
    """Trains from the program's own start; `run(state, *args) -> (state, outputs)` is its step."""
    return train_on(program, run, program.batches(num_steps, jnp.dtype(dtype)), dtype)


def train_on(program: Program, run: Callable[..., Any], batches: list[Any], dtype: Any) -> Training:
    """The same on given batches. Call it within `jax.enable_x64(True)` for float64."""
    with configured(program):
        state = program.init(jnp.dtype(dtype))
        outputs: list[Any] = []
        calls: list[Any] = []
        for args in batches:
            with recorded(program, calls):
                found = run(state, *args)
                state, output = found if program.returns_metrics else (found, {})
                outputs.append(to_host(output))
        return Training(outputs, to_host(getattr(run, "unshard", _same)(state)), calls)


def train_alone(program: Program, batches: list[Any], dtype: Any, num_shards: int = 1) -> Training:
    """One device with the whole batch: what every training must equal."""
    if program.alone is not None:
        found = to_host(program.alone(batches))
        return Training([outputs for _, outputs in found], found[-1][0], [])
    return train_on(program, reference(program, num_shards), batches, dtype)


def reference(program: Program, num_shards: int = 1) -> Callable[..., Any]:
    static = {k: v for k, v in program.options.items() if k.startswith("static_arg")}
    return jax.jit(program.alone_on(num_shards), **static)


def check(name: str, setting: Setting) -> tuple[str, list[str], float]:
    """Trains a program: "equal", "refused" with its text, or "differs" with what, where and how much at most.

    JAX's 64-bit types are enabled by the caller, for float64.
    """
    program = get(name)
    batches = program.batches(NUM_STEPS, jnp.dtype(setting.dtype))
    try:
        actual = train_on(program, sharded(program, setting), batches, setting.dtype)
    except jzero.JzeroError as error:
        return "refused", [str(error)], 0.0
    # Only a step with collectives of its own sees into how many parts the batch is split.
    num_shards = setting.num_devices * setting.accumulate if program.axis_name else 1
    expected = train_alone(program, batches, setting.dtype, num_shards)
    found = differences(expected, actual, program)
    return "differs" if found else "equal", found, largest_difference(expected, actual)


def verdict(name: str, setting: Setting) -> str | None:
    """What is wrong with the program in this setting, or None: it is equal, or refused as it says."""
    program = get(name)
    result, found, _ = check(name, setting)
    allowed = [program.refused] if program.refused else []
    if setting.accumulate > 1 and name in NOT_IN_MICROBATCHES:
        allowed.append(NOT_IN_MICROBATCHES[name])
    if result == "refused" and any(re.search(text, found[0]) for text in allowed):
        return None
    if result == "equal" and not program.refused:
        return None
    return f"{name}, {setting}: {result}. " + "; ".join(found[:4])


def differences(expected: Training, actual: Training, program: Program) -> list[str]:
    """A sentence for each leaf and call that differs: where, in what, and by how much."""
    problems: list[str] = []
    tolerance = program.tolerance if program.rounded_to else None
    for i, (wanted, found) in enumerate(zip(expected.outputs, actual.outputs, strict=True)):
        problems += _differences(wanted, found, f"step {i} outputs", tolerance)
    problems += _differences(expected.state, actual.state, "state", tolerance)
    for i, (wanted, found) in enumerate(zip(expected.calls, actual.calls, strict=True)):
        problems += _call_differences(wanted, found, f"step {i}")
    return problems


def assert_trees_close(actual: Any, desired: Any, tolerance: Tolerance, where: str) -> None:
    """Same paths, shapes and dtypes; floats within the tolerance, everything else equal."""
    problems = list(_compare.differences(actual, desired, where, tolerance))
    assert not problems, "\n".join(problems)


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
def configured(program: Program) -> Iterator[None]:
    """The program's settings of JAX, and afterwards those from before."""
    before = {name: getattr(jax.config, name) for name in program.config}
    try:
        for name, value in program.config.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@contextlib.contextmanager
def recorded(program: Program, into: list[Any]) -> Iterator[None]:
    """Adds to `into` what the effects of one step do, if the program has any."""
    if program.calls is None:
        yield
        return
    program.calls.clear()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        yield
        jax.effects_barrier()
    into.append({"values": to_host(program.calls), "printed": printed.getvalue()})


def _differences(
    expected: Any, actual: Any, name: str, tolerance: Tolerance | None = None
) -> Iterator[str]:
    wanted, found = _leaves(expected, name), _leaves(actual, name)
    for path in {**wanted, **found}:
        if path not in found or path not in wanted:
            yield f"{path} is {'new' if path in found else 'missing'}"
            continue
        a, d = _parts(found[path]), _parts(wanted[path])
        yield from _compare.differences(a, d, path, DOUBLE if d.dtype == np.float64 else tolerance)


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
