"""A whole program with Equinox."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._script import NUM_STEPS, images, script


@script(author=eqx.filter_jit)
def equinox_vit(jit):
    """Modules in and out, a key for each row, dropout; evaluated in inference mode; saved and read again."""

    class Block(eqx.Module):
        norms: list
        attention: eqx.nn.MultiheadAttention
        mlp: eqx.nn.MLP
        dropout: eqx.nn.Dropout

        def __init__(self, width, key):
            first, second = jax.random.split(key)
            self.norms = [eqx.nn.LayerNorm(width) for _ in range(2)]
            self.attention = eqx.nn.MultiheadAttention(2, width, key=first)
            self.mlp = eqx.nn.MLP(width, width, 2 * width, 1, jax.nn.gelu, key=second)
            self.dropout = eqx.nn.Dropout(0.1)

        def __call__(self, x, key):
            first, second = (None, None) if key is None else jax.random.split(key)
            y = jax.vmap(self.norms[0])(x)
            x = x + self.dropout(self.attention(y, y, y), key=first)
            y = jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))
            return x + self.dropout(y, key=second)

    class ViT(eqx.Module):
        patch: eqx.nn.Conv2d
        cls: jax.Array
        positions: jax.Array
        blocks: list[Block]
        head: eqx.nn.Sequential
        width: int = eqx.field(static=True)

        def __init__(self, width, depth, key):
            keys = jax.random.split(key, depth + 3)
            self.width = width
            self.patch = eqx.nn.Conv2d(1, width, 4, stride=4, key=keys[0])
            self.cls = jnp.zeros((1, width))
            self.positions = 0.1 * jax.random.normal(keys[1], (5, width))
            self.blocks = [Block(width, k) for k in keys[3:]]
            head = eqx.nn.Linear(width, 10, key=keys[2])
            self.head = eqx.nn.Sequential([eqx.nn.LayerNorm(width), head])

        def __call__(self, x, key=None):
            x = self.patch(x).reshape(self.width, -1).T
            x = jnp.concatenate([self.cls, x]) + self.positions
            keys = (
                [None] * len(self.blocks)
                if key is None
                else jax.random.split(key, len(self.blocks))
            )
            for block, k in zip(self.blocks, keys, strict=True):
                x = block(x, k)
            return self.head(x[0])

    @eqx.filter_value_and_grad
    def compute_grads(model, images, labels, keys):
        logits = jax.vmap(model)(images, keys)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @jit
    def step_model(model, optimizer, state, images, labels, key):
        key, *subkeys = jax.random.split(key, len(images) + 1)
        loss, grads = compute_grads(model, images, labels, jnp.stack(subkeys))
        updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, loss, key

    @eqx.filter_jit
    def accuracy(model, images, labels):
        return jnp.mean(jax.vmap(model)(images).argmax(-1) == labels)

    key = jax.random.PRNGKey(2003)
    *train, test = images(NUM_STEPS + 1)
    optimizer = optax.adamw(1e-2, b1=0.9, b2=0.99, eps=1e-3)
    model = ViT(16, 1, key)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    losses = []
    for batch in train:
        x = np.transpose(batch["image"], (0, 3, 1, 2))
        model, state, loss, key = step_model(model, optimizer, state, x, batch["label"], key)
        losses.append(loss.item())
    x = np.transpose(test["image"], (0, 3, 1, 2))
    evaluated = accuracy(eqx.nn.inference_mode(model), x, test["label"])
    return eqx.filter((model, state, losses, key, evaluated), eqx.is_array_like)
