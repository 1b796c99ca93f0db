"""Train steps of Flax's Linen examples on tokens: lm1b, seq2seq and sst2, with their signatures and keys."""

import dataclasses

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax.training import common_utils

from .core import ROWS, SEQ_LEN, VOCAB_SIZE


def padded_tokens(rng: np.random.Generator, length: int = SEQ_LEN) -> jax.Array:
    """Token ids int32 [32, length] that end in zeros, after 2 or more tokens."""
    tokens = rng.integers(1, VOCAB_SIZE, (ROWS, length))
    lengths = rng.integers(2, length + 1, ROWS)
    return jnp.asarray(np.where(np.arange(length) < lengths[:, None], tokens, 0), jnp.int32)


def weighted_cross_entropy(logits, targets, weights, label_smoothing=0.0):
    """The sum over tokens that count, and how many these are, as lm1b and wmt have it."""
    size = logits.shape[-1]
    rest = label_smoothing / (size - 1)
    targets = common_utils.onehot(targets, size, 1 - label_smoothing, rest)
    loss = -(targets * nn.log_softmax(logits)).sum(-1) * weights
    return loss.sum(), weights.sum()


def token_metrics(logits, targets, weights):
    loss, count = weighted_cross_entropy(logits, targets, weights)
    correct = ((logits.argmax(-1) == targets) * weights).sum()
    return {"loss": loss, "accuracy": correct, "denominator": count}


@dataclasses.dataclass(frozen=True)
class Config:
    width: int = 16
    dropout: float = 0.3


class Decoder(nn.Module):
    """Packed sequences: attention within a segment, positions from the batch."""

    config: Config

    @nn.compact
    def __call__(self, inputs, positions, segments):
        shifted = jnp.pad(inputs, ((0, 0), (1, 0)))[:, :-1]
        x = nn.Embed(VOCAB_SIZE, self.config.width)(shifted)
        x = x + nn.Embed(SEQ_LEN, self.config.width, name="positions")(positions)
        mask = nn.combine_masks(
            nn.make_causal_mask(inputs), nn.make_attention_mask(segments, segments, jnp.equal)
        )
        attention = nn.MultiHeadDotProductAttention(
            num_heads=2, use_bias=False, dropout_rate=self.config.dropout, deterministic=False
        )
        x = x + attention(nn.LayerNorm()(x), mask=mask)
        x = nn.Dropout(self.config.dropout, deterministic=False)(x)
        return nn.Dense(VOCAB_SIZE)(nn.LayerNorm()(x))


def schedule(step):
    return 0.01 * jnp.minimum(1.0, (step + 1) / 3)


@flax.struct.dataclass
class Metrics:
    """sst2's: sums over the examples, and how many there were."""

    loss: jax.Array
    correct: jax.Array
    count: jax.Array
