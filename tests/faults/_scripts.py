"""What children do: each a function of `say`, which tells the parent, and of arguments in JSON."""

from __future__ import annotations

import functools
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import jzero
from jzero.cli._main import main

from ._library import Fault, armed, disarm, note

Say = Callable[[Any], None]
STEPS, IMPORTED = "steps", "made"  # below the root of a scenario
KEPT = 2  # steps that a Checkpointer keeps


def step_fn(state, batch):
    return jax.tree.map(lambda x: x + 1, state)


def new_train_step() -> jzero.ShardedTrainStep:
    return jzero.shard_train_step(step_fn, min_shard_bytes=0)


def values(step: int) -> dict[str, Any]:
    """The state after so many steps: other bits after each."""
    rng = np.random.default_rng(step)
    shapes = {"wide": (17, 8), "bias": (8,), "table": (30, 5)}  # Some of it rests padded.
    params = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return {"params": params, "count": np.int32(step)}


def verdict(state: Any, expected: Any) -> str:
    """Whether what was restored is what was saved, bit for bit."""
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True)
    same = all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)
    return "right" if same else "wrong values"


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:500]}"


class Attempts:
    """Does one thing after the other; what fails is told, and done once more without the fault."""

    def __init__(self, say: Say):
        self._say = say

    def __call__(self, what: str, act: Callable[[], Any]) -> Any:
        for when in ("failed", "failed again"):
            try:
                return act()
            except Exception as error:
                disarm()
                ours = isinstance(error, jzero.CheckpointError)
                self._say({when: what, "ours": ours, "error": described(error)})
        return None


def save(
    say: Say,
    root: str,
    steps: Sequence[int],
    asynchronous: bool = True,
    fault: Sequence[Any] = (),
    log: str | None = None,
) -> None:
    """Saves steps, as a training would, and says which are complete."""
    attempt, train_step = Attempts(say), new_train_step()
    states = {step: train_step.shard(values(step)) for step in steps}
    options: dict[str, Any] = dict(max_to_keep=KEPT, asynchronous=asynchronous)

    def open_() -> jzero.Checkpointer:
        return jzero.Checkpointer(pathlib.Path(root) / STEPS, train_step, **options)

    def save_one(step: int) -> None:
        saved = checkpointer.save(step, states[step])
        checkpointer.wait()
        if saved or checkpointer.latest_step() == step:
            note(f"complete {step}")
            say({"complete": step})

    with armed(root, Fault(*fault), log):
        checkpointer = attempt("open", open_)
        for step in steps:
            attempt(f"save {step}", functools.partial(save_one, step))
        attempt("close", checkpointer.close)


def look(say: Say, root: str, go_on: bool = True) -> None:
    """Says which steps are there and whether they are right; then saves two more, as a new training would."""
    directory, train_step = pathlib.Path(root) / STEPS, new_train_step()
    with jzero.Checkpointer(directory, train_step, max_to_keep=KEPT) as checkpointer:
        latest = checkpointer.latest_step()
        listed = sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal())
        say({"latest": latest, "steps": {n: _restored(checkpointer, n) for n in listed}})
        new = [(latest or 0) + 1, (latest or 0) + 2] if go_on else []
        for step in new:
            checkpointer.save(step, train_step.shard(values(step)))
            checkpointer.wait()
            say({"went on": _restored(checkpointer, step)})
    say({"names": sorted(os.listdir(directory)), "expected": [str(step) for step in new]})


def _restored(checkpointer: jzero.Checkpointer, step: int) -> str:
    try:
        return verdict(checkpointer.restore(values(step), step=step), values(step))
    except Exception as error:
        return described(error)


def restore(
    say: Say, root: str, step: int, fault: Sequence[Any] = (), log: str | None = None
) -> None:
    """Restores the latest step in every way there is, each again if it fails."""
    attempt, train_step = Attempts(say), new_train_step()
    directory = pathlib.Path(root) / STEPS

    def by_checkpointer() -> None:
        with jzero.Checkpointer(directory, train_step) as checkpointer:
            say({"latest": checkpointer.latest_step()})
            say({"restored": verdict(checkpointer.restore(values(step)), values(step))})

    def by_path() -> None:
        state = jzero.restore(directory / str(step), train_step, values(step))
        say({"restored": verdict(state, values(step))})

    with armed(root, Fault(*fault), log):
        attempt("restore by a Checkpointer", by_checkpointer)
        attempt("restore by path", by_path)


def command(
    say: Say, root: str, words: Sequence[str], fault: Sequence[Any] = (), log: str | None = None
) -> None:
    """Runs `python -m jzero` with these words; paths in them are relative to the root."""
    os.chdir(root)
    with armed(root, Fault(*fault), log):
        try:
            main(words)
            say({"exit": 0})
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 1
            say({"exit": status, "error": str(ended.code)})
        except Exception as error:
            say({"exit": None, "error": described(error)})


def look_at_import(say: Say, root: str, step: int) -> None:
    """Says whether an imported checkpoint is there, and right."""
    directory, params = pathlib.Path(root) / IMPORTED, {"params": values(step)["params"]}
    if not directory.exists():
        return say({"imported": "absent"})
    try:
        say({"imported": verdict(jzero.restore(directory, new_train_step(), params), params)})
    except Exception as error:
        say({"imported": described(error)})


def write_file(say: Say, root: str, fault: Sequence[Any] = (), log: str | None = None) -> None:
    """Writes a file beside, and renames it: what the library of faults is tried on."""
    path = pathlib.Path(root) / "file.tmp"
    with armed(root, Fault(*fault), log):
        try:
            with path.open("wb", buffering=0) as file:
                rest = memoryview(b"0123456789")
                while rest:
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
            path.rename(path.with_name("file"))
        except OSError as error:
            say({"errno": error.errno})


def hang(say: Say) -> None:
    time.sleep(1000)
