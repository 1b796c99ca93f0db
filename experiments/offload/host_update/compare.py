"""Updates state in host memory by jzero, DeepSpeed, PyTorch and XLA, in turns: share of the memory limit.

make host-update                                               # creates .venv-host-update, runs this
.venv-host-update/bin/python experiments/offload/host_update/compare.py --help

In each round every side updates the same memory twice, the limit among them; a share is the limit's second
time over a side's in the same round. Writes results/<date>.json and .png.
"""

import argparse
import gc
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

import picture
import sides
from experiments.shared import records
from problem import MOMENTS, Config, Memory

HERE = Path(__file__).parent
# OpenMP's threads keep a processor busy for some 10 ms when they have nothing to do, which the next side
# would lack. So each side comes after a pause, and its second run is timed, when its threads are awake.
PAUSE = 0.03
ROUNDS = {1: 41, 32: 15, 256: 7}
LEAVES = (1, 300)
# Temporaries of PyTorch's foreach would not fit beside the rest.
LARGEST_FOREACH = 32


def configs() -> list[Config]:
    """Every size for the plainest and the most usual traffic; all traffic for AdamW."""
    usual = [("float32", False), ("bfloat16", True)]
    every = [*usual, ("float32", True), ("bfloat16", False)]
    return [
        Config(optimizer, millions, num_leaves, grads, copy)
        for optimizer in MOMENTS
        for millions in ROUNDS
        for num_leaves in LEAVES
        for grads, copy in (every if optimizer == "AdamW" and millions == 32 else usual)
    ]


def measure(config: Config, rounds: int) -> dict[str, list[float]]:
    """Seconds of each side in each round."""
    made = sides.sides_of(Memory(config))
    if config.millions > LARGEST_FOREACH:
        made.pop(sides.FOREACH, None)
    for side in made.values():  # They compile, and their pages are touched.
        side()
        side()
    names = list(made)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            time.sleep(PAUSE)
            made[name]()
            start = time.perf_counter()
            made[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def row(config: Config, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Medians over the rounds; a share is taken within each round."""
    limit, ours = np.array(seconds[sides.LIMIT]), np.array(seconds[sides.JZERO])
    sizes = 8 * (1 + MOMENTS[config.optimizer]) + (4 if config.grads == "float32" else 2)
    moved = (sizes + 2 * config.copy) * config.leaf_size * config.num_leaves
    return {
        **config.__dict__,
        "limit_gb_per_s": moved / float(np.median(limit)) / 1e9,
        "seconds": {name: float(np.median(times)) for name, times in seconds.items()},
        "share": {name: float(np.median(limit / times)) for name, times in seconds.items()},
        "quartiles": {
            name: np.quantile(limit / times, [0.25, 0.75]).tolist()
            for name, times in seconds.items()
        },
        "jzero_over": {name: float(np.median(times / ours)) for name, times in seconds.items()},
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Shares of the memory limit as Markdown."""
    names = [sides.JZERO, sides.DEEPSPEED, sides.FUSED, sides.FOREACH, sides.XLA]
    lines = [
        "| optimizer | parameters | leaves | gradients, copy | limit, GB/s | "
        + " | ".join(names)
        + " |",
        "| --- | --- | --- | --- | --- |" + " --- |" * len(names),
    ]
    for r in rows:
        shares = [f"{r['share'][n]:.2f}" if n in r["share"] else "" for n in names]
        what = r["grads"] + (", bfloat16" if r["copy"] else "")
        head = (
            f"| {r['optimizer']} | {r['millions']}M | {r['num_leaves']} | {what} "
            f"| {r['limit_gb_per_s']:.1f} | "
        )
        lines.append(head + " | ".join(shares) + " |")
    return "\n".join(lines) + "\n"


def environment() -> dict[str, Any]:
    packages = ("jax", "jaxlib", "optax", "llvmlite", "torch", "deepspeed", "numpy")
    return {
        **records.versions(*packages),
        "processors": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizers", nargs="+", default=list(MOMENTS), choices=list(MOMENTS))
    parser.add_argument(
        "--millions", nargs="+", type=int, default=list(ROUNDS), choices=list(ROUNDS)
    )
    parser.add_argument("--leaves", nargs="+", type=int, default=LEAVES, choices=LEAVES)
    parser.add_argument("--rounds-times", type=float, default=1.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {"environment": environment(), "apart": {}, "rows": []}
    out = args.out or HERE / "results" / f"{result['environment']['date']}.json"
    for optimizer in args.optimizers:
        result["apart"][optimizer] = apart = sides.check(Config(optimizer, 1, 1))
        print(f"{optimizer}: parameters differ from jzero's by {apart}", flush=True)
        assert max(apart.values()) < 1e-6, "the sides do not do the same"
    for config in configs():
        if (
            config.optimizer in args.optimizers
            and config.millions in args.millions
            and config.num_leaves in args.leaves
        ):
            seconds = measure(config, max(3, round(ROUNDS[config.millions] * args.rounds_times)))
            result["rows"].append(row(config, seconds))
            write(result, out)  # What is measured is kept if the rest does not fit.
            print(table(result["rows"][-1:]).splitlines()[-1], flush=True)
            gc.collect()
    print(table(result["rows"]))


def write(result: dict[str, Any], out: Path) -> None:
    result["environment"]["load_after"] = os.getloadavg()
    records.write(out, result)
    picture.draw(result, out.with_suffix(".png"))


if __name__ == "__main__":
    main()
