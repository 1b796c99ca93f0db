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

from ._program import BATCH_SIZE, NUM_STEPS, adam, images, program, tokens

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


@program()
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


@program()
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


@program()
def ddpm(jit):
    """`loss, state`: EMA and a key in the state; the averaged parameters sample when training is over."""

    class UNet(nn.Module):
        @nn.compact
        def __call__(self, x, t):
            angles = t[:, None] * jnp.exp(-jnp.arange(8.0))
            t = nn.Dense(16)(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1))
            down = nn.Conv(16, (3, 3), strides=(2, 2))(x)
            down = nn.GroupNorm(4)(down) + t[:, None, None]
            up = nn.ConvTranspose(8, (3, 3), strides=(2, 2))(nn.swish(down))
            return nn.Conv(1, (3, 3))(jnp.concatenate([up, x], -1))

    class State(flax.struct.PyTreeNode):
        step: jax.Array
        params: Any
        ema_params: Any
        opt_state: Any
        rng: jax.Array
        tx: Any = flax.struct.field(pytree_node=False)

    alphas_bar = jnp.cumprod(1 - jnp.linspace(1e-4, 0.2, 20))
    model: Any = UNet()

    def noised(x, noise, t):
        a = alphas_bar[t][:, None, None, None]
        return jnp.sqrt(a) * x + jnp.sqrt(1 - a) * noise

    @functools.partial(jit, donate_argnums=0)
    def train_step(state, batch):
        rng, t_rng, noise_rng = jax.random.split(state.rng, 3)
        t = jax.random.randint(t_rng, (len(batch),), 0, len(alphas_bar))
        noise = jax.random.normal(noise_rng, batch.shape)

        def loss_fn(params):
            predicted = model.apply({"params": params}, noised(batch, noise, t), t)
            return jnp.mean(jnp.square(predicted - noise), axis=(1, 2, 3)).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        updates, opt_state = state.tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        decay = jnp.minimum(0.99, (1 + state.step) / (10 + state.step))
        ema = optax.incremental_update(params, state.ema_params, 1 - decay)
        return loss, state.replace(
            step=state.step + 1, params=params, ema_params=ema, opt_state=opt_state, rng=rng
        )

    @jax.jit
    def sample(params, rng):
        def body(x, t_rng):
            t, rng = t_rng
            predicted = model.apply({"params": params}, x, jnp.full(len(x), t))
            x = 0.99 * x - 0.1 * predicted + 0.05 * jax.random.normal(rng, x.shape)
            return x, None

        rng, init = jax.random.split(rng)
        x = jax.random.normal(init, (2, 8, 8, 1))
        return jax.lax.scan(body, x, (jnp.arange(4)[::-1], jax.random.split(rng, 4)))[0]

    rng, init_rng = jax.random.split(jax.random.key(0))
    params = model.init(init_rng, jnp.ones((1, 8, 8, 1)), jnp.ones(1))["params"]
    tx = adam()
    ema = jax.tree.map(jnp.copy, params)
    state = State(jnp.array(0), params, ema, tx.init(params), rng, tx)
    losses = []
    for batch in images():
        loss, state = train_step(state, batch["image"])
        losses.append(loss)
    return state, losses, sample(state.ema_params, jax.random.key(1))


@program()
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


@program()
def distillation(jit):
    """A frozen teacher's parameters as an argument, after the state; a float and a key; batches by name."""

    class Net(nn.Module):
        width: int

        @nn.compact
        def __call__(self, x, train=False):
            x = nn.silu(nn.Dense(self.width)(x.reshape(len(x), -1)))
            return nn.Dense(10)(nn.Dropout(0.1)(x, deterministic=not train))

    student, teacher = Net(16), Net(64)

    @jit
    def train_step(state, teacher_params, batch, temperature, dropout_rng):
        dropout_rng = jax.random.fold_in(dropout_rng, state.step)
        targets = jax.nn.softmax(teacher.apply(teacher_params, batch["image"]) / temperature)

        def loss_fn(params):
            rngs = {"dropout": dropout_rng}
            logits = state.apply_fn(params, batch["image"], train=True, rngs=rngs)
            soft = optax.softmax_cross_entropy(logits / temperature, targets).mean()
            return 0.3 * token_loss(logits, batch["label"]) + 0.7 * temperature**2 * soft, logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        agreement = jnp.mean(logits.argmax(-1) == targets.argmax(-1))
        return state.apply_gradients(grads=grads), {"loss": loss, "agreement": agreement}

    keys = jax.random.split(jax.random.PRNGKey(0), 3)
    batches = images()
    teacher_params = teacher.init(keys[0], batches[0]["image"])
    params = student.init(keys[1], batches[0]["image"])
    state, log = TrainState.create(apply_fn=student.apply, params=params, tx=adam()), []
    for batch in batches:
        state, metrics = train_step(
            state, teacher_params, batch=batch, temperature=2.0, dropout_rng=keys[2]
        )
        log.append(jax.tree.map(float, metrics))
    return state, log, teacher_params


