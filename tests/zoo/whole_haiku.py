"""Whole programs with Haiku: transformed functions, states in NamedTuples, a precision policy of jmp's."""

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._script import BATCH_SIZE, NUM_STEPS, adam, images, script


@script()
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


@script()
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
