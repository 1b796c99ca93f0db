"""Pipelines (vmap over stages, and a roll) on an automatic axis train what the layers train in a row."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import programs
import small
import zoo

STAGES, EACH, MICROBATCHES, WIDTH, HIDDEN, VOCAB, SEQ, BATCH = 2, 2, 4, 16, 32, 24, 4, 16
TICKS = MICROBATCHES + STAGES - 1
TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
COLUMNS, ROWS = P("stage", None, None, "model"), P("stage", None, "model")


def init():
    keys = iter(jax.random.split(jax.random.key(0), 4))

    def weights(*shape):
        return jax.random.normal(next(keys), shape) / shape[-2] ** 0.5

    params = {
        "embed": weights(VOCAB, WIDTH),
        "blocks": {
            "up": weights(STAGES, EACH, WIDTH, HIDDEN),
            "down": weights(STAGES, EACH, HIDDEN, WIDTH),
            "scale": jnp.ones((STAGES, EACH, WIDTH)),
        },
    }
    return {"params": params, "opt_state": TX.init(params)}


def layer(constrain, x, w):
    hidden = constrain(jnp.tanh(x @ w["up"]), P(None, None, "model"))
    return x + hidden @ w["down"] * w["scale"][None, None], None


def in_a_row(blocks, x):
    blocks = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), blocks)
    return jax.lax.scan(functools.partial(layer, lambda x, spec: x), x, blocks)[0]


@jax.custom_vjp
def onward(held):
    """What each stage has made, at the next one; of a gradient, at the one before, by as many messages."""
    return jnp.roll(held, 1, axis=0)


onward.defvjp(lambda held: (onward(held), None), lambda _, grad: (jnp.roll(grad, -1, axis=0),))


def pipelined(constrain, blocks, x):
    """The layers as stages, each of which has another microbatch at a time."""
    parts = x.reshape(-1, MICROBATCHES, *x.shape[1:]).swapaxes(0, 1)
    empty = ((0, STAGES - 1),) * 2 + ((0, 0),) * x.ndim
    entering = place(jnp.pad(parts[:, None], empty), 1)  # [ticks, stages, rows, ...]: at the first
    first = (jnp.arange(STAGES) == 0)[:, None, None, None]

    def stage(blocks, x):
        return jax.lax.scan(functools.partial(layer, constrain), x, blocks)[0]

    def tick(held, entering):
        held = place(jax.vmap(stage)(blocks, jnp.where(first, entering, onward(held))), 0)
        return held, held

    _, out = jax.lax.scan(tick, jnp.zeros_like(entering[0]), entering)
    return place(out, 1)[STAGES - 1 :, -1].swapaxes(0, 1).reshape(x.shape)


def place(x, dim):
    return jax.lax.with_sharding_constraint(x, P(*(None,) * dim, "stage"))


def make_step(through):
    def loss_fn(params, tokens):
        x = through(params["blocks"], params["embed"][tokens[:, :-1]])
        logits = x @ params["embed"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(state, tokens):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], tokens)
        updates, opt_state = TX.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, {"loss": loss}

    return step


def batches(num=4):
    rng = np.random.default_rng(0)
    return [rng.integers(VOCAB, size=(BATCH, SEQ + 1)).astype(np.int32) for _ in range(num)]


def sharded(stage, model=1, data=2, **options):
    mesh = small.auto_mesh(data=data, stage=STAGES, **({"model": model} if model > 1 else {}))
    constrain = jax.lax.with_sharding_constraint if model > 1 else lambda x, spec: x
    specs = {"up": COLUMNS, "down": ROWS} if model > 1 else {}
    return small.shard_train_step(
        make_step(functools.partial(pipelined, constrain)),
        stage=stage,
        mesh=mesh,
        axis_names="data",
        auto_specs={**specs, "blocks": P("stage")},
        **options,
    )


@functools.cache
def on_one_device():
    """The losses, and the state after the last step, of the layers in a row with the whole batch."""
    step, state, losses = jax.jit(make_step(in_a_row)), init(), []
    for tokens in batches():
        state, metrics = step(state, tokens)
        losses.append(zoo.to_host(metrics))
    return losses, zoo.to_host(state)


@pytest.mark.slow(but=["3-2"])
@pytest.mark.parametrize(("stage", "model"), [(1, 1), (3, 2)])
def test_trains_as_on_one_device(stage, model):
    train_step = sharded(stage, model=model)
    state = train_step.init(init)
    losses, expected = on_one_device()
    for tokens, wanted in zip(batches(), losses, strict=True):
        state, metrics = train_step(state, tokens)
        zoo.assert_trees_close(zoo.to_host(metrics), wanted, zoo.FP32, "metrics")
    zoo.assert_trees_close(zoo.to_host(state), expected, zoo.FP32, "state")
    # Each stage's devices have its layers alone, and of those each data device its part.
    up, mu = state["params"]["blocks"]["up"], state["opt_state"][1][0].mu["blocks"]["up"]
    parts = 2 * model
    assert up.addressable_shards[0].data.size == up.size // (parts * 2 if stage == 3 else parts)
    assert mu.addressable_shards[0].data.size == mu.size // (parts * 2)


def runs(text, kind, groups):
    """How often a compiled program runs a collective over some groups of devices, and of which sizes."""
    found: dict[int, int] = {}
    for computation, times in programs.compiled_times(text).items():
        for line in computation.splitlines():
            if re.search(rf" {kind}(?:-start)?\(", line) and any(g in line for g in groups):
                dims = re.findall(r"= f32\[([\d,]+)\]", line)[0]
                size = int(np.prod([int(d) for d in dims.split(",")]))
                found[size] = found.get(size, 0) + times
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_are_reduced_once_and_not_in_each_tick(stage):
    """And a tick of each pass hands on one microbatch's rows, by one permutation; XLA inserts no other."""
    train_step, state = sharded(stage), jax.eval_shape(init)
    tokens = jax.ShapeDtypeStruct((BATCH, SEQ + 1), jnp.int32)
    num = dict.fromkeys(("up", "down"), WIDTH * HIDDEN) | {"scale": WIDTH}
    of_a_stage = VOCAB * WIDTH + EACH * sum(num.values())
    traffic = train_step.describe(state, tokens).traffic
    assert [c.total_elements for c in traffic if c.op == "all-reduce"] == [1, 1]  # loss and norm
    reduced = [c for c in traffic if c.op == "reduce-scatter"]
    assert sum(c.total_elements for c in reduced) == of_a_stage
    assert [c.times for c in reduced] == [1] * 4
    # Before the ticks, for all of them.
    assert {c.times for c in traffic if c.op == "all-gather"} == {1}
    gathered = [c for c in traffic if c.op == "all-gather" and "scale" in c.leaf]
    assert {c.total_elements for c in gathered} == {EACH * WIDTH}  # of its view, in one stage, too
    text = train_step.lower(state, tokens).compile().as_text()
    rows = BATCH // 2 // MICROBATCHES * SEQ * WIDTH
    around = runs(text, "collective-permute", ["{0,1},{1,0},{2,3},{3,2}"])
    assert around == {rows: 2 * TICKS}
    # What enters and leaves, once for a step.
    ends = runs(text, "collective-permute", ["{{1,0},{3,2}}", "{{0,1},{2,3}}"])
    assert ends == {rows * TICKS: 1, rows * MICROBATCHES: 1}
    assert programs.compiled_collectives(text)["reduce-scatter"] == 4
    assert "all-to-all" not in programs.compiled_collectives(text)
