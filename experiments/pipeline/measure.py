"""A GPT over data, stages of a pipeline, and tensor parallelism, compiled for 512 H200s: bubble, bytes, peak.

python experiments/pipeline/measure.py              # 51.8B on 16 x 4 x 8; no GPU needed
python experiments/pipeline/measure.py --show       # the tables of the last result

Nothing runs. Each step is compiled ahead of time; its collectives are counted by mesh axis, with loops
multiplied out. Prints tables in Markdown, writes <date>.json.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jzero
from experiments.shared import records
from experiments.shared.gpt import make_step
from model import PipelinedGPT

AXES = {"data": 16, "stage": 4, "model": 8}  # a host's 8 devices are of one tensor axis
# By name: ZeRO's stage, microbatches.
RUNS = {
    "ZeRO 1": (1, 16),
    "ZeRO 2": (2, 16),
    "ZeRO 3": (3, 16),
    "ZeRO 1, more microbatches": (1, 48),
}


def compiled(model: PipelinedGPT, zero: int, axes: dict[str, int]) -> dict[str, Any]:
    """Memory, collectives by axis, and the schedule."""
    tx = jzero.master_weights(optax.adamw(1e-4))
    state = jax.eval_shape(lambda: model.state(tx))
    rows = axes["data"] * model.microbatches  # one sequence for each device and microbatch
    tokens = jax.ShapeDtypeStruct((rows, model.context + 1), jnp.int32)
    train_step = jzero.shard_train_step(
        make_step(model.loss, tx), stage=zero, axes=jzero.Axes("data", auto_specs=model.specs)
    )
    hosts = axes["data"] * axes["stage"] * axes["model"] // 8
    found = jzero.preflight(
        train_step, state, tokens, target="h200", topology=f"{hosts}x8", axes=axes
    )
    moved: dict[str, dict[str, float]] = {}
    for c in found.schedule.collectives:
        row = moved.setdefault(
            f"{c.op} over {' and '.join(c.axes)}", {"times": 0, "MiB": 0, "ms": 0}
        )
        row["times"] += c.times
        row["MiB"] += c.nbytes / 2**20
        row["ms"] += 1e3 * c.seconds * c.times
    ticks = model.microbatches + model.stages - 1
    return {
        "ZeRO stage": zero,
        "microbatches": model.microbatches,
        "bubble": (model.stages - 1) / ticks,
        "compile seconds": round(found.compile_seconds),
        "at rest GiB": round((found.at_rest or 0) / 2**30, 2),
        "peak GiB": round(found.peak_bytes / 2**30, 1),
        "products ms": round(1e3 * found.schedule.product_seconds),
        "exposed ms": round(1e3 * found.schedule.exposed_seconds),
        "moved": {
            name: {"times": int(row["times"]), "MiB": round(row["MiB"]), "ms": round(row["ms"], 1)}
            for name, row in sorted(moved.items())
            if row["MiB"] >= 0.5
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--show", action="store_true", help="what the last run has written")
    parser.add_argument("--only", nargs="+", default=list(RUNS), help="names of some runs")
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--dim", type=int, default=8192)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--data", type=int, default=AXES["data"])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    if args.show:
        show(json.loads(max(args.out.glob("*.json")).read_text()))
        return
    axes = AXES | {"data": args.data}
    result: dict[str, Any] = {
        **records.environment("jax", "jaxlib", "optax"),
        "jzero files": records.library(),
        "axes": axes,
        "runs": {},
    }
    path = args.out / f"{result['date']}.json"
    if path.exists():  # a run of the same day adds to it
        result["runs"] = json.loads(path.read_text())["runs"]
    for name in args.only:
        zero, microbatches = RUNS[name]
        model = PipelinedGPT(
            args.layers, args.dim, args.dim // 128, axes["stage"], microbatches, args.context
        )
        result["parameters"] = model.num_params
        result["runs"][name] = compiled(model, zero, axes)
        print(name, result["runs"][name], flush=True)
        records.write(path, result)
    show(result)
    print(f"written: {os.path.relpath(path)}")


def show(result: dict[str, Any]) -> None:
    axes = " x ".join(f"{size} {name}" for name, size in result["axes"].items())
    print(f"{result['parameters']:,} parameters, {axes}, JAX {result['jax']}")
    print("\n| | microbatches | bubble | at rest GiB | peak GiB | products ms | exposed ms |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, run in result["runs"].items():
        print(
            f"| {name} | {run['microbatches']} | {run['bubble']:.1%} | {run['at rest GiB']} | "
            f"{run['peak GiB']} | {run['products ms']} | {run['exposed ms']} |"
        )
    names = dict.fromkeys(name for run in result["runs"].values() for name in run["moved"])
    print(f"\n| MiB (times) | {' | '.join(result['runs'])} |")
    print("| --- " * (len(result["runs"]) + 1) + "|")
    for name in sorted(names):
        cells = [run["moved"].get(name) for run in result["runs"].values()]
        texts = [f"{cell['MiB']:,} ({cell['times']})" if cell else "-" for cell in cells]
        print(f"| {name} | {' | '.join(texts)} |")


if __name__ == "__main__":
    main()
