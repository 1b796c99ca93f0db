"""Scripts call their steps in every way that `jax.jit` and `jax.pmap` allow; all of them work."""

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
import small
import zoo
from zoo.calls import (
    CASES,
    TX,
    Config,
    X,
    Y,
    make_state,
    train,
    with_config,
    with_repeats,
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
@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey], ids=["typed", "old"])
def test_keys_of_a_written_step_are_folded_with_the_device(make_key):
    """Else all devices would drop the same."""

    def step(state, x, y, key):
        return pmapped("batch")(state, x * jax.random.bernoulli(key, 0.5, x.shape), y)

    train_step = small.shard_train_step(step, axes=jzero.Axes(axis_name="batch"))
    assert_same_training(train_step, jax.jit(zoo.on_shards(step, 8, "batch")), X, Y, make_key(5))


def pmapped(axis_name: str) -> Callable[..., Any]:
    """A step of the kind that `jax.pmap(..., axis_name=axis_name)` takes."""

    def step(state, x, y):
        def loss_fn(params):
            return ((x @ params["w"] + params["b"][None] - y) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = TX.update(jax.lax.pmean(grads, axis_name), state["opt"])
        params = optax.apply_updates(state["params"], updates)
        return {**state, "params": params, "opt": opt}, jax.lax.pmean({"loss": loss}, axis_name)

    return step


@pytest.mark.slow
def test_own_axis_name_is_the_mesh_axis():
    """A step that was written for `jax.shard_map` over the mesh's axis needs no option."""
    step = pmapped("data")
    train_step = small.shard_train_step(step, mesh=make_mesh({"data": 8}))
    assert_same_training(train_step, jax.jit(zoo.on_shards(step, 8, axis_name="data")), X, Y)


@pytest.mark.slow
def test_decorator():
    @small.shard_train_step(stage=1)
    def with_options(state, x, y):
        """Docs."""
        return train(state, x, y)

    @jzero.shard_train_step
    def bare(state, x, y):
        return train(state, x, y)

    @functools.partial(jzero.shard_train_step, stage=2, static_argnames="config")
    def by_partial(state, x, y, config):
        return with_config(state, x, y, config)

    assert_same_training(with_options, jax.jit(train), X, Y)
    assert_same_training(bare, jax.jit(train), X, Y)
    assert_same_training(
        by_partial, jax.jit(with_config, static_argnames="config"), X, Y, config=Config()
    )
    assert (with_options.__name__, with_options.__doc__) == ("with_options", "Docs.")
    assert with_options.__wrapped__(make_state(), X, Y)[1]["loss"].shape == ()


@pytest.mark.slow
def test_inside_jit():
    train_step = small.shard_train_step(train)

    @jax.jit
    def twice(state, x, y):
        state, _ = train_step(state, x, y)
        return train_step(state, x, y=y)

    def reference(state, x, y):
        return train(train(state, x, y)[0], x, y)

    assert_same_training(twice, jax.jit(reference), X, Y, num_steps=1)
    assert_same_training(jax.jit(train_step), jax.jit(train), X, Y)


@pytest.mark.slow
def test_compiler_options_of_jit():
    """Several collectives under way are an option of XLA's, which a sharded step takes as any function."""
    limit = {"xla_gpu_experimental_parallel_collective_overlap_limit": 4}
    train_step = small.shard_train_step(train)
    assert_same_training(jax.jit(train_step, compiler_options=limit), jax.jit(train), X, Y)
    donating = jax.jit(train_step, donate_argnums=0, compiler_options=limit)
    state = train_step.shard(make_state(), X, Y)
    donating(state, X, Y)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    with pytest.raises(Exception, match="No such compile option"):
        jax.jit(train_step, compiler_options={"overlap_limit": 4})(make_state(), X, Y)


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "lstm", "pmap_style"])
def test_no_leaks(name):
    """For both ways in which a step is traced: whole, and as written for one device."""
    entry = zoo.get(name)
    (batch,) = entry.batches(1)
    state = entry.init()
    with jax.checking_leaks():
        _, metrics = small.shard_train_step(entry.step, **entry.options)(state, *batch)
    assert np.isfinite(metrics["loss"])


def make_mesh(shape: Mapping[str, int], axis_type: AxisType = AxisType.Auto, first: int = 0) -> Any:
    num = int(np.prod(list(shape.values())))
    devices = jax.devices()[first : first + num]
    axis_types = (axis_type,) * len(shape)
    return jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types, devices=devices)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_state_that_was_never_placed_under_an_outer_jit(axis_type):
    train_step = small.shard_train_step(train, mesh=make_mesh({"data": 4}, axis_type))
    actual, _ = jax.jit(train_step)(make_state(), X, Y)
    expected, _ = jax.jit(train)(make_state(), X, Y)
    zoo.assert_trees_close(zoo.to_host(actual), zoo.to_host(expected), zoo.FP32, str(axis_type))


