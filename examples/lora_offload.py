"""Fine-tunes a byte-level GPT by LoRA; the frozen base rests in the memory of the hosts.

python examples/lora_offload.py --base checkpoints/linen_gpt/1000/state --text 'notes/**/*.md'
"""

import argparse
import glob
import os
import sysconfig
import time
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import jzero

# Each is a flag: --rank 4 --batch-size 64
SETTINGS: dict[str, Any] = dict(
    base="",  # a state that linen_gpt.py has saved, of this size; else random weights
    device_bytes=2**26,  # the most bytes of the base on each device at a time
    steps=1000, batch_size=32, learning_rate=3e-3, seed=0,  # rows of a step over all devices
    context=128, dim=128, layers=3, heads=4, rank=8,  # the model sees `context` bytes
    text=sysconfig.get_paths()["stdlib"] + "/*.py",  # files; Python's library is at hand anywhere
    checkpoints="checkpoints/lora",  # a run goes on from the latest one that is there
    logs="",  # a folder for TensorBoard
    save_every=200, log_every=10, eval_batches=20,
)  # fmt: skip


class Dense(nn.Module):
    features: int
    rank: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        normal, zeros = nn.initializers.lecun_normal(), nn.initializers.zeros
        kernel = self.param("kernel", normal, (x.shape[-1], self.features))
        bias = self.param("bias", zeros, (self.features,))
        key = self.make_rng("params") if self.is_initializing() else None
        down = self.variable("lora", "down", normal, key, (x.shape[-1], self.rank))
        up = self.variable("lora", "up", jnp.zeros, (self.rank, self.features))
        return x @ kernel + bias + x @ down.value @ up.value


class Block(nn.Module):
    heads: int
    rank: int

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        dim = x.shape[-1]
        qkv = Dense(3 * dim, self.rank, name="qkv")(nn.LayerNorm(name="norm1")(x))
        q, k, v = jnp.split(qkv.reshape(*x.shape[:-1], 3 * self.heads, -1), 3, axis=-2)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x += Dense(dim, self.rank, name="project")(mixed.reshape(x.shape))
        hidden = nn.gelu(Dense(4 * dim, self.rank, name="up")(nn.LayerNorm(name="norm2")(x)))
        return x + Dense(dim, self.rank, name="down")(hidden), None


class GPT(nn.Module):
    args: Any

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        args, init = self.args, nn.initializers.normal(self.args.dim**-0.5)
        embed = nn.Embed(256, args.dim, embedding_init=init, name="embed")
        positions = self.param("positions", init, (args.context, args.dim))
        x = (embed(tokens) + positions[: tokens.shape[1]]) * args.dim**0.5
        # Layer after layer, the devices fetch what they compute with; again in the backward pass.
        each: Any = {"variable_axes": {"params": 0, "lora": 0}, "split_rngs": {"params": True}}
        stack = nn.scan(nn.remat(Block, prevent_cse=False), length=args.layers, **each)
        x, _ = stack(args.heads, args.rank, name="blocks")(x, None)
        return embed.attend(nn.LayerNorm(name="norm")(x))


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
    model, tx = GPT(args), optax.adam(args.learning_rate)

    def loss_fn(lora: Any, base: Any, batch: jax.Array) -> jax.Array:
        logits = model.apply({"params": base, "lora": lora}, batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    def init() -> dict[str, Any]:
        made = model.init(jax.random.key(args.seed), rows(text, 0, args)[:, :-1])
        return {"base": made["params"], "lora": made["lora"], "opt_state": tx.init(made["lora"])}

    @jzero.shard_train_step(memory=jzero.Memory(params=jzero.PinnedHost(args.device_bytes)))
    def train_step(state: dict[str, Any], batch: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(state["lora"], state["base"], batch)
        updates, opt_state = tx.update(grads, state["opt_state"])
        lora = optax.apply_updates(state["lora"], updates)
        return {"base": state["base"], "lora": lora, "opt_state": opt_state}, {"loss": loss}

    if args.logs:
        from tensorboardX import SummaryWriter  # pip install tensorboardX
    writer = SummaryWriter(args.logs) if args.logs else None
    with jzero.Checkpointer(
        args.checkpoints, train_step, max_to_keep=2, save_interval_steps=args.save_every
    ) as checkpointer:
        first = step = checkpointer.latest_step() or 0
        state = checkpointer.restore(jax.eval_shape(init)) if step else train_step.init(init)
        if args.base and not step:
            state["base"] = ocp.PyTreeCheckpointer().restore(os.path.abspath(args.base))["params"]
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

    @jzero.shard_eval_step(like=train_step)  # reads the base from the hosts, too
    def evaluate(state: dict[str, Any], batch: jax.Array) -> jax.Array:
        return loss_fn(state["lora"], state["base"], batch)

    losses = [evaluate(state, rows(held_out, i, args)) for i in range(args.eval_batches)]
    print(f"held-out loss {np.mean(losses):.6f} nats/byte")


if __name__ == "__main__":
    main()
