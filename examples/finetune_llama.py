"""Trains a Llama on from Hugging Face's weights, its state in shards, and writes such weights again.

python examples/finetune_llama.py --weights model.safetensors --config config.json --tokens ids.npy
python examples/finetune_llama.py              # a small one with random weights, and bytes as tokens
"""

import argparse
import glob
import json
import os
import pathlib
import sysconfig
import zlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState

import jzero

# Each is a flag: --stage 1 --batch-size 64
SETTINGS: dict[str, Any] = dict(
    weights="", config="", tokens="",  # Hugging Face's files; ids of tokens, as NumPy saves them
    stage=3, microbatches=1, steps=200, batch_size=16, learning_rate=1e-3, seed=0, context=128,
    dim=128, layers=3, heads=4, text=sysconfig.get_paths()["stdlib"] + "/*.py",  # if none is given
    checkpoints="checkpoints/finetune_llama", logs="", save_every=100, log_every=10, eval_batches=20,
)  # fmt: skip


def rotated(x: jax.Array, theta: float) -> jax.Array:
    """Rotary embeddings of x[batch, length, heads, dim], whose pairs are half a head apart."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * theta ** -(jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


class Attention(nn.Module):
    config: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c, heads = self.config, self.config["num_attention_heads"]
        num = {"q": heads, "k": c["num_key_value_heads"], "v": c["num_key_value_heads"]}
        q, k, v = (
            nn.DenseGeneral((n, c["head_dim"]), use_bias=False, name=f"{name}_proj")(x)
            for name, n in num.items()
        )
        q, k = rotated(q, c["rope_theta"]), rotated(k, c["rope_theta"])
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return nn.DenseGeneral(x.shape[-1], (-2, -1), use_bias=False, name="o_proj")(mixed)


class MLP(nn.Module):
    inner: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gate = nn.silu(nn.Dense(self.inner, use_bias=False, name="gate_proj")(x))
        up = nn.Dense(self.inner, use_bias=False, name="up_proj")(x)
        return nn.Dense(x.shape[-1], use_bias=False, name="down_proj")(gate * up)


class Layer(nn.Module):
    config: Any

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        c = self.config
        before, after = (nn.RMSNorm(c["rms_norm_eps"], name=f"{name}_layernorm")
                         for name in ("input", "post_attention"))  # fmt: skip
        x = x + Attention(c, name="self_attn")(before(x))
        return x + MLP(c["intermediate_size"], name="mlp")(after(x)), None


class Llama(nn.Module):
    config: Any

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        c = self.config
        embed = nn.Embed(c["vocab_size"], c["hidden_size"], name="embed_tokens")
        each: Any = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        stack = nn.scan(nn.remat(Layer, prevent_cse=False), length=c["num_hidden_layers"], **each)
        x, _ = stack(c, name="layers")(embed(tokens), None)
        x = nn.RMSNorm(c["rms_norm_eps"], name="norm")(x)
        tied = c["tie_word_embeddings"]
        return embed.attend(x) if tied else nn.Dense(c["vocab_size"], False, name="lm_head")(x)


def loss_fn(params: Any, apply_fn: Any, batch: jax.Array) -> jax.Array:
    logits = apply_fn({"params": params}, batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def step_fn(state: TrainState, batch: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
    loss, grads = jax.value_and_grad(loss_fn)(state.params, state.apply_fn, batch)
    return state.apply_gradients(grads=grads), {"loss": loss}


def rows(text: np.ndarray, step: int, args: Any) -> Any:
    """NumPy int32[batch_size, context + 1], by the step's number alone."""
    rng = np.random.default_rng((args.seed, step))
    starts = rng.integers(len(text) - args.context, size=(args.batch_size, 1))
    return text[starts + np.arange(args.context + 1)]


