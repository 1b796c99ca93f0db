"""A script of experiments/train_lm with settings that train in seconds: `small_training.py SCRIPT ...`."""

import importlib
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "experiments" / "train_lm"))
common = importlib.import_module("common")
vars(common).update(num_layers=1, dim=32, num_heads=2, context=16)
vars(common).update(held_out_batches=1, sample_bytes=8)
importlib.import_module(sys.argv.pop(1)).main()
