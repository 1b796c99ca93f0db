"""Mixtures of experts in plain JAX, top 2 of each token: einsums with a capacity, and sorts without one."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from experiments.rivals.annotations import Unannotated
from experiments.rivals.models.llama import attention, rms_norm
from experiments.rivals.models.training import State, cross_entropy, make_step, new_state


@dataclasses.dataclass(frozen=True)
class MoE:
    layers: int
    dim: int
    heads: int
    hidden: int
    experts: int = 8
    capacity: float = 1.25
    vocab: int = 32_768
    context: int = 1024
    dtype: Any = jnp.bfloat16
    annotate: Unannotated = Unannotated()

    def batch(self, rows: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, self.context + 1), jnp.int32)

    def init(self, key: jax.Array) -> State:
        normal, d, num, hidden = (
            jax.nn.initializers.normal(0.02),
            self.dim,
            self.layers,
            self.hidden,
        )
        shapes = {
            "q": (d, d), "k": (d, d), "v": (d, d), "o": (d, d), "router": (d, self.experts),
            "up": (self.experts, d, hidden), "down": (self.experts, hidden, d),
        }  # fmt: skip
        keys = iter(jax.random.split(key, len(shapes) + 2))
        stacked = {name: normal(next(keys), (num, *shape)) for name, shape in shapes.items()}
        norms = {name: jnp.ones((num, d)) for name in ("attention_norm", "mlp_norm")}
        return new_state({
            "embed": normal(next(keys), (self.vocab, d)),
            "layers": stacked | norms,
            "norm": jnp.ones(d),
            "head": normal(next(keys), (d, self.vocab)),
        })  # fmt: skip

    def step(self, state: State, batch: jax.Array) -> tuple[State, jax.Array]:
        return make_step(self.loss, self.annotate)(state, batch)

    def loss(self, params: Any, tokens: jax.Array) -> jax.Array:
        tokens = self.annotate.rows(tokens)
        x = self.annotate.rows(self.weights(params["embed"])[tokens[:, :-1]])
        layer = jax.checkpoint(self.layer, prevent_cse=False)
        x, balance = jax.lax.scan(layer, x, params["layers"])
        logits = rms_norm(x, params["norm"]) @ self.weights(params["head"])
        return cross_entropy(self.annotate.rows(logits), tokens[:, 1:]) + 0.01 * balance.mean()

    def layer(self, x: jax.Array, params: Any) -> tuple[jax.Array, jax.Array]:
        w, rows = self.weights(params), self.annotate.rows
        h = rms_norm(x, w["attention_norm"])
        x += attention(h, w, self.dim // self.heads, self.annotate)
        h = rms_norm(x, w["mlp_norm"])
        dispatch, combine, balance = self.routed(h, w["router"])
        inputs = rows(jnp.einsum("bsec,bsd->becd", dispatch, h))
        hidden = jax.nn.gelu(rows(jnp.einsum("becd,edh->bech", inputs, w["up"])))
        outputs = rows(jnp.einsum("bech,ehd->becd", hidden, w["down"]))
        return rows(x + jnp.einsum("bsec,becd->bsd", combine, outputs)), balance

    def routed(self, x: jax.Array, router: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Which token goes to which place of which expert, its weight there, and the balancing loss."""
        places = int(self.capacity * 2 * x.shape[1] / self.experts)
        probs = jax.nn.softmax((x @ router).astype(jnp.float32))
        weights, chosen = jax.lax.top_k(probs, 2)
        weights /= weights.sum(-1, keepdims=True)
        # First choices have places before second ones, tokens in their order.
        picks = jax.nn.one_hot(chosen, self.experts).swapaxes(1, 2)  # [rows, 2, context, experts]
        in_order = picks.reshape(len(x), -1, self.experts)
        place = ((jnp.cumsum(in_order, axis=1) - 1) * in_order).sum(-1).reshape(picks.shape[:3])
        at = jax.nn.one_hot(place.astype(jnp.int32), places)  # none beyond the capacity
        combine = jnp.einsum("bks,bkse,bksc->bsec", weights.swapaxes(1, 2), picks, at)
        combine = self.annotate.rows(combine)
        balance = self.experts * jnp.sum(probs.mean((0, 1)) * picks[:, 0].mean((0, 1)))
        return (combine > 0).astype(self.dtype), combine.astype(self.dtype), balance

    def weights(self, params: Any) -> Any:
        return self.annotate.weights(jax.tree.map(lambda w: w.astype(self.dtype), params))


@dataclasses.dataclass(frozen=True)
class DroplessMoE(MoE):
    """Every token has both of its experts: tokens of all sequences are sorted by expert, and put back."""

    def layer(self, x: jax.Array, params: Any) -> tuple[jax.Array, jax.Array]:
        w, rows = self.weights(params), self.annotate.rows
        h = rms_norm(x, w["attention_norm"])
        x += attention(h, w, self.dim // self.heads, self.annotate)
        h = rms_norm(x, w["mlp_norm"]).reshape(-1, self.dim)
        probs = jax.nn.softmax((h @ w["router"]).astype(jnp.float32))
        weights, chosen = jax.lax.top_k(probs, 2)
        weights /= weights.sum(-1, keepdims=True)
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=self.experts)
        hidden = jax.nn.gelu(rows(jax.lax.ragged_dot(rows(h[order // 2]), w["up"], sizes)))
        outputs = rows(jax.lax.ragged_dot(hidden, w["down"], sizes))
        back = rows(outputs[jnp.argsort(order)]).reshape(-1, 2, self.dim)
        y = jnp.einsum("tkd,tk->td", back, weights.astype(self.dtype))
        first = jax.nn.one_hot(chosen[:, 0], self.experts)
        balance = self.experts * jnp.sum(probs.mean(0) * first.mean(0))
        return rows(x + y.reshape(x.shape)), balance
