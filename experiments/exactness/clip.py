"""CLIP at growing batches, in microbatches of one size: memory of a device, and the losses of one device.

python experiments/exactness/clip.py                    # 8 virtual CPU devices; some minutes on two cores
python experiments/exactness/clip.py --rows 256 512     # fewer

Prints a table in Markdown, writes results/clip.json.
"""

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jzero
from experiments.shared import records
from experiments.shared.devices import use_virtual_devices

# ---------------------------------------------------------------------------------------------
rows = (256, 512, 1024, 2048, 4096, 8192)
rows_at_a_time = 32  # of each device
features, width, depth, embedding = 64, 512, 8, 64
num_steps = 2
# ---------------------------------------------------------------------------------------------

tx = optax.adamw(1e-3)
HEADER = ("rows", "microbatches", "loops", "products", "temporary MiB", "of it kept", "and gathered",
          "one device, whole batch, MiB", "largest difference of a loss")  # fmt: skip


def tower(params: Any, x: jax.Array) -> jax.Array:
    for weights in params[:-1]:
        x = jax.nn.gelu(x @ weights)
    z = x @ params[-1]
    return z / jnp.linalg.norm(z, axis=1, keepdims=True)


def init() -> Any:
    sizes = (features, *[width] * depth, embedding)

    def of(seed: int) -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(seed), depth + 1)
        pairs = zip(sizes, sizes[1:], strict=False)
        return [
            jax.random.normal(key, shape) / shape[0] ** 0.5
            for key, shape in zip(keys, pairs, strict=True)
        ]

    params = {"image": of(0), "text": of(1), "scale": jnp.asarray(1.0)}
    return params, tx.init(params)


def step(state: Any, image: jax.Array, text: jax.Array) -> Any:
    """What anyone would write for one device; it has no word of devices or microbatches."""
    params, opt_state = state

    def loss_fn(params: Any) -> jax.Array:
        images, texts = tower(params["image"], image), tower(params["text"], text)
        logits = jnp.exp(params["scale"]) * images @ texts.T
        labels = jnp.arange(logits.shape[0])
        losses = optax.softmax_cross_entropy_with_integer_labels
        return (losses(logits, labels).mean() + losses(logits.T, labels).mean()) / 2

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), {"loss": loss}


def batch(num: int, seed: int) -> list[np.ndarray]:
    pairs = np.random.default_rng(seed).normal(size=(num, features)).astype(np.float32)
    turned = pairs @ np.linalg.qr(np.random.default_rng(0).normal(size=(features, features)))[0]
    return [pairs, turned.astype(np.float32)]


def losses(run: Any, num: int) -> list[float]:
    state, found = init(), []
    for seed in range(num_steps):
        state, metrics = run(state, *batch(num, seed))
        found.append(float(metrics["loss"]))
    return found


def temporary(lowered: Any) -> int:
    return int(lowered.compile().memory_analysis().temp_size_in_bytes)


def measure(num: int, most: int) -> dict[str, Any]:
    k = num // (rows_at_a_time * jax.device_count())
    sharded = jzero.shard_train_step(
        step, stage=3, microbatches=k, comm=jzero.Comm(max_gather_bytes=2**34)
    )
    args = (jax.eval_shape(init), *batch(num, 0))
    report = sharded.describe(*args)
    gathered = sum(m.nbytes * m.times for m in report.movements)
    jitted = jax.jit(step, donate_argnums=0)
    found = {
        "rows": num, "microbatches": k,
        "loops": report.loops.num if report.loops else 1,
        "products": round(report.loops.repeats, 2) if report.loops else 1.0,
        "temporary": temporary(sharded.lower(*args)),
        "kept": sum(kept.nbytes for kept in report.loops.saved) if report.loops else 0,
        "gathered": gathered,
        "one_device": temporary(jitted.lower(*args)),
    }  # fmt: skip
    if num <= most:
        pairs = zip(losses(sharded, num), losses(jitted, num), strict=True)
        found["difference"] = max(abs(a - b) / abs(b) for a, b in pairs)
    return found


def row(found: dict[str, Any]) -> str:
    def mib(name: str) -> str:
        return f"{found[name] / 2**20:.1f}"

    difference = f"{found['difference']:.1g}" if "difference" in found else "not run"
    cells = [found["rows"], found["microbatches"], found["loops"], found["products"], mib("temporary"),
             mib("kept"), mib("gathered"), mib("one_device"), difference]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=rows)
    parser.add_argument("--run", type=int, default=8192, help="most rows that are also trained")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "clip.json")
    args = parser.parse_args()
    use_virtual_devices(8)
    about = {**records.versions("jax", "jzero"), "devices": jax.device_count()}
    print(f"| {' | '.join(HEADER)} |\n|{' --- |' * len(HEADER)}")
    results = []
    for num in args.rows:
        results.append(measure(num, args.run))
        print(row(results[-1]), flush=True)
        records.write(args.out, {**about, "results": results})
        jax.clear_caches()


if __name__ == "__main__":
    main()
