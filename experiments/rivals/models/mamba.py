"""Mamba in Flax NNX: selective state spaces by an associative scan over time, the layers scanned."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.rivals.annotations import Unannotated
from experiments.rivals.models.training import State, cross_entropy, make_step, new_state


def selective_scan(
    x: jax.Array, delta: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array
) -> jax.Array:
    """h[t] = exp(delta a) h[t-1] + delta b x[t], y[t] = c h[t]; x [rows, context, inner], b [.., states]."""
    decay = jnp.exp(delta[..., None] * a[None, None])
    driven = (delta * x)[..., None] * b[:, :, None]

    def combine(left: Any, right: Any) -> Any:
        return left[0] * right[0], right[0] * left[1] + right[1]

    _, states = jax.lax.associative_scan(combine, (decay, driven), axis=1)
    return jnp.einsum("btds,bts->btd", states, c)


class Layer(nnx.Module):
    def __init__(self, dim: int, states: int, dtype: Any, annotate: Unannotated, *, rngs: nnx.Rngs):
        inner, rank = 2 * dim, max(1, dim // 16)
        self.annotate = annotate
        dense = {"dtype": dtype, "rngs": rngs}
        self.norm = nnx.RMSNorm(dim, **dense)
        self.expand = nnx.Linear(dim, 2 * inner, use_bias=False, **dense)
        self.conv = nnx.Conv(
            inner, inner, (4,), feature_group_count=inner, padding="CAUSAL", **dense
        )
        self.select = nnx.Linear(inner, rank + 2 * states, use_bias=False, **dense)
        self.delta = nnx.Linear(rank, inner, **dense)
        self.project = nnx.Linear(inner, dim, use_bias=False, **dense)
        powers = jnp.arange(1, states + 1, dtype=jnp.float32)
        self.log_a = nnx.Param(jnp.log(jnp.broadcast_to(powers, (inner, states))))
        self.skip = nnx.Param(jnp.ones(inner))
        self.rank, self.states = rank, states

    def __call__(self, x: jax.Array) -> jax.Array:
        rows = self.annotate.rows
        h, gate = jnp.split(rows(self.expand(self.norm(x))), 2, axis=-1)
        h = nnx.silu(rows(self.conv(h)))
        selected = rows(self.select(h))
        delta, b, c = jnp.split(selected, (self.rank, self.rank + self.states), axis=-1)
        delta = jax.nn.softplus(rows(self.delta(delta)).astype(jnp.float32))
        wide, b, c = (v.astype(jnp.float32) for v in (h, b, c))
        y = rows(selective_scan(wide, delta, -jnp.exp(self.log_a[...]), b, c))
        y = (y + wide * self.skip[...][None, None]).astype(x.dtype)
        return rows(x + self.project(y * nnx.silu(gate)))


class Network(nnx.Module):
    def __init__(
        self, layers: int, dim: int, states: int, vocab: int, dtype: Any, annotate: Unannotated,
        *, rngs: nnx.Rngs,
    ):  # fmt: skip
        @nnx.split_rngs(splits=layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked(rngs: nnx.Rngs) -> Layer:
            return Layer(dim, states, dtype, annotate, rngs=rngs)

        self.embed = nnx.Embed(vocab, dim, dtype=dtype, rngs=rngs)
        self.layers = stacked(rngs)
        self.norm = nnx.RMSNorm(dim, dtype=dtype, rngs=rngs)
        self.dtype, self.annotate = dtype, annotate

    def __call__(self, tokens: jax.Array) -> jax.Array:
        rows = self.annotate.rows
        graphdef, params = nnx.split(self.layers)

        def layer(x: jax.Array, params: Any) -> tuple[jax.Array, None]:
            of_one = nnx.merge(graphdef, params)
            return self.annotate.nnx(of_one, self.dtype)(x), None

        # A module for each use: so that each use's gradient is reduced at once.
        x = rows(self.annotate.nnx(self.embed, self.dtype)(tokens))
        x, _ = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, params)
        return rows(self.annotate.nnx(self.embed, self.dtype).attend(self.norm(x)))


@dataclasses.dataclass(frozen=True)
class Mamba:
    layers: int
    dim: int
    states: int = 16
    vocab: int = 50_304
    context: int = 1024
    dtype: Any = jnp.bfloat16
    annotate: Unannotated = Unannotated()

    def network(self, rngs: nnx.Rngs) -> Network:
        sizes = (self.layers, self.dim, self.states, self.vocab)
        return Network(*sizes, self.dtype, self.annotate, rngs=rngs)

    def batch(self, rows: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, self.context + 1), jnp.int32)

    def init(self, key: jax.Array) -> State:
        return new_state(nnx.to_pure_dict(nnx.state(self.network(nnx.Rngs(key)), nnx.Param)))

    def step(self, state: State, batch: jax.Array) -> tuple[State, jax.Array]:
        graphdef, abstract = nnx.split(nnx.eval_shape(lambda: self.network(nnx.Rngs(0))))

        def loss(params: Any, tokens: jax.Array) -> jax.Array:
            nnx.replace_by_pure_dict(abstract, params)
            tokens = self.annotate.rows(tokens)
            logits = nnx.merge(graphdef, abstract)(tokens[:, :-1])
            return cross_entropy(logits, tokens[:, 1:])

        return make_step(loss, self.annotate)(state, batch)
