"""Whole programs with Haiku: transformed functions, states in NamedTuples, a precision policy of jmp's."""

from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax

from jzero.testing import Tolerance

from ._program import BATCH_SIZE, NUM_STEPS, adam, images, program


@program()
def haiku_classifier(jit):
    """Four arguments of state, a key among them, returned in another order behind the loss."""

    def forward(images, is_training):
        x = hk.Conv2D(8, 3, stride=2, with_bias=False)(images)
        x = hk.BatchNorm(True, True, decay_rate=0.9)(x, is_training)
        x = hk.Flatten()(jax.nn.silu(x))
        if is_training:
            x = hk.dropout(hk.next_rng_key(), 0.2, x)
        return hk.nets.MLP([32, 10], activation=jnp.tanh)(x)

    net: Any = hk.transform_with_state(forward)
    tx = optax.chain(optax.trace(decay=0.9), optax.scale_by_schedule(lambda i: -0.1 * 0.9**i))

    def loss_fn(params, state, rng, batch):
        logits, state = net.apply(params, state, rng, batch["image"], True)
        labels = jax.nn.one_hot(batch["label"], 10)
        loss = optax.softmax_cross_entropy(logits, labels).mean()
        l2 = 0.5 * sum(jnp.sum(p**2) for p in jax.tree.leaves(params))
        return loss + 1e-3 * l2, (loss, state)

    @jit
    def update(params, state, opt_state, rng, batch):
        rng, net_rng = jax.random.split(rng)
        grads, (loss, state) = jax.grad(loss_fn, has_aux=True)(params, state, net_rng, batch)
        updates, opt_state = tx.update(grads, opt_state)
        return loss, rng, optax.apply_updates(params, updates), opt_state, state

    @jax.jit
    def evaluate(params, state, batch):
        logits, _ = net.apply(params, state, None, batch["image"], False)
        return jnp.mean(logits.argmax(-1) == batch["label"])

    *train, test = images(NUM_STEPS + 1)
    rng = hk.PRNGSequence(0)
    params, state = net.init(next(rng), train[0]["image"], is_training=True)
    opt_state, key, log = tx.init(params), next(rng), []
    for batch in train:
        loss, key, params, opt_state, state = update(params, state, opt_state, key, batch)
        log.append({"loss": loss, "accuracy": evaluate(params, state, test)})
    return params, state, opt_state, key, log


class GANTuple(NamedTuple):
    gen: Any
    disc: Any


class GANState(NamedTuple):
    params: GANTuple
    opt_state: GANTuple


