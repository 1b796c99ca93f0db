"""The training of experiments/train_lm, for experiments that run it: its script, output and modules."""

import argparse
import csv
import importlib
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "train_lm"
SCRIPT = FOLDER / "train_linen.py"


def parse_args(description: str, out: Path) -> argparse.Namespace:
    """Of an experiment that runs one training in several ways, and saves checkpoints in it."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--out", type=Path, default=out)
    return parser.parse_args()


def losses(out: Path) -> dict[int, float]:
    """Of every step, in nats per byte, as a run wrote them to its folder."""
    with open(out / "metrics.csv", newline="") as file:
        return {int(row["step"]): float(row["loss_nats_per_byte"]) for row in csv.DictReader(file)}


def modules() -> tuple[Any, Any]:
    """`common` and `train_linen`, to train in this process; they import each other by bare names."""
    sys.path.append(str(FOLDER))
    return importlib.import_module("common"), importlib.import_module("train_linen")