@pytest.mark.slow
def test_default_mesh_is_all_devices():
    state, _ = small.shard_train_step(train)(make_state(), X, Y)
    assert state["params"]["w"].sharding.device_set == set(jax.devices())
    assert state["params"]["w"].addressable_shards[0].data.size == 8 * 16 // 8


def buffers(tree: Any) -> list[int]:
    return [
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
    ]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_placed_state_is_not_copied(stage):
    train_step = small.shard_train_step(train, stage=stage)
    placed = train_step.shard(make_state(), X, Y)
    assert buffers(train_step.shard(placed, X, Y)) == buffers(placed)
    state, _ = train_step(placed, X, Y)
    assert buffers(train_step.shard(state, X, Y)) == buffers(state)
    shardings = jax.tree.leaves(train_step.state_shardings(state, X, Y))
    for leaf, sharding in zip(jax.tree.leaves(state), shardings, strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def test_state_is_donated():
    train_step = small.shard_train_step(train)
    placed = train_step.shard(make_state(), X, Y)
    train_step(placed, X, Y)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(placed))


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


@pytest.mark.slow(but=["NoOffload()-1"])
@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize("offload", [jzero.NoOffload(), jzero.PinnedHost()], ids=str)
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


@pytest.mark.slow
def test_init_places():
    train_step = small.shard_train_step(train)
    state = train_step.init(make_state, 7)
    expected = make_state(7)
    zoo.assert_trees_close(zoo.to_host(state), zoo.to_host(expected), zoo.FP32, "init")
    assert state["params"]["w"].addressable_shards[0].data.size == 8 * 16 // 8
    before = zoo.to_host(state)
    state, _ = train_step(state, X, Y)
    expected, _ = jax.jit(train)(expected, X, Y)
    zoo.assert_trees_close(zoo.to_host(state), zoo.to_host(expected), zoo.FP32, "init, one step")
    assert not np.array_equal(before["params"]["w"], state["params"]["w"])


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


@pytest.mark.slow
def test_new_shapes_and_static_values_are_traced_again():
    step, runs = counting(with_repeats)
    train_step = small.shard_train_step(step, static_argnames="num_repeats")
    state = make_state()
    counts = []
    for x, y, num_repeats in [
        (X, Y, 1),
        (X[:8], Y[:8], 1),
        (X, Y, 2),
        (X, Y, 1),
        (X[:8], Y[:8], 1),
    ]:
        state, metrics = train_step(state, x, y, num_repeats=num_repeats)
        counts.append(len(runs))
    assert counts == [1, 2, 3, 3, 3]
    assert int(state["count"]) == 6


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


@pytest.mark.slow
def test_batch_that_is_already_split():
    mesh = make_mesh({"data": 8})
    x, y = (jax.device_put(a, NamedSharding(mesh, P("data"))) for a in (X, Y))
    train_step = small.shard_train_step(train, mesh=mesh)
    assert_same_training(train_step, lambda state, *_: jax.jit(train)(state, X, Y), x, y)
    assert not x.is_deleted()


@pytest.mark.slow
def test_two_steps_share_a_state():
    """As GANs do, and scripts that fine-tune in phases; each step places the state as it needs."""

    def only_bias(state, x, y):
        new, metrics = train(state, x, y)
        return {**new, "params": {**new["params"], "w": state["params"]["w"]}}, metrics

    one, other = small.shard_train_step(train, stage=3), small.shard_train_step(only_bias, stage=1)
    state, expected = make_state(), make_state()
    for step, reference in [(one, train), (other, only_bias), (one, train)]:
        state, _ = step(state, X, Y)
        expected, _ = jax.jit(reference)(expected, X, Y)
    zoo.assert_trees_close(zoo.to_host(state), zoo.to_host(expected), zoo.FP32, "shared")


@pytest.mark.slow
def test_plain_jit_evaluates_a_sharded_state():
    @jax.jit
    def evaluate(state, x):
        return (x @ state["params"]["w"]).sum()

    state, _ = small.shard_train_step(train)(make_state(), X, Y)
    expected, _ = jax.jit(train)(make_state(), X, Y)
    assert float(evaluate(state, X)) == pytest.approx(float(evaluate(expected, X)), rel=1e-4)


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
