"""A diffusion transformer in Flax NNX: adaptive norms, the layers unrolled, nothing computed again."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.rivals.annotations import Unannotated
from experiments.rivals.models.training import State, new_state, updated


def sinusoids(t: jax.Array, size: int) -> jax.Array:
    frequencies = jnp.exp(-jnp.log(10_000.0) * jnp.arange(size // 2) / (size // 2))
    angles = t[:, None] * frequencies[None]
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


class Block(nnx.Module):
    def __init__(self, dim: int, heads: int, dtype: Any, annotate: Unannotated, *, rngs: nnx.Rngs):
        dense = {"dtype": dtype, "rngs": rngs}
        self.modulation = nnx.Linear(dim, 6 * dim, **dense)
        self.qkv = nnx.Linear(dim, 3 * dim, **dense)
        self.out = nnx.Linear(dim, dim, **dense)
        self.up = nnx.Linear(dim, 4 * dim, **dense)
        self.down = nnx.Linear(4 * dim, dim, **dense)
        self.heads, self.annotate = heads, annotate

    def __call__(self, x: jax.Array, condition: jax.Array) -> jax.Array:
        rows = self.annotate.rows
        six = jnp.split(rows(self.modulation(nnx.silu(condition)))[:, None], 6, axis=-1)
        shift1, scale1, gate1, shift2, scale2, gate2 = six
        h = jax.nn.standardize(x) * (1 + scale1) + shift1
        qkv = jnp.split(rows(self.qkv(h)), 3, axis=-1)
        q, k, v = (a.reshape(*x.shape[:2], self.heads, -1) for a in qkv)
        attended = jax.nn.dot_product_attention(q, k, v, implementation="xla").reshape(x.shape)
        x += gate1 * rows(self.out(attended))
        h = jax.nn.standardize(x) * (1 + scale2) + shift2
        return rows(x + gate2 * self.down(nnx.gelu(rows(self.up(h)))))


class Network(nnx.Module):
    def __init__(self, sizes: "DiT", *, rngs: nnx.Rngs):
        dim, inputs, dtype = sizes.dim, sizes.patch**2 * sizes.channels, sizes.dtype
        dense = {"dtype": dtype, "rngs": rngs}
        self.patches = nnx.Linear(inputs, dim, **dense)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (sizes.context, dim)))
        self.time_in, self.time_out = nnx.Linear(256, dim, **dense), nnx.Linear(dim, dim, **dense)
        self.labels = nnx.Embed(sizes.classes, dim, **dense)
        self.blocks = nnx.List(
            [Block(dim, sizes.heads, dtype, sizes.annotate, rngs=rngs) for _ in range(sizes.layers)]
        )
        self.modulation = nnx.Linear(dim, 2 * dim, **dense)
        self.out = nnx.Linear(dim, inputs, **dense)
        self.annotate, self.dtype = sizes.annotate, dtype

    def __call__(self, patches: jax.Array, t: jax.Array, labels: jax.Array) -> jax.Array:
        rows = self.annotate.rows
        used = lambda module: self.annotate.nnx(module, self.dtype)  # noqa: E731
        positions = self.annotate.weights(self.positions[...], self.dtype)
        x = rows(used(self.patches)(patches) + positions[None].astype(self.dtype))
        time = used(self.time_out)(nnx.silu(used(self.time_in)(sinusoids(t, 256))))
        condition = rows(time + used(self.labels)(labels))
        for block in self.blocks:
            x = used(block)(x, condition)
        modulation = rows(used(self.modulation)(nnx.silu(condition)))[:, None]
        shift, scale = jnp.split(modulation, 2, axis=-1)
        return rows(used(self.out)(jax.nn.standardize(x) * (1 + scale) + shift))


@dataclasses.dataclass(frozen=True)
class DiT:
    layers: int
    dim: int
    heads: int
    image: int = 64  # pixels of a side, of the latent
    channels: int = 4
    patch: int = 2
    classes: int = 1000
    dtype: Any = jnp.bfloat16
    annotate: Unannotated = Unannotated()

    @property
    def context(self) -> int:
        return (self.image // self.patch) ** 2

    def batch(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        image = (rows, self.image, self.image, self.channels)
        return {
            "images": jax.ShapeDtypeStruct(image, jnp.float32),
            "labels": jax.ShapeDtypeStruct((rows,), jnp.int32),
        }

    def init(self, key: jax.Array) -> State:
        params = nnx.to_pure_dict(nnx.state(Network(self, rngs=nnx.Rngs(key)), nnx.Param))
        return new_state(params, key=jax.random.key(1))

    def step(self, state: State, batch: dict[str, jax.Array]) -> tuple[State, jax.Array]:
        graphdef, abstract = nnx.split(nnx.eval_shape(lambda: Network(self, rngs=nnx.Rngs(0))))
        key, time_key, noise_key = jax.random.split(state["key"], 3)

        def loss_fn(params: Any) -> jax.Array:
            nnx.replace_by_pure_dict(abstract, params)
            images, labels = self.annotate.rows((batch["images"], batch["labels"]))
            t = self.annotate.rows(jax.random.uniform(time_key, labels.shape))
            noise = self.annotate.rows(jax.random.normal(noise_key, images.shape))
            along = t[:, None, None, None]
            mixed = self.patches((1 - along) * images + along * noise)
            velocity = nnx.merge(graphdef, abstract)(mixed, 1000 * t, labels)
            return jnp.mean((velocity.astype(jnp.float32) - self.patches(noise - images)) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        return updated(state, grads, self.annotate, key=key), loss

    def patches(self, images: jax.Array) -> jax.Array:
        """[rows, image, image, channels] -> [rows, context, patch * patch * channels]."""
        side, patch = self.image // self.patch, self.patch
        x = images.reshape(-1, side, patch, side, patch, self.channels).swapaxes(2, 3)
        return x.reshape(len(images), side * side, -1)
