"""`shard_eval_step`: what is read of a state in shards is what one device would make of it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import jzero
import small
import zoo
from jzero._compare import TOLERANCES
from small import grouped, shard_train_step

pytestmark = pytest.mark.usefixtures("float64")

LAYERS, DIM, HEADS, VOCAB, CONTEXT = 3, 16, 2, 40, 10
TX = optax.adam(1e-2)


# -- a small GPT, its training, and what one would ask of it ---------------------------------------


def new_params(vocab=VOCAB, layers=LAYERS):
    rng = np.random.default_rng(0)
    shapes = {
        "embed": (vocab, DIM),
        "positions": (CONTEXT, DIM),
        "blocks": {
            "qkv": (layers, DIM, 3 * DIM),
            "project": (layers, DIM, DIM),
            "up": (layers, DIM, 4 * DIM),
            "down": (layers, 4 * DIM, DIM),
        },
    }
    return jax.tree.map(
        lambda shape: jnp.asarray(0.3 * rng.normal(size=shape)),
        shapes,
        is_leaf=lambda x: type(x) is tuple,
    )


def block(x, w, cache, t):
    """One token `[rows, dim]` of each row through a block; keys and values `[rows, context, dim]`."""
    q, k, v = jnp.split(x @ w["qkv"], 3, axis=-1)
    keys, values = (
        lax.dynamic_update_index_in_dim(old, new, t, 1)
        for old, new in zip(cache, (k, v), strict=True)
    )
    heads = (-1, CONTEXT, HEADS, DIM // HEADS)
    scores = jnp.einsum("bhd,bthd->bht", q.reshape(-1, *heads[2:]), keys.reshape(heads))
    scores = jnp.where(jnp.arange(CONTEXT)[None, None] <= t, scores, -1e30)
    seen = jnp.einsum("bht,bthd->bhd", jax.nn.softmax(scores), values.reshape(heads))
    x = x + seen.reshape(x.shape) @ w["project"]
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"], (keys, values)


def logits_of(params, tokens, cache, t):
    x = params["embed"][tokens] + params["positions"][t][None]

    def layer(x, weights_and_cache):
        weights, cache = weights_and_cache
        return block(x, weights, cache, t)

    x, cache = lax.scan(layer, x, (params["blocks"], cache))
    return x @ params["embed"].T, cache


def empty_cache(params, rows):
    return (jnp.zeros((len(params["blocks"]["qkv"]), rows, CONTEXT, DIM)),) * 2


def loss_fn(params, tokens):
    def iteration(cache, t):
        logits, cache = logits_of(params, tokens[:, t], cache, t)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, t + 1])
        return cache, losses

    cache = empty_cache(params, len(tokens))
    _, losses = lax.scan(iteration, cache, jnp.arange(CONTEXT - 1))
    return losses.mean()


def step_fn(state, tokens):
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
    updates, opt_state = TX.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def generate(params, prompt, key):
    """Samples until every row has token 1: `([rows, context], the last position)`."""
    rows, given = prompt.shape

    def goes_on(carry):
        t, _, _, done, _ = carry
        return (t < CONTEXT - 1) & ~done.all()

    def iteration(carry):
        t, out, cache, done, key = carry
        logits, cache = logits_of(params, out[:, t], cache, t)
        key, own = jax.random.split(key)
        drawn = jax.random.categorical(own, logits, axis=-1).astype(out.dtype)
        token = jnp.where(t + 1 < given, out[:, t + 1], jnp.where(done, 0, drawn))
        done |= (token == 1) & (t + 1 >= given)
        return t + 1, lax.dynamic_update_index_in_dim(out, token, t + 1, 1), cache, done, key

    out = jnp.zeros((rows, CONTEXT), prompt.dtype).at[:, :given].set(prompt)
    start = 0, out, empty_cache(params, rows), jnp.zeros(rows, bool), key
    t, out, *_ = lax.while_loop(goes_on, iteration, start)
    return out, t


def evaluate(state, tokens, key):
    """What an evaluation may say of its rows, in all the ways that couple them."""
    params, _ = state
    logits, _ = logits_of(params, tokens[:, 0], empty_cache(params, len(tokens)), 0)
    kept = jax.random.bernoulli(key, 0.5, logits.shape)
    ranks = jnp.argsort(logits[:, 0])
    return {
        "loss": loss_fn(params, tokens),
        "rows": logits,
        "dropped": jnp.where(kept, logits, 0).sum(),
        "best": (logits.argmax(-1), logits[:, 0].argmax(), logits.max(0)),
        "correct": (logits.argmax(-1) == tokens[:, 1]).sum(),
        "similar": jax.nn.softmax(logits @ logits.T).trace(),
        "ranks": ranks,
        "median": jnp.median(logits),
        "num": tokens.shape[0],
    }


def tokens_of(rows, columns=CONTEXT):
    return np.random.default_rng(rows).integers(2, VOCAB, (rows, columns), np.int32)


def trained(axes=None, params=None, **options):
    """A step on a mesh, and a state that it has trained for one step."""
    train_step = shard_train_step(step_fn, mesh=small.auto_mesh(**axes or {"data": 8}), **options)
    params = new_params() if params is None else params
    state, _ = train_step((params, TX.init(params)), tokens_of(16))
    return train_step, state


def same(actual, expected):
    zoo.assert_trees_close(
        zoo.to_host(actual), zoo.to_host(expected), TOLERANCES["float64"], "output"
    )


one_device = functools.cache(jax.jit)

# -- equal to one device ---------------------------------------------------------------------------


# Thirteen and three are no multiples of the devices.
@pytest.mark.slow
@pytest.mark.parametrize("rows", [16, 13, 3])
@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"data": 8}, {}),
        ({"data": 4, "model": 2}, {"axis_names": "data", "auto_specs": {"up": jax.P(None, None, "model")}}),
    ],
)  # fmt: skip
def test_evaluates_as_one_device(axes, options, rows):
    train_step, state = trained(axes, **options)
    eval_step, whole = jzero.shard_eval_step(evaluate, like=train_step), zoo.to_host(state)
    inputs = tokens_of(rows), jax.random.key(rows)
    same(eval_step(state, *inputs), one_device(evaluate)(whole, *inputs))
    train_step(state, tokens_of(16))  # Nothing was consumed.


@pytest.mark.slow
def test_padded_leaves_and_leaves_that_lie_elsewhere():
    train_step = shard_train_step(
        lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.tanh(x @ w).mean())(w),
        mesh=small.auto_mesh(data=8),
    )
    w = train_step(jnp.asarray(np.random.default_rng(0).normal(size=(41, 3))), jnp.ones((8, 41)))
    assert isinstance(w, jzero.LeafArray)

    def table(w, rows):
        return w[rows], w.sum(0), w, jnp.sort(w, axis=0)

    eval_step, rows = jzero.shard_eval_step(table, like=train_step), jnp.arange(12) % 41
    whole = np.asarray(w)
    for given in (
        w,
        whole,
        jnp.asarray(whole),
        train_step.on_mesh(small.auto_mesh(data=4)).shard(whole),
    ):
        same(eval_step(given, rows), jax.jit(table)(whole, rows))


def test_without_a_train_step():
    params = new_params()
    eval_step = jzero.shard_eval_step(generate, mesh=small.auto_mesh(data=4))
    placed = eval_step.shard(params)
    assert placed["blocks"]["up"].sharding.spec == PartitionSpec(None, "data")
    inputs = tokens_of(6, 3), jax.random.key(0)
    for given in (placed, params):
        same(eval_step(given, *inputs), one_device(generate)(zoo.to_host(params), *inputs))


# -- and what it costs -----------------------------------------------------------------------------


def test_what_is_not_read_is_not_taken():
    train_step, state = trained()
    tokens, key = tokens_of(16), jax.random.key(0)
    eval_step = jzero.shard_eval_step(evaluate, like=train_step)
    lowered = eval_step.lower(state, tokens, key)
    assert len(jax.tree.leaves(lowered.in_avals)) == len(jax.tree.leaves(state[0])) + 2
    plan = eval_step.plan(state, tokens, key)
    assert {plan.leaves[i].path.split(".")[0] for i in plan.unread} == {"state[1][0]"}
    assert "returns no state; reads all leaves but" in str(plan)
    report = eval_step.describe(state, tokens, key)
    assert str(report).splitlines()[:4] == [
        "jzero: evaluation over 8 devices (data axes: 'data' of size 8)",
        "reductions: where the step sums over the batch; it computes what jax.jit",
        "  computes on one device",
        "13 of 19 leaves are not read, and stay where they are",
    ]
    assert [row.role for row in report.memory] == ["parameter"]
    assert len(report.to_dict()["unread"]) == 13


@pytest.mark.parametrize(
    "unread", [np.ones(3), 2, 0.5, jnp.ones(3)], ids=lambda x: type(x).__name__
)
def test_what_is_not_read_may_be_no_array(unread):
    eval_step = jzero.shard_eval_step(lambda state, x: x @ state["w"])
    for state in (
        {"w": jnp.ones((16, 8))},
        eval_step.shard({"w": jnp.ones((16, 8))}, jnp.ones((8, 16))),
    ):
        for _ in range(3):
            np.testing.assert_array_equal(
                eval_step(state | {"unread": unread}, jnp.ones((8, 16))), 16.0
            )


# -- refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"gather": "keep"}, "shard_eval_step: Comm(gather='keep'). An evaluation has no backward pass"),
        ({"like": loss_fn}, "shard_eval_step: like is a function. It is the train step whose state is read"),
        ({"like": "a step", "mesh": "a mesh"}, "both like and a mesh of its own"),
        ({"like": "a stage 1 step", "gather": "per_pass"}, "stage=1 and Comm(gather='per_pass')"),
        ({"eval_step": 3}, "shard_eval_step: eval_step is an int. It must be a function"),
        ({"static_argnums": 0, "state_argnums": 0}, "shard_eval_step: the state 'params' is declared static"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_obeyed(options, told):
    steps = {
        "a step": shard_train_step(step_fn),
        "a stage 1 step": shard_train_step(step_fn, stage=1),
    }
    options = {"eval_step": loss_fn, **options}
    options |= {"like": steps[options["like"]]} if options.get("like") in steps else {}
    with pytest.raises(jzero.OptionError) as raised:
        jzero.shard_eval_step(**grouped(**options))
    assert told in str(raised.value)


@pytest.mark.slow
def test_a_state_that_cannot_be_read():
    train_step, state = trained()
    eval_step: Any = jzero.shard_eval_step(
        lambda state, x: x.sum() + state[0]["embed"].sum(), like=train_step
    )
    train_step(state, tokens_of(16))
    with pytest.raises(
        jzero.StateError, match="shard_eval_step: 1 of 1 leaves were already donated"
    ):
        eval_step(state, tokens_of(16))
    policy = jzero.HostCPU(delayed_update=True, delay_after=0)
    train_step, state = trained(offload=policy)
    inputs = tokens_of(16), jax.random.key(0)
    # Parameters are there; the moments wait for the last step's gradients.
    eval_step = jzero.shard_eval_step(evaluate, like=train_step)
    same(eval_step(state, *inputs), one_device(evaluate)(zoo.to_host((state[0], None)), *inputs))
    eval_step = jzero.shard_eval_step(
        lambda state, x: optax.tree.norm(state[1][0].mu), like=train_step
    )
    with pytest.raises(
        jzero.StateError, match="shard_eval_step: 6 leaves fail:\n.*still waits for the last"
    ):
        eval_step(state, tokens_of(16))


def test_a_step_inside_of_another_and_one_without_devices():
    train_step, state = trained()
    eval_step = jzero.shard_eval_step(lambda state, x: loss_fn(state[0], x), like=train_step)
    nested = jzero.shard_eval_step(lambda state, x: eval_step(state, x), like=train_step)
    with pytest.raises(
        jzero.StepError, match=r"shard_eval_step: a sharded step is called inside of another"
    ):
        nested(state, tokens_of(16))
    somewhere = train_step.on_mesh(jax.sharding.AbstractMesh((8,), ("data",)))
    eval_step, whole = jzero.shard_eval_step(loss_fn, like=somewhere), zoo.to_host(state[0])
    for use in (eval_step, eval_step.lower, lambda params, _: eval_step.shard(params)):
        with pytest.raises(
            jzero.MeshError, match="shard_eval_step: the mesh is abstract, and the step is"
        ):
            use(whole, tokens_of(16))


def counted_in_a_ref(params, tokens):
    total = jax.new_ref(jnp.zeros(()))
    total[...] = tokens.sum().astype(float)
    return total[...] + params["embed"].sum()


def test_mutable_arrays_are_refused():
    train_step, (params, _) = trained()
    for step in (counted_in_a_ref, jax.jit(counted_in_a_ref)):
        eval_step: Any = jzero.shard_eval_step(step, like=train_step)
        with pytest.raises(
            jzero.StepError, match=r"equations with a jax.Ref fail:\n.*counted_in_a_ref"
        ):
            eval_step(params, tokens_of(16))
    kept = jax.new_ref(jnp.ones(()))
    eval_step = jzero.shard_eval_step(lambda params, x: x.sum() + kept[...], like=train_step)
    with pytest.raises(jzero.StepError, match="a jax.Ref changes beside them"):
        eval_step(params, tokens_of(16))
    eval_step = jzero.shard_eval_step(lambda params, x: x[...], like=train_step)
    with pytest.raises(jzero.BatchError, match="x is a Ref"):
        eval_step(params, kept)


@pytest.mark.slow
def test_a_train_step_that_evaluates_is_told():
    train_step = shard_train_step(lambda state, tokens: loss_fn(state[0], tokens))
    params = new_params()
    with pytest.raises(jzero.StateError, match="To evaluate, use jzero.shard_eval_step"):
        train_step((params, TX.init(params)), tokens_of(16))
    for updates in (True, False):
        train_step = shard_train_step(
            lambda w, x, updates=updates: (w * 2 if updates else w, (x @ w).sum())
        )
        report = train_step.describe(jnp.ones((64, 8)), np.ones((8, 64)))
        assert ("the step changes no leaf: jzero.shard_eval_step" in str(report)) != updates
        assert report.to_dict()["updates"] == updates
