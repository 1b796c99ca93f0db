"""Equinox modules given to a sharded step as they are: arrays are trained, all else is compiled in."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import jzero
import small
from test_eqx import TX, Net, X, assert_close, train

pytestmark = pytest.mark.usefixtures("float64")

filter_jit: Any = eqx.filter_jit


def make():
    model = Net()
    return model, TX.init(eqx.filter(model, eqx.is_array))


def step(model, opt_state, batch, key):
    return train(model, opt_state, batch, key)


def step_in_another_order(batch, opt_state, key, *, model):
    model, opt_state, loss = train(model, opt_state, batch, key)
    return loss, {"rows": batch.sum(1)}, opt_state, model


@pytest.mark.parametrize("filtered", [False, True])
def test_the_order_is_the_steps(filtered):
    train_step = small.shard_train_step(
        filter_jit(step_in_another_order) if filtered else step_in_another_order
    )
    own, (model, opt_state) = make(), make()
    for seed in range(2):
        key = jax.random.key(seed)
        *own, expected = filter_jit(step)(*own, X, key)
        loss, aux, opt_state, model = train_step(X, opt_state, key, model=model)
        assert_close((loss, aux), (expected, {"rows": X.sum(1)}))
    assert_close((model, opt_state), tuple(own))


def test_statistics_and_a_model_that_has_an_average():
    class Normed(eqx.Module):
        first: eqx.nn.Linear
        norm: eqx.nn.BatchNorm

        def __init__(self, key):
            self.first = eqx.nn.Linear(8, 8, key=key, dtype=jnp.float64)
            self.norm = eqx.nn.BatchNorm(8, "batch", dtype=jnp.float64, mode="batch")

        def __call__(self, x, state):
            return self.norm(jax.nn.silu(self.first(x)), state)

    def step(model, average, state, opt_state, batch):
        def loss_fn(model, state):
            forward = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
            out, state = forward(batch, state)
            return jnp.mean((out - batch) ** 2), state

        (loss, state), grads = eqx.filter_value_and_grad(loss_fn, has_aux=True)(model, state)
        updates, opt_state = TX.update(grads, opt_state)
        model = eqx.apply_updates(model, updates)
        mixed = jax.tree.map(lambda a, b: (a + b) / 2 if eqx.is_array(a) else a, average, model)
        return model, mixed, state, opt_state, loss

    def init():
        model, state = eqx.nn.make_with_state(Normed)(jax.random.key(0))
        return model, model, state, TX.init(eqx.filter(model, eqx.is_array))

    own, values, train_step = init(), init(), small.shard_train_step(step)
    for batch in (X, X + 1):
        *own, expected = filter_jit(step)(*own, batch)
        *values, loss = train_step(*values, batch)
        assert_close(loss, expected)
    assert_close(tuple(values), tuple(own))


@pytest.mark.slow
def test_what_is_no_array_is_a_part_of_the_program():
    traces = []

    def step(model, batch, scale, mode="a"):
        traces.append(mode)
        grads = eqx.filter_grad(lambda m: jnp.mean(m.scale * jax.vmap(m)(batch)) * scale)(model)
        model = eqx.apply_updates(model, jax.tree.map(jnp.negative, grads))
        return eqx.tree_at(lambda m: m.scale, model, model.scale + 1.0), (mode, jax.nn.relu)

    own, model, train_step = Net(), Net(), small.shard_train_step(step)
    for scale, mode in ((0.1, "a"), (0.2, "a"), (0.2, "b")):
        own, _ = filter_jit(step)(own, X, scale, mode)
        traces.clear()
        model, result = train_step(model, X, scale, mode)
        assert result == (mode, jax.nn.relu)
        assert traces
    assert model.scale == own.scale == 5.0
    assert_close(model, own)
    traces.clear()
    train_step(eqx.tree_at(lambda m: m.scale, model, 4.0), X, 0.3, "b")  # As the last one.
    assert not traces


def test_modules_are_born_placed_made_whole_and_evaluated():
    train_step = small.shard_train_step(step)
    born, placed = train_step.init(make), train_step.shard(make())
    expected = filter_jit(step)(*make(), X, jax.random.key(0))
    for values in (born, placed):
        assert not values[0].mlp.layers[0].weight.is_fully_replicated
        assert_close(train_step(*values, X, jax.random.key(0)), expected)
    values = train_step(*make(), X, jax.random.key(0))[:2]
    whole = train_step.unshard(values)
    assert whole[0].mlp.layers[0].weight.is_fully_replicated
    assert whole[0].scale == 2.0
    eval_step: Any = jzero.shard_eval_step(lambda model, x: jax.vmap(model)(x), like=train_step)
    assert_close(eval_step(values[0], X[:13]), jax.vmap(whole[0])(X[:13]))
    shapes = eqx.filter_eval_shape(make)
    report = str(train_step.describe(*shapes, X, jax.random.key(0)))
    assert "model.mlp.layers[0].weight" in str(train_step.plan(*shapes, X, jax.random.key(0)))
    assert "stage 3 over 8 devices" in report
    of_shards = train_step.state_shardings(values)
    assert of_shards[0].mlp.layers[0].weight == values[0].mlp.layers[0].weight.sharding


def test_a_step_of_filter_pmap():
    with pytest.raises(
        jzero.StepError, match=r"made by eqx\.filter_pmap.* its axis_name= in axes="
    ):
        jzero.shard_train_step(eqx.filter_pmap(step))


@pytest.mark.slow
def test_a_state_with_functions_names_what_keeps_its_arrays(tmp_path):
    train_step = small.shard_train_step(step)
    with pytest.raises(jzero.StateError, match=r"eqx\.filter\(state, eqx\.is_array\)"):
        train_step.state_shardings({"activation": jax.nn.relu, "w": X})
    values = train_step(*make(), X, jax.random.key(0))[:2]
    with jzero.Checkpointer(tmp_path, train_step) as checkpointer:
        checkpointer.save(1, eqx.filter(values, eqx.is_array))
        shapes = eqx.filter(eqx.filter_eval_shape(make), lambda x: hasattr(x, "shape"))
        again = eqx.combine(checkpointer.restore(shapes), values)
    assert_close(again, values)


@pytest.mark.parametrize("filtered", [False, True])
def test_a_method_of_a_module(filtered):
    class Trainer(eqx.Module):
        w: jax.Array

        def train(self, x):
            return self, x.sum()

    method = Trainer(jnp.ones(8)).train
    with pytest.raises(
        jzero.StepError, match=r"method Trainer\.train of a module.*Pass the function of the class"
    ):
        jzero.shard_train_step(eqx.filter_jit(method) if filtered else method)
