"""Trains train_lm without offload, updated by the host, and with updates delayed by a step, from equal seeds.

python experiments/offload/delayed/compare.py                       # make offload-delayed
python experiments/offload/delayed/compare.py --steps 60 --out /tmp/delayed

Each training is experiments/train_lm/train_linen.py at stage 3 on 8 virtual CPU devices, with its flags, at
three peak learning rates. Writes <date>.json (versions, held-out losses), .csv (the loss of every step) and
.png.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.shared import pictures, records, training

HERE = Path(__file__).parent

NONE, HOST, AFTER, FROM_START = (
    "no offload", "host", "delayed after 40 steps", "delayed from the start"
)  # fmt: skip
DELAYED = ["--offload", "host", "--delayed", "--delay-after"]
FLAGS = {
    NONE: [],
    HOST: ["--offload", "host"],
    AFTER: [*DELAYED, "40"],
    FROM_START: [*DELAYED, "0"],
}
STYLES = {
    NONE: ("#90caf9", 6),
    HOST: ("#0d47a1", 2),
    AFTER: ("#e65100", 2),
    FROM_START: ("#2e7d32", 2),
}
RATES = (6e-3, 2e-3, 6e-4)  # the first is train_lm's own
SMOOTH = 20  # steps that a curve is the mean of


class Run(NamedTuple):
    update: str
    rate: float
    seed: int = 0


RUNS = (
    *(Run(update, RATES[0]) for update in FLAGS),
    *(Run(update, rate) for rate in RATES[1:] for update in (NONE, AFTER)),
    Run(NONE, RATES[0], seed=1),  # what another seed changes
)


class Training(NamedTuple):
    losses: list[float]  # nats per byte, of each step's batch, before its update
    numbers: dict[str, Any]  # what train_linen.py wrote: versions, held-out loss


def train(run: Run, steps: int) -> Training:
    with tempfile.TemporaryDirectory() as out:
        options = ["--steps", steps, "--seed", run.seed, "--learning-rate", run.rate, "--out", out]
        command = [sys.executable, training.SCRIPT, "--devices", 8, *options, *FLAGS[run.update]]
        subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
        losses = list(training.losses(Path(out)).values())
        return Training(losses, json.loads(Path(out, "held_out.json").read_text()))


def row(run: Run, trained: Training, plain: Training) -> dict[str, Any]:
    """A training's numbers, and how far it is from the one without offload."""
    held_out = "held_out_loss_nats_per_byte"
    losses = np.array(trained.losses)
    return run._asdict() | {
        "held_out_loss": trained.numbers[held_out],
        "above_no_offload": trained.numbers[held_out] - plain.numbers[held_out],
        "last_training_loss": float(losses[-SMOOTH:].mean()),
        "largest_difference_of_a_step": float(np.abs(losses - plain.losses).max()),
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| peak learning rate | update | seed | held-out loss | above no offload | largest of a step |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for x in rows:
        apart = [f"{x['above_no_offload']:+.2g}", f"{x['largest_difference_of_a_step']:.2g}"]
        cells = [f"{x['rate']:g}", x["update"], str(x["seed"]), f"{x['held_out_loss']:.4f}"]
        lines.append(f"| {' | '.join(cells + (['', ''] if x['update'] == NONE else apart))} |")
    return "\n".join(lines)


def plot(path: Path, trainings: dict[Run, Training]) -> None:
    with pictures.drawn(
        path, 1, len(RATES), font=12, figsize=(12, 4.2), sharex=True, sharey=True
    ) as (_, panels):
        for axes, rate in zip(panels, RATES, strict=True):
            for run, trained in trainings.items():
                if run.rate != rate or run.seed:
                    continue
                num = min(SMOOTH, len(trained.losses))
                curve = np.convolve(trained.losses, np.ones(num) / num, mode="valid")
                color, width = STYLES[run.update]
                steps = np.arange(num - 1, len(trained.losses))
                axes.plot(steps, curve, color=color, linewidth=width, label=run.update)
            axes.set_title(f"peak learning rate {rate:g}", fontsize=12)
            axes.set(xlabel="step")
            axes.grid(alpha=0.3)
        panels[0].set(ylabel=f"loss (nats per byte), mean of {SMOOTH} steps")
        panels[0].legend()


def write_losses(path: Path, trainings: dict[Run, Training]) -> None:
    names = [f"{run.update}, {run.rate:g}, seed {run.seed}" for run in trainings]
    columns = [trained.losses for trained in trainings.values()]
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *names])
        for step, losses in enumerate(zip(*columns, strict=True)):
            writer.writerow((step, *(f"{x:.7g}" for x in losses)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    trainings: dict[Run, Training] = {}
    rows = []
    for run in RUNS:
        trainings[run] = train(run, args.steps)
        rows.append(row(run, trainings[run], trainings[Run(NONE, run.rate, run.seed)]))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    numbers = dict(trainings[RUNS[0]].numbers)
    del numbers["held_out_loss_nats_per_byte"]
    result = {**numbers, "steps": args.steps, "rows": rows}
    stem = args.out / result["date"]
    records.write(stem.with_suffix(".json"), result)
    write_losses(stem.with_suffix(".csv"), trainings)
    plot(stem.with_suffix(".png"), trainings)
    print(table(rows))


if __name__ == "__main__":
    main()
