"""Llama 3.1 8B at torchtitan's published batch, compiled for 8 H100s: memory and traffic through jzero.

JAX_PLATFORMS=cpu python experiments/torchtitan/compiled.py    # some minutes, no GPU needed

Nothing runs. Prints a table in Markdown and writes <date>.json.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

import jzero
from experiments.shared import records
from experiments.shared.gpt import make_step

# ---------------------------------------------------------------------------------------------
layers, dim, heads, kv_heads, hidden, vocab = 32, 4096, 32, 8, 14_336, 128_256
rows, context = 2, 8192  # on each device
part = 512  # queries whose scores exist at once, in place of a fused kernel
# torchtitan's selective checkpointing keeps every other matrix product of a layer, in the order in which they
# run (q, k, v, output, gate, up, down: the first, third, ...), and what attention returns.
kept = ("q", "v", "attention", "gate", "down")
ways = {
    "gradients reduced in float32": jzero.Comm(reduce_dtype=jnp.float32),  # as torchtitan
    "gradients reduced in bfloat16": jzero.Comm(),
}
# ---------------------------------------------------------------------------------------------

tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
GIB = 2**30


def params_of(make: Any) -> Any:
    size = dim // heads
    matrices = {
        "q": (dim, dim), "k": (dim, kv_heads * size), "v": (dim, kv_heads * size), "o": (dim, dim),
        "gate": (dim, hidden), "up": (dim, hidden), "down": (hidden, dim),
        "attention_norm": (dim,), "mlp_norm": (dim,),
    }  # fmt: skip
    stacks = {name: make((layers, *shape)) for name, shape in matrices.items()}
    return {
        "embed": make((vocab, dim)),
        "layers": stacks,
        "norm": make((dim,)),
        "head": make((dim, vocab)),
    }


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * scale[None, None]


def rope(x: jax.Array) -> jax.Array:
    """Rotates pairs of [rows, context, heads, size] by their place in the context."""
    half = x.shape[-1] // 2
    frequencies = 500_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = (jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequencies[None])[None, :, None]
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    turned = [left * cos - right * sin, right * cos + left * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal, some queries at a time: the backward pass computes scores again, as a fused kernel does."""

    @jax.checkpoint
    def of_some(start: jax.Array, q: jax.Array) -> jax.Array:
        seen = jnp.arange(context)[None] <= start + jnp.arange(part)[:, None]
        return jax.nn.dot_product_attention(q, k, v, mask=seen[None, None], implementation="xla")

    parts = q.reshape(q.shape[0], -1, part, *q.shape[2:]).swapaxes(0, 1)
    starts = jnp.arange(len(parts)) * part
    _, out = jax.lax.scan(lambda _, each: (None, of_some(*each)), None, (starts, parts))
    return out.swapaxes(0, 1).reshape(q.shape)


@partial(
    jax.checkpoint, prevent_cse=False, policy=jax.checkpoint_policies.save_only_these_names(*kept)
)
def layer(x: jax.Array, params: Any) -> tuple[jax.Array, None]:
    w = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)

    def product(x: jax.Array, name: str) -> jax.Array:
        return checkpoint_name(x @ w[name], name)

    h = rms_norm(x, w["attention_norm"])
    q, k, v = (product(h, name).reshape(*x.shape[:2], -1, dim // heads) for name in "qkv")
    out = checkpoint_name(attention(rope(q), rope(k), v), "attention")
    x += product(out.reshape(x.shape), "o")
    h = rms_norm(x, w["mlp_norm"])
    return x + product(jax.nn.silu(product(h, "gate")) * product(h, "up"), "down"), None


def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
    x = params["embed"].astype(jnp.bfloat16)[tokens[:, :-1]]
    x, _ = jax.lax.scan(layer, x, params["layers"])
    x = rms_norm(x, params["norm"].astype(jnp.bfloat16))
    logits = (x @ params["head"].astype(jnp.bfloat16)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def compiled(comm: jzero.Comm) -> dict[str, Any]:
    params = params_of(lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32))
    state = {"params": params, "opt_state": jax.eval_shape(tx.init, params)}
    tokens = jax.ShapeDtypeStruct((8 * rows, context + 1), jnp.int32)
    train_step = jzero.shard_train_step(make_step(loss_fn, tx), stage=3, comm=comm)
    found = jzero.preflight(train_step, state, tokens, target="h100", topology="1x8")
    ops = ("all-gather", "reduce-scatter", "all-reduce")
    return {
        "parameters": sum(p.size for p in jax.tree.leaves(params)),
        "at_rest_bytes": found.at_rest,
        "peak_bytes": found.peak_bytes,
        "moved_bytes": {op: found.nbytes(op) for op in ops},
        "hidden": found.hidden(),
        "exposed_seconds": round(found.schedule.exposed_seconds, 4),
        "step_seconds": round(found.schedule.step_seconds, 3),
        "compile_seconds": round(found.compile_seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    result: dict[str, Any] = {**records.versions("jax", "jaxlib", "optax"), "ways": {}}
    print("| | at rest GiB | peak GiB | gathered GB | reduced GB | hidden | exposed ms |")
    print("| --- " * 7 + "|")
    for name, comm in ways.items():
        found = result["ways"][name] = compiled(comm)
        moved = found["moved_bytes"]
        cells = [
            *(f"{found[key] / GIB:.1f}" for key in ("at_rest_bytes", "peak_bytes")),
            f"{moved['all-gather'] / 1e9:.1f}",
            f"{(moved['reduce-scatter'] + moved['all-reduce']) / 1e9:.1f}",
            records.percent(found["hidden"]),
            f"{1000 * found['exposed_seconds']:.0f}",
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
        records.write(args.out / f"{result['date']}.json", result)


if __name__ == "__main__":
    main()
