"""Trains a byte-level GPT in Flax Linen on Python's standard library, its state sharded by jzero.

python experiments/train_lm/train_linen.py                             # stage 3, 8 devices
python experiments/train_lm/train_linen.py --stage 1 --devices 4 --steps 100
python experiments/train_lm/train_linen.py --checkpoints /tmp/checkpoints  # the same again goes on
python experiments/train_lm/train_linen.py --batch-size 256 --seed 1 --out /tmp/train_lm
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.training.train_state import TrainState

import common
import data
import jzero
import loop


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dtype, heads = common.compute_dtype, common.num_heads
        h = nn.LayerNorm(dtype=dtype, name="norm1")(x)
        q, k, v = jnp.split(nn.Dense(3 * common.dim, dtype=dtype, name="qkv")(h), 3, axis=-1)
        q, k, v = (a.reshape(*a.shape[:-1], heads, -1) for a in (q, k, v))
        h = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = x + nn.Dense(common.dim, dtype=dtype, name="project")(h)
        h = nn.LayerNorm(dtype=dtype, name="norm2")(x)
        h = nn.gelu(nn.Dense(4 * common.dim, dtype=dtype, name="up")(h))
        return x + nn.Dense(common.dim, dtype=dtype, name="down")(h)


class GPT(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        dtype, init = common.compute_dtype, nn.initializers.normal(common.dim**-0.5)
        embed = nn.Embed(
            common.vocab_size, common.dim, dtype=dtype, embedding_init=init, name="embed"
        )
        positions = self.param("positions", init, (common.context, common.dim))
        # Also the output layer, hence the small values, and the scale that undoes them here.
        x = (embed(tokens) + positions[: tokens.shape[1]].astype(dtype)) * common.dim**0.5
        # One scanned, rematerialized block; its parameters are stacked along dim 0.
        layers = nn.scan(
            lambda block, x, _: (block(x), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=common.num_layers,
        )
        x, _ = layers(nn.remat(Block, prevent_cse=False)(name="blocks"), x, None)
        return embed.attend(nn.LayerNorm(dtype=dtype, name="norm")(x))


def train_step(state: TrainState, batch: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
    """An ordinary single-device step: nothing in it knows about devices."""

    def loss_fn(params):
        return common.next_byte_loss(lambda x: state.apply_fn({"params": params}, x), batch)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def make_init(args: argparse.Namespace) -> Callable[[], TrainState]:
    """A function that makes the state, of the size that `common` has now."""
    model, tx = GPT(), common.make_optimizer(args)

    def init() -> TrainState:
        tokens = jnp.zeros((1, common.context), jnp.int32)
        params = model.init(jax.random.key(args.seed), tokens)["params"]
        params = common.cast_params(args, params)
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    return init


def apply(state: TrainState, tokens: jax.Array) -> jax.Array:
    return state.apply_fn({"params": state.params}, tokens)


def train(args: argparse.Namespace, text: data.Text) -> loop.Run:
    sharded_step = jzero.shard_train_step(train_step, **common.sharding_options(args))
    return loop.fit(sharded_step, make_init(args), text.train, args)


def main() -> None:
    args = common.parse_args(__doc__, out=Path("out/linen"))
    text = data.load()
    loop.report(args, text, train(args, text), apply)


if __name__ == "__main__":
    main()
