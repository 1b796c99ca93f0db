"""Scripts call their steps in every way that `jax.jit` and `jax.pmap` allow; all of them work."""

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jzero
import small
import zoo
from zoo.calls import (
    CASES,
    X,
    Y,
    make_state,
    train,
    with_scale,
)


def assert_same_training(
    train_step: Any, reference: Any, *args: Any, num_steps: int = 2, **kwargs: Any
):
    """Both are called alike, twice, and must give the same states and metrics."""
    actual, expected = make_state(), make_state()
    for i in range(num_steps):
        actual, metrics = train_step(actual, *args, **kwargs)
        expected, expected_metrics = reference(expected, *args, **kwargs)
        zoo.assert_trees_close(
            zoo.to_host((actual, metrics)),
            zoo.to_host((expected, expected_metrics)),
            zoo.FP32,
            f"step {i}",
        )


@pytest.mark.slow(but=["table_by_leaf"])
@pytest.mark.parametrize("name", CASES)
def test_calls_like_jit(name):
    case = CASES[name]
    train_step = small.shard_train_step(case.step, in_specs=case.in_specs, **case.options)
    assert_same_training(train_step, jax.jit(case.step, **case.options), *case.args, **case.kwargs)


def test_state_by_keyword():
    train_step = small.shard_train_step(train)
    state, metrics = train_step(y=Y, x=X, state=make_state())
    expected = jax.jit(train)(make_state(), X, Y)
    zoo.assert_trees_close(
        zoo.to_host((state, metrics)), zoo.to_host(expected), zoo.FP32, "by keyword"
    )


@pytest.mark.slow
def test_inside_scan_inside_jit():
    def many(step):
        def run(state, xs, ys):
            return jax.lax.scan(lambda state, xy: step(state, *xy), state, (xs, ys))

        return jax.jit(run)

    xs, ys = np.stack([X, X + 1, X - 1]), np.stack([Y, Y, Y + 1])
    assert_same_training(many(small.shard_train_step(train)), many(train), xs, ys, num_steps=1)


def test_eval_shape():
    shapes: Any = jax.eval_shape(small.shard_train_step(train), make_state(), X, Y)
    expected: Any = jax.eval_shape(train, make_state(), X, Y)
    same = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), shapes, expected)
    assert all(jax.tree.leaves(same))
    assert len(jax.tree.leaves(same)) == len(jax.tree.leaves(expected))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_state_that_was_never_placed_under_an_outer_jit(axis_type):
    train_step = small.shard_train_step(train, mesh=small.mesh(axis_type, data=4))
    actual, _ = jax.jit(train_step)(make_state(), X, Y)
    expected, _ = jax.jit(train)(make_state(), X, Y)
    zoo.assert_trees_close(zoo.to_host(actual), zoo.to_host(expected), zoo.FP32, str(axis_type))


def buffers(tree: Any) -> list[int]:
    return [
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
    ]


