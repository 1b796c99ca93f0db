"""Checkpoints that are damaged, or made to do harm, and what becomes of each: run in a process of its own.

python tests/hostile_checkpoints.py FOLDER 0 1 2      # lines of JSON for each of these cases

A case that hangs ends the process by SIGALRM, and one that aborts by SIGABRT; memory is bounded.
"""

import copy
import functools
import json
import logging
import os
import pathlib
import random
import resource
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import safetensors.numpy
import tensorstore

import jzero
from jzero.checkpoint import _inspect, _seal
from jzero.weights import _export
from test_hostile_files import mutated

SECONDS = 20
SPACE = 16 * 2**30  # addresses of the process, of which JAX has some
MEMORY = 2**30  # what a case may take
VALUES = {"w": np.arange(32.0, dtype=np.float32).reshape(8, 4), "b": np.arange(5, dtype=np.int32)}
KINDS = ("sealed", "resealed", "orbax", "files", "files of zarr3")
# What nobody can tell from an honest checkpoint, where there are no checksums.
UNSEEN = ("flip", "json", "json again", "key", "key again", "chunk", "manifest")


class Case(NamedTuple):
    """A checkpoint of some kind with one change; `strict`: whatever is read must be what was written."""

    kind: str
    change: str
    strict: bool
    directory: pathlib.Path


def step_fn(state, batch):
    grads = jax.grad(lambda w: jnp.mean(batch @ w))(state["w"])
    return {"w": state["w"] - grads, "b": state["b"] + 1}


def make(kind: str, directory: pathlib.Path) -> None:
    """A checkpoint of `VALUES`, below `directory` in a step."""
    if kind.endswith("sealed"):
        with jzero.Checkpointer(directory, jzero.shard_train_step(step_fn)) as checkpointer:
            checkpointer.save(1, jax.tree.map(jnp.asarray, VALUES))
        return
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=kind == "orbax", use_zarr3="zarr3" in kind)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(directory / "1" / "state", args=ocp.args.PyTreeSave(VALUES))


def cases(folder: pathlib.Path, numbers: Iterable[int]) -> Iterator[Case]:
    for kind in KINDS:
        if not (folder / kind).exists():
            make(kind, folder / kind)
    for number in numbers:
        rng, kind = random.Random(number), KINDS[number % len(KINDS)]
        directory = folder / f"case-{number}"
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(folder / kind, directory)
        name = [*CHANGES][number // len(KINDS) % len(CHANGES)]
        change = CHANGES[name](rng, directory / "1")
        if kind == "resealed":
            reseal(rng, directory / "1")
        strict = kind == "sealed" or (kind != "resealed" and name not in UNSEEN)
        yield Case(kind, f"{name}: {change}", strict, directory / "1")


def files_of(step: pathlib.Path, json_only: bool = False) -> list[pathlib.Path]:
    found = sorted(path for path in step.rglob("*") if path.is_file())
    return [path for path in found if not json_only or path.read_bytes()[:1] == b"{"]


def put(rng: random.Random, step: pathlib.Path) -> str:
    """Something that is no file, in the place of one."""
    path = rng.choice(files_of(step))
    path.unlink()
    kind, make = rng.choice([*NO_FILES.items()])
    make(path)
    return f"{kind} for {path.relative_to(step)}"


NO_FILES: dict[str, Callable[[pathlib.Path], None]] = {
    "a pipe": os.mkfifo,
    "a directory": pathlib.Path.mkdir,
    "nothing": lambda path: None,
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to a directory": lambda path: path.symlink_to("/proc"),
    "a link to another file": lambda path: path.symlink_to("/etc/passwd"),
}


def link(rng: random.Random, step: pathlib.Path) -> str:
    """A file as a link to where it is now, as in Hugging Face's cache."""
    path = rng.choice(files_of(step))
    path.rename(moved := step.parent / "moved")
    path.symlink_to(moved)
    return str(path.relative_to(step))


def resize(rng: random.Random, step: pathlib.Path) -> str:
    path = rng.choice(files_of(step))
    size = rng.choice([0, 1, path.stat().st_size // 2, path.stat().st_size + 1, 2**40])
    os.truncate(path, size)
    return f"{path.relative_to(step)} to {size}"


def flip(rng: random.Random, step: pathlib.Path) -> str:
    path = rng.choice(files_of(step))
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 8])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return str(path.relative_to(step))


def change_json(rng: random.Random, step: pathlib.Path) -> str:
    path = rng.choice(files_of(step, json_only=True))
    whole = path.read_bytes()
    first, end, rest = whole.partition(b"\n") if path.name == _seal.NAME else (whole, b"", b"")
    path.write_bytes(mutated(rng, first) + end + rest)
    return str(path.relative_to(step))


def change_key(rng: random.Random, step: pathlib.Path) -> str:
    """What describes an array, inside of the store or in a file."""
    store = Store(step)
    key = rng.choice([key for key in store.keys if key.endswith((".zarray", "zarr.json"))])
    value = store.read(key)
    store.write(key, claims(rng, value) if rng.random() < 0.6 else mutated(rng, value))
    return key


def claims(rng: random.Random, value: bytes) -> bytes:
    """Other shapes and chunks than there are."""
    described = json.loads(value)
    size = rng.choice([2**20, 2**33, 2**38, 2**62, 2**63 - 1, 0, -1, 3])
    shape, chunks = copy.copy(described["shape"]), None
    if "chunks" in described:
        chunks = described["chunks"]
    else:
        chunks = described["chunk_grid"]["configuration"]["chunk_shape"]
    which = rng.randrange(3)
    if which != 1:
        shape[0] = size
    if which != 0:
        chunks[0] = size
    return json.dumps({**described, "shape": shape}).encode()


def change_chunk(rng: random.Random, step: pathlib.Path) -> str:
    """Another chunk: missing, cut, of noise, or of far more zeros than belong there."""
    store = Store(step)
    key = rng.choice([key for key in store.keys if not key.endswith((".zarray", "zarr.json"))])
    value = store.read(key)
    others = [None, b"", value[:-1], rng.randbytes(100), value + bytes(2**20), bomb()]
    which = rng.randrange(len(others))
    store.write(key, others[which])
    return f"{key} {('missing', 'empty', 'cut', 'noise', 'longer', 'a bomb')[which]}"


@functools.cache
def bomb() -> bytes:
    """4 GB of zeros, as zstd has them: blocks of 128 KiB that repeat one byte."""
    block = (2**17 << 3 | 1 << 1).to_bytes(3, "little") + b"\0"
    return b"\x28\xb5\x2f\xfd\x00\x58" + block * 2**15 + (1 << 0).to_bytes(3, "little")


class Store:
    """The keys and values of a checkpoint's arrays."""

    def __init__(self, step: pathlib.Path) -> None:
        base = f"file://{step / 'state'}/"
        is_ocdbt = (step / "state" / "manifest.ocdbt").exists()
        spec: Any = {"driver": "ocdbt", "base": base} if is_ocdbt else base
        self._store: Any = tensorstore.KvStore.open(spec).result()
        keys = sorted(key.decode() for key in self._store.list().result())
        self.keys = [key for key in keys if key.startswith(("w/", "b/"))]

    def read(self, key: str) -> bytes:
        return bytes(self._store.read(key).result().value)

    def write(self, key: str, value: bytes | None) -> None:
        self._store.write(key, value).result()


def change_manifest(rng: random.Random, step: pathlib.Path) -> str:
    """A byte of the store's own nodes, with a right checksum."""
    path = rng.choice([p for p in files_of(step) if p.name == "manifest.ocdbt"] or files_of(step))
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data))
    data[at] = rng.choice([0, 1, 127, 255, data[at] ^ 1])
    if path.name == "manifest.ocdbt":
        data[-4:] = crc32c(bytes(data[:-4])).to_bytes(4, "little")
    path.write_bytes(data)
    return f"byte {at} of {path.relative_to(step)}"


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


