"""NNX objects given to a sharded step as they are: mutated as `nnx.jit` mutates them, or refused by name."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jzero
import small
import zoo
from jzero._compare import TOLERANCES
from test_nnx import FLOAT64, Net, X, adam_of, doubled, mutating_step

pytestmark = pytest.mark.usefixtures("float64")

nnx_jit: Any = nnx.jit


def make(seed=0):
    model = Net(seed)
    metrics = doubled(nnx.MultiMetric(loss=nnx.metrics.Average("loss")))
    return model, adam_of(model), metrics, nnx.Rngs(dropout=1)


def run(step, objects, batches):
    model, optimizer, metrics, rngs = objects
    return [step(model, optimizer, metrics, batch, rngs=rngs) for batch in batches]


def assert_same(actual, expected):
    actual, expected = (zoo.to_host(nnx.state(x)) for x in (actual, expected))
    zoo.assert_trees_close(actual, expected, TOLERANCES["float64"], "objects")


def train_step(model, optimizer, metrics, batch, rngs):
    mutating_step(model, optimizer, metrics, batch, rngs)
    return {"rows": batch.sum(1)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_devices", "stage", "options"),
    [(2, 1, {"accumulate": 2}), (8, 3, {}), (8, 3, {"offload": jzero.HostCPU()})],
)
def test_objects_are_mutated_as_by_nnx_jit(num_devices, stage, options):
    own, objects = make(), make()
    expected = run(nnx_jit(train_step), own, [X, X + 0.1, X])
    sharded = small.shard_train_step(
        nnx_jit(train_step), stage=stage, mesh=small.mesh(data=num_devices), **options
    )
    results = run(sharded, objects, [X, X + 0.1, X])
    zoo.assert_trees_close(
        zoo.to_host(results), zoo.to_host(expected), TOLERANCES["float64"], "result"
    )
    assert_same(objects, own)
    if num_devices == 8 and stage == 3:
        assert not objects[0].first.kernel.get_value().sharding.is_fully_replicated
        moment = objects[1].opt_state[0].mu.first.kernel.get_value()
        assert (getattr(moment, "where", "") == "in host memory") == bool(options)
    x = jnp.asarray(X)
    for model in (own[0], objects[0]):
        model.eval()
    np.testing.assert_allclose(objects[0](x), own[0](x))  # Whoever has the model computes with it.


@pytest.mark.slow
def test_what_is_changed_between_two_steps_is_what_the_next_one_takes():
    own, objects = make(), make()
    steps = nnx_jit(train_step), small.shard_train_step(train_step)
    for given, step in zip((own, objects), steps, strict=True):
        run(step, given, [X])
        given[0].last.bias[...] = jnp.ones(8)
        given[0].dropout.deterministic = True  # Another program; the step sets it back.
        nnx.update(given[2], jax.tree.map(jnp.zeros_like, nnx.state(given[2])))
        run(step, given, [X])
        assert given[0].dropout.deterministic is False
    assert_same(objects, own)


class Padded(nnx.Module):
    """With a table that 8 devices do not divide."""

    def __init__(self):
        self.table = nnx.Embed(257, 3, rngs=nnx.Rngs(0), **FLOAT64)
        self.scale = nnx.data(jnp.ones(8))  # An array that is in no variable.


def test_leaves_that_are_padded_and_arrays_that_are_no_variables():
    def step(model, optimizer, batch):
        def loss_fn(model):
            return jnp.mean(model.table(batch) ** 2)

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        model.scale = model.scale * 2
        return loss

    def objects():
        model = Padded()
        return model, nnx.Optimizer(model, optax.sgd(10.0), wrt=nnx.Param)

    own, given = objects(), objects()
    sharded = small.shard_train_step(step, stage=3)
    sharded.shard(*given)
    assert isinstance(given[0].table.embedding.get_value(), jzero.LeafArray)
    for batch in np.arange(32).reshape(2, 16):
        np.testing.assert_allclose(sharded(*given, batch), nnx_jit(step)(*own, batch))
    assert isinstance(given[0].table.embedding.get_value(), jzero.LeafArray)
    assert given[0].scale.tolist() == own[0].scale.tolist() == [4.0] * 8
    assert_same(given, own)
    ids = jnp.arange(257)
    np.testing.assert_allclose(given[0].table(ids), own[0].table(ids), rtol=1e-6)
    assert "Padded" in repr(given[0])
    ready = nnx.clone(given[0])
    np.testing.assert_allclose(ready.table(ids), own[0].table(ids), rtol=1e-6)


@pytest.mark.parametrize("decorated", [False, True])
def test_an_evaluation_keeps_what_it_changes_and_nothing_else(decorated):
    def evaluate(model, metrics, batch):
        predicted = model(batch)
        metrics.update(loss=jnp.mean((predicted - batch) ** 2))
        return predicted

    own, objects = make(), make()
    run(nnx_jit(train_step), own, [X])
    sharded = small.shard_train_step(train_step, stage=3)
    run(sharded, objects, [X])
    eval_step = jzero.shard_eval_step(nnx_jit(evaluate) if decorated else evaluate, like=sharded)
    kernel = objects[0].first.kernel.get_value()
    for batch in (X, X[:13]):
        for model in (own[0], objects[0]):
            model.eval()
        np.testing.assert_allclose(
            eval_step(objects[0], objects[2], batch), evaluate(own[0], own[2], batch)
        )
    assert objects[0].first.kernel.get_value() is kernel  # Where it lay.
    assert_same(objects, own)


def test_a_scan_hands_variables_through_an_evaluation():
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def layers(rngs):
        return nnx.Linear(8, 8, rngs=rngs, **FLOAT64)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def forward(layer, x):
        return nnx.remat(nnx.Linear.__call__)(layer, x)

    model = layers(nnx.Rngs(0))
    eval_step: Any = jzero.shard_eval_step(forward, axes="data", mesh=small.mesh(data=8))
    eval_step.shard(model)
    kernel = model.kernel.get_value()
    np.testing.assert_allclose(eval_step(model, X), forward(layers(nnx.Rngs(0)), jnp.asarray(X)))
    assert model.kernel.get_value() is kernel
    assert len(eval_step.plan(model, X).outputs) == 1


def test_objects_are_born_in_shards_placed_and_made_whole():
    own = make()
    run(nnx_jit(train_step), own, [X])
    sharded = small.shard_train_step(train_step, stage=3)
    born, placed, told = sharded.init(make, 0), make(), make()
    assert sharded.shard(*placed) == placed
    sharded.shard(*told[:3], jax.ShapeDtypeStruct(X.shape, X.dtype), told[3])
    for objects in (born, placed, told):
        assert not objects[0].last.kernel.get_value().is_fully_replicated
        run(sharded, objects, [X])
        assert_same(objects, own)
    whole = sharded.unshard(born)
    assert whole[0].last.kernel.get_value().is_fully_replicated
    assert_same(whole, own)
    shardings = sharded.state_shardings(*born[:3], X, born[3])
    structure: Any = jax.tree.structure(shardings)
    assert structure == jax.tree.structure(nnx.state(born))
    jax.tree.map(lambda x, s: x.sharding == s or pytest.fail(f"{s}"), nnx.state(born), shardings)
    model, *beside = born
    assert sharded.plan(model, *beside[:2], X, beside[2]).stage == 3
    sharded.lower(model, *beside[:2], X, beside[2])
    report = str(sharded.describe(*nnx.eval_shape(make)[:3], X, nnx.eval_shape(make)[3]))
    assert "output['rows'] sharded along" in report


def linear() -> Any:
    return nnx.Linear(8, 8, rngs=nnx.Rngs(0), **FLOAT64)


def linear_and_adam():
    model = linear()
    return model, adam_of(model)


def mean_step(model, optimizer, batch):
    grads = nnx.grad(lambda model: jnp.mean(model(batch) ** 2))(model)
    optimizer.update(model, grads)


@pytest.mark.slow
def test_a_state_of_all_objects_is_what_a_checkpoint_takes(tmp_path):
    sharded = small.shard_train_step(mean_step)
    objects = linear_and_adam()
    sharded(*objects, X)
    with jzero.Checkpointer(tmp_path, sharded) as checkpointer:
        checkpointer.save(1, nnx.state(objects))
        again = nnx.eval_shape(linear_and_adam)
        nnx.update(again, checkpointer.restore(nnx.state(again)))
    assert_same(again, objects)
    for given in (again, objects):
        sharded(*given, X)
    assert_same(again, objects)


@pytest.mark.slow
def test_objects_that_a_step_returns_are_those_it_was_given():
    def step(models, batch):
        models["a"].eval()
        models["a"].last.bias[...] += 1
        return {"last": models["a"].last, "all": models}, nnx.state(models["a"], nnx.BatchStat)

    models = {"a": Net(0), "b": Net(1)}
    result, stats = small.shard_train_step(step)(models, X)
    assert result["last"] is models["a"].last
    assert result["all"]["b"] is models["b"]
    assert models["a"].dropout.deterministic
    assert not models["b"].dropout.deterministic
    assert models["a"].last.bias.get_value().tolist() == [1.0] * 8
    assert isinstance(stats, nnx.State)


@pytest.mark.parametrize("options", [{}, {"state_argnums": 0}])
def test_a_step_that_returns_another_object_takes_them_as_pytrees(options):
    def step(model, batch):
        graph, params = nnx.split(model)
        grads = jax.grad(lambda p: jnp.mean(nnx.merge(graph, p)(batch) ** 2))(params)
        return nnx.merge(graph, jax.tree.map(lambda p, g: p - g, params, grads)), batch.sum()

    model = linear()
    kernel = model.kernel.get_value()
    expected, _ = jax.jit(step)(model, X)
    new, _ = small.shard_train_step(step, **options)(model, X)
    assert new is not model
    assert model.kernel.get_value() is kernel
    assert_same(new, expected)


def test_a_step_that_fails_leaves_objects_as_they_were():
    def step(model, batch):
        model.last.bias[...] += jnp.log(batch.sum())
        model.extra = "changed"
        if batch.shape[0] == 8:
            raise RuntimeError("a bug of the user's")

    model: Any = Net(0)
    sharded = small.shard_train_step(step)
    sharded(model, X**2)
    del model.extra
    before = jax.tree.map(np.asarray, nnx.state(model))
    with pytest.raises(RuntimeError, match="a bug of the user's"):
        sharded(model, X[:8])
    with pytest.raises(jzero.BatchError, match="is a str"):
        sharded(model, "no batch")
    assert not hasattr(model, "extra")
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(model))


def test_gradients_that_wait_are_applied_in_the_objects():
    own, given = linear_and_adam(), linear_and_adam()
    policy = jzero.HostCPU(delayed_update=True, delay_after=0)
    sharded = small.shard_train_step(mean_step, memory=policy)
    sharded(*given, X)
    assert sharded.flush(given) is given
    nnx_jit(mean_step)(*own, X)
    assert_same(given, own)


def test_what_preflight_asks_of_other_batches():
    model, optimizer, metrics, rngs = make()
    sharded = small.shard_train_step(train_step)
    batch = sharded._programs.batch_of("preflight", (model, optimizer, metrics, X, rngs), {})
    assert batch.call(sharded.describe, 4).plan.num_devices == 8
    assert isinstance(batch.call(sharded.lower, 4), jax.stages.Lowered)
    assert batch.call(lambda *args: args[3].shape, 4) == (32, 8)


@pytest.mark.parametrize(
    "options", [{}, {"offload": jzero.HostCPU(delayed_update=True)}], ids=["devices", "host"]
)
def test_objects_under_a_mesh_of_explicit_axes(options):
    """They themselves are trained, evaluated, placed, flushed and made whole, and not copies of them."""
    own, objects = make(), make()
    alone = small.shard_train_step(train_step, **options) if options else nnx_jit(train_step)
    run(alone, own, [X, X])
    if options:
        alone.flush(own)
    mesh = small.mesh(data=8)  # Explicit, as JAX makes them.
    sharded = small.shard_train_step(train_step, **options)
    with jax.set_mesh(mesh):
        model, optimizer, *rest = objects
        sharded.shard(objects)
        kinds = model.first.kernel.get_value().sharding.mesh.axis_types
        assert options or kinds == mesh.axis_types
        run(sharded, objects, [X])
        before = nnx.state(objects)
        with pytest.raises(jzero.StepError, match="a call does not fit"):
            sharded(model)
        assert all(map(operator.is_, jax.tree.leaves(before), jax.tree.leaves(nnx.state(objects))))
        run(sharded, objects, [X])
        if options:
            assert sharded.flush(objects) == objects
        evaluate = jzero.shard_eval_step(
            lambda model, metrics, x: metrics.update(loss=jnp.mean(model(x) ** 2)), like=sharded
        )
        model.eval()
        own[0].eval()
        rest[0].reset()
        evaluate(model, rest[0], X)
        assert rest[0].compute()["loss"] > 0
        whole = sharded.unshard(model)
        assert whole.first.kernel.get_value().sharding.is_fully_replicated
        rest[0].reset()
    own[2].reset()
    assert_same(objects, own)  # And are read where no mesh is current.


@pytest.mark.parametrize("how", ["swap", "clone"])
def test_objects_that_a_step_replaces(how):
    class Agent(nnx.Module):
        def __init__(self):
            self.first, self.second = linear(), linear()

    def step(agent, batch):
        agent.first.kernel[...] += batch.mean()
        if how == "swap":
            agent.first, agent.second = agent.second, agent.first
        else:
            agent.second = nnx.clone(agent.first)

    own, given = Agent(), Agent()
    before = {agent: (agent.first, agent.second) for agent in (own, given)}
    sharded = small.shard_train_step(step)
    for _ in range(3):
        nnx_jit(step)(own, X)
        sharded(given, X)
    assert_same(given, own)
    for name in ("first", "second"):
        ids = [[getattr(a, name) is old for old in before[a]] for a in (own, given)]
        assert ids[0] == ids[1]


# -- what is refused -------------------------------------------------------------------------------


def refuses(pattern, step, *args, error=jzero.StepError, **options):
    with pytest.raises(error, match=pattern):
        small.shard_train_step(step, **options)(*args)


def test_objects_that_are_no_arguments():
    rngs = nnx.Rngs(0)
    refuses(
        r"shard_train_step: train_step changes an object that was not passed to it \(.*RngCount.*\)\. "
        r".* Make the object a parameter of train_step, and pass it with each call\.",
        lambda model, batch: model(batch + jax.random.normal(rngs())).sum(), linear(), X,
    )  # fmt: skip
    text = r"partial\[0\]\[0\] is a Linear\. .* Pass them with each call"
    with pytest.raises(jzero.StepError, match=text):
        jzero.shard_train_step(functools.partial(lambda model, rngs, batch: 0, linear()))
    refuses(
        r"m\['x'\] is an ndarray beside NNX objects\. .* arguments of their own; .* jzero\.from_nnx",
        lambda m: None, {"model": linear(), "x": X},
    )  # fmt: skip


def test_state_beside_objects_which_from_nnx_can_take():
    tx = optax.adam(0.1)

    def step(model, opt_state, batch):
        grads = nnx.grad(lambda model: jnp.mean(model(batch) ** 2))(model)
        updates, opt_state = tx.update(nnx.state(grads), opt_state)
        nnx.update(model, optax.apply_updates(nnx.state(model), updates))
        return opt_state, batch.sum()

    model = linear()
    opt_state = tx.init(nnx.state(model))
    refuses(
        r"opt_state comes back, beside NNX objects \(model\)\. .* jzero\.from_nnx\(step, model\), and "
        r"shard_train_step\(step_fn, state=\('state', 'opt_state'\)\)\.",
        step, model, opt_state, X,
    )  # fmt: skip
    step_fn, state = jzero.from_nnx(step, model)
    sharded = small.shard_train_step(step_fn, state=("state", "opt_state"))
    new, (new_opt_state, _) = sharded(state, opt_state, X)
    expected, _ = nnx_jit(step)(model, opt_state, X)
    zoo.assert_trees_close(
        zoo.to_host((new, new_opt_state)), zoo.to_host((nnx.state((model,)), expected)),
        TOLERANCES["float64"], "state",
    )  # fmt: skip


def test_variables_that_come_and_go():
    def step(model, batch):
        del model.bias

    text = r"removes model\.bias \(a Param\), or shares it\. A step keeps the variables"
    refuses(text, step, linear(), X)

    def ties(model, batch):
        model.bias = model.kernel

    text = r"removes model\.kernel \(a Param\), or shares it\. .* variable\[\.\.\.\] = value"
    refuses(text, ties, linear(), X)


def test_changed_objects():
    def step(model, batch):
        model.bias[...] += 1
        return nnx.clone(model)

    refuses(r"result is a Linear\. .* nnx\.update\(model, \.\.\.\)", step, linear(), X)

    def of_no_state(state, model, batch):
        model.bias[...] += 1
        return state

    text = r"model is changed by the step\. .* Drop state="
    refuses(text, of_no_state, jnp.ones(8), linear(), X, state_argnums=0)
    refuses(
        "in_specs names model, of NNX objects.* Drop it from in_specs", lambda batch, model: None,
        X, linear(), error=jzero.OptionError, in_specs={"model": jax.P()},
    )  # fmt: skip


def test_a_cached_partial():
    def step(model, batch):
        model.kernel[...] += batch.mean()

    with nnx.set_graph_mode(True), nnx.set_graph_updates(True):
        sharded = small.shard_train_step(step)
        model = linear()
        before = np.asarray(model.kernel[...])
        for _ in range(2):
            with pytest.raises(jzero.StepError, match=r"cached_partial has .* jzero\.from_nnx"):
                nnx.cached_partial(sharded, model)(X)
        with pytest.raises(jzero.StepError, match=r"nnx\.cached_partial has"):
            small.shard_train_step(nnx.cached_partial(nnx_jit(step), model))
        np.testing.assert_array_equal(before, model.kernel[...])


def test_objects_that_an_initialiser_has_not_made():
    rngs = nnx.Rngs(0)
    sharded = small.shard_train_step(train_step)
    error = r"init: init_fn changes an object that was there before .* Make nnx\.Rngs inside"
    for args in ((lambda: nnx.Linear(8, 8, rngs=rngs),), (lambda r: r.params(), rngs)):
        with pytest.raises(jzero.StepError, match=error):
            sharded.init(*args)
