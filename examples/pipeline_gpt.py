"""Trains a byte-level GPT as a pipeline: its layers in stages on other devices, with ZeRO in each stage.

python examples/pipeline_gpt.py --pipeline 2 --microbatches 8     # SIGTERM stops it; the same again goes on
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

# Each is a flag: --stage 3 --batch-size 64
SETTINGS: dict[str, Any] = dict(
    stage=1, pipeline=2, microbatches=8,  # ZeRO's stage; stages of the pipeline; what passes it in a step
    steps=1000, batch_size=64, learning_rate=3e-3, seed=0,  # rows of a step over all devices
    context=128, dim=128, layers=4, heads=4,  # the model sees `context` bytes
    text=sysconfig.get_paths()["stdlib"] + "/*.py",  # files; Python's library is at hand anywhere
    checkpoints="checkpoints/pipeline_gpt", logs="",  # a run goes on from the latest; for TensorBoard
    save_every=200, log_every=10, eval_batches=20,
)  # fmt: skip
place = jax.lax.with_sharding_constraint


class Block(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dim, mask = x.shape[-1], nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(dim)(nn.gelu(nn.Dense(4 * dim)(nn.LayerNorm()(x))))


@jax.custom_vjp
def onward(held: jax.Array) -> jax.Array:
    """What each stage has made, at the next one; of a gradient, at the one before, by as many messages."""
    return jnp.roll(held, 1, axis=0)


onward.defvjp(lambda held: (onward(held), None), lambda _, grad: (jnp.roll(grad, -1, axis=0),))


def pipelined(stage: Any, blocks: Any, x: jax.Array, microbatches: int) -> jax.Array:
    """`x [rows, ...]` through `stage(blocks[i], x)` of each i, all of them at once, on another microbatch."""
    stages = jax.tree.leaves(blocks)[0].shape[0]
    parts = x.reshape(-1, microbatches, *x.shape[1:]).swapaxes(0, 1)  # no row leaves its device
    more = ((0, stages - 1),) * 2 + ((0, 0),) * x.ndim  # [ticks, stages, ...]
    entering = place(jnp.pad(parts[:, None], more), jax.P(None, "stage"))
    first = (jnp.arange(stages) == 0).reshape(-1, *(1,) * x.ndim)

    def tick(held: jax.Array, entering: jax.Array) -> tuple[jax.Array, jax.Array]:
        held = jnp.where(first, entering, onward(held))
        held = place(jax.vmap(stage)(blocks, held), jax.P("stage"))
        return held, held

    _, out = jax.lax.scan(tick, jnp.zeros_like(entering[0]), entering)
    return place(out, jax.P(None, "stage"))[stages - 1 :, -1].swapaxes(0, 1).reshape(x.shape)


def loss_fn(params: Any, block: Any, batch: jax.Array, microbatches: int) -> jax.Array:
    def stage(blocks: Any, x: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda x, w: (block({"params": w}, x), None), prevent_cse=False)
        return jax.lax.scan(layer, x, blocks)[0]

    x = params["embed"][batch[:, :-1]] + params["positions"][None]
    x = pipelined(stage, params["blocks"], x, microbatches)
    logits = jax.nn.standardize(x) @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


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
    block, tx = Block(args.heads), optax.adamw(args.learning_rate)

    def init() -> TrainState:
        embed, positions, layers = jax.random.split(jax.random.key(args.seed), 3)
        each, x = (args.pipeline, args.layers // args.pipeline), jnp.zeros((1, 1, args.dim))
        new = jax.vmap(jax.vmap(lambda key: block.init(key, x)["params"]))
        params = {"blocks": new(jax.random.split(layers, each))}  # [stages, layers of each, ...]
        for name, key, num in (("embed", embed, 256), ("positions", positions, args.context)):
            params[name] = jax.random.normal(key, (num, args.dim))
        return TrainState.create(apply_fn=block.apply, params=params, tx=tx)

    def step_fn(state: TrainState, batch: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        given = state.params, state.apply_fn, batch, args.microbatches
        loss, grads = jax.value_and_grad(loss_fn)(*given)
        return state.apply_gradients(grads=grads), {"loss": loss}

    sizes, auto = (jax.device_count() // args.pipeline, args.pipeline), jax.sharding.AxisType.Auto
    mesh = jax.make_mesh(sizes, ("data", "stage"), (auto, auto))  # of which "stage" is XLA's
    axes = jzero.Axes("data", auto_specs={"blocks": jax.P("stage")})
    train_step = jzero.shard_train_step(step_fn, stage=args.stage, axes=axes, mesh=mesh)
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
        return loss_fn(state.params, state.apply_fn, batch, args.microbatches)

    losses = [evaluate(state, rows(held_out, i, args)) for i in range(args.eval_batches)]
    print(f"held-out loss {np.mean(losses):.6f} nats/byte")


if __name__ == "__main__":
    main()
