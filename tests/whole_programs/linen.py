"""Whole programs with Flax Linen."""

import dataclasses
import functools
import io
import tempfile
from typing import Any, NamedTuple

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

    model, tx = Mixer(), optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(eps=1e-3))
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


class ActorCritic(nn.Module):
    num_actions: int = 3

    @nn.compact
    def __call__(self, x):
        actor = nn.tanh(nn.Dense(16, kernel_init=nn.initializers.orthogonal(np.sqrt(2)))(x))
        critic = nn.tanh(nn.Dense(16, kernel_init=nn.initializers.orthogonal(np.sqrt(2)))(x))
        logits = nn.Dense(self.num_actions, kernel_init=nn.initializers.orthogonal(0.01))(actor)
        return logits, nn.Dense(1)(critic).squeeze(-1)


class Transition(NamedTuple):
    done: jax.Array
    action: jax.Array
    value: jax.Array
    reward: jax.Array
    log_prob: jax.Array
    obs: jax.Array


@program()
def purejaxrl_ppo(jit):
    """A `runner_state` alone: environments, rollouts, permuted minibatches and epochs, all in the step."""
    num_envs, num_steps, gamma, lam, clip = 16, 4, 0.99, 0.95, 0.2

    def env_step(env_state, action):
        position, time = env_state
        position = jnp.clip(position + 0.1 * (action - 1), -1, 1)
        done = time >= 3
        reward = 1.0 - jnp.abs(position)
        env_state = jnp.where(done, 0.5, position), jnp.where(done, 0, time + 1)
        return observe(env_state), env_state, reward, done

    def observe(env_state):
        position, time = env_state
        return jnp.stack([position, position**2, time / 3, jnp.ones_like(position)], axis=-1)

    network = ActorCritic()

    def log_probs(logits, action):
        return jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None], -1)[..., 0]

    @jit
    def update_step(runner_state):
        def env_steps(runner_state, _):
            train_state, env_state, last_obs, rng = runner_state
            rng, key = jax.random.split(rng)
            logits, value = network.apply(train_state.params, last_obs)
            action = jax.random.categorical(key, logits)
            obs, env_state, reward, done = jax.vmap(env_step)(env_state, action)
            log_prob = log_probs(logits, action)
            transition = Transition(done, action, value, reward, log_prob, last_obs)
            return (train_state, env_state, obs, rng), transition

        runner_state, traj_batch = jax.lax.scan(env_steps, runner_state, None, num_steps)
        train_state, env_state, last_obs, rng = runner_state
        _, last_val = network.apply(train_state.params, last_obs)

        def advantage(carry, transition):
            gae, next_value = carry
            alive = 1 - transition.done
            delta = transition.reward + gamma * next_value * alive - transition.value
            gae = delta + gamma * lam * alive * gae
            return (gae, transition.value), gae

        start = (jnp.zeros_like(last_val), last_val)
        _, advantages = jax.lax.scan(advantage, start, traj_batch, reverse=True, unroll=4)

        def update_epoch(update_state, _):
            def update_minibatch(train_state, minibatch):
                def loss_fn(params, traj, gae, targets):
                    logits, value = network.apply(params, traj.obs)
                    ratio = jnp.exp(log_probs(logits, traj.action) - traj.log_prob)
                    gae = (gae - gae.mean()) / (gae.std() + 1e-8)
                    clipped = jnp.clip(ratio, 1 - clip, 1 + clip)
                    actor_loss = -jnp.minimum(ratio * gae, clipped * gae).mean()
                    entropy = -(jax.nn.softmax(logits) * jax.nn.log_softmax(logits)).sum(-1)
                    value_loss = 0.5 * jnp.square(value - targets).mean()
                    return actor_loss + 0.5 * value_loss - 0.01 * entropy.mean()

                loss, grads = jax.value_and_grad(loss_fn)(train_state.params, *minibatch)
                return train_state.apply_gradients(grads=grads), loss

            train_state, rng = update_state
            rng, key = jax.random.split(rng)
            permutation = jax.random.permutation(key, num_envs * num_steps)
            batch = (traj_batch, advantages, advantages + traj_batch.value)
            batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[permutation], batch)
            minibatches = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)
            train_state, losses = jax.lax.scan(update_minibatch, train_state, minibatches)
            return (train_state, rng), losses

        update_state, losses = jax.lax.scan(update_epoch, (train_state, rng), None, 2)
        train_state, rng = update_state
        metrics = {"reward": traj_batch.reward.mean(), "losses": losses}
        return (train_state, env_state, last_obs, rng), metrics

    rng = jax.random.PRNGKey(30)
    rng, key = jax.random.split(rng)
    env_state = (jnp.linspace(-1, 1, num_envs), jnp.zeros(num_envs, jnp.int32))
    obs = observe(env_state)
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-3, eps=1e-3))
    params = network.init(key, obs)
    train_state = TrainState.create(apply_fn=network.apply, params=params, tx=tx)
    runner_state, log = (train_state, env_state, obs, rng), []
    for _ in range(NUM_STEPS):
        runner_state, metrics = update_step(runner_state)
        log.append(metrics)
    return runner_state, log


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
    model = UNet()

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

    model = Clip()

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
    rates, merged = [], None
    for batch in train:
        state, metrics = train_step(state, batch)
        rates.append(float(state.opt_state.inner_opt_state.hyperparams["learning_rate"]))
        merged = metrics["loss"].merge(merged) if merged else metrics["loss"]
    return state, rates, merged.compute(), eval_step(state, test).compute()