CHANGES: dict[str, Callable[[random.Random, pathlib.Path], str]] = {
    "no file": put,
    "json": change_json,
    "key": change_key,
    "link": link,
    "resize": resize,
    "chunk": change_chunk,
    "flip": flip,
    "no file again": put,
    "key again": change_key,
    "manifest": change_manifest,
    "json again": change_json,
}


def reseal(rng: random.Random, step: pathlib.Path) -> None:
    """A seal with right digests, of what is there; it may say anything of it."""
    if not (step / _seal.NAME).is_file():
        return
    text, _, _ = (step / _seal.NAME).read_bytes().rstrip(b"\n").rpartition(b"\n")
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return
    try:
        files = {
            name: [size, None if "/d/" in name else _seal._digest((step / name).read_bytes())]
            for name, size in _seal._sizes(step).items()
            if (step / name).is_file() and size < 2**30
        }
    except (OSError, _seal.Broken):
        return
    text = json.dumps({**said, "files": files}).encode()
    if rng.random() < 0.3:
        text = mutated(rng, text)
    (step / _seal.NAME).write_bytes(text + b"\n" + _seal._digest(text).encode() + b"\n")


# ------------------------------------------------------------------------------------ what becomes of it


def readers(case: Case, out: pathlib.Path) -> dict[str, Callable[[], Any]]:
    train_step = jzero.shard_train_step(step_fn)
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in VALUES.items()}

    def latest() -> Any:
        with jzero.Checkpointer(case.directory.parent, train_step) as checkpointer:
            return checkpointer.restore(shapes)

    def export() -> Any:
        _export.export_weights(case.directory, out, select=".", overwrite=True)
        return safetensors.numpy.load_file(out)

    return {
        "inspect": lambda: _inspect.inspect(case.directory)[0] and None,
        "verify": lambda: _inspect.verify(_inspect.inspect(case.directory)[1]) and None,
        "export": export,
        "restore": lambda: jzero.restore(case.directory, train_step, shapes),
        "latest": latest,
    }


def outcome(case: Case, read: Callable[[], Any]) -> str:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        found = read()
        same = found is None or all(
            name in found and np.array_equal(np.asarray(found[name]), x)
            for name, x in VALUES.items()
        )
        result = "right" if same else ("WRONG" if case.strict else "other")
    except jzero.JzeroError as error:
        text = str(error)
        printable = text.replace("\n", "").replace("\t", "").isprintable()
        result = "named" if printable and len(text) < 5000 else f"UNPRINTABLE {text[:200]!r}"
    except Exception as error:
        result = f"UNNAMED {type(error).__name__}: {str(error)[:200]}"
    more = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return result if more < MEMORY else f"MEMORY {more} of {result}"


def main(folder: str, *numbers: str) -> None:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (SPACE, SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for case in cases(pathlib.Path(folder), map(int, numbers)):
        print(json.dumps({"case": case.directory.parent.name, "of": case[:3]}), flush=True)
        for name, read in readers(case, pathlib.Path(folder, "out.safetensors")).items():
            signal.alarm(SECONDS)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**30, resource.RLIM_INFINITY))
            found = outcome(case, read)
            signal.alarm(0)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            print(json.dumps({"reader": name, "outcome": found}), flush=True)
        shutil.rmtree(case.directory.parent)


if __name__ == "__main__":
    main(*sys.argv[1:])
