"""A GPT whose layers are stages of a pipeline and whose matrices are cut over a tensor axis, in plain JAX."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

place = jax.lax.with_sharding_constraint
P = jax.P


@jax.custom_vjp
def onward(held: jax.Array) -> jax.Array:
    """What each stage has made, at the next one; of a gradient, at the one before, by as many messages."""
    return jnp.roll(held, 1, axis=0)


def _onward(held: jax.Array) -> tuple[jax.Array, None]:
    return onward(held), None


def _backward(_: None, grad: jax.Array) -> tuple[jax.Array]:
    return (jnp.roll(grad, -1, axis=0),)


onward.defvjp(_onward, _backward)


@dataclasses.dataclass(frozen=True)
class PipelinedGPT:
    """A size, and into how many stages and microbatches it is cut.

    Attributes:
      layers: each of 12 dim^2 parameters; as many in each stage.
      dim: of the residual stream.
      heads: of attention, cut over the tensor axis.
      stages: of the pipeline.
      microbatches: that pass it one after the other.
      context: tokens of a sequence.
      vocab: rows of the embedding, which is the output layer, too.
    """

    layers: int
    dim: int
    heads: int
    stages: int
    microbatches: int
    context: int = 1024
    vocab: int = 32_768

    @property
    def shapes(self) -> dict[str, Any]:
        """Of the parameters; those of layers begin with the stage, and the layer within it."""
        d, head = self.dim, self.dim // self.heads
        block = {
            "scale1": (d,), "scale2": (d,), "out": (self.heads, head, d),
            "up": (d, 4 * d), "down": (4 * d, d),
            **dict.fromkeys(("query", "key", "value"), (d, self.heads, head)),
        }  # fmt: skip
        each = (self.stages, self.layers // self.stages)
        blocks = {name: (*each, *shape) for name, shape in block.items()}
        return {"embed": (self.vocab, d), "positions": (self.context, d), "blocks": blocks}

    @property
    def specs(self) -> dict[str, jax.sharding.PartitionSpec]:
        """How leaves rest over the axes beside the data axis: `auto_specs`."""
        return {
            "query|key|value|up": P("stage", None, None, "model"),
            "out|down": P("stage", None, "model"),
            "scale": P("stage"),
        }

    @property
    def num_params(self) -> int:
        shapes = jax.tree.leaves(self.shapes, is_leaf=lambda x: isinstance(x, tuple))
        return sum(map(math.prod, shapes))

    def state(self, tx: optax.GradientTransformation) -> dict[str, Any]:
        """Parameters in bfloat16 and the optimizer's state, all of them zero: to be compiled with."""
        params = jax.tree.map(
            lambda shape: jnp.zeros(shape, jnp.bfloat16),
            self.shapes, is_leaf=lambda x: isinstance(x, tuple),
        )  # fmt: skip
        return {"params": params, "opt_state": tx.init(params)}

    def loss(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Mean cross entropy, of int32 [rows, context + 1]."""
        inputs, targets = self.cut(tokens[:, :-1]), self.cut(tokens[:, 1:])
        # Whole on each device of the other axes: XLA's partitioner ends the process on a look-up in rows that
        # are cut over one of them, with indices that are cut over another.
        table = place(params["embed"], P(None, None))
        x = table[inputs] + params["positions"][None, None]
        out = self.through_stages(params["blocks"], place(x, P("stage")))
        # The output layer's work is divided among the stages, by microbatches.
        out = place(out, P("stage"))
        logits = (jax.nn.standardize(out) @ params["embed"].T).astype(jnp.float32)
        logits = place(logits, P("stage", None, None, "model"))
        chosen = jnp.arange(self.vocab)[None, None, None] == targets[..., None]
        right = jnp.sum(jnp.where(chosen, logits, 0.0), axis=-1)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - right)

    def cut(self, x: jax.Array) -> jax.Array:
        """`[rows, ...] -> [microbatches, rows of each, ...]`; no row leaves its device."""
        return x.reshape(-1, self.microbatches, *x.shape[1:]).swapaxes(0, 1)

    def through_stages(self, blocks: Any, parts: jax.Array) -> jax.Array:
        """`[microbatches, rows, context, dim]` through all layers: a tick for each microbatch and stage."""
        empty = ((0, self.stages - 1),) * 2 + ((0, 0),) * (parts.ndim - 1)
        entering = place(jnp.pad(parts[:, None], empty), P(None, "stage"))
        first = (jnp.arange(self.stages) == 0)[:, None, None, None]

        def tick(held: jax.Array, entering: jax.Array) -> tuple[jax.Array, jax.Array]:
            held = jnp.where(first, entering, onward(held))
            held = place(jax.vmap(self.stage)(blocks, held), P("stage"))
            return held, held

        _, out = jax.lax.scan(tick, jnp.zeros_like(entering[0]), entering)
        return place(out, P(None, "stage"))[self.stages - 1 :, -1]

    def stage(self, blocks: Any, x: jax.Array) -> jax.Array:
        """The layers of one stage."""
        layer = jax.checkpoint(lambda x, w: (self.block(x, w), None), prevent_cse=False)
        return jax.lax.scan(layer, x, blocks)[0]

    def block(self, x: jax.Array, w: Any) -> jax.Array:
        scale1, scale2 = (1 + w[name][None, None] for name in ("scale1", "scale2"))
        normed = jax.nn.standardize(x) * scale1
        into = functools.partial(jnp.einsum, "rtd,dhe->rthe", normed)
        q, k, v = (into(w[name]) for name in ("query", "key", "value"))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")
        x = x + jnp.einsum("rthe,hed->rtd", mixed, w["out"])
        return x + jax.nn.gelu(jax.nn.standardize(x) * scale2 @ w["up"]) @ w["down"]