# The rows of `q_pred` are like those of `rewards`, which may thus be state.
@program(state_argnums=0)
def cleanrl_dqn(jit):
    """The state returned last, behind rows; a replay buffer in NumPy; a target network."""

    class QNetwork(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(nn.silu(nn.Dense(32)(nn.silu(nn.Dense(32)(x)))))

    class QState(TrainState):  # type: ignore[misc]
        target_params: Any

    class ReplayBuffer:
        def __init__(self, size, rng):
            self.rng, self.size, self.num = rng, size, 0
            self.obs = np.zeros((size, 2, 4), np.float32)
            self.actions, self.rewards = np.zeros((size, 1), np.int32), np.zeros(size, np.float32)
            self.dones = np.zeros(size, bool)

        def add(self, obs, next_obs, action, reward, done):
            i = self.num % self.size
            self.obs[i], self.actions[i] = (obs, next_obs), action
            self.rewards[i], self.dones[i] = reward, done
            self.num += 1

        def sample(self, num):
            i = self.rng.integers(0, min(self.num, self.size), num)
            return self.obs[i, 0], self.actions[i], self.obs[i, 1], self.rewards[i], self.dones[i]

    q_network, rng = QNetwork(), np.random.default_rng(0)
    q_network_apply = jax.jit(q_network.apply)
    params = q_network.init(jax.random.PRNGKey(0), np.zeros((1, 4), np.float32))
    q_state = QState.create(
        apply_fn=q_network.apply, params=params, tx=adam(),
        target_params=q_network.init(jax.random.PRNGKey(1), np.zeros((1, 4), np.float32)),
    )  # fmt: skip

    @jit
    def update(q_state, observations, actions, next_observations, rewards, dones):
        q_next = q_network.apply(q_state.target_params, next_observations).max(axis=-1)
        targets = rewards + (1 - dones) * 0.99 * q_next

        def mse_loss(params):
            q_pred = q_network.apply(params, observations)
            q_pred = q_pred[jnp.arange(q_pred.shape[0]), actions.squeeze()]
            return ((q_pred - targets) ** 2).mean(), q_pred

        (loss_value, q_pred), grads = jax.value_and_grad(mse_loss, has_aux=True)(q_state.params)
        q_state = q_state.apply_gradients(grads=grads)
        return loss_value, q_pred, q_state

    buffer, log = ReplayBuffer(64, rng), []
    obs = rng.normal(size=4).astype(np.float32)
    for global_step in range(80):
        epsilon = max(0.1, 1 - global_step / 40)
        if rng.random() < epsilon:
            action = rng.integers(3)
        else:
            action = int(q_network_apply(q_state.params, obs[None]).argmax())
        next_obs = np.roll(obs, action) * np.float32(0.9)
        buffer.add(obs, next_obs, action, next_obs.sum(), global_step % 10 == 9)
        obs = rng.normal(size=4).astype(np.float32) if global_step % 10 == 9 else next_obs
        if global_step >= 40 and global_step % 10 == 0:
            loss, q_values, q_state = update(q_state, *buffer.sample(BATCH_SIZE))
            log.append({"loss": float(loss), "q_values": q_values.mean().item()})
        if global_step % 20 == 0:
            q_state = q_state.replace(
                target_params=optax.incremental_update(q_state.params, q_state.target_params, 0.5)
            )
    return q_state, log


@program()
def jaxrl_agent(jit):
    """`agent, info = agent.update(batch)`: a jitted method of a dataclass, which is itself the state."""

    class Critic(nn.Module):
        @nn.compact
        def __call__(self, observations, actions):
            x = jnp.concatenate([observations, actions], -1)
            return nn.Dense(1)(nn.gelu(nn.Dense(32)(x))).squeeze(-1)

    class Policy(nn.Module):
        @nn.compact
        def __call__(self, observations):
            x = nn.gelu(nn.Dense(32)(observations))
            return jnp.tanh(nn.Dense(2)(x)), nn.Dense(2)(x)

    def pair(*args):
        """Two critics, their parameters stacked."""
        return nn.vmap(
            Critic,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=None,
            axis_size=2,
        )(*args)

    @flax.struct.dataclass
    class Agent:
        rng: jax.Array
        actor: TrainState
        critic: TrainState
        target: Any
        log_alpha: TrainState
        discount: float = flax.struct.field(pytree_node=False)

        def sample(self, params, rng, observations):
            mean, log_std = self.actor.apply_fn(params, observations)
            noise = jax.random.normal(rng, mean.shape)
            log_prob = jax.scipy.stats.norm.logpdf(noise) - log_std
            return mean + jnp.exp(log_std) * noise, log_prob.sum(-1)

        @jit
        def update(self, batch):
            rng, next_rng, actor_rng = jax.random.split(self.rng, 3)
            alpha = jnp.exp(self.log_alpha.params["value"])
            actions, log_prob = self.sample(self.actor.params, next_rng, batch["next_observations"])
            next_q = self.critic.apply_fn(self.target, batch["next_observations"], actions).min(0)
            target_q = batch["rewards"] + self.discount * batch["masks"] * (
                next_q - alpha * log_prob
            )

            def critic_loss(params):
                q = self.critic.apply_fn(params, batch["observations"], batch["actions"])
                return ((q - target_q) ** 2).sum(0).mean()

            value, grads = jax.value_and_grad(critic_loss)(self.critic.params)
            critic = self.critic.apply_gradients(grads=grads)

            def actor_loss(params):
                actions, log_prob = self.sample(params, actor_rng, batch["observations"])
                q = critic.apply_fn(critic.params, batch["observations"], actions).min(0)
                return (alpha * log_prob - q).mean(), -log_prob.mean()

            grads, entropy = jax.grad(actor_loss, has_aux=True)(self.actor.params)
            actor = self.actor.apply_gradients(grads=grads)
            grads = jax.grad(lambda p: jnp.exp(p["value"]) * (entropy + 2.0))(self.log_alpha.params)
            log_alpha = self.log_alpha.apply_gradients(grads=grads)
            target = optax.incremental_update(critic.params, self.target, 0.1)
            agent = self.replace(
                rng=rng, actor=actor, critic=critic, target=target, log_alpha=log_alpha
            )
            return agent, {"critic_loss": value, "entropy": entropy, "alpha": alpha}

    def batches():
        rng = np.random.default_rng(0)
        normal = lambda *shape: rng.normal(size=(BATCH_SIZE, *shape)).astype(np.float32)  # noqa: E731
        for _ in range(NUM_STEPS):
            yield {
                "observations": normal(6),
                "actions": np.tanh(normal(2)),
                "rewards": normal(),
                "masks": np.float32(rng.random(BATCH_SIZE) < 0.9),
                "next_observations": normal(6),
            }

    rng, actor_rng, critic_rng = jax.random.split(jax.random.PRNGKey(42), 3)
    observations, actions = np.zeros((1, 6), np.float32), np.zeros((1, 2), np.float32)
    policy, critics = Policy(), pair()
    critic_params = critics.init(critic_rng, observations, actions)
    create = TrainState.create
    agent: Any = Agent(
        rng,
        create(apply_fn=policy.apply, params=policy.init(actor_rng, observations), tx=adam()),
        create(apply_fn=critics.apply, params=critic_params, tx=adam()),
        jax.tree.map(jnp.copy, critic_params),
        create(apply_fn=None, params={"value": jnp.zeros(())}, tx=adam()),
        discount=0.99,
    )
    infos = []
    for batch in batches():
        agent, info = agent.update(batch)
        infos.append({f"training/{k}": v for k, v in info.items()})
    return agent, infos
