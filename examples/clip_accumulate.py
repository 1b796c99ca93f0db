"""Trains two towers to find a function by its docstring, by a loss over all pairs of the whole batch.

python examples/clip_accumulate.py --batch-size 1024 --microbatches 8      # memory of an eighth
python examples/clip_accumulate.py --check 1      # first: the same numbers as one device without
"""

import argparse
import ast
import glob
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import jzero
from jzero.testing import assert_same_training

# Each is a flag: --stage 1 --batch-size 64
SETTINGS: dict[str, Any] = dict(
    stage=3, microbatches=4,  # ZeRO's stage; microbatches of a step
    steps=500, batch_size=256, learning_rate=1e-3, seed=0,  # pairs of a step over all devices
    dim=128, layers=2, length=128,  # bytes that a tower sees
    text=sysconfig.get_paths()["stdlib"] + "/*.py",  # files; Python's library is at hand anywhere
    checkpoints="checkpoints/clip",  # a run goes on from the latest one that is there
    logs="",  # a folder for TensorBoard
    save_every=200, log_every=10, check=0,
)  # fmt: skip


class Tower(nn.Module):
    dim: int
    layers: int

    @nn.compact
    def __call__(self, text: jax.Array) -> jax.Array:
        """Unit vectors float32[rows, dim] of uint8[rows, length]."""
        x = nn.Embed(256, self.dim)(text.astype(jnp.int32))
        for _ in range(self.layers):
            hidden = nn.gelu(nn.Conv(self.dim, kernel_size=(5,))(nn.LayerNorm()(x)))
            x = x + nn.Dense(self.dim)(hidden)
        x = nn.Dense(self.dim)(x.mean(axis=1))
        return x / jnp.linalg.norm(x, axis=1, keepdims=True)


class CLIP(nn.Module):
    dim: int
    layers: int

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array]) -> jax.Array:
        """Scores of all pairs, float32[rows, rows]."""
        code = Tower(self.dim, self.layers, name="code")(batch["code"])
        words = Tower(self.dim, self.layers, name="words")(batch["words"])
        scale = self.param("scale", nn.initializers.constant(jnp.log(10.0)), ())
        return jnp.exp(scale) * code @ words.T


def step_fn(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, Any]:
    def loss_fn(params: Any) -> jax.Array:
        scores = state.apply_fn({"params": params}, batch)
        labels = jnp.arange(scores.shape[0])
        entropy = optax.softmax_cross_entropy_with_integer_labels
        return (entropy(scores, labels).mean() + entropy(scores.T, labels).mean()) / 2

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def pairs_in(source: str, length: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The functions of a file that have docstrings: their code without it, and its beginning."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and (words := ast.get_docstring(node)):
            node.body = node.body[1:] or [ast.Pass()]
            texts = ast.unparse(node), words
            code, said = (text.encode()[:length].ljust(length, b" ") for text in texts)
            yield np.frombuffer(code, np.uint8), np.frombuffer(said, np.uint8)


def rows(pairs: np.ndarray, step: int, args: Any) -> dict[str, Any]:
    """The pairs of a step, by its number alone: a run that goes on sees the same."""
    rng = np.random.default_rng((args.seed, step))
    chosen = pairs[rng.permutation(len(pairs))[: args.batch_size]]  # none of them twice
    return {"code": chosen[:, 0], "words": chosen[:, 1]}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in SETTINGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    args = parser.parse_args(argv)
    files = [Path(name).read_text() for name in sorted(glob.glob(args.text, recursive=True))]
    pairs = np.array([pair for file in files for pair in pairs_in(file, args.length)])
    held_out, pairs = pairs[::10], np.delete(pairs, np.s_[::10], axis=0)
    model, tx = CLIP(args.dim, args.layers), optax.adamw(args.learning_rate)

    def init(tx: Any = tx) -> TrainState:
        params = model.init(jax.random.key(args.seed), rows(pairs, 0, args))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    options = {"stage": args.stage, "microbatches": args.microbatches}
    if args.check:  # by SGD, since Adam makes whole steps of the rounding of gradients near zero
        some, sgd = [rows(pairs, i, args) for i in range(2)], optax.sgd(0.1)
        assert_same_training(step_fn, lambda: init(sgd), some, **options)
        print("checked: two steps train what one device trains with the whole batch")
    train_step = jzero.shard_train_step(step_fn, **options)
    if args.logs:
        from tensorboardX import SummaryWriter  # pip install tensorboardX
    writer = SummaryWriter(args.logs) if args.logs else None
    with jzero.Checkpointer(
        args.checkpoints, train_step, max_to_keep=2, save_interval_steps=args.save_every
    ) as checkpointer:
        first = step = checkpointer.latest_step() or 0
        state = checkpointer.restore(jax.eval_shape(init)) if step else train_step.init(init)
        print(train_step.describe(state, rows(pairs, step, args)), flush=True)
        began, stop = time.perf_counter(), False
        while step < args.steps and not stop:
            state, metrics = train_step(state, rows(pairs, step, args))
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
    def found(state: TrainState, batch: dict[str, jax.Array]) -> jax.Array:
        scores = state.apply_fn({"params": state.params}, batch)
        return (scores.argmax(axis=1) == jnp.arange(scores.shape[0])).sum()

    batch = rows(held_out, 0, args)
    print(f"held out: {found(state, batch)} of {len(batch['code'])} are found by their docstrings")


if __name__ == "__main__":
    main()
