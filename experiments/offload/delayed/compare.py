"""Trains train_lm without offload, updated by the host, and with updates delayed by a step, from equal seeds.

python experiments/offload/delayed/compare.py                       # make offload-delayed
python experiments/offload/delayed/compare.py --steps 60 --seeds 1 --out /tmp/delayed

Each training is experiments/train_lm/train_linen.py at stage 3 on 8 virtual CPU devices, with its flags.
Writes <date>.json (versions, held-out losses, differences), .csv (the loss of every step) and .png.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib import pyplot

HERE = Path(__file__).parent
TRAIN = HERE.parents[1] / "train_lm" / "train_linen.py"
matplotlib.use("Agg")

DELAYED = ["--offload", "host", "--delayed", "--delay-after"]
RUNS = {  # the first is what the others are compared with
    "no offload": [],
    "host": ["--offload", "host"],
    "delayed after 40 steps": [*DELAYED, "40"],
    "delayed from the start": [*DELAYED, "0"],
}
STYLES = [("#90caf9", 6), ("#0d47a1", 2.5), ("#e65100", 1.5), ("#2e7d32", 1.5)]  # color, width
SMOOTH = 20  # steps that a curve is the mean of


class Training(NamedTuple):
    losses: list[float]  # nats per byte, of each step's batch, before its update
    numbers: dict[str, Any]  # what train_linen.py wrote: versions, held-out loss


def train(flags: list[str], steps: int, seed: int) -> Training:
    with tempfile.TemporaryDirectory() as out:
        options = ["--steps", str(steps), "--seed", str(seed), "--devices", "8", "--out", out]
        subprocess.run(
            [sys.executable, str(TRAIN), *options, *flags], check=True, stdout=subprocess.DEVNULL
        )
        with open(Path(out, "metrics.csv"), newline="") as file:
            losses = [float(row["loss_nats_per_byte"]) for row in csv.DictReader(file)]
        return Training(losses, json.loads(Path(out, "held_out.json").read_text()))


def summary(trainings: list[dict[str, Training]]) -> dict[str, Any]:
    """Of each run: its held-out loss with every seed, and how far losses are from the first run's."""
    held_out: dict[str, list[float]] = {name: [] for name in RUNS}
    largest: dict[str, float] = dict.fromkeys(RUNS, 0.0)
    for runs in trainings:
        (first, *_) = runs.values()
        for name, run in runs.items():
            held_out[name].append(run.numbers["held_out_loss_nats_per_byte"])
            apart = np.abs(np.subtract(run.losses, first.losses)).max()
            largest[name] = max(largest[name], float(apart))
    return {
        "held_out_loss_nats_per_byte": held_out,
        "largest_difference_of_a_training_loss": largest,
        "last_training_loss": {  # mean of the last steps
            name: [float(np.mean(runs[name].losses[-SMOOTH:])) for runs in trainings]
            for name in RUNS
        },
    }


def table(result: dict[str, Any]) -> str:
    seeds = range(result["settings"]["seeds"])
    lines = [
        "| update | " + " | ".join(f"held-out loss, seed {i}" for i in seeds)
        + " | mean of differences | largest of a step's loss |",
        "| --- |" + " --- |" * (len(seeds) + 2),
    ]  # fmt: skip
    first, *_ = result["held_out_loss_nats_per_byte"].values()
    for name, held_out in result["held_out_loss_nats_per_byte"].items():
        apart = float(np.mean(np.subtract(held_out, first)))
        largest = result["largest_difference_of_a_training_loss"][name]
        shown = ["", ""] if held_out is first else [f"{apart:+.1e}", f"{largest:.1e}"]
        lines.append(f"| {' | '.join([name, *(f'{x:.4f}' for x in held_out), *shown])} |")
    return "\n".join(lines)


def smoothed(losses: list[float]) -> np.ndarray:
    num = min(SMOOTH, len(losses))
    return np.convolve(losses, np.ones(num) / num, mode="valid")


def plot(path: Path, runs: dict[str, Training]) -> None:
    with pyplot.rc_context({"font.size": 13, "axes.spines.top": False, "axes.spines.right": False}):
        figure, (top, bottom) = pyplot.subplots(
            2, 1, figsize=(8, 6.5), sharex=True, height_ratios=[2, 1], layout="constrained"
        )
        (first, *_) = runs.values()
        for (name, run), (color, width) in zip(runs.items(), STYLES, strict=True):
            curve, reference = smoothed(run.losses), smoothed(first.losses)
            steps = np.arange(len(curve)) + len(run.losses) - len(curve)
            top.plot(steps, curve, color=color, linewidth=width, label=name)
            if run is not first:
                bottom.plot(steps, curve - reference, color=color, linewidth=width)
        title = f"byte-level GPT, stage 3, 8 virtual CPU devices; mean of {SMOOTH} steps, seed 0"
        top.set(ylabel="loss (nats per byte)")
        top.set_title(title, fontsize=12)
        top.legend()
        bottom.set(xlabel="step", ylabel="less that\nwithout offload")
        for axes in (top, bottom):
            axes.grid(alpha=0.3)
        figure.savefig(path, dpi=120)
        pyplot.close(figure)


def write_losses(path: Path, trainings: list[dict[str, Training]]) -> None:
    columns = {
        f"{name}, seed {seed}": run.losses
        for seed, runs in enumerate(trainings)
        for name, run in runs.items()
    }
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *columns])
        writer.writerows(
            (i, *(f"{x:.7g}" for x in row))
            for i, row in enumerate(zip(*columns.values(), strict=True))
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=2, help="trainings of each kind")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    trainings: list[dict[str, Training]] = []
    for seed in range(args.seeds):
        trainings.append({})
        for name, flags in RUNS.items():
            trainings[-1][name] = train(flags, args.steps, seed)
            print(f"seed {seed}, {name}: {trainings[-1][name].losses[-1]:.4f}", flush=True)
    numbers = dict(trainings[0]["no offload"].numbers)
    del numbers["held_out_loss_nats_per_byte"]
    settings = {"steps": args.steps, "seeds": args.seeds}
    result = {**numbers, "settings": settings, **summary(trainings)}
    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / result["date"]
    stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    write_losses(stem.with_suffix(".csv"), trainings)
    plot(stem.with_suffix(".png"), trainings[0])
    print(table(result))


if __name__ == "__main__":
    main()
