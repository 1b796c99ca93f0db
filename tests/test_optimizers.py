"""Every optimizer that optax exports trains as on one device, and its moments rest as shards."""

import functools
import types
from typing import Any

import jax
import numpy as np
import optax
import pytest

import optimizers
import small
from optimizers import ENTRIES, NOT_TRANSFORMATIONS, Entry

# Some of optax's optimizers are deprecated, some call what is.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:optax"),
    pytest.mark.usefixtures("optax_promotions"),
]

NUM_DEVICES = 8
# Each element to 2e-5 of itself or 2e-6 of its leaf's largest. float32 resolves 1.2e-7; a mean over
# the batch in another order moves it by a few of those. Measured between one and eight devices
# under plain `jax.jit`: most optimizers stay below 0.05 of this tolerance, all below 0.5. The
# leaf's scale, not one constant: second moments of 1e-6 are compared as strictly as parameters.
RTOL, LEAF_RTOL = 2e-5, 2e-6
# bfloat16 has 8 bits: a rounding that falls the other way is one unit in the last place.
BFLOAT16_RTOL = 2**-8

# Stages 0 and 2 differ from 1 and 3 in where gradients rest, which few optimizers can notice.
ALL_STAGES = "adafactor adamw clip_by_global_norm lamb muon MultiSteps sam(opaque)".split()
CASES = [
    (name, stage)
    for name in ENTRIES
    for stage in ((0, 1, 2, 3) if name in ALL_STAGES else (1, 3))
]  # fmt: skip


@pytest.mark.slow(but=["scale_by_zoom_linesearch-3"])
@pytest.mark.parametrize(("name", "stage"), CASES, ids=lambda value: str(value))
def test_trains_as_on_one_device(name: str, stage: int):
    entry = ENTRIES[name]
    train_step = small.shard_train_step(
        optimizers.make_step(entry), stage=stage, mesh=small.mesh(data=NUM_DEVICES)
    )
    batches = optimizers.make_batches(entry.poisoned)
    state: Any = train_step.shard(optimizers.make_state(entry), batches[0])
    for i, (batch, expected) in enumerate(zip(batches, one_device(name), strict=True)):
        state, metrics = train_step(state, batch)
        assert_same((state, metrics), expected, f"{name}, stage {stage}, step {i}")
    if stage > 0:
        assert_rests_as_shards(state if stage == 3 else state["opt"])


def test_table_names_every_export_and_nothing_else():
    exported = optimizers.exported_factories()
    unknown = unknown_names(exported)
    assert not unknown, f"optax exports {unknown}: add an entry, or list it with the reason"
    names = {name.split("(")[0] for name in [*ENTRIES, *NOT_TRANSFORMATIONS]}
    assert names <= exported, f"not exported by optax {optax.__version__}: {names - exported}"


def test_new_export_is_noticed():
    """A factory without annotations, as some of optax's are, in a module of its own."""

    def new_optimizer(learning_rate):
        return optax.GradientTransformation(optax.init_empty_state, learning_rate)

    module = types.SimpleNamespace(
        new_optimizer=new_optimizer, sgd=optax.sgd, _hidden=new_optimizer
    )
    assert unknown_names(optimizers.exported_factories((module,))) == {"new_optimizer"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgd", "lion", "adam"])
def test_comparison_notices_a_gradient_of_other_rows(name: str):
    """Training on half of the batch is the mistake of a missing reduction."""
    step = jax.jit(optimizers.make_step(ENTRIES[name]))
    state: Any = optimizers.make_state(ENTRIES[name])
    for batch in optimizers.make_batches():
        state, metrics = step(state, jax.tree.map(lambda leaf: leaf[: len(leaf) // 2], batch))
    with pytest.raises(AssertionError, match="loss"):
        assert_same((state, metrics), one_device(name)[-1], name)


def test_rest_check_notices_full_leaves():
    with pytest.raises(AssertionError, match="moment"):
        assert_rests_as_shards({"moment": jax.device_put(np.zeros((16, 32)))})


@functools.cache
def one_device(name: str) -> list[Any]:
    """State and metrics after each step of plain `jax.jit`, as NumPy arrays."""
    entry = ENTRIES[name]
    step = jax.jit(optimizers.make_step(entry))
    state: Any = optimizers.make_state(entry)
    start = to_numpy(optimizers.make_state(entry)["params"])
    trajectory = []
    for batch in optimizers.make_batches(entry.poisoned):
        state, metrics = step(state, batch)
        trajectory.append(to_numpy((state, metrics)))
    assert_moves(entry, start, trajectory[-1][0]["params"])
    return trajectory


def assert_moves(entry: Entry, start: Any, end: Any) -> None:
    """Without motion far above the tolerances, a comparison would show nothing."""
    if entry.lookahead:
        start, end = start.fast, end.fast
    for leaf in start:
        moved = np.max(np.abs(end[leaf] - start[leaf])) / np.max(np.abs(start[leaf]))
        if leaf in entry.still:
            assert moved == 0, f"{leaf} moves"
        else:
            assert moved > 100 * RTOL, f"{leaf} moves by {moved:.1e} only"


def assert_same(actual: Any, expected: Any, title: str) -> None:
    actual = to_numpy(actual)
    structures = [str(jax.tree.structure(tree)) for tree in (actual, expected)]
    assert structures[0] == structures[1], title
    wrong = []
    leaves = zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True)
    for (path, got), want in leaves:
        assert (got.shape, got.dtype) == (want.shape, want.dtype), f"{title}: {path}"
        error = relative_error(got, want)
        if not error <= 1:
            wrong.append(f"{jax.tree_util.keystr(path)} {got.dtype}{got.shape}: {error:.1f}")
    assert not wrong, f"{title}: error in units of the tolerance\n" + "\n".join(wrong)


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """The largest error in units of the tolerance; equal integers, booleans, NaNs are zero."""
    same = (got == want) | ((got != got) & (want != want))
    if same.all():
        return 0.0
    if not np.issubdtype(want.dtype, np.inexact) and want.dtype != jax.numpy.bfloat16:
        return np.inf
    rtol = BFLOAT16_RTOL if want.dtype == jax.numpy.bfloat16 else RTOL
    wide = np.complex128 if np.iscomplexobj(want) else np.float64
    got, want = got.astype(wide), want.astype(wide)
    if not np.array_equal(np.isfinite(got), np.isfinite(want)):
        return np.inf
    finite = np.isfinite(want)
    scale = np.max(np.abs(want), where=finite, initial=0.0)
    tolerance = rtol * np.abs(want) + LEAF_RTOL * scale
    return float(np.max(np.abs(got - want)[~same] / tolerance[~same]))


def assert_rests_as_shards(tree: Any) -> None:
    """Each leaf of a matrix parameter's shape keeps one eighth of its bytes on every device."""
    shapes = {leaf.shape for leaf in optimizers.make_params().values() if leaf.ndim > 1}
    for path, leaf in jax.tree.leaves_with_path(tree):
        if leaf.shape in shapes:
            name = jax.tree_util.keystr(path)
            assert not leaf.sharding.is_fully_replicated, f"{name} rests full"
            assert leaf.addressable_shards[0].data.nbytes == leaf.nbytes // NUM_DEVICES, name


def to_numpy(tree: Any) -> Any:
    def convert(leaf):
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.array(leaf)

    return jax.tree.map(convert, tree)


def unknown_names(exported: set[str]) -> set[str]:
    return exported - optimizers.covered_names(ENTRIES) - set(NOT_TRANSFORMATIONS)
