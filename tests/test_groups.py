"""`jzero.groups` is a vmap over groups of rows; on devices that divide the groups nothing of it moves."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jzero
import small
from jzero.testing import assert_collectives

ROWS = 32
COLLECTIVES = r"all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def by_hand(fn, n, x, axis=0):
    """A Python loop over the groups."""
    return [fn(part) for part in np.split(x, n, axis)]


# -- what it means -----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 4, 32])
def test_results_come_back_in_the_order_of_the_rows(n):
    x = normal(ROWS, 3)
    rows, means = jzero.groups(lambda x: (x - x.mean(0)[None], x.mean(0)), n, out_axes=(0, None))(x)
    np.testing.assert_allclose(
        rows, np.concatenate(by_hand(lambda x: x - x.mean(0), n, x)), atol=1e-6
    )
    np.testing.assert_allclose(means, np.stack(by_hand(lambda x: x.mean(0), n, x)), atol=1e-6)


def test_rows_along_other_dims_and_shared_arguments():
    x, w, b = normal(3, ROWS), normal(3, 5), normal(ROWS, 1)

    def fn(arrays, weights, *, bias):
        y = arrays["x"].T @ weights + jnp.broadcast_to(bias, (8, 5))
        return {"y": y.T, "last": y[-1]}

    grouped = jzero.groups(fn, 4, in_axes=(1, None), out_axes={"y": -1, "last": None})
    found = grouped({"x": x}, w, bias=b)
    np.testing.assert_allclose(found["y"], (x.T @ w + b).T, atol=1e-6)
    np.testing.assert_allclose(found["last"], (x.T @ w + b)[7::8], atol=1e-6)


def test_results_may_have_another_number_of_rows():
    x = jnp.arange(8.0)
    assert jzero.groups(lambda x: jnp.repeat(x, 2), 2)(x).tolist() == jnp.repeat(x, 2).tolist()
    assert jzero.groups(lambda x: x[::2], 4)(x).tolist() == [0, 2, 4, 6]


def test_a_key_for_each_row():
    keys = jax.random.split(jax.random.key(0), 8)
    bits = jzero.groups(lambda keys, x: x + jax.random.normal(keys[0], x.shape), 2)(
        keys, jnp.zeros(8)
    )
    expected = jnp.concatenate([jax.random.normal(keys[0], (4,)), jax.random.normal(keys[4], (4,))])
    assert bits.tolist() == expected.tolist()


# -- wrong uses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "n", "options", "args"), [
    ("jzero.groups: n=0. There is at least one group", 0, {}, ()),
    ("n=3 does not divide 32 rows. All groups have as many rows", 3, {}, [normal(ROWS)]),
    ("args[0] float32[32] has 32 rows\n  - args[1]['y'] float32[8] has 8 rows", 4, {},
     [normal(ROWS), {"y": normal(8)}]),
    ("no argument has rows. All arguments with rows have the same", 4, {"in_axes": None}, [normal(ROWS)]),
    ("no argument has rows", 4, {}, []),
    ("args[0] float32[] has no dim 0. Rows lie along a dim. Name that dim in in_axes", 4, {},
     [np.float32(1)]),
    ("args[1] float32[32] has no dim 1", 4, {"in_axes": (0, 1)}, [normal(ROWS), normal(ROWS)]),
    ("output float32[] has no dim 0. Rows lie along a dim. Name that dim in out_axes, or None", 4, {},
     [normal(ROWS)]),
])  # fmt: skip
def test_refusals(text, n, options, args):
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        jzero.groups(lambda *args: jnp.sum(args[0]), n, **options)(*args)
    assert isinstance(caught.value, jzero.JzeroError)


# -- on devices ------------------------------------------------------------------------------------------


def norm(x):
    """Of a group: its rows, normalised, sorted and added up along the group."""
    x = (x - x.mean(0)[None]) * jax.lax.rsqrt(x.var(0) + 0.1)[None]
    return jnp.sort(x, axis=0) + jnp.cumsum(x, axis=0)


def forward_and_backward(n, state, x):
    def loss(x):
        return jnp.sum(jnp.sin(jzero.groups(norm, n)(x)), axis=1)

    return state, {"loss": loss(x), "grad": jax.grad(lambda x: loss(x).sum())(x)}


@pytest.mark.parametrize(
    ("devices", "accumulate", "n"), [(8, 1, 8), (8, 1, 16), (4, 2, 8), (8, 2, 16)]
)
def test_nothing_moves(devices, accumulate, n):
    mesh = jax.make_mesh((devices,), ("data",), (jax.sharding.AxisType.Auto,),
                         devices=jax.devices()[:devices])  # fmt: skip
    fn = functools.partial(forward_and_backward, n)
    step = small.shard_train_step(fn, mesh=mesh, accumulate=accumulate)
    state, x = jnp.ones(8), normal(ROWS, 3)
    assert_collectives(step, state, x, {})
    assert not re.search(COLLECTIVES, step.lower(state, x).compile().as_text())
    _, expected = jax.jit(fn)(state, x)
    _, found = step(step.shard(state), x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)


def test_too_few_groups_gather_and_say_so():
    fn = functools.partial(forward_and_backward, 4)
    step = small.shard_train_step(fn)
    state, x = jnp.ones(8), normal(ROWS, 3)
    text = str(step.describe(state, x))
    assert "jzero.groups is local if its n is a multiple of 8" in text
    assert "test_groups.py" in text
    _, expected = jax.jit(fn)(state, x)
    _, found = step(step.shard(state), x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)


# -- the same in a step written for one device ------------------------------------------------------------


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, momentum=0.8)(nn.Dense(16)(x))
        return nn.Dense(1)(nn.relu(x))


MODEL = Net()


def start():
    return MODEL.init(jax.random.key(0), jnp.zeros((2, 3)))


def updated(state, grads, batch_stats):
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
    return {"params": params, "batch_stats": batch_stats}


def forward(variables, x):
    return MODEL.apply(variables, x, mutable=["batch_stats"])


def step_of_a_device(state, x):
    """As for `jax.pmap(..., axis_name="batch")`: each device's own statistics, which it averages itself."""

    def loss_fn(params):
        y, new = forward({**state, "params": params}, x)
        return jnp.mean(y**2), new["batch_stats"]

    (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
    loss, stats, grads = jax.lax.pmean((loss, stats, grads), "batch")
    return updated(state, grads, stats), loss


def step_in_groups(n, state, x):
    """The same for the whole batch: a group for each device and microbatch."""

    def loss_fn(params):
        apply = jzero.groups(forward, n, in_axes=(None, 0), out_axes=(0, None))
        y, new = apply({**state, "params": params}, x)
        return jnp.mean(y**2), jax.tree.map(lambda x: x.mean(0), new["batch_stats"])

    (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
    return updated(state, grads, stats), loss


@pytest.mark.parametrize("k", [1, 2])
def test_a_step_for_pmap_keeps_its_statistics_local(k):
    state, x = start(), normal(ROWS, 3)
    whole_step = functools.partial(step_in_groups, 8 * k)
    num_sums = 1 + sum(leaf.size for leaf in jax.tree.leaves(state))
    expected, loss = jax.jit(whole_step)(state, x)
    for fn, axis_name in ((step_of_a_device, "batch"), (whole_step, None)):
        step = small.shard_train_step(fn, stage=0, accumulate=k, axis_name=axis_name)
        assert_collectives(step, state, x, {"all-reduce": num_sums})
        found, metric = step(step.shard(state), x)
        np.testing.assert_allclose(metric, loss, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)


def test_a_synchronised_norm_of_a_device_is_the_whole_batchs():
    synchronised = nn.BatchNorm(use_running_average=False, axis_name="batch")
    whole = nn.BatchNorm(use_running_average=False)
    x = normal(ROWS, 3)

    def step(state, x, norm=synchronised):
        y, new = norm.apply(state, x, mutable=["batch_stats"])
        return {**state, **new}, y

    state = whole.init(jax.random.key(0), x)
    found, y = small.shard_train_step(step, axis_name="batch")(state, x)
    expected, z = jax.jit(functools.partial(step, norm=whole))(state, x)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), (found, y), (expected, z)
    )
