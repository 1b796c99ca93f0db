"""Random bits are those of one device, however the keys come: never folded, never averaged."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._parts import (
    CLASSES,
    FEATURES,
    ROWS,
    WIDTH,
    cross_entropies,
    dense,
    labelled,
    learn,
    mlp,
    mlp_start,
    update,
    with_arguments,
)
from ._program import Program, program, register, relative


def _with_mask(params, x, label, kept):
    """The loss of a net whose hidden units are dropped where `kept` says, at a rate of a half."""
    h = jnp.where(kept, 2 * jnp.tanh(dense(params[0], x)), 0)
    losses = cross_entropies(dense(params[1], h), label)
    return losses.mean(), {"losses": losses, "kept": kept, "num_kept": kept.sum()}


def _mask(key, rows):
    return jax.random.bernoulli(key, 0.5, (rows, WIDTH))


def _dropout(key_of_step, impl_config=None):
    def step(state, x, label, key):
        kept = _mask(key, x.shape[0])
        return learn(state, lambda params: _with_mask(params, x, label, kept))

    return Program(
        init=mlp_start,
        batches=with_arguments(labelled, lambda i, _: (key_of_step(i),)),
        step=step,
        covers="I3",
        config=impl_config or {},
    )


for _name, _key_of_step, _config in [
    ("dropout_typed_key", jax.random.key, None),
    ("dropout_raw_key", jax.random.PRNGKey, None),
    ("dropout_rbg_key", functools.partial(jax.random.key, impl="rbg"), None),
    ("dropout_unsafe_rbg_key", functools.partial(jax.random.key, impl="unsafe_rbg"), None),
    # Bits of a part of the rows cannot be computed alone: the whole must be.
    ("dropout_threefry_in_order", jax.random.key, {"jax_threefry_partitionable": False}),
]:
    _is_slow = _name == "dropout_unsafe_rbg_key"
    register(_name, functools.partial(_dropout, _key_of_step, _config), is_slow=_is_slow)


@program
def dropout_key_in_the_state():
    """The key rests in the state, is split in each step, and another one is folded with a counter."""

    def init(dtype):
        keys = {"key": jax.random.key(3), "raw": jax.random.PRNGKey(4)}
        return {**mlp_start(dtype), **keys, "step": jnp.zeros((), jnp.int32)}

    def step(state, x, label):
        key, dropout_key = jax.random.split(state["key"])
        kept = _mask(dropout_key, x.shape[0])
        kept &= _mask(jax.random.fold_in(state["raw"], state["step"]), x.shape[0]) | (x[:, :1] > 0)
        more = {"key": key, "step": state["step"] + 1}
        return learn(state, lambda params: _with_mask(params, x, label, kept), **more)

    return Program(init=init, batches=labelled, step=step, covers="I3")


def _per_example(keys_of_step):
    def step(state, x, label, keys):
        def of_row(key):
            mask_key, crop_key = jax.random.split(key)
            kept = jax.random.bernoulli(mask_key, 0.5, (WIDTH,))
            return kept, jax.random.randint(crop_key, (), 0, FEATURES)

        kept, at = jax.vmap(of_row)(keys)
        rolled = jax.vmap(jnp.roll)(x, at)

        def loss_fn(params):
            loss, outputs = _with_mask(params, rolled, label, kept)
            return loss, {**outputs, "at": at}

        return learn(state, loss_fn)

    return Program(
        init=mlp_start,
        batches=with_arguments(labelled, lambda i, _: (keys_of_step(i),)),
        step=step,
        covers="B3 I3",
        note="one key for each row, as an argument with rows",
    )


def _raw_keys(i):
    return np.random.default_rng(30 + i).integers(0, 2**32, (ROWS, 2)).astype(np.uint32)


register(
    "one_typed_key_for_each_row",
    functools.partial(_per_example, lambda i: jax.random.split(jax.random.key(i), ROWS)),
)
register("one_raw_key_for_each_row", functools.partial(_per_example, _raw_keys))


@program
def keys_for_rows_made_inside():
    """One key is split into one for each row; others are folded with the rows' labels."""

    def step(state, x, label, key):
        noise_key, mask_key = jax.random.split(key)
        of_rows = jax.random.split(noise_key, x.shape[0])
        of_labels = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(mask_key, label)
        noise = jax.vmap(lambda k: jax.random.normal(k, (FEATURES,), x.dtype))(of_rows)
        kept = jax.vmap(lambda k: jax.random.bernoulli(k, 0.5, (WIDTH,)))(of_labels)
        state, outputs = learn(
            state, lambda params: _with_mask(params, x + 0.1 * noise, label, kept)
        )
        return state, {**outputs, "noise": noise, "key_of_row": jax.random.key_data(of_rows)}

    batches = with_arguments(labelled, lambda i, _: (jax.random.key(i),))
    return Program(init=mlp_start, batches=batches, step=step, covers="B3 I3")


