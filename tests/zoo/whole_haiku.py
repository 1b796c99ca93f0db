"""Whole programs with Haiku: transformed functions, states in NamedTuples, a precision policy of jmp's."""

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from ._script import NUM_STEPS, images, script


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