@program()
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


@program()
def clip_towers(jit):
    """`train_step(state, **batch)`: a learned temperature, logits of all pairs, recall."""

    class Clip(nn.Module):
        @nn.compact
        def __call__(self, image, text):
            image = nn.Dense(16)(nn.gelu(nn.Dense(32)(image.reshape(len(image), -1))))
            text = nn.Dense(16)(nn.Embed(24, 16)(text).mean(1))
            image = image / jnp.linalg.norm(image, axis=-1, keepdims=True)
            text = text / jnp.linalg.norm(text, axis=-1, keepdims=True)
            return image, text, self.param("temperature", nn.initializers.constant(2.0), ())

    model: Any = Clip()

    @jit
    def train_step(state, **batch):
        def loss_fn(params):
            image, text, temperature = model.apply({"params": params}, **batch)
            logits = jnp.exp(temperature) * image @ text.T
            labels = jnp.arange(len(logits))
            losses = [token_loss(x, labels) for x in (logits, logits.T)]
            return (losses[0] + losses[1]) / 2, (logits.argmax(-1) == labels).mean()

        (loss, accuracy), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads)
        clipped = jnp.minimum(state.params["temperature"], jnp.log(100.0))
        state = state.replace(params=state.params | {"temperature": clipped})
        return state, {"loss": loss, "accuracy": accuracy, "temperature": clipped}

    pairs = [
        {"image": batch["image"], "text": text[:, :8]}
        for batch, text in zip(images(), tokens(), strict=True)
    ]
    params = model.init(jax.random.key(0), **pairs[0])["params"]
    tx = optax.lamb(1e-2, eps=1e-3)
    state, log = TrainState.create(apply_fn=model.apply, params=params, tx=tx), []
    for batch in pairs:
        state, metrics = train_step(state, **batch)
        log.append(metrics)
    image, text, _ = model.apply({"params": state.params}, **pairs[0])
    return state, log, jax.lax.top_k(image @ text.T, 3)


@flax.struct.dataclass
class Average:
    total: jax.Array
    count: jax.Array

    def merge(self, other):
        return Average(self.total + other.total, self.count + other.count)

    def compute(self):
        return self.total / self.count


@program()
def multi_steps(jit):
    """`optax.MultiSteps` with an injected rate, read and set outside of the step; metrics that merge."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.Conv(8, (3, 3), use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            return nn.Dense(10)(nn.silu(x).mean((1, 2)))

    class State(TrainState):  # type: ignore[misc]
        batch_stats: Any

    tx = optax.inject_hyperparams(optax.sgd)(
        learning_rate=optax.linear_schedule(0.1, 0.01, 4), momentum=0.9
    )
    tx = optax.MultiSteps(tx, every_k_schedule=2)
    model = Net()

    @jit
    def train_step(state, batch):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, new = model.apply(variables, batch["image"], True, mutable=["batch_stats"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return losses.mean(), (new, losses)

        grads, (new, losses) = jax.grad(loss_fn, has_aux=True)(state.params)
        metrics = {"loss": Average(losses.sum(), jnp.float32(len(losses)))}
        return state.apply_gradients(grads=grads, batch_stats=new["batch_stats"]), metrics

    @jax.jit
    def eval_step(state, batch):
        variables = {"params": state.params, "batch_stats": state.batch_stats}
        losses = optax.softmax_cross_entropy_with_integer_labels(
            model.apply(variables, batch["image"], False), batch["label"]
        )
        return Average(losses.sum(), jnp.float32(len(losses)))

    *train, test = images(5)
    variables = model.init(jax.random.key(0), train[0]["image"], True)
    state = State.create(apply_fn=model.apply, tx=tx, **variables)
    rates, merged = [], Average(jnp.zeros(()), jnp.zeros(()))
    for batch in train:
        state, metrics = train_step(state, batch)
        rates.append(float(state.opt_state.inner_opt_state.hyperparams["learning_rate"]))
        merged = merged.merge(metrics["loss"])
    return state, rates, merged.compute(), eval_step(state, test).compute()