@program
def rng_bit_generator():
    """XLA's own generator, with its state in the train state: bits and the next state, exactly."""

    def init(dtype):
        return {**mlp_start(dtype), "rng": jnp.arange(4, dtype=jnp.uint32)}

    def step(state, x, label):
        rng, bits = jax.lax.rng_bit_generator(state["rng"], (x.shape[0], WIDTH), dtype=jnp.uint32)
        kept = bits > jnp.uint32(2**31)
        state, outputs = learn(state, lambda params: _with_mask(params, x, label, kept), rng=rng)
        return state, {**outputs, "bits": bits}

    return Program(init=init, batches=labelled, step=step, covers="A2 I3")


@program
def gradient_noise():
    """Langevin dynamics: noise on the gradient from a key argument, as large as the author says."""

    def step(state, x, label, key):
        def loss(params):
            return cross_entropies(mlp(params, x), label).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        leaves, structure = jax.tree.flatten(grads)
        keys = jax.random.split(key, len(leaves))
        noise = [
            0.1 * jax.random.normal(k, leaf.shape, leaf.dtype)
            for k, leaf in zip(keys, leaves, strict=True)
        ]
        grads = jax.tree.map(jnp.add, grads, jax.tree.unflatten(structure, noise))
        outputs = {"loss": value, "noise": noise[0], "size": optax.tree.norm(noise)}
        return update(state, grads), outputs

    batches = with_arguments(labelled, lambda i, _: (jax.random.key(i),))
    return Program(init=mlp_start, batches=batches, step=step, covers="A3 I3")


@program
def returned_key():
    """The step hands back the next key, among its outputs and in its state."""

    def init(dtype):
        return {**mlp_start(dtype), "last": jax.random.key(0)}

    def step(state, x, label, key):
        following, mask_key = jax.random.split(key)
        kept = _mask(mask_key, x.shape[0])
        state, outputs = learn(
            state, lambda params: _with_mask(params, x, label, kept), last=following
        )
        keys = jax.random.split(following, x.shape[0])
        return state, {**outputs, "key": following, "keys": keys}

    batches = with_arguments(labelled, lambda i, _: (jax.random.key(i),))
    return Program(init=init, batches=batches, step=step, covers="I3", note="Misleading: a key")


@relative
def drawn_from_many_distributions():
    """Bits of all widths, integers, and distributions that draw in loops, for each row."""

    def step(state, x, label, key):
        keys = jax.random.split(key, 8)
        rows = x.shape[0]
        scale = 1.0 + x[:, 0] ** 2
        drawn = {
            "bits8": jax.random.bits(keys[0], (rows, 3), jnp.uint8),
            "bits32": jax.random.bits(keys[1], (rows, 5)),
            "integers": jax.random.randint(keys[2], (rows,), -5, 17),
            "signs": jax.random.rademacher(keys[3], (rows, 2), jnp.int32),
            "truncated": jax.random.truncated_normal(keys[4], -1.0, 2.0, (rows,), x.dtype),
            "exponential": jax.random.exponential(keys[5], (rows,), x.dtype),
            "gamma": jax.random.gamma(keys[6], scale.astype(jnp.float32)),
            "poisson": jax.random.poisson(keys[7], scale.astype(jnp.float32)),
        }
        weights = drawn["exponential"] + drawn["gamma"].astype(x.dtype)

        def loss_fn(params):
            losses = cross_entropies(mlp(params, x), (label + drawn["integers"]) % CLASSES)
            return (weights * losses).mean() / 3, drawn

        return learn(state, loss_fn)

    batches = with_arguments(labelled, lambda i, _: (jax.random.key(i),))
    return Program(init=mlp_start, batches=batches, step=step, covers="I3")
