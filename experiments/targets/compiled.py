"""A small GPT at stages 1 to 3, compiled for every target that there is a compiler for: peak and collectives.

python experiments/targets/compiled.py           # two rows of hosts, a rack, a slice; no GPU, no TPU needed
python experiments/targets/compiled.py h100      # only for these, beside what the day has
python experiments/targets/compiled.py --show    # the table of the last result

Nothing runs. A target whose compiler is not installed is left out, and why. Prints a table in Markdown,
writes <date>-compiled.json.
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
from experiments.shared.gpt import GPT, make_step
from jzero.targets._target import TARGETS, find_target

# Hosts and devices of each; of TPUs the chips of a slice.
TOPOLOGIES = {"gb200-nvl72": "18x4", "gh200": "8x1", "rtx4090": "1x4", "rtx5090": "1x4"}
OTHERS = {"cuda": "2x8", "tpu": "4x4", "rocm": "1x8"}
STAGES = (1, 2, 3)
PLATFORMS = ("tpu", "cuda", "rocm")


def compiled(model: GPT, target: str, stage: int) -> dict[str, Any]:
    """What a stage needs of that target."""
    topology = TOPOLOGIES.get(target, OTHERS[platform_of(target)])
    hosts, devices = map(int, topology.split("x"))
    tx = optax.adamw(1e-4)
    state = jax.eval_shape(lambda: model.state(tx, lambda shape: jnp.zeros(shape, jnp.float32)))
    tokens = jax.ShapeDtypeStruct((hosts * devices, model.context + 1), jnp.int32)
    train_step = jzero.shard_train_step(make_step(model.loss, tx), stage=stage)
    found: Any = jzero.preflight(train_step, state, tokens, target=target, topology=topology)
    return {
        "topology": topology,
        "compile seconds": round(found.compile_seconds, 1),
        "at rest MiB": round(found.at_rest / 2**20, 1),
        "peak MiB": round(found.peak_bytes / 2**20, 1),
        "moved MiB": moved(found),
        "modelled step ms": found.to_dict()["step_seconds"] and round(1e3 * found.schedule.step_seconds, 2),
    }  # fmt: skip


def platform_of(target: str) -> str:
    return find_target("compiled.py", target).platform


def moved(found: Any) -> dict[str, float]:
    totals: dict[str, float] = {}
    for c in found.schedule.collectives:
        totals[c.op] = totals.get(c.op, 0) + c.nbytes / 2**20
    return {op: round(mib, 1) for op, mib in sorted(totals.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("targets", nargs="*", help="all, if none is named")
    parser.add_argument("--show", action="store_true", help="what the last run has written")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    if args.show:
        show(records.latest(args.out, "compiled"))
        return
    model = GPT(layers=args.layers, dim=args.dim, heads=args.dim // 64, vocab=4096, context=256)
    result: dict[str, Any] = {
        **records.versions("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12"),
        "jzero files": records.library(),
        "parameters": model.num_params,
        "targets": {},
        "left out": {},
    }
    path = args.out / f"{result['date']}-compiled.json"
    if args.targets and path.exists():  # They join what the day has.
        before = json.loads(path.read_text())
        result |= {key: before[key] for key in ("targets", "left out")}
    for target in sorted(
        args.targets or TARGETS, key=lambda name: PLATFORMS.index(platform_of(name))
    ):
        for stage in STAGES:
            try:
                found = compiled(model, target, stage)
            except (ImportError, jzero.OptionError) as error:
                result["left out"][target] = str(error)
                break
            result["targets"].setdefault(target, {})[str(stage)] = found
            print(target, stage, found, flush=True)
        records.write(path, result)
    show(result)
    print(f"\nwritten: {os.path.relpath(path)}")


def show(result: dict[str, Any]) -> None:
    names = ("jax", "libtpu", "jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12")
    versions = ", ".join(f"{name} {result[name]}" for name in names if result[name])
    print(
        f"{result['date']}: {result['parameters']:,} parameters, Python {result['python']}, {versions}"
    )
    print(
        "\n| target | topology | stage | at rest | peak, MiB | moved, MiB | a step by the model, ms |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for target, stages in result["targets"].items():
        for stage, x in stages.items():
            what = "; ".join(f"{op} {mib:g}" for op, mib in x["moved MiB"].items())
            step = "not read" if x["modelled step ms"] is None else x["modelled step ms"]
            print(
                f"| {target} | {x['topology']} | {stage} | {x['at rest MiB']:g} | {x['peak MiB']:g} "
                f"| {what} | {step} |"
            )
    for target, why in result["left out"].items():
        print(f"\n{target}: {why}")


if __name__ == "__main__":
    main()
