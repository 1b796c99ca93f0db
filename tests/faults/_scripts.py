"""What children do: each a function of `say`, which tells the parent, and of arguments in JSON."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

import jzero
from jzero.checkpoint import _bucket, _lock, _mirror, _seal
from jzero.checkpoint._bucket import Bucket
from jzero.cli._main import main

from . import _library, _requests
from ._library import Fault

Say = Callable[[Any], None]
# Below the root of a scenario, which is a folder or a directory of a bucket.
STEPS, EXPORTS, IMPORTED = "steps", "exports", "made"
KEPT = 2  # steps that a Checkpointer keeps


def on_machine(world: str, lease: float) -> None:
    """This process counts as one of another machine, and for dead after so many seconds."""
    _lock._world = lambda: world  # type: ignore[assignment]
    _lock.BEAT, _lock.EXPIRES, _lock._MARGIN, _lock._LOOK = lease / 8, lease, lease / 4, lease / 16


@contextlib.contextmanager
def armed(root: str, fault: Sequence[Any], log: str | None) -> Iterator[None]:
    """While it is entered, the fault is there; that of a bucket is in the proxy before it."""
    if Bucket.of("test", root) is None:
        with _library.armed(root, Fault(*fault), log):
            yield
    else:
        # Faults are as soon over as they are met, so that nobody need wait for it.
        _bucket._RETRIES.update(max_retries=3, initial_delay="5ms", max_delay="20ms")
        yield


def disarm() -> None:
    """Nothing fails any more."""
    proxy = os.environ.get(_requests.PROXY)
    if proxy is None:
        _library.disarm()
    else:
        urllib.request.urlopen(f"{proxy}{_requests.CONTROL}").close()


def note(text: str) -> None:
    """Writes it into the log of operations on files."""
    if _requests.PROXY not in os.environ:
        _library.note(text)


def names(directory: str) -> list[str]:
    """What there is in a directory."""
    bucket = Bucket.of("test", directory)
    if bucket is None:
        return sorted(os.listdir(directory))
    return sorted({name.split("/")[0] for name in bucket.names()})


def step_fn(state, batch):
    return jax.tree.map(lambda x: x + 1, state)


def new_train_step() -> jzero.ShardedStep:
    return jzero.shard_train_step(step_fn, axes=jzero.Axes(min_shard_bytes=0))


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
    lease: float | None = None,
    clock: float = 0.0,
) -> None:
    """Saves steps, as a training would, and says which are complete."""
    now = time.time
    time.time = lambda: now() + clock
    if lease is not None:
        on_machine("one of the tests", lease)
    attempt, train_step = Attempts(say), new_train_step()
    states = {step: train_step.shard(values(step)) for step in steps}
    options: dict[str, Any] = dict(max_to_keep=KEPT, asynchronous=asynchronous)

    def open_() -> jzero.Checkpointer:
        return jzero.Checkpointer(f"{root}/{STEPS}", train_step, **options)

    def save_one(step: int) -> None:
        saved = checkpointer.save(step, states[step])
        checkpointer.wait()
        if saved or checkpointer.latest_step() == step:
            note(f"complete {step}")
            say({"complete": step})

    with armed(root, fault, log):
        checkpointer = attempt("open", open_)
        for step in steps:
            attempt(f"save {step}", functools.partial(save_one, step))
        attempt("close", checkpointer.close)


def look(say: Say, root: str, go_on: bool = True) -> None:
    """Says which steps are there and whether they are right; then saves two more, as a new training would."""
    directory, train_step = f"{root}/{STEPS}", new_train_step()
    with jzero.Checkpointer(directory, train_step, max_to_keep=KEPT) as checkpointer:
        latest = checkpointer.latest_step()
        if Bucket.of("test", root) is None:
            listed = sorted(int(name) for name in names(directory) if name.isdecimal())
        else:  # Of what was not finished, too, there are objects until somebody saves.
            listed = checkpointer.steps()
        say({"latest": latest, "steps": {n: restored(checkpointer, n) for n in listed}})
        new = [(latest or 0) + 1, (latest or 0) + 2] if go_on else []
        for step in new:
            checkpointer.save(step, train_step.shard(values(step)))
            checkpointer.wait()
            say({"went on": restored(checkpointer, step)})
    say({"names": names(directory), "expected": [str(step) for step in new]})


def restored(checkpointer: jzero.Checkpointer, step: int) -> str:
    try:
        return verdict(checkpointer.restore(values(step), step=step), values(step))
    except Exception as error:
        return described(error)


def restore(
    say: Say, root: str, step: int, fault: Sequence[Any] = (), log: str | None = None
) -> None:
    """Restores the latest step in every way there is, each again if it fails."""
    attempt, train_step = Attempts(say), new_train_step()
    directory = f"{root}/{STEPS}"

    def by_checkpointer() -> None:
        with jzero.Checkpointer(directory, train_step) as checkpointer:
            say({"latest": checkpointer.latest_step()})
            say({"restored": verdict(checkpointer.restore(values(step)), values(step))})

    def by_path() -> None:
        state = jzero.restore(f"{directory}/{step}", train_step, values(step))
        say({"restored": verdict(state, values(step))})

    with armed(root, fault, log):
        attempt("restore by a Checkpointer", by_checkpointer)
        attempt("restore by path", by_path)


def command(
    say: Say, root: str, words: Sequence[str], fault: Sequence[Any] = (), log: str | None = None
) -> None:
    """Runs `python -m jzero` with these words; paths in them are relative to the root."""
    if Bucket.of("test", root) is None:
        os.chdir(root)
    else:
        words = [
            f"{root}/{word}" if word.split("/")[0] in (STEPS, EXPORTS, IMPORTED) else word
            for word in words
        ]
    with armed(root, fault, log):
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
    directory, params = f"{root}/{IMPORTED}", {"params": values(step)["params"]}
    bucket = Bucket.of("test", directory)
    found = bucket and bucket.read(_seal.NAME)
    # In a bucket it is there when it is sealed.
    if IMPORTED not in names(root) or (bucket and (not found or _mirror.is_claim(found))):
        return say({"imported": "absent"})
    try:
        say({"imported": verdict(jzero.restore(directory, new_train_step(), params), params)})
    except Exception as error:
        say({"imported": described(error)})


def write_file(say: Say, root: str, fault: Sequence[Any] = (), log: str | None = None) -> None:
    """Writes a file beside, and renames it: what the library of faults is tried on."""
    path = pathlib.Path(root) / "file.tmp"
    with _library.armed(root, Fault(*fault), log):
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
