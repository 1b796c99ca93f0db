"""Llama 3 in plain JAX: grouped-query attention, RoPE, SwiGLU, RMSNorm, an output layer of its own."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from experiments.rivals.annotations import Unannotated
from experiments.rivals.models.training import State, cross_entropy, make_step, new_state


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-5)
    return (wide * scale.astype(jnp.float32)[None, None]).astype(x.dtype)


def rope(x: jax.Array) -> jax.Array:
    """Rotates pairs of [rows, context, heads, size] by their place in the context."""
    half = x.shape[-1] // 2
    frequencies = 500_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequencies[None]
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [left * cos - right * sin, right * cos + left * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def attention(x: jax.Array, w: dict[str, jax.Array], size: int, annotate: Unannotated) -> jax.Array:
    q, k, v = (
        annotate.rows(x @ w[name]).reshape(*x.shape[:2], -1, size) for name in ("q", "k", "v")
    )
    out = jax.nn.dot_product_attention(rope(q), rope(k), v, is_causal=True, implementation="xla")
    return annotate.rows(out.reshape(*x.shape[:2], -1) @ w["o"])


@dataclasses.dataclass(frozen=True)
class Llama:
    layers: int
    dim: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int = 128_256
    context: int = 1024
    loss_chunks: int = 1  # of the context, of which the logits exist one after the other
    microbatches: int = 1
    dtype: Any = jnp.bfloat16
    annotate: Unannotated = Unannotated()

    @property
    def head_size(self) -> int:
        return self.dim // self.heads

    def batch(self, rows: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, self.context + 1), jnp.int32)

    def init(self, key: jax.Array) -> State:
        normal, d, layers = jax.nn.initializers.normal(0.02), self.dim, self.layers
        kv = self.kv_heads * self.head_size
        shapes = {
            "q": (d, d), "k": (d, kv), "v": (d, kv), "o": (d, d),
            "gate": (d, self.hidden), "up": (d, self.hidden), "down": (self.hidden, d),
        }  # fmt: skip
        keys = iter(jax.random.split(key, len(shapes) + 2))
        stacked = {name: normal(next(keys), (layers, *shape)) for name, shape in shapes.items()}
        norms = {name: jnp.ones((layers, d)) for name in ("attention_norm", "mlp_norm")}
        return new_state({
            "embed": normal(next(keys), (self.vocab, d)),
            "layers": stacked | norms,
            "norm": jnp.ones(d),
            "head": normal(next(keys), (d, self.vocab)),
        })  # fmt: skip

    def step(self, state: State, batch: jax.Array) -> tuple[State, jax.Array]:
        return make_step(self.loss, self.annotate, self.microbatches)(state, batch)

    def loss(self, params: Any, tokens: jax.Array) -> jax.Array:
        tokens = self.annotate.rows(tokens)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.annotate.rows(self.weights(params["embed"])[inputs])
        x, _ = jax.lax.scan(jax.checkpoint(self.layer, prevent_cse=False), x, params["layers"])
        x = rms_norm(x, params["norm"])
        head = self.weights(params["head"])
        if self.loss_chunks == 1:
            return cross_entropy(self.annotate.rows(x @ head), targets)

        @jax.checkpoint
        def chunk(part: tuple[jax.Array, jax.Array]) -> jax.Array:
            x, targets = self.annotate.rows(part)
            # Of a gathered head: so that its gradient is reduced to shards before it is added up.
            return cross_entropy(self.annotate.rows(x @ self.annotate.weights(head)), targets)

        parts = jax.tree.map(
            lambda x: x.reshape(len(x), self.loss_chunks, -1, *x.shape[2:]).swapaxes(0, 1),
            (x, targets),
        )
        return jax.lax.map(chunk, parts).mean()

    def layer(self, x: jax.Array, params: Any) -> tuple[jax.Array, None]:
        w, rows = self.weights(params), self.annotate.rows
        x += attention(rms_norm(x, w["attention_norm"]), w, self.head_size, self.annotate)
        h = rms_norm(x, w["mlp_norm"])
        x += rows(jax.nn.silu(rows(h @ w["gate"])) * rows(h @ w["up"])) @ w["down"]
        return rows(x), None

    def weights(self, params: Any) -> Any:
        return self.annotate.weights(jax.tree.map(lambda w: w.astype(self.dtype), params))
