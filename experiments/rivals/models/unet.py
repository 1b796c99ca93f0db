"""A diffusion UNet in Flax Linen: BatchNorm in residual blocks, attention where images are small."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from experiments.rivals.annotations import Unannotated
from experiments.rivals.models.dit import sinusoids
from experiments.rivals.models.training import State, new_state, updated


class ResBlock(nn.Module):
    channels: int
    dtype: Any
    annotate: Unannotated

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        rows = self.annotate.rows
        conv = functools.partial(nn.Conv, dtype=self.dtype)
        norm = functools.partial(nn.BatchNorm, use_running_average=False, dtype=self.dtype)
        h = rows(conv(self.channels, (3, 3))(nn.silu(norm()(x))))
        h += rows(nn.Dense(self.channels, dtype=self.dtype)(nn.silu(time)))[:, None, None]
        h = rows(conv(self.channels, (3, 3))(nn.silu(norm()(h))))
        if x.shape[-1] != self.channels:
            x = conv(self.channels, (1, 1))(x)
        return rows(x + h)


class Attention(nn.Module):
    dtype: Any
    annotate: Unannotated
    head_size: int = 64

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        rows, channels = self.annotate.rows, x.shape[-1]
        h = nn.LayerNorm(dtype=self.dtype)(x.reshape(len(x), -1, channels))
        qkv = jnp.split(rows(nn.Dense(3 * channels, dtype=self.dtype)(h)), 3, axis=-1)
        size = min(self.head_size, channels)
        q, k, v = (a.reshape(*h.shape[:2], -1, size) for a in qkv)
        out = jax.nn.dot_product_attention(q, k, v, implementation="xla").reshape(h.shape)
        return rows(x + nn.Dense(channels, dtype=self.dtype)(out).reshape(x.shape))


class Network(nn.Module):
    widths: tuple[int, ...]
    depth: int
    attends: tuple[bool, ...]
    dtype: Any
    annotate: Unannotated

    @nn.compact
    def __call__(self, x: jax.Array, t: jax.Array) -> jax.Array:
        linen, out_channels = self.annotate.linen, x.shape[-1]
        options = {"dtype": self.dtype, "annotate": self.annotate}
        res = functools.partial(linen(ResBlock, self.dtype), **options)
        attend = functools.partial(linen(Attention, self.dtype), **options)
        conv = functools.partial(linen(nn.Conv, self.dtype), dtype=self.dtype)
        dense = functools.partial(linen(nn.Dense, self.dtype), dtype=self.dtype)
        base = self.widths[0]
        time = dense(4 * base)(nn.silu(dense(4 * base)(sinusoids(t, base))))
        x = self.annotate.rows(conv(base, (3, 3))(x))
        skips = [x]
        for i, (width, attends) in enumerate(zip(self.widths, self.attends, strict=True)):
            for _ in range(self.depth):
                x = res(width)(x, time)
                x = attend()(x) if attends else x
                skips.append(x)
            if i < len(self.widths) - 1:
                x = self.annotate.rows(conv(width, (3, 3), strides=(2, 2))(x))
                skips.append(x)
        x = res(self.widths[-1])(attend()(res(self.widths[-1])(x, time)), time)
        for i, width in reversed(list(enumerate(self.widths))):
            for _ in range(self.depth + 1):
                x = res(width)(jnp.concatenate([x, skips.pop()], axis=-1), time)
                x = attend()(x) if self.attends[i] else x
            if i > 0:
                shape = (len(x), 2 * x.shape[1], 2 * x.shape[2], x.shape[3])
                x = self.annotate.rows(conv(width, (3, 3))(jax.image.resize(x, shape, "nearest")))
        return self.annotate.rows(conv(out_channels, (3, 3))(nn.silu(x)))


@dataclasses.dataclass(frozen=True)
class UNet:
    widths: tuple[int, ...]
    depth: int = 2
    attends: tuple[bool, ...] = (False, True, True, True)
    image: int = 64  # pixels of a side, of the latent
    channels: int = 4
    dtype: Any = jnp.bfloat16
    annotate: Unannotated = Unannotated()

    @property
    def model(self) -> Network:
        return Network(self.widths, self.depth, self.attends, self.dtype, self.annotate)

    def batch(self, rows: int) -> jax.ShapeDtypeStruct:
        image = (rows, self.image, self.image, self.channels)
        return jax.ShapeDtypeStruct(image, jnp.float32)

    def init(self, key: jax.Array) -> State:
        images = jnp.zeros((1, self.image, self.image, self.channels))
        variables = self.model.init(key, images, jnp.zeros(1))
        params, stats = variables["params"], variables["batch_stats"]
        return new_state(params, batch_stats=stats, key=jax.random.key(1))

    def step(self, state: State, images: jax.Array) -> tuple[State, jax.Array]:
        key, time_key, noise_key = jax.random.split(state["key"], 3)
        images = self.annotate.rows(images)
        t = self.annotate.rows(jax.random.uniform(time_key, (len(images),)))
        noise = self.annotate.rows(jax.random.normal(noise_key, images.shape))
        along = t[:, None, None, None]
        mixed = (1 - along) * images + along * noise

        def loss_fn(params: Any) -> tuple[jax.Array, Any]:
            variables = {"params": params, "batch_stats": state["batch_stats"]}
            found, changed = self.model.apply(variables, mixed, 1000 * t, mutable=["batch_stats"])
            return jnp.mean((found.astype(jnp.float32) - noise) ** 2), changed["batch_stats"]

        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        return updated(state, grads, self.annotate, batch_stats=stats, key=key), loss
