"""Whole programs with Flax Linen."""

import dataclasses
import functools
import io
import tempfile
from typing import Any

import flax.linen as nn
import flax.struct
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import serialization
from flax.training import train_state

from ._script import BATCH_SIZE, NUM_STEPS, adam, images, script, tokens

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
def big_vision(jit):
    """`update_fn(params, opt, rng, batch)`: a key that comes back, measurements, a checkpoint by NumPy."""

    class Mixer(nn.Module):
        @nn.compact
        def __call__(self, image, train=False):
            x = nn.Conv(16, (2, 2), strides=(2, 2), name="stem")(image)
            x = x.reshape(len(x), -1, 16)
            y = nn.gelu(nn.Dense(32)(nn.LayerNorm()(x).swapaxes(1, 2)))
            x = x + nn.Dense(x.shape[1], use_bias=False)(y).swapaxes(1, 2)
            x = nn.Dropout(0.1)(nn.LayerNorm()(x).mean(1), deterministic=not train)
            return nn.Dense(10, name="head", kernel_init=nn.initializers.zeros)(x)

    model: Any = Mixer()
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(eps=1e-3))
    schedule = optax.linear_schedule(1e-2, 0.0, 10)
    tx = optax.chain(tx, optax.scale_by_schedule(schedule), optax.scale(-1.0))

    @functools.partial(jit, donate_argnums=(0, 1))
    def update_fn(params, opt, rng, batch):
        measurements = {}
        rng, rng_mixup, rng_model = jax.random.split(rng, 3)
        mix = jax.random.beta(rng_mixup, 0.5, 0.5)
        image = mix * batch["image"] + (1 - mix) * jnp.roll(batch["image"], 1, axis=0)
        hot = jax.nn.one_hot(batch["label"], 10)
        labels = mix * hot + (1 - mix) * jnp.roll(hot, 1, axis=0)

        def loss_fn(params):
            logits = model.apply({"params": params}, image, train=True, rngs={"dropout": rng_model})
            return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, labels).sum(-1))

        l, grads = jax.value_and_grad(loss_fn)(params)  # noqa: E741
        updates, opt = tx.update(grads, opt, params)
        params = optax.apply_updates(params, updates)
        gs = jax.tree.leaves(grads)
        measurements["l2_grads"] = jnp.sqrt(sum([jnp.vdot(g, g) for g in gs]))
        ps = jax.tree.leaves(params)
        measurements["l2_params"] = jnp.sqrt(sum([jnp.vdot(p, p) for p in ps]))
        us = jax.tree.leaves(updates)
        measurements["l2_updates"] = jnp.sqrt(sum([jnp.vdot(u, u) for u in us]))
        return params, opt, rng, l, measurements

    @jax.jit
    def predict_fn(params, image):
        return jax.nn.sigmoid(model.apply({"params": params}, image))

    rng, rng_init = jax.random.split(jax.random.PRNGKey(0))
    *train, val = images(NUM_STEPS + 1)
    params = jax.jit(model.init)(rng_init, train[0]["image"])["params"]
    opt = tx.init(params)
    rng, rng_loop = jax.random.split(rng)
    log: list[Any] = []
    for step, batch in enumerate(train):
        params, opt, rng_loop, loss_value, measurements = update_fn(params, opt, rng_loop, batch)
        log.append({"training_loss": float(loss_value), "global_schedule": schedule(step)})
        log[-1] |= measurements
    file = io.BytesIO()
    checkpoint = {"params": params, "opt": serialization.to_state_dict(opt), "step": step}
    np.savez(file, **flax.traverse_util.flatten_dict(jax.tree.map(np.asarray, checkpoint), sep="/"))
    file.seek(0)
    return params, opt, rng_loop, log, dict(np.load(file)), predict_fn(params, val["image"])


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


@script()
def lora_partial(jit):
    """`functools.partial(step, config, model)`; a frozen base and adapters in one tree."""

    @dataclasses.dataclass(frozen=True)
    class Config:
        rank: int = 4
        lr: float = 1e-2
        z_loss: float = 1e-3

    def init_lora(key, params, rank):
        flat = flax.traverse_util.flatten_dict(params)
        chosen = {path: w for path, w in flat.items() if path[-1] == "kernel" and w.ndim == 2}
        keys = jax.random.split(key, len(chosen))
        return {
            "/".join(path): {
                "a": 0.1 * jax.random.normal(k, (w.shape[0], rank)),
                "b": jnp.zeros((rank, w.shape[1])),
            }
            for k, (path, w) in zip(keys, chosen.items(), strict=True)
        }

    def merged(params):
        flat = flax.traverse_util.flatten_dict(params["base"], sep="/")
        for path, ab in params["lora"].items():
            flat[path] = flat[path] + ab["a"] @ ab["b"]
        return flax.traverse_util.unflatten_dict(flat, sep="/")

    def train_step(config, model, tx, state, batch):
        def loss_fn(params):
            logits = model.apply({"params": merged(params)}, batch["input_ids"])
            z = jax.nn.logsumexp(logits, axis=-1)
            mask = batch["attention_mask"]
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
            return jnp.sum((losses + config.z_loss * z**2) * mask) / jnp.sum(mask)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        state = {"params": params, "opt_state": opt_state, "step": state["step"] + 1}
        return state, {"loss": loss, "step": state["step"]}

    config, model, data = Config(), Decoder(), tokens()
    base = model.init(jax.random.key(0), data[0, :, :-1])["params"]
    params = {"base": base, "lora": init_lora(jax.random.key(1), base, config.rank)}
    transforms = {"base": optax.set_to_zero(), "lora": optax.adamw(config.lr, eps=1e-3)}
    tx = optax.multi_transform(transforms, {"base": "base", "lora": "lora"})
    step_fn = jit(functools.partial(train_step, config, model, tx), donate_argnums=(0,))
    state, log = {"params": params, "opt_state": tx.init(params), "step": 0}, []
    for ids in data:
        batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "attention_mask": ids[:, 1:] > 3}
        state, metrics = step_fn(state, batch)
        log.append(metrics)
    return state, log, merged(state["params"])
