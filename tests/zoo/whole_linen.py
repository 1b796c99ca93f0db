"""Whole programs with Flax Linen."""

import dataclasses
import tempfile
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training import train_state

from ._script import BATCH_SIZE, NUM_STEPS, adam, script, tokens

TrainState: Any = train_state.TrainState


class Block(nn.Module):
    width: int
    heads: int = 2

    @nn.compact
    def __call__(self, x, mask=None):
        y = nn.LayerNorm(use_bias=False)(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads, use_bias=False)(y, y, mask=mask)
        y = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm(use_bias=False)(x)))
        return x + nn.Dense(self.width)(y)


class Decoder(nn.Module):
    vocab: int = 24
    width: int = 16
    layers: int = 1

    @nn.compact
    def __call__(self, inputs):
        embed = nn.Embed(self.vocab, self.width)
        x = embed(inputs) + self.param("pos", nn.initializers.normal(0.02), (8, self.width))
        for _ in range(self.layers):
            x = Block(self.width)(x, nn.make_causal_mask(inputs))
        return embed.attend(nn.LayerNorm(use_bias=False)(x))


def token_loss(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@script()
def nanodo_trainer(jit):
    """A Trainer with a config, a step that donates by name, Orbax in its own hands; stopped and resumed."""

    @dataclasses.dataclass(frozen=True)
    class Config:
        workdir: str
        lr: float = 1e-2
        warmup: int = 2
        seed: int = 0
        save_every: int = 2

    class Trainer:
        def __init__(self, c: Config, data: np.ndarray):
            self.c, self.data, self.model = c, data, Decoder()
            schedule = optax.warmup_cosine_decay_schedule(0.0, c.lr, c.warmup, 10)
            tx = optax.adamw(schedule, b2=0.98, weight_decay=0.1, eps=1e-3)
            self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), tx)
            self.train_step = jit(self._train_step, donate_argnames="state")
            self.manager = ocp.CheckpointManager(
                c.workdir, options=ocp.CheckpointManagerOptions(max_to_keep=1)
            )

        def init_state(self):
            params = self.model.init(jax.random.key(self.c.seed), self.data[0, :, :-1])["params"]
            return TrainState.create(apply_fn=self.model.apply, params=params, tx=self.optimizer)

        def _train_step(self, state, in_BxL):
            def loss_fn(params):
                logits = state.apply_fn({"params": params}, in_BxL[:, :-1])
                return token_loss(logits, in_BxL[:, 1:])

            loss, grads = jax.value_and_grad(loss_fn)(state.params)
            new_state = state.apply_gradients(grads=grads)
            return new_state, {"train_loss": loss, "grad_norm": optax.tree.norm(grads)}

        def run(self, until):
            state = self.init_state()
            if (latest := self.manager.latest_step()) is not None:
                state = self.manager.restore(latest, args=ocp.args.StandardRestore(state))
            log = []
            for i in range(int(state.step), until):
                state, metrics = self.train_step(state=state, in_BxL=self.data[i])
                log.append({k: float(v) for k, v in metrics.items()})
                if (i + 1) % self.c.save_every == 0:
                    self.manager.save(i + 1, args=ocp.args.StandardSave(state))
            self.manager.wait_until_finished()
            self.manager.close()
            return state, log

    with tempfile.TemporaryDirectory() as workdir:
        data = tokens(4)
        _, first = Trainer(Config(workdir), data).run(until=3)
        state, resumed = Trainer(Config(workdir), data).run(until=4)
    return state, first, resumed


@script()
def stateful_lstm(jit):
    """Truncated backpropagation: hidden states of rows go in and come out, beside the state; no shuffling."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, carry, inputs):
            x = nn.Embed(24, 16)(inputs)
            carry, x = nn.RNN(nn.OptimizedLSTMCell(16), return_carry=True)(x, initial_carry=carry)
            return carry, nn.Dense(24)(x)

    model = Model()

    @jit
    def train_step(state, carry, inputs, targets):
        def loss_fn(params):
            new_carry, logits = state.apply_fn({"params": params}, carry, inputs)
            return token_loss(logits, targets), new_carry

        (loss, carry), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), jax.lax.stop_gradient(carry), loss

    text = tokens(1, 1 + 8 * NUM_STEPS)[0]
    carry = (jnp.zeros((BATCH_SIZE, 16)), jnp.zeros((BATCH_SIZE, 16)))
    params = model.init(jax.random.key(0), carry, text[:, :8])["params"]
    tx = optax.chain(optax.clip(0.5), adam())
    state, losses = TrainState.create(apply_fn=model.apply, params=params, tx=tx), []
    for start in range(0, 8 * NUM_STEPS, 8):
        inputs, targets = text[:, start : start + 8], text[:, start + 1 : start + 9]
        state, carry, loss = train_step(state, carry, inputs, targets)
        losses.append(float(loss))
    return state, carry, losses