@pytest.mark.parametrize("stage", [1, 3])
def test_placed_state_is_not_copied(stage):
    train_step = small.shard_train_step(train, stage=stage)
    placed = train_step.shard(make_state(), X, Y)
    assert buffers(train_step.shard(placed, X, Y)) == buffers(placed)
    state, _ = train_step(placed, X, Y)
    assert buffers(train_step.shard(state, X, Y)) == buffers(state)
    shardings = jax.tree.leaves(train_step.state_shardings(state, X, Y))
    for leaf, sharding in zip(jax.tree.leaves(state), shardings, strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


VIEWS: dict[str, Callable[[jax.Array], Any]] = {
    "a cached copy": lambda x: np.asarray(x) is None,
    "a kept copy": np.asarray,
    "device_get": jax.device_get,
    "shards": lambda x: [np.asarray(shard.data) for shard in x.addressable_shards],
    "the first shard": lambda x: np.asarray(x.addressable_shards[0].data),
    "the last shard": lambda x: np.asarray(x.addressable_shards[-1].data),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("stage", [1, 3])  # Parameters are replicated, and sharded.
def test_state_that_numpy_has_a_view_of_is_donated(stage, name):
    """JAX deletes it in some releases and shardings, or on some devices only: who then uses it may hang."""
    train_step = small.shard_train_step(train, stage=stage)
    state = train_step.shard(make_state(), X, Y)
    expected, _ = jax.jit(train)(make_state(), X, Y)
    views = jax.tree.map(VIEWS[name], state)
    before = jax.tree.map(np.copy, views)
    new, _ = train_step(state, X, Y)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    with pytest.raises(jzero.StateError, match="already donated"):
        train_step(state, X, Y)
    zoo.assert_trees_close(zoo.to_host(new), zoo.to_host(expected), zoo.FP32, "new")
    jax.tree.map(np.testing.assert_array_equal, views, before)


@pytest.mark.slow
def test_a_thread_may_read_the_state_of_a_step_that_runs():
    """[Note: what JAX 0.10 leaves alive] Deleting what a thread reads ends the process there."""
    mesh = small.mesh(data=1)
    train_step = small.shard_train_step(
        lambda s, x: (jax.tree.map(lambda w: w + x.sum(), s), 0.0), mesh=mesh
    )
    state = train_step.shard([jnp.ones((16, 13)) for _ in range(20)], X)
    box, is_over = [state], threading.Event()

    def read():
        held = []
        while not is_over.is_set():
            for leaf in box[0][::3]:
                with contextlib.suppress(
                    Exception
                ):  # Consumed meanwhile: errors of JAX's, of any type.
                    held.append(np.asarray(leaf))
            del held[:-20]

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        state, _ = train_step(state, X)
        box[0] = state
    is_over.set()
    for thread in threads:
        thread.join()


def test_unplaced_state_survives():
    """Only what is placed is donated: the caller's own arrays can be used again."""
    train_step = small.shard_train_step(train)
    state = make_state()
    train_step.shard(state, X, Y)
    first, _ = train_step(state, X, Y)
    train_step(first, X, Y)
    zoo.assert_trees_close(zoo.to_host(state), zoo.to_host(make_state()), zoo.FP32, "unplaced")


@pytest.mark.parametrize(
    ("offload", "num_devices"), [(jzero.NoOffload(), 1), (jzero.PinnedHost(), 8)]
)
def test_what_was_unsharded_is_kept(offload, num_devices):
    """The best parameters so far, of which some rest whole: the next step does not consume them."""
    train_step = small.shard_train_step(
        train, mesh=small.mesh(data=num_devices), stage=1, memory=offload
    )
    state, _ = train_step(make_state(), X, Y)
    best = train_step.unshard(state)
    expected = zoo.to_host(best)
    train_step(state, X, Y)
    zoo.assert_trees_close(zoo.to_host(best), expected, zoo.FP32, "kept")


def counting(step: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    """The step, and a list that grows with each time that Python runs it."""
    runs: list[int] = []

    @functools.wraps(step)
    def counted(*args, **kwargs):
        runs.append(len(runs))
        return step(*args, **kwargs)

    return counted, runs


@pytest.mark.slow
def test_step_is_traced_once():
    step, runs = counting(with_scale)
    train_step = small.shard_train_step(step)
    state = make_state()
    train_step.describe(state, X, Y)
    train_step.plan(state, X, Y)
    train_step.lower(state, X, Y)
    train_step.state_shardings(state, X, Y)
    state = train_step.shard(state, X, Y)
    for _ in range(3):
        state, _ = train_step(state, X, Y)
    state, _ = train_step(state, y=Y, x=X)
    state, _ = train_step(state, jnp.asarray(X), jnp.asarray(Y))
    train_step.shard(state)
    assert len(runs) == 1


def test_later_calls_compile_nothing(caplog):
    train_step = small.shard_train_step(train)

    def compiled(state):
        caplog.clear()
        with jax.log_compiles():
            state, _ = train_step(state, X, Y)
        return state, [r.getMessage() for r in caplog.records if "ompil" in r.getMessage()]

    state, first = compiled(make_state())
    assert first
    for _ in range(2):
        state, later = compiled(state)
        assert not later


def test_lowered_and_planned_without_arrays():
    train_step = small.shard_train_step(train)
    abstract = jax.eval_shape(make_state)
    x, y = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (X, Y))
    assert "all_gather" in train_step.lower(abstract, x, y).as_text()
    assert train_step.plan(abstract, x, y) == train_step.plan(make_state(), X, Y)
    assert hash(train_step.plan(abstract, x, y)) == hash(train_step.plan(make_state(), X, Y))
    other = small.shard_train_step(train, stage=1).plan(abstract, x, y)
    assert train_step.plan(abstract, x, y) != other


@pytest.mark.slow
def test_a_keyword_may_have_the_name_of_all_keywords():
    def step(state, **batch):
        return state, batch["batch"].sum()

    x = jnp.arange(8.0)
    _, total = small.shard_train_step(step)(jnp.ones(8), batch=x)
    assert total == x.sum()
