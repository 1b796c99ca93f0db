"""`jzero.from_eqx`: modules taken and returned, in any order; or a refusal (more in test_zoo.py)."""

import inspect
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
import small
import zoo
from jzero._compare import TOLERANCES

pytestmark = pytest.mark.usefixtures("float64")

X = np.random.default_rng(0).normal(size=(16, 8))
TX = optax.adam(0.1, eps=1e-3)


class Net(eqx.Module):
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout
    scale: float

    def __init__(self, seed=0):
        self.mlp = eqx.nn.MLP(8, 8, 16, 1, key=jax.random.key(seed), dtype=jnp.float64)
        self.dropout, self.scale = eqx.nn.Dropout(0.3), 2.0

    def __call__(self, x, key=None):
        return self.scale * self.dropout(self.mlp(x), key=key, inference=key is None)


def train(model, opt_state, batch, key):
    def loss_fn(model):
        keys = jax.random.split(key, len(batch))
        return jnp.mean((jax.vmap(model)(batch, keys) - batch) ** 2)

    loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
    updates, opt_state = TX.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, loss


def average_step(model, average, batch, opt_state, *, key):
    """Two alike, a key that goes on, several values beside the state, in another order."""
    key, this_key = jax.random.split(key)
    model, opt_state, loss = train(model, opt_state, batch, this_key)
    mixed = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b if eqx.is_array(a) else a, average, model)
    return loss, opt_state, model, mixed, key, {"rows": jnp.sum(batch, 1)}


def carry_step(carry, batch):
    model, opt_state = carry
    return train(model, opt_state, batch, jax.random.key(0))[:2]


def carry_step_apart(model, opt_state, batch, echo=False):
    if echo:
        return model, opt_state, batch
    return train(model, opt_state, batch, jax.random.key(0))


def make():
    model = Net()
    opt_state = TX.init(eqx.filter(model, eqx.is_array))
    return {"model": model, "average": Net(1), "opt_state": opt_state, "key": jax.random.key(2)}


def sharded(step_fn, num_devices=8):
    return small.shard_train_step(step_fn, stage=3, mesh=small.mesh(data=num_devices))


def assert_close(actual, expected):
    actual, expected = (zoo.to_host(eqx.filter(x, eqx.is_array)) for x in (actual, expected))
    zoo.assert_trees_close(actual, expected, TOLERANCES["float64"], "values")


def test_two_that_are_alike_keep_their_order():
    values = make()
    step_fn, state = jzero.from_eqx(
        average_step, values["model"], values["average"], key=values["key"],
        opt_state=values["opt_state"],
    )  # fmt: skip
    assert str(inspect.signature(step_fn)) == "(state, batch)"
    train_step = sharded(step_fn, 2)
    own: Any = eqx.filter_jit(average_step)
    for batch in (X, X + 0.1, X):
        loss, *new, aux = own(**values, batch=batch)
        values = dict(zip(("opt_state", "model", "average", "key"), new, strict=True))
        state, result = train_step(state, batch)
        assert_close(result, (loss, aux))
    names = ("model", "average", "opt_state", "key")
    expected = tuple(values[name] for name in names)
    assert_close(train_step.unshard(state), expected)
    together = eqx.combine(train_step.unshard(state), expected)
    assert together[0].scale == 2.0
    assert_close(jax.vmap(together[0])(X), jax.vmap(expected[0])(X))


def test_a_carry_alone():
    carry = make()["model"], make()["opt_state"]
    step_fn, state = jzero.from_eqx(carry_step, carry)
    state, result = sharded(step_fn)(state, X)
    assert result is None
    assert_close(state[0], eqx.filter_jit(carry_step)(carry, X))


def test_a_state_that_is_born_in_shards():
    def init():
        return make()["model"], make()["opt_state"]

    def step(model, opt_state, batch):
        return train(model, opt_state, batch, jax.random.key(0))

    step_fn, shapes = jzero.from_eqx(step, *eqx.filter_eval_shape(init))
    train_step = sharded(step_fn)
    own: Any = eqx.filter_jit(step)
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(shapes))
    state, loss = train_step(train_step.init(lambda: eqx.filter(init(), eqx.is_array)), X)
    assert_close((*state, loss), own(*init(), X))


# -- what is refused -------------------------------------------------------------------------------


def refuses(pattern, step, *args, **kwargs):
    def run():
        step_fn, state = jzero.from_eqx(step, *args, **kwargs)
        jzero.shard_train_step(step_fn)(state, X)

    with pytest.raises(jzero.StepError, match=pattern) as error:
        run()
    assert str(error.value).startswith("from_eqx: ")


def test_what_is_given_is_not_returned():
    refuses(
        r"model \(a Net\) is not among the results: float64\[\]\. .* Return it; or close over it",
        lambda model, batch: batch.sum(), Net(),
    )  # fmt: skip
    refuses(
        r"model \(a Net\) is not among the results: a dict\.",
        lambda model, batch: {"model": model}, Net(),
    )  # fmt: skip


def test_what_is_returned_is_another():
    def changed(where, value):
        return lambda model, batch: (eqx.tree_at(where, model, value), batch.sum())

    refuses(
        r"result 0 is another model \(a Net\): model\.scale was 2\.0 and becomes 3\.0\.",
        changed(lambda m: m.scale, 3.0), Net(),
    )  # fmt: skip
    refuses(
        r"model\.mlp\.layers\[0\]\.bias was float64\[16\] and becomes float64\[2\]\.",
        changed(lambda m: m.mlp.layers[0].bias, jnp.ones(2, float)), Net(),
    )  # fmt: skip


def test_a_state_that_a_call_brings():
    step_fn, state = jzero.from_eqx(carry_step_apart, make()["model"])
    text = r"opt_state \(a tuple\) comes with the call, .* Pass it to from_eqx, .*: opt_state="
    with pytest.raises(jzero.StepError, match=text):
        jzero.shard_train_step(step_fn)(state, make()["opt_state"], X)
    _, (same, rows) = jzero.shard_train_step(step_fn, static_argnames="echo")(
        state, {"x": X}, X, echo=True
    )  # A batch that is returned as it came is none.
    np.testing.assert_array_equal(same["x"], rows)


def test_more_results_are_like_it_than_were_given():
    refuses(
        r"temperature \(float64\[\]\) is like results \[0, 1\], and 1 of the values .* in one argument",
        lambda temperature, batch: (temperature, batch.sum()), jnp.ones((), float),
    )  # fmt: skip


def test_what_is_given_has_no_arrays():
    refuses("tx has no arrays. A state is made of arrays", lambda tx, batch: batch.sum(), TX)


def test_a_step_of_filter_pmap():
    step = eqx.filter_pmap(lambda model, batch: model)
    refuses("made by eqx.filter_pmap.* its axis_name= in axes=", step, Net())
