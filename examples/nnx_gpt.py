"""Trains a byte-level GPT in Flax NNX, its state in shards on all devices.

python examples/nnx_gpt.py                     # SIGTERM stops it; the same again goes on
"""

import argparse
import glob
import sysconfig
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jzero

# Each is a flag: --stage 1 --batch-size 64
SETTINGS: dict[str, Any] = dict(
    stage=3, microbatches=1,  # ZeRO's stage; microbatches of a step
    steps=1000, batch_size=32, learning_rate=3e-3, seed=0,  # rows of a step over all devices
    context=128, dim=128, layers=3, heads=4,  # the model sees `context` bytes
    text=sysconfig.get_paths()["stdlib"] + "/*.py",  # files; Python's library is at hand anywhere
    checkpoints="checkpoints/nnx_gpt",  # a run goes on from the latest one that is there
    logs="",  # a folder for TensorBoard
    save_every=200, log_every=10, eval_batches=20, sample_bytes=400,
)  # fmt: skip


class Block(nnx.Module):
    def __init__(self, args: Any, rngs: nnx.Rngs):
        dim, self.heads = args.dim, args.heads
        self.norm1, self.norm2 = nnx.LayerNorm(dim, rngs=rngs), nnx.LayerNorm(dim, rngs=rngs)
        self.qkv, self.project = (nnx.Linear(dim, n * dim, rngs=rngs) for n in (3, 1))
        self.up = nnx.Linear(dim, 4 * dim, rngs=rngs)
        self.down = nnx.Linear(4 * dim, dim, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        qkv = self.qkv(self.norm1(x)).reshape(*x.shape[:-1], 3 * self.heads, -1)
        q, k, v = jnp.split(qkv, 3, axis=-2)
        x += self.project(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    def __init__(self, args: Any, rngs: nnx.Rngs):
        self.dim, init = args.dim, nnx.initializers.normal(args.dim**-0.5)
        self.embed = nnx.Embed(256, args.dim, embedding_init=init, rngs=rngs)
        self.positions = nnx.Param(init(rngs.params(), (args.context, args.dim)))
        # All layers in one module, their parameters in stacks.
        stack = nnx.split_rngs(splits=args.layers)(nnx.vmap(partial(Block, args)))
        self.blocks, self.norm = stack(rngs), nnx.LayerNorm(args.dim, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        layer = nnx.remat(Block.__call__, prevent_cse=False)  # again in the backward pass
        layers = nnx.scan(layer, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        x = (self.embed(tokens) + self.positions[: tokens.shape[1]]) * self.dim**0.5
        return self.embed.attend(self.norm(layers(self.blocks, x)))


def loss_fn(model: GPT, batch: jax.Array) -> jax.Array:
    logits = model(batch[:, :-1])  # of the next bytes
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def step_fn(model: GPT, optimizer: nnx.Optimizer, batch: jax.Array) -> dict[str, jax.Array]:
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return {"loss": loss}


def rows(text: np.ndarray, step: int, args: Any) -> Any:
    """NumPy int32[batch_size, context + 1], by the step's number alone: a run that goes on sees the same."""
    rng = np.random.default_rng((args.seed, step))
    starts = rng.integers(len(text) - args.context, size=(args.batch_size, 1))
    return text[starts + np.arange(args.context + 1)]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in SETTINGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    args = parser.parse_args(argv)
    files = [np.fromfile(name, np.uint8) for name in sorted(glob.glob(args.text, recursive=True))]
    text = np.concatenate(files).astype(np.int32)
    text, held_out = np.split(text, [len(text) * 9 // 10])
    schedule = optax.cosine_decay_schedule(args.learning_rate, args.steps)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98))

    def make() -> tuple[GPT, nnx.Optimizer]:
        model = GPT(args, nnx.Rngs(args.seed))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    train_step = jzero.shard_train_step(step_fn, stage=args.stage, microbatches=args.microbatches)
    if args.logs:
        from tensorboardX import SummaryWriter  # pip install tensorboardX
    writer = SummaryWriter(args.logs) if args.logs else None
    with jzero.Checkpointer(
        args.checkpoints, train_step, max_to_keep=2, save_interval_steps=args.save_every
    ) as checkpointer:
        first = step = checkpointer.latest_step() or 0
        if step:
            objects = nnx.eval_shape(make)  # shapes only: the arrays come from the checkpoint
            nnx.update(objects, checkpointer.restore(nnx.state(objects)))
        else:
            objects = train_step.init(make)  # in shards, and never whole on one device
        model, optimizer = objects
        print(train_step.describe(model, optimizer, rows(text, step, args)), flush=True)
        began, stop = time.perf_counter(), False
        while step < args.steps and not stop:
            metrics = train_step(model, optimizer, rows(text, step, args))
            step += 1
            stop = checkpointer.preempted(step)  # SIGTERM came: save, and end.
            last = stop or step == args.steps
            checkpointer.save(step, nnx.state(objects), force=last)
            if last or step % args.log_every == 0:
                loss = float(metrics["loss"])  # waits for the devices, hence not after every step
                speed = (step - first) / (time.perf_counter() - began)
                print(f"step {step:5}  loss {loss:.6f}  {speed:.2f} steps/s", flush=True)
                if writer:
                    writer.add_scalar("loss", loss, step)
    if writer:
        writer.close()
    if step < args.steps:
        return print(f"stopped after step {step}; the same command goes on")

    evaluate = jzero.shard_eval_step(loss_fn, like=train_step)

    @jzero.shard_eval_step(like=train_step, in_specs={"window": jax.P()})
    def generate(model: GPT, window: Any, key: jax.Array) -> jax.Array:
        graph, params = nnx.split(model)

        def next_byte(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits = nnx.merge(graph, params, copy=True)(window[None])[0, -1]
            byte = jax.random.categorical(key, logits / 0.7)
            return jnp.append(window[1:], byte), byte

        return jax.lax.scan(next_byte, window, jax.random.split(key, args.sample_bytes))[1]

    losses = [evaluate(model, rows(held_out, i, args)) for i in range(args.eval_batches)]
    print(f"held-out loss {np.mean(losses):.6f} nats/byte")
    sample = generate(model, held_out[: args.context], jax.random.key(args.seed))
    print(bytes([*held_out[: args.context], *np.asarray(sample)]).decode(errors="replace"))


if __name__ == "__main__":
    main()
