"""Trains a byte-level GPT in Flax Linen, its state in shards on all devices.

python examples/linen_gpt.py                   # SIGTERM stops it; the same again goes on
python examples/linen_gpt.py --stage 1 --microbatches 4 --text 'notes/**/*.md'
"""

import argparse
import glob
import sysconfig
import time
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import jzero

# Each is a flag: --stage 1 --batch-size 64
SETTINGS: dict[str, Any] = dict(
    stage=3, microbatches=1,  # ZeRO's stage; microbatches of a step
    steps=1000, batch_size=32, learning_rate=3e-3, seed=0,  # rows of a step over all devices
    context=128, dim=128, layers=3, heads=4,  # the model sees `context` bytes
    text=sysconfig.get_paths()["stdlib"] + "/*.py",  # files; Python's library is at hand anywhere
    checkpoints="checkpoints/linen_gpt",  # a run goes on from the latest one that is there
    logs="",  # a folder for TensorBoard
    save_every=200, log_every=10, eval_batches=20, sample_bytes=400,
)  # fmt: skip


class Block(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        dim = x.shape[-1]
        qkv = nn.Dense(3 * dim, name="qkv")(nn.LayerNorm(name="norm1")(x))
        q, k, v = jnp.split(qkv.reshape(*x.shape[:-1], 3 * self.heads, -1), 3, axis=-2)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + nn.Dense(dim, name="project")(mixed.reshape(x.shape))
        hidden = nn.gelu(nn.Dense(4 * dim, name="up")(nn.LayerNorm(name="norm2")(x)))
        return x + nn.Dense(dim, name="down")(hidden), None


class GPT(nn.Module):
    dim: int
    layers: int
    heads: int
    context: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        init = nn.initializers.normal(self.dim**-0.5)
        embed = nn.Embed(256, self.dim, embedding_init=init, name="embed")
        positions = self.param("positions", init, (self.context, self.dim))
        x = (embed(tokens) + positions[: tokens.shape[1]]) * self.dim**0.5
        # All layers in one scan, each computed again in the backward pass.
        each: Any = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        stack = nn.scan(nn.remat(Block, prevent_cse=False), length=self.layers, **each)
        x, _ = stack(self.heads, name="blocks")(x, None)
        return embed.attend(nn.LayerNorm(name="norm")(x))


def loss_fn(params: Any, apply_fn: Any, batch: jax.Array) -> jax.Array:
    logits = apply_fn({"params": params}, batch[:, :-1])  # of the next bytes
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def step_fn(state: TrainState, batch: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
    loss, grads = jax.value_and_grad(loss_fn)(state.params, state.apply_fn, batch)
    return state.apply_gradients(grads=grads), {"loss": loss}


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
    model = GPT(args.dim, args.layers, args.heads, args.context)
    schedule = optax.cosine_decay_schedule(args.learning_rate, args.steps)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98))

    def init() -> TrainState:
        params = model.init(jax.random.key(args.seed), rows(text, 0, args)[:, :-1])["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    # The one line: `step_fn` is written for one device and the whole batch.
    train_step = jzero.shard_train_step(step_fn, stage=args.stage, microbatches=args.microbatches)
    if args.logs:
        from tensorboardX import SummaryWriter  # pip install tensorboardX
    writer = SummaryWriter(args.logs) if args.logs else None
    with jzero.Checkpointer(
        args.checkpoints, train_step, max_to_keep=2, save_interval_steps=args.save_every
    ) as checkpointer:
        first = step = checkpointer.latest_step() or 0
        state = checkpointer.restore(jax.eval_shape(init)) if step else train_step.init(init)
        print(train_step.describe(state, rows(text, step, args)), flush=True)
        began, stop = time.perf_counter(), False
        while step < args.steps and not stop:
            state, metrics = train_step(state, rows(text, step, args))
            step += 1
            stop = checkpointer.preempted(step)  # SIGTERM came: save, and end.
            checkpointer.save(step, state, force=stop or step == args.steps)
            if stop or step == args.steps or step % args.log_every == 0:
                loss = float(metrics["loss"])  # waits for the devices, hence not after every step
                speed = (step - first) / (time.perf_counter() - began)
                print(f"step {step:5}  loss {loss:.6f}  {speed:.2f} steps/s", flush=True)
                if writer:
                    writer.add_scalar("loss", loss, step)
    if writer:
        writer.close()
    if step < args.steps:
        return print(f"stopped after step {step}; the same command goes on")

    @jzero.shard_eval_step(like=train_step)
    def evaluate(state: TrainState, batch: jax.Array) -> jax.Array:
        return loss_fn(state.params, state.apply_fn, batch)

    @jzero.shard_eval_step(like=train_step, in_specs={"window": jax.P()})
    def generate(state: Any, window: Any, key: jax.Array) -> jax.Array:
        def next_byte(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
            byte = jax.random.categorical(
                key, state.apply_fn({"params": state.params}, window[None])[0, -1] / 0.7
            )
            return jnp.append(window[1:], byte), byte

        return jax.lax.scan(next_byte, window, jax.random.split(key, args.sample_bytes))[1]

    losses = [evaluate(state, rows(held_out, i, args)) for i in range(args.eval_batches)]
    print(f"held-out loss {np.mean(losses):.6f} nats/byte")
    sample = generate(state, held_out[: args.context], jax.random.key(args.seed))
    print(bytes([*held_out[: args.context], *np.asarray(sample)]).decode(errors="replace"))


if __name__ == "__main__":
    main()