@program()
def gan(jit):
    """Two steps of one state: each updates one network, and returns both; a static size; a key first."""

    def generator(z):
        return hk.Sequential([hk.Linear(32), jax.nn.silu, hk.Linear(16), jnp.tanh])(z)

    def discriminator(x):
        x = jax.nn.leaky_relu(hk.Linear(32)(x), 0.2)
        return hk.Linear(2)(hk.LayerNorm(-1, True, True)(x))

    gen: Any = hk.without_apply_rng(hk.transform(generator))
    disc: Any = hk.without_apply_rng(hk.transform(discriminator))
    optimizers = GANTuple(gen=adam(1e-2), disc=optax.adam(3e-3, b1=0.5, b2=0.9, eps=1e-3))

    class GAN:
        num_latents = 8

        def initial_state(self, rng, batch):
            latents = jnp.ones((len(batch), self.num_latents))
            rng_gen, rng_disc = jax.random.split(rng)
            params = GANTuple(gen.init(rng_gen, latents), disc.init(rng_disc, batch))
            states = GANTuple(*(o.init(p) for o, p in zip(optimizers, params, strict=True)))
            return GANState(params, states)

        def sample(self, rng, gen_params, num_samples):
            return gen.apply(gen_params, jax.random.normal(rng, (num_samples, self.num_latents)))

        def gen_loss(self, gen_params, disc_params, rng, batch):
            logits = disc.apply(disc_params, self.sample(rng, gen_params, len(batch)))
            return -jax.nn.log_softmax(logits)[:, 1].mean()

        def disc_loss(self, disc_params, gen_params, rng, batch):
            fake = self.sample(rng, gen_params, len(batch))
            logits = disc.apply(disc_params, jnp.concatenate([batch, fake], axis=0))
            labels = jnp.concatenate([jnp.ones(len(batch)), jnp.zeros(len(batch))])
            labels = labels.astype(jnp.int32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        def update(self, rng, gan_state, batch):
            """A step of the discriminator, then one of the generator."""
            params, opt_state = gan_state
            rng, rng_disc, rng_gen = jax.random.split(rng, 3)
            loss_fn = jax.value_and_grad(self.disc_loss)
            disc_loss, grads = loss_fn(params.disc, params.gen, rng_disc, batch)
            updates, disc_opt = optimizers.disc.update(grads, opt_state.disc)
            disc_params = optax.apply_updates(params.disc, updates)
            loss_fn = jax.value_and_grad(self.gen_loss)
            gen_loss, grads = loss_fn(params.gen, disc_params, rng_gen, batch)
            updates, gen_opt = optimizers.gen.update(grads, opt_state.gen)
            gen_params = optax.apply_updates(params.gen, updates)
            state = GANState(GANTuple(gen_params, disc_params), GANTuple(gen_opt, disc_opt))
            return rng, state, {"gen_loss": gen_loss, "disc_loss": disc_loss}

    data = np.random.default_rng(0).normal(size=(NUM_STEPS, BATCH_SIZE, 16)).astype(np.float32)
    model, rng = GAN(), jax.random.PRNGKey(1729)
    update = jit(model.update)
    sample = jax.jit(model.sample, static_argnums=2)
    rng, rng1 = jax.random.split(rng)
    gan_state, log = model.initial_state(rng1, data[0]), []
    for batch in data:
        rng, gan_state, metrics = update(rng, gan_state, batch)
        log.append(metrics)
    return gan_state, log, sample(rng, gan_state.params.gen, 8)


@program()
def wgan_two_steps(jit):
    """Two jitted steps with a state each: what one trains is a plain argument of the other."""
    gen: Any = hk.without_apply_rng(
        hk.transform(lambda z: hk.nets.MLP([32, 16], activation=jnp.tanh)(z))
    )
    critic: Any = hk.without_apply_rng(
        hk.transform(lambda x: hk.nets.MLP([32, 1], activation=jnp.tanh)(x))
    )
    tx_gen, tx_critic = adam(1e-2), optax.rmsprop(5e-3, eps=1e-3)

    @jit
    def critic_step(critic_params, critic_opt, gen_params, key, real):
        z_key, eps_key = jax.random.split(key)
        fake = gen.apply(gen_params, jax.random.normal(z_key, (len(real), 8)))
        eps = jax.random.uniform(eps_key, (len(real), 1))
        mixed = eps * real + (1 - eps) * fake

        def loss_fn(params):
            one = lambda x: critic.apply(params, x[None])[0, 0]  # noqa: E731
            slopes = jnp.linalg.norm(jax.vmap(jax.grad(one))(mixed), axis=-1)
            distance = critic.apply(params, fake).mean() - critic.apply(params, real).mean()
            return distance + 10.0 * jnp.mean((slopes - 1) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(critic_params)
        updates, critic_opt = tx_critic.update(grads, critic_opt)
        return optax.apply_updates(critic_params, updates), critic_opt, loss

    @jit
    def generator_step(gen_params, gen_opt, critic_params, z):
        def loss_fn(params):
            return -critic.apply(critic_params, gen.apply(params, z)).mean()

        loss, grads = jax.value_and_grad(loss_fn)(gen_params)
        updates, gen_opt = tx_gen.update(grads, gen_opt)
        return optax.apply_updates(gen_params, updates), gen_opt, loss

    data = np.random.default_rng(1).normal(size=(2 * NUM_STEPS, BATCH_SIZE, 16)).astype(np.float32)
    keys = hk.PRNGSequence(3)
    gen_params = gen.init(next(keys), jnp.ones((1, 8)))
    critic_params = critic.init(next(keys), data[0])
    gen_opt, critic_opt, log = tx_gen.init(gen_params), tx_critic.init(critic_params), []
    for i in range(NUM_STEPS):
        for real in data[2 * i : 2 * i + 2]:
            critic_params, critic_opt, critic_loss = critic_step(
                critic_params, critic_opt, gen_params, next(keys), real
            )
        z = jax.random.normal(next(keys), (BATCH_SIZE, 8))
        gen_params, gen_opt, gen_loss = generator_step(gen_params, gen_opt, critic_params, z)
        log.append((critic_loss, gen_loss))
    return gen_params, gen_opt, critic_params, critic_opt, log


class TrainState(NamedTuple):
    params: Any
    state: Any
    opt_state: Any
    loss_scale: Any


# As `mixed_bf16` of the zoo: gradients are summed over the devices in bfloat16.
@program(tolerance=Tolerance(rtol=2**-6, leaf_rtol=2**-6))
def jmp_loss_scale(jit):
    """A precision policy for the network, and a dynamic loss scale in the state; steps that are skipped."""
    policy = jmp.get_policy("params=float32,compute=bfloat16,output=float32")
    tx = optax.sgd(0.05, momentum=0.9)

    def forward(batch, is_training):
        x = hk.Flatten()(batch["image"])
        x = jnp.tanh(hk.Linear(32)(policy.cast_to_compute(x)))
        x = policy.cast_to_output(hk.Linear(10)(x))
        count = hk.get_state("count", [], jnp.int32, jnp.zeros)
        hk.set_state("count", count + is_training)
        return x

    net: Any = hk.transform_with_state(forward)

    def loss_fn(params, state, loss_scale, batch):
        logits, state = net.apply(policy.cast_to_compute(params), state, None, batch, True)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return loss_scale.scale(losses.mean()), (losses.mean(), state)

    @jit
    def train_step(train_state, batch):
        params, state, opt_state, loss_scale = train_state
        grad_fn = jax.grad(loss_fn, has_aux=True)
        grads, (loss, new_state) = grad_fn(params, state, loss_scale, batch)
        grads = loss_scale.unscale(policy.cast_to_param(grads))
        updates, new_opt_state = tx.update(grads, opt_state)
        new_params = optax.apply_updates(params, updates)
        finite = jmp.all_finite(grads)
        new_params, new_state, new_opt_state = jmp.select_tree(
            finite, (new_params, new_state, new_opt_state), (params, state, opt_state)
        )
        train_state = TrainState(new_params, new_state, new_opt_state, loss_scale.adjust(finite))
        return train_state, {"loss": loss, "scale": loss_scale.loss_scale, "finite": finite}

    batches = images(NUM_STEPS + 1)
    batches[1]["image"][3, 0, 0, 0] = np.inf  # a broken example
    params, state = net.init(jax.random.PRNGKey(0), batches[0], True)
    params = policy.cast_to_param(params)
    scale = jmp.DynamicLossScale(jnp.float32(2**10), period=2)
    train_state, log = TrainState(params, state, tx.init(params), scale), []
    for batch in batches:
        train_state, scalars = train_step(train_state, batch)
        log.append(jax.device_get(scalars))
    return train_state, log
