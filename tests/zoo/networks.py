"""Kinds of networks under one plain step: TrainState, `value_and_grad`, `apply_gradients`."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state

from jzero.testing import Tolerance

from ._entry import Entry, entry
from ._models import (
    BATCH_SIZE,
    MLP,
    NUM_CLASSES,
    NUM_FEATURES,
    SEQ_LEN,
    VOCAB_SIZE,
    accuracy,
    adamw,
    cross_entropy,
    labelled_batches,
    token_batches,
)


def create_state(model: nn.Module, example: jax.Array, tx: optax.GradientTransformation) -> Any:
    params = model.init(jax.random.key(0), example)["params"]
    return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def classify_step(state, batch):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["x"])
        return cross_entropy(logits, batch["label"]), logits

    (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    state = state.apply_gradients(grads=grads)
    return state, {"loss": loss, "accuracy": accuracy(logits, batch["label"])}


def predict_next_step(state, tokens):
    def loss_fn(params):
        return cross_entropy(state.apply_fn({"params": params}, tokens[:, :-1]), tokens[:, 1:])

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss, "grad_norm": optax.tree.norm(grads)}


def classifier_state():
    return create_state(MLP(), jnp.zeros((1, NUM_FEATURES)), adamw())


@entry
def mlp():
    return Entry(init=classifier_state, batches=labelled_batches, step=classify_step)


class Block(nn.Module):
    width: int = 16

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        mask = nn.make_causal_mask(x[..., 0])
        # No biases: the loss does not depend on a key's bias, whose gradient would be all rounding.
        attention = nn.MultiHeadDotProductAttention(num_heads=2, use_bias=False)
        x = x + attention(nn.LayerNorm()(x), mask=mask)
        x = x + nn.Dense(self.width)(nn.gelu(nn.Dense(2 * self.width)(nn.LayerNorm()(x))))
        return x, None


class Transformer(nn.Module):
    scanned: bool = False
    remat: bool = False
    tied: bool = False
    num_layers: int = 2
    width: int = 16

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCAB_SIZE, self.width)
        positions = self.param("positions", nn.initializers.normal(0.1), (SEQ_LEN, self.width))
        x = embed(tokens) + positions[None]
        block = nn.remat(Block, prevent_cse=not self.scanned) if self.remat else Block
        if self.scanned:
            layers = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=self.num_layers,
            )
            x, _ = layers(self.width)(x, None)
        else:
            for _ in range(self.num_layers):
                x, _ = block(self.width)(x)
        x = nn.LayerNorm()(x)
        return embed.attend(x) if self.tied else nn.Dense(VOCAB_SIZE, use_bias=False)(x)


def _transformer(**options) -> Entry:
    def init():
        schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-2, warmup_steps=2, decay_steps=10)
        tx = optax.chain(optax.clip_by_global_norm(0.5), adamw(schedule, weight_decay=0.1))
        return create_state(Transformer(**options), jnp.zeros((1, SEQ_LEN), jnp.int32), tx)

    return Entry(init=init, batches=token_batches, step=predict_next_step)


@entry
def transformer():
    return _transformer()


@entry
def transformer_remat():
    return _transformer(remat=True)


@entry
def transformer_scan():
    return _transformer(scanned=True)


@entry
def transformer_scan_remat():
    return _transformer(scanned=True, remat=True)


@entry
def tied_embeddings():
    return _transformer(tied=True, num_layers=1)


@entry
def mixed_bf16():
    """float32 parameters, bfloat16 compute."""

    def init():
        return create_state(MLP(dtype=jnp.bfloat16), jnp.zeros((1, NUM_FEATURES)), adamw())

    def step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["x"])
            return cross_entropy(logits.astype(jnp.float32), batch["label"])

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    # bfloat16 has 8 bits, and gradients are summed over the devices before the cast to float32: two
    # roundings at 2**-8, twice that in the second moments.
    tolerance = Tolerance(rtol=2**-6, leaf_rtol=2**-6)
    return Entry(init=init, batches=labelled_batches, step=step, tolerance=tolerance)


@entry
def conv():
    class ConvNet(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Conv(8, (3, 3))(x))
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
            x = nn.relu(nn.Conv(16, (3, 3), strides=(2, 2))(x))
            return nn.Dense(NUM_CLASSES)(x.reshape(x.shape[0], -1))

    def init():
        return create_state(ConvNet(), jnp.zeros((1, 8, 8, 3)), optax.sgd(0.1, momentum=0.9))

    def batches(num_steps):
        rng = np.random.default_rng(2)
        shape = (BATCH_SIZE, 8, 8, 3)
        return [
            ({**batch, "x": jnp.asarray(rng.normal(size=shape), jnp.float32)},)
            for (batch,) in labelled_batches(num_steps)
        ]

    return Entry(init=init, batches=batches, step=classify_step)


@entry
def lstm():
    """A scan whose first carry is a constant, while every later one has rows of the batch."""

    class Tagger(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(VOCAB_SIZE, 8)(tokens)
            return nn.Dense(VOCAB_SIZE)(nn.RNN(nn.LSTMCell(8))(x))

    def init():
        return create_state(Tagger(), jnp.zeros((1, SEQ_LEN), jnp.int32), adamw())

    return Entry(init=init, batches=token_batches, step=predict_next_step)


@jax.custom_vjp
def attention(params, x):
    return _attention_forward(params, x)[0]


def _attention_forward(params, x):
    q, k, v = (x @ params[name] for name in ("query", "key", "value"))
    weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k) / np.float32(np.sqrt(q.shape[-1])))
    context = jnp.einsum("bqk,bkd->bqd", weights, v)
    return context @ params["out"], (params, x, q, k, v)


def _attention_backward(residuals, d_out):
    params, x, q, k, v = residuals
    scale = np.float32(1 / np.sqrt(q.shape[-1]))
    weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k) * scale)
    context = jnp.einsum("bqk,bkd->bqd", weights, v)
    d_context = d_out @ params["out"].T
    d_weights = jnp.einsum("bqd,bkd->bqk", d_context, v)
    d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdims=True)) * scale
    d_query = jnp.einsum("bqk,bkd->bqd", d_scores, k)
    d_key = jnp.einsum("bqk,bqd->bkd", d_scores, q)
    d_value = jnp.einsum("bqk,bqd->bkd", weights, d_context)
    d_params = {
        "query": jnp.einsum("bse,bsd->ed", x, d_query),
        "key": jnp.einsum("bse,bsd->ed", x, d_key),
        "value": jnp.einsum("bse,bsd->ed", x, d_value),
        "out": jnp.einsum("bse,bsd->ed", context, d_out),
    }
    d_x = d_query @ params["query"].T + d_key @ params["key"].T + d_value @ params["value"].T
    return d_params, d_x


attention.defvjp(_attention_forward, _attention_backward)


@entry
def custom_vjp_attention():
    """The backward pass is written by hand and returns the parameters' gradients itself."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(VOCAB_SIZE, 16)(tokens)
            init = nn.initializers.lecun_normal()
            names = ("query", "key", "value", "out")
            x = x + attention({name: self.param(name, init, (16, 16)) for name in names}, x)
            return nn.Dense(VOCAB_SIZE)(x)

    def init():
        return create_state(Model(), jnp.zeros((1, SEQ_LEN), jnp.int32), adamw())

    return Entry(init=init, batches=token_batches, step=predict_next_step)