def checked(config: dict[str, Any]) -> dict[str, Any]:
    """With defaults; refused where this model would compute something else."""
    computed = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
                "attention_dropout": 0, "partial_rotary_factor": 1, "rope_type": "default"}  # fmt: skip
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found = {"rope_type": rope.get("type", "default"), **config, **rope}
    if bad := {x: found[x] for x in computed if found.get(x, computed[x]) != computed[x]}:
        raise SystemExit(f"finetune_llama: config.json has {bad}, and only {computed} is computed")
    heads = config["num_attention_heads"]
    defaults = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False}
    own = {"num_key_value_heads": heads, "head_dim": config["hidden_size"] // heads}
    return {**defaults, **own, **{name: x for name, x in found.items() if x is not None}}


def imported(args: Any, folder: pathlib.Path) -> tuple[Llama, Any, pathlib.Path]:
    """The model, the shapes of its parameters, and where in `folder` the first run imports them to."""
    sizes = [256, args.dim, 3 * args.dim, args.layers, args.heads, max(args.heads // 2, 1)]
    names = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
             "num_attention_heads", "num_key_value_heads"]  # fmt: skip
    config = {"model_type": "llama", **dict(zip(names, sizes, strict=True))}
    config = json.loads(pathlib.Path(args.config).read_text()) if args.config else config
    model = Llama(checked(config))
    init = jax.tree_util.Partial(
        model.init, jax.random.key(args.seed), jnp.zeros((1, 2), jnp.int32)
    )
    shapes, weights = jax.eval_shape(init)["params"], args.weights or folder / "model.safetensors"
    # Another file, or another version of it, is imported anew.
    stat = pathlib.Path(args.weights).stat() if pathlib.Path(args.weights).is_file() else None
    version = stat and (stat.st_size, stat.st_mtime_ns)
    source = [os.path.abspath(args.weights), version, args.seed, config]
    target = folder / f"imported_{zlib.crc32(repr(source).encode()):08x}"
    if not target.exists():
        if not args.weights:
            ocp.PyTreeCheckpointer().save(folder / "random", init(), force=True)
            jzero.export_weights(folder / "random", weights, layout="llama", overwrite=True)
        jzero.import_weights(weights, target, layout="llama", like=shapes, config=config)
    return model, shapes, target


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in SETTINGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    args = parser.parse_args(argv)
    files = [np.fromfile(name, np.uint8) for name in sorted(glob.glob(args.text, recursive=True))]
    text = (np.load(args.tokens) if args.tokens else np.concatenate(files)).astype(np.int32)
    text, held_out = np.split(text, [len(text) * 9 // 10])
    folder = pathlib.Path(f"{args.checkpoints}_weights").absolute()
    model, shapes, weights = imported(args, folder)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(args.learning_rate))

    def init(params: Any) -> TrainState:
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    train_step = jzero.shard_train_step(step_fn, stage=args.stage, microbatches=args.microbatches)
    if args.logs:
        from tensorboardX import SummaryWriter  # pip install tensorboardX
    writer = SummaryWriter(args.logs) if args.logs else None
    with jzero.Checkpointer(
        args.checkpoints, train_step, max_to_keep=2, save_interval_steps=args.save_every
    ) as checkpointer:
        step = checkpointer.latest_step() or 0
        if step:
            state = checkpointer.restore(jax.eval_shape(init, shapes))
        else:  # Parameters come in shards; what the optimizer has beside them is made so.
            same = jzero.shard_train_step(lambda state, batch: state, stage=args.stage)
            loaded = jzero.restore(weights, same, {"params": shapes})
            state = train_step.init(init, loaded["params"])
        print(train_step.describe(state, rows(text, step, args)), flush=True)
        stop = False
        while step < args.steps and not stop:
            state, metrics = train_step(state, rows(text, step, args))
            step += 1
            stop = checkpointer.preempted(step)  # SIGTERM came: save, and end.
            checkpointer.save(step, state, force=stop or step == args.steps)
            if stop or step == args.steps or step % args.log_every == 0:
                print(f"step {step:5}  loss {float(metrics['loss']):.6f}", flush=True)
                if writer:
                    writer.add_scalar("loss", float(metrics["loss"]), step)
    if writer:
        writer.close()
    if step < args.steps:
        return print(f"stopped after step {step}; the same command goes on")
    evaluate = jzero.shard_eval_step(
        lambda state, batch: loss_fn(state.params, state.apply_fn, batch), like=train_step
    )
    losses = [evaluate(state, rows(held_out, i, args)) for i in range(args.eval_batches)]
    print(f"held-out loss {np.mean(losses):.6f} nats/token")
    out = folder / "trained.safetensors"
    jzero.export_weights(args.checkpoints, out, layout="llama", overwrite=True)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
