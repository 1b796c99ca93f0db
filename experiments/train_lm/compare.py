"""Trains train_linen.py's model at stages 0 to 3 from one seed: the four curves must coincide.

python experiments/train_lm/compare.py                                 # 8 devices
python experiments/train_lm/compare.py --devices 4 --steps 50 --out /tmp/compare

Writes <date>-compare.csv (loss of every step and stage), .json (versions, hardware, largest
differences) and .png.
"""

import argparse
import csv
import json
from pathlib import Path

import numpy as np

import common
import data
import train_linen
from experiments.shared import pictures, records  # `common` made them importable

STAGES = range(4)


def plot(path: Path, losses: np.ndarray, title: str) -> None:
    """`losses` is float[stage, step]."""
    # The first curve is drawn widest and the last one narrowest, so that all of them can be seen.
    styles = [(9, "-"), (6, "-"), (3, "-"), (1.5, "--")]
    colors = ["#cfd8dc", "#90caf9", "#1e88e5", "black"]
    with pictures.drawn(path, 2, 1, figsize=(8, 6.5), sharex=True, height_ratios=[2, 1]) as (
        _,
        (top, bottom),
    ):
        for stage, (width, style), color in zip(STAGES, styles, colors, strict=True):
            label = f"stage {stage}"
            top.plot(losses[stage], style, color=color, linewidth=width, label=label)
            if stage > 0:
                difference = abs(losses[stage] - losses[0])
                bottom.plot(difference, style, color=color, linewidth=width / 1.5, label=label)
        top.set(ylabel="loss (nats per byte)", title=title)
        bottom.set(xlabel="step", ylabel="|loss - stage 0|\n(nats per byte)")
        bottom.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        for axes in (top, bottom):
            axes.grid(alpha=0.3)
            axes.legend()


def main() -> None:
    args = common.parse_args(__doc__, out=Path("results"), steps=200, choose_stage=False)
    text = data.load()
    losses = []
    for stage in STAGES:
        chosen = argparse.Namespace(**vars(args), stage=stage, checkpoints=None)
        losses.append(train_linen.train(chosen, text).history.loss)
    if not common.is_first_process():
        return
    differences = abs(np.asarray(losses) - losses[0]).max(axis=1)

    result = {
        **common.environment(args.devices),
        "settings": {"steps": args.steps, "batch_size": args.batch_size, "seed": args.seed},
        "last_loss": {f"stage {stage}": losses[stage][-1] for stage in STAGES},
        "max_abs_difference_to_stage_0": {f"stage {s}": float(differences[s]) for s in STAGES[1:]},
    }
    stem = args.out / f"{result['date']}-compare"
    records.write(stem.with_suffix(".json"), result)
    with open(stem.with_suffix(".csv"), "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *(f"stage_{stage}_loss_nats_per_byte" for stage in STAGES)])
        writer.writerows((step, *row) for step, row in enumerate(zip(*losses, strict=True)))
    title = f"byte-level GPT, one seed, {result['devices']}"
    plot(stem.with_suffix(".png"), np.asarray(losses), title)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
