"""Gathers run ahead of their use: what holds them back, and what they leave alone."""

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
NOTHING = 0


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