@entry
def moe_top_k():
    """Top-2 routing; the balance loss is a product of two means over the whole batch."""
    num_experts, width = 8, 16

    class MixtureOfExperts(nn.Module):
        @nn.compact
        def __call__(self, x):
            probs = nn.softmax(nn.Dense(num_experts, use_bias=False)(x))
            gates, chosen = jax.lax.top_k(probs, 2)
            routed = jax.nn.one_hot(chosen, num_experts)
            init = nn.initializers.lecun_normal(batch_axis=0)
            up = self.param("up", init, (num_experts, x.shape[-1], width))
            down = self.param("down", init, (num_experts, width, NUM_CLASSES))
            combine = jnp.einsum("bk,bke->be", gates / gates.sum(-1, keepdims=True), routed)
            hidden = nn.relu(jnp.einsum("bf,efw->bew", x, up))
            balance = (routed.sum(1).mean(0) * probs.mean(0)).sum() * num_experts
            return jnp.einsum("bew,ewc,be->bc", hidden, down, combine), balance

    def init():
        return create_state(MixtureOfExperts(), jnp.zeros((1, NUM_FEATURES)), adamw())

    def step(state, batch):
        def loss_fn(params):
            logits, balance = state.apply_fn({"params": params}, batch["x"])
            return cross_entropy(logits, batch["label"]) + 0.1 * balance, balance

        (loss, balance), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss, "balance": balance}

    return Entry(init=init, batches=labelled_batches, step=step)


@entry
def lora():
    """Frozen base parameters in the state, low-rank adapters that are trained."""
    model, rank = MLP(), 4

    def init():
        base = model.init(jax.random.key(0), jnp.zeros((1, NUM_FEATURES)))["params"]
        keys = iter(jax.random.split(jax.random.key(1), 4))

        def adapter(kernel):
            rows, columns = kernel.shape
            a = 0.3 * jax.random.normal(next(keys), (rows, rank))
            return {"a": a, "b": 0.3 * jax.random.normal(next(keys), (rank, columns))}

        adapters = {name: adapter(layer["kernel"]) for name, layer in base.items()}
        tx = adamw()
        return {"base": base, "adapters": adapters, "opt_state": tx.init(adapters)}

    def step(state, batch):
        def loss_fn(adapters):
            def adapted(name, layer):
                low_rank = adapters[name]["a"] @ adapters[name]["b"]
                return {**layer, "kernel": layer["kernel"] + low_rank}

            params = {name: adapted(name, layer) for name, layer in state["base"].items()}
            return cross_entropy(model.apply({"params": params}, batch["x"]), batch["label"])

        loss, grads = jax.value_and_grad(loss_fn)(state["adapters"])
        updates, opt_state = adamw().update(grads, state["opt_state"], state["adapters"])
        adapters = optax.apply_updates(state["adapters"], updates)
        return {**state, "adapters": adapters, "opt_state": opt_state}, {"loss": loss}

    return Entry(init=init, batches=labelled_batches, step=step)
