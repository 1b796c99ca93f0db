"""Gathers run ahead of their use by at most `prefetch_bytes`; what is computed and moved stays the same."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import jzero
import programs
import small
from jzero.segments import _planned
from jzero.testing import assert_same_training
from jzero.tracing import _jaxpr

KERNEL = 4 * programs.WIDTH * programs.HIDDEN  # bytes of one of a layer's two matrices
NOTHING, EVERYTHING = 0, 2**28


def stacked_state(num_layers, dim=16):
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "up": jax.random.normal(keys[0], (num_layers, dim, 2 * dim)) / 4,
        "down": jax.random.normal(keys[1], (num_layers, 2 * dim, dim)) / 4,
        "scale": 1 + jax.random.normal(keys[2], (num_layers, dim)) / 4,
    }


def layer(x, weights):
    hidden = jnp.tanh(x * weights["scale"][None] @ weights["up"])
    return x + hidden @ weights["down"], hidden.mean()


def stacked_step(params, x, *, remat=False, reverse=False):
    """Gradient descent on a stack of layers; the loop also stacks a statistic of each."""

    def loss_fn(params):
        block = jax.checkpoint(layer, prevent_cse=False) if remat else layer
        y, means = jax.lax.scan(block, x, params, reverse=reverse)
        weights = jnp.arange(1.0, 1 + means.size, dtype=means.dtype)
        return jnp.mean(y**2) + jnp.sum(means * weights), means

    (loss, means), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": loss, "means": means}


def assert_close(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert jnp.allclose(jnp.asarray(a), jnp.asarray(b), rtol=2e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "num_layers", "reverse", "remat"),
    [
        ({"data": 8}, 1, False, True), ({"data": 8}, 2, True, False), ({"data": 8}, 5, False, True),
        ({"node": 2, "local": 2}, 3, True, True),
    ],
)  # fmt: skip
def test_loops_of_any_length_train_as_on_one_device(axes, num_layers, reverse, remat):
    step = functools.partial(stacked_step, remat=remat, reverse=reverse)
    state, x = stacked_state(num_layers), jax.random.normal(jax.random.key(1), (16, 16))
    expected = jax.jit(step)(state, x)
    # The second prefetches `scale` and `up`, not `down`.
    for prefetch_bytes in (NOTHING, 4 * (16 + 512), EVERYTHING):
        train_step = small.shard_train_step(
            step, mesh=small.auto_mesh(**axes), comm=jzero.Comm(prefetch_bytes=prefetch_bytes)
        )
        assert_close(train_step(train_step.shard(state, x), x), expected)


# What moves, and when.


def sharded_jaxpr(model, prefetch_bytes, **options):
    train_step = small.shard_train_step(
        programs.train_step, mesh=small.auto_mesh(data=8), prefetch_bytes=prefetch_bytes, **options
    )
    state = programs.abstract_state(model, optax.sgd(1e-3))
    jaxpr = jax.make_jaxpr(train_step)(state, programs.tokens())
    return _jaxpr.open_jaxpr(jaxpr)[0]


def walk(jaxpr):
    for eqn in jaxpr.eqns:
        yield jaxpr, eqn
        for inner in _jaxpr.inner_jaxprs(eqn):
            yield from walk(_jaxpr.open_jaxpr(inner)[0])


def is_gather(eqn):
    """Whether it is of a gather, by the name that a profile shows."""
    return "jzero.gather[" in str(eqn.source_info.name_stack)


def carried_gathers(jaxpr):
    """Bytes of gathered values that each loop hands to its next turn, for loops that hand any."""
    scans = [eqn for _, eqn in walk(jaxpr) if eqn.primitive.name == "scan"]
    return [nbytes for nbytes in map(carried_bytes, scans) if nbytes]


def carried_bytes(scan):
    body = _jaxpr.scan_parts(scan).body
    outs = {v for e in body.eqns if is_gather(e) for v in e.outvars}
    return sum(v.aval.size * v.aval.dtype.itemsize for v in body.outvars if v in outs)


@pytest.mark.slow
def test_a_backward_loop_begins_when_its_carry_is_there(monkeypatch):
    """With remat its first turn reads no cotangent, and would be computed beside the logits."""
    monkeypatch.setattr(
        _planned, "_on_cpus", lambda mesh: False
    )  # There a gather waits by what it reads.
    found = []
    for outer, eqn in walk(sharded_jaxpr(programs.Model(depth=5, remat=True), KERNEL)):
        if eqn.primitive.name == "scan":
            parts = _jaxpr.scan_parts(eqn)
            gathers = {v for e in parts.body.eqns if is_gather(e) for v in e.outvars}
            carried = eqn.invars[parts.num_consts :]
            first = [x for x, y in zip(carried, parts.body.outvars, strict=False) if y in gathers]
            makers = {v: e for e in outer.eqns for v in e.outvars}
            found += [is_held(makers, x) for x in first]
    assert found == [False, True]  # of the forward loop, and of the backward one


def is_held(makers, x):
    """Whether a barrier holds what is gathered, or what it is gathered from."""
    eqn = makers[x]
    if is_gather(eqn) and eqn.primitive.name == "all_gather":
        eqn = makers[eqn.invars[0]]
    return eqn.primitive.name == "optimization_barrier"


@pytest.mark.slow
def test_a_loop_that_is_unrolled_is_left_alone():
    def step(params, x):
        def loss_fn(params):
            y, _ = jax.lax.scan(layer, x, params, unroll=2)
            return jnp.mean(y**2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss_fn)(params))

    train_step = small.shard_train_step(step, mesh=small.auto_mesh(data=8))
    jaxpr = jax.make_jaxpr(train_step)(stacked_state(4), jnp.ones((16, 16)))
    assert carried_gathers(_jaxpr.open_jaxpr(jaxpr)[0]) == []


@pytest.mark.slow
def test_what_a_gather_waits_for_has_two_uses():
    """The barrier of a gather keeps what it waits for: XLA drops what has no other use."""
    jaxpr = sharded_jaxpr(programs.Model(scan=False), NOTHING)
    barriers = [e for _, e in walk(jaxpr) if e.primitive.name == "optimization_barrier"]
    tokens = [a for e in barriers for a in e.invars[1:]]
    assert tokens
    assert all(tokens.count(token) >= 2 for token in tokens)


@pytest.mark.slow
def test_a_policy_around_a_loop_hides_no_parameter():
    """JAX wraps what such a policy computes again in a call of its own; gathers belong inside it."""

    def layer(x, ws):
        def inner(y, w):
            return jax.checkpoint(lambda y: (jnp.tanh(y @ w) * jnp.sin(x), None))(y)

        return jax.lax.scan(inner, x, ws)[0] + x, None

    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

    def step_fn(ws, x):
        def loss_fn(ws):
            return jnp.mean(jax.lax.scan(jax.checkpoint(layer, policy=policy), x, ws)[0] ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(ws)
        return ws - 0.1 * grads, loss

    def init_fn():
        return jax.random.normal(jax.random.key(0), (3, 2, 16, 16)) / 4

    batches = [jax.random.normal(jax.random.key(i), (16, 16)) for i in range(3)]
    assert_same_training(step_fn, init_fn, batches, stage=3, axes=jzero.Axes(min_shard_bytes=0))
    train_step = small.shard_train_step(step_fn)
    calls = str(jax.make_jaxpr(train_step)(jax.eval_shape(init_fn), batches[0]))
    assert "eval_jaxpr" not in calls
