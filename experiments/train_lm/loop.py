"""The training loop of both scripts: batches, steps under a progress bar, checkpoints, metrics.csv."""

import argparse
import contextlib
import csv
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import common
import data
import jzero
from experiments.shared import speed  # `common` made it importable

max_to_keep = 3  # checkpoints
HEADER = ["step", "loss_nats_per_byte", "seconds"]


class Batches:
    """Batches of a text: every process hands its own rows to its devices, which make one array."""

    def __init__(self, text: np.ndarray, args: argparse.Namespace, mesh: Mesh):
        part = jax.process_index(), jax.process_count()
        self.rows = data.Windows(text, args.batch_size, common.context + 1, args.seed, part)
        self.sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self.get_state, self.set_state = self.rows.get_state, self.rows.set_state

    def __next__(self) -> jax.Array:
        return jax.make_array_from_process_local_data(self.sharding, next(self.rows))


class History(NamedTuple):
    first: int  # steps that were done before
    loss: list[float]  # nats per byte, before each step's update
    seconds: list[float]  # each step's wall time; the first one contains the compilation

    @property
    def last(self) -> int:
        """Steps that are done."""
        return self.first + len(self.loss)

    def tokens_per_second(self, batch_size: int) -> float:
        """From the median of the last 50 steps; the first step compiles and does not count."""
        seconds = (self.seconds[1:] or self.seconds or [float("nan")])[-50:]
        return batch_size * common.context / float(np.median(seconds))


class Run(NamedTuple):
    step: jzero.ShardedStep
    state: Any  # after the last step
    history: History


def fit(
    train_step: jzero.ShardedStep,
    init: Callable[[], Any],
    text: np.ndarray,
    args: argparse.Namespace,
) -> Run:
    """Trains on from the latest checkpoint, or from `init()`, for `args.steps` steps in all.

    Told to end before (SIGTERM), it saves a checkpoint and returns.
    """
    batches = Batches(text, args, train_step.mesh)
    with contextlib.ExitStack() as stack:
        checkpointer = None
        if args.checkpoints is not None:
            checkpointer = stack.enter_context(
                jzero.Checkpointer(args.checkpoints, train_step, max_to_keep=max_to_keep)
            )
        first = checkpointer.latest_step() if checkpointer else None
        if checkpointer is None or first is None:
            first, state = 0, train_step.init(init)
        else:
            state = checkpointer.restore(jax.eval_shape(init), data_iterator=batches)
        if common.is_first_process():
            print(f"going on after step {first}" if first else describe(train_step, state, args))
        history = History(first, [], [])
        state = train(train_step, state, batches, history, checkpointer, args)
        return Run(train_step, state, history)


def describe(train_step: jzero.ShardedStep, state: Any, args: argparse.Namespace) -> Any:
    batch = jax.ShapeDtypeStruct((args.batch_size, common.context + 1), np.uint8)
    return train_step.describe(state, batch)


def make_meter(train_step: jzero.ShardedStep, state: Any, args: argparse.Namespace) -> speed.Meter:
    batch = jax.ShapeDtypeStruct((args.batch_size, common.context + 1), np.uint8)
    leaves = train_step.plan(state, batch).leaves
    num_params = sum(math.prod(leaf.shape) for leaf in leaves if leaf.role == "parameter")
    flops = speed.flops_per_token(num_params, common.num_layers, common.dim, common.context)
    mesh = train_step.mesh
    return speed.Meter(flops, mesh.size, mesh.local_devices)


def train(
    train_step: jzero.ShardedStep,
    state: Any,
    batches: Batches,
    history: History,
    checkpointer: jzero.Checkpointer | None,
    args: argparse.Namespace,
) -> Any:
    """Steps under a progress bar; adds to `history`, and says at the end how fast they were."""
    meter = make_meter(train_step, state, args)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    silent = not common.is_first_process()
    with Progress(*columns, TimeRemainingColumn(), disable=silent) as progress:
        label = f"stage {args.stage}"
        task = progress.add_task(f"{label}: compiling", total=args.steps, completed=history.first)
        while history.last < args.steps:
            batch = next(batches)
            start = time.perf_counter()
            state, metrics = train_step(state, batch)
            history.loss.append(float(metrics["loss"]))  # waits for the device
            history.seconds.append(time.perf_counter() - start)
            said = meter.said(history.tokens_per_second(args.batch_size))
            text = f"{label}: loss {history.loss[-1]:.3f} nats/byte, {said}"
            progress.update(task, advance=1, description=text)
            if checkpointer is not None:
                stop = checkpointer.preempted(history.last)
                if stop or history.last == args.steps or history.last % args.save_every == 0:
                    state = train_step.flush(state)  # One that waits for an update cannot be saved.
                    checkpointer.save(history.last, state, batches)
                    if not silent:
                        write_metrics(args, history)  # A run that is killed writes no others.
                if stop:
                    break
    if history.seconds and not silent:
        said = meter.said(history.tokens_per_second(args.batch_size))
        print(f"the first step took {history.seconds[0]:.1f} s with compiling it; then {said}")
    return train_step.flush(state)


def write_metrics(args: argparse.Namespace, history: History) -> list[float]:
    """Writes metrics.csv, after the steps that an earlier run wrote there; the losses of all."""
    path = args.out / "metrics.csv"
    rows: list[list[Any]] = []
    if history.first and path.exists():
        with open(path, newline="") as file:
            rows = [row for row in csv.reader(file) if row[0].isdigit()][: history.first]
    steps = range(history.first, history.last)
    rows += map(list, zip(steps, history.loss, history.seconds, strict=True))
    args.out.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([HEADER, *rows])
    return [float(row[1]) for row in rows]


def report(args: argparse.Namespace, text: data.Text, run: Run, apply: Callable) -> None:
    """Evaluates on all devices, and writes and prints once; `apply(state, tokens)` are the model's logits."""
    history, first = run.history, common.is_first_process()
    losses = write_metrics(args, history) if first else []
    if history.last < args.steps:
        if first:
            print(f"stopped after step {history.last}; the same command goes on from there")
        return
    held_out = common.held_out_loss(text.held_out, apply, run.step, run.state, args)
    sample = common.sample(text.held_out, apply, run.step, run.state, args.seed)
    if first:
        tokens_per_second = history.tokens_per_second(args.batch_size)
        common.report(args, text, losses, tokens_per_second, held_out, sample)
