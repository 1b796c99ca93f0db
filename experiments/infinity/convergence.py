"""Trains a small GPT on real text with all tiers, and by `jax.jit` on one device: do the losses differ?

python experiments/infinity/convergence.py                # 300 steps; ten minutes on idle cores
python experiments/infinity/convergence.py --steps 20

The model and the text are those of experiments/train_lm: a byte-level GPT with a scanned layer, on the source
files of Python's own library. All ways get the same parameters and the same batches. Prints a table in
Markdown, writes <date>-convergence.json with every loss.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jzero
from experiments.shared import training
from experiments.shared.devices import use_virtual_devices
from tiers import ACTIVATIONS, ALL, LAYER_MAJOR, ONE_DEVICE, tiers

common, train_linen = training.modules()
data = common.data

# ---------------------------------------------------------------------------------------------
ways = (ALL, ACTIVATIONS, LAYER_MAJOR)
device_bytes = 2**22  # two layers as they are fetched and gathered
batch_size, seed = 8, 0  # 4 microbatches on 2 devices
# ---------------------------------------------------------------------------------------------


def losses(init: Any, step: Any, state: Any, text: np.ndarray, steps: int) -> list[float]:
    """Of every step, in nats per byte."""
    batches = data.Windows(text, batch_size, common.context + 1, seed)
    found = []
    for _ in range(steps):
        state, metrics = step(state, next(batches))
        found.append(float(metrics["loss"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    use_virtual_devices(args.devices)
    text = data.load().train
    init = train_linen.make_init(argparse.Namespace(steps=args.steps, seed=seed))
    mesh = jax.make_mesh((args.devices,), ("data",), devices=jax.devices()[: args.devices])
    found = {}
    one = jax.jit(train_linen.train_step, donate_argnums=0)
    found[ONE_DEVICE] = losses(init, one, jax.jit(init)(), text, args.steps)
    print("| tiers | loss of the last step | mean of the last 20 | largest difference | at step |")
    print("| --- | --- | --- | --- | --- |")
    rows = {}
    for name in (ONE_DEVICE, *ways):
        if name != ONE_DEVICE:
            options = tiers(device_bytes)[name]
            step = jzero.shard_train_step(train_linen.train_step, mesh=mesh, **options)
            found[name] = losses(init, step, step.init(init), text, args.steps)
        apart = np.abs(np.subtract(found[name], found[ONE_DEVICE]))
        rows[name] = {
            "last": found[name][-1],
            "mean_of_last_20": float(np.mean(found[name][-20:])),
            "largest_difference": float(apart.max()),
            "at_step": int(apart.argmax()),
        }
        r = rows[name]
        print(
            f"| {name} | {r['last']:.5f} | {r['mean_of_last_20']:.5f} | "
            f"{r['largest_difference']:.1e} | {r['at_step']} |",
            flush=True,
        )
    result = {
        **common.environment(args.devices),
        "jzero files": common.records.library(),
        "settings": {"steps": args.steps, "batch_size": batch_size, "device_bytes": device_bytes},
        "rows": rows,
        "losses": found,
    }
    path = args.out / f"{result['date']}-convergence.json"
    common.records.write(path, result)
    print(f"written: {os.path.relpath(path)}")


if __name__ == "__main__":
    main()
