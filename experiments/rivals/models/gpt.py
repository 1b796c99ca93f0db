"""`experiments/shared/gpt.py`: no biases, learned positions, q, k and v in one matrix, a tied table."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from experiments.rivals.annotations import Unannotated
from experiments.rivals.models.training import State, make_step, new_state
from experiments.shared import gpt


@dataclasses.dataclass(frozen=True)
class GPT:
    layers: int
    dim: int
    heads: int
    vocab: int = 32_768
    context: int = 1024
    dtype: Any = jnp.bfloat16
    annotate: Unannotated = Unannotated()

    @property
    def model(self) -> gpt.GPT:
        sizes = (self.layers, self.dim, self.heads, self.vocab, self.context)
        return gpt.GPT(*sizes, dtype=self.dtype)

    def batch(self, rows: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, self.context + 1), jnp.int32)

    def init(self, key: jax.Array) -> State:
        shapes, tree = jax.tree.flatten(self.model.shapes, is_leaf=lambda x: isinstance(x, tuple))
        keys = jax.random.split(key, len(shapes))
        normal = jax.nn.initializers.normal(0.02)
        return new_state(jax.tree.unflatten(tree, list(map(normal, keys, shapes))))

    def step(self, state: State, batch: jax.Array) -> tuple[State, jax.Array]:
        return make_step(self.loss, self.annotate)(state, batch)

    def loss(self, params: Any, tokens: jax.Array) -> jax.Array:
        tokens = self.annotate.rows(tokens)
        return self.model.loss(params, tokens, self.annotate.rows, self.annotate.weights)
