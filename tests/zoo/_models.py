"""Models and data that several entries share.

Widths are multiples of 8, so that kernels can be sharded; ten classes are not, so that some leaves
must stay full.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

BATCH_SIZE = 32
NUM_FEATURES = 8
NUM_CLASSES = 10
SEQ_LEN = 8
VOCAB_SIZE = 24


def adamw(learning_rate: Any = 1e-2, **kwargs) -> optax.GradientTransformation:
    # With the default eps of 1e-8 a gradient that is zero but for rounding moves its parameter by a
    # whole learning rate. This eps keeps rounding errors the size of rounding errors.
    return optax.adamw(learning_rate, eps=1e-3, **kwargs)


def labelled_batches(num_steps: int) -> list[tuple[Any, ...]]:
    """One dict per step: 'x' float32 [32, 8], 'label' int32 [32]."""
    rng = np.random.default_rng(0)
    return [
        (
            {
                "x": jnp.asarray(rng.normal(size=(BATCH_SIZE, NUM_FEATURES)), jnp.float32),
                "label": jnp.asarray(rng.integers(0, NUM_CLASSES, BATCH_SIZE), jnp.int32),
            },
        )
        for _ in range(num_steps)
    ]


def token_batches(num_steps: int) -> list[tuple[Any, ...]]:
    """One array per step: int32 [32, 9]; the last column is only predicted."""
    rng = np.random.default_rng(1)
    shape = (BATCH_SIZE, SEQ_LEN + 1)
    return [(jnp.asarray(rng.integers(0, VOCAB_SIZE, shape), jnp.int32),) for _ in range(num_steps)]


def cross_entropy(logits: Any, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def accuracy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return (logits.argmax(-1) == labels).astype(jnp.float32).mean()


class MLP(nn.Module):
    width: int = 16
    num_outputs: int = NUM_CLASSES
    dropout_rate: float = 0.0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        # Smooth: in float16 a rounding could take a unit across the kink of a relu.
        x = nn.silu(nn.Dense(self.width, dtype=self.dtype)(x))
        x = nn.Dropout(self.dropout_rate, deterministic=not train)(x)
        return nn.Dense(self.num_outputs, dtype=self.dtype)(x)
