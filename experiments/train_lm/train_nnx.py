"""Trains the GPT of train_linen.py written in Flax NNX, its state sharded by jzero.

python experiments/train_lm/train_nnx.py                               # stage 3, 8 devices
python experiments/train_lm/train_nnx.py --stage 1 --devices 4 --steps 100
python experiments/train_lm/train_nnx.py --batch-size 256 --seed 1 --out /tmp/train_lm
"""

from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

import common
import data
import jzero
import loop


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        dim, dtype = common.dim, common.compute_dtype
        self.norm1 = nnx.LayerNorm(dim, dtype=dtype, rngs=rngs)
        self.qkv = nnx.Linear(dim, 3 * dim, dtype=dtype, rngs=rngs)
        self.project = nnx.Linear(dim, dim, dtype=dtype, rngs=rngs)
        self.norm2 = nnx.LayerNorm(dim, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(dim, 4 * dim, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * dim, dim, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = jnp.split(self.qkv(self.norm1(x)), 3, axis=-1)
        q, k, v = (a.reshape(*a.shape[:-1], common.num_heads, -1) for a in (q, k, v))
        h = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = x + self.project(h)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        dim, dtype = common.dim, common.compute_dtype
        init = nnx.initializers.normal(dim**-0.5)
        self.embed = nnx.Embed(common.vocab_size, dim, dtype=dtype, embedding_init=init, rngs=rngs)
        self.positions = nnx.Param(init(rngs.params(), (common.context, dim)))
        self.norm = nnx.LayerNorm(dim, dtype=dtype, rngs=rngs)
        # All layers in one module; their parameters are stacked along dim 0.
        stack = nnx.split_rngs(splits=common.num_layers)(nnx.vmap(Block))
        self.blocks = stack(rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat(prevent_cse=False)
        def layers(block: Block, x: jax.Array) -> jax.Array:
            return block(x)

        positions = self.positions[: tokens.shape[1]].astype(common.compute_dtype)
        # Also the output layer, hence the small values, and the scale that undoes them here.
        x = (self.embed(tokens) + positions) * common.dim**0.5
        return self.embed.attend(self.norm(layers(self.blocks, x)))


def train_step(model: GPT, optimizer: nnx.Optimizer, batch: jax.Array) -> dict[str, jax.Array]:
    """An ordinary single-device step: nothing in it knows about devices."""
    loss, grads = nnx.value_and_grad(lambda model: common.next_byte_loss(model, batch))(model)
    optimizer.update(model, grads)
    return {"loss": loss}


def main() -> None:
    args = common.parse_args(__doc__, out=Path("out/nnx"))
    text = data.load()

    def init() -> tuple[GPT, nnx.Optimizer]:
        model = GPT(nnx.Rngs(args.seed))
        nnx.update(model, common.cast_params(args, nnx.state(model, nnx.Param)))
        return model, nnx.Optimizer(model, common.make_optimizer(args), wrt=nnx.Param)

    model, optimizer = nnx.eval_shape(init)  # shapes only: the arrays are born in shards below
    step, _ = jzero.from_nnx(train_step, model, optimizer)
    sharded_step = jzero.shard_train_step(step, **common.sharding_options(args))
    run = loop.fit(sharded_step, lambda: nnx.state(init()), text.train, args)
    graph = nnx.graphdef((model, optimizer))

    def apply(state: nnx.State, tokens: jax.Array) -> jax.Array:
        # A copy, because NNX refuses Variables made outside of the current trace.
        model, _ = nnx.merge(graph, state, copy=True)
        return model(tokens)

    loop.report(args, text, run, apply)


if __name__ == "__main__":
    main()
