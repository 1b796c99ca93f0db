# SPDX-License-Identifier: Apache-2.0
"""The commands `jzero inspect`, `export`, `import` and `unlock`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jzero._errors import CheckpointError, first_of, message, named
from jzero._quantities import readable_bytes
from jzero.checkpoint import _inspect, _lock, _reading, _stored
from jzero.checkpoint._bucket_steps import steps_in
from jzero.checkpoint._inspect import Inspection, Saved, Verified
from jzero.cli import _flags
from jzero.cli._command import JSON, Command, Shown
from jzero.reports._tables import Table
from jzero.sharding.plan._stages import PARAMETER
from jzero.weights import _export, _import
from jzero.weights._families import LAYOUTS
from jzero.weights._safetensors import FLOATS

_CHECKPOINT = "a checkpoint of Orbax, or a directory of steps (the latest)"


def _like(text: str) -> Any:
    """The result of a user's function, as shapes."""
    module, _, name = text.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        return jax.eval_shape(getattr(importlib.import_module(module), name))
    except (Exception, SystemExit) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r}: {type(error).__name__}: {error}. It is MODULE:FUNCTION; without arguments the "
            "function returns the parameters, or their shapes"
        ) from error


def _show(checkpoint: str, verify: bool = False, json: bool = False) -> Shown:
    found, stored = _inspect.inspect(checkpoint)
    verified = _inspect.verify(stored) if verify else None
    yield from [_as_dict(found, verified)] if json else _as_tables(found, verified)
    if verified is not None and verified.damaged:
        error = _reading.LeafErrors(verified.damaged)
        raise CheckpointError(_stored.damaged(_inspect.WHO, stored.directory, error))
    if verify and (steps := steps_in(_inspect.WHO, checkpoint).damaged()):
        newer = ", ".join(map(str, steps))
        raise CheckpointError(message(
            _inspect.WHO, f"{named(checkpoint)} has incomplete steps: {newer}",
            "The latest complete one was read.", "Remove them, or inspect one by name."))  # fmt: skip


def _as_dict(found: Inspection, verified: Verified | None) -> dict[str, Any]:
    leaves = [leaf._asdict() for leaf in found.leaves]
    report = {**found._asdict(), "leaves": leaves, "totals": found.totals()}
    report["saved"] = found.saved and found.saved._asdict()
    if verified is not None:
        damaged = {name: str(error) for name, error in verified.damaged.items()}
        report["verified"] = {**verified._asdict(), "damaged": damaged}
    return report


def _as_tables(found: Inspection, verified: Verified | None) -> Shown:
    yield found.directory
    if found.steps:
        yield f"The latest of the steps {', '.join(map(str, found.steps))}."
    data = "with a data iterator" if found.has_data_iterator else "without a data iterator"
    yield f"Written {found.written or 'at an unknown time'} by {found.writer or 'unknown'}, {data}."
    if found.saved is not None:
        yield _saved_by(found.saved)
    yield _summary(found)
    totals = [
        (row["role"] or "", row["dtype"], f"{row['leaves']:,}", f"{row['elements']:,}",
         readable_bytes(row["nbytes"])) for row in found.totals()
    ]  # fmt: skip
    yield Table(("role", "dtype", "leaves", "elements", "bytes"), totals)
    rows = [
        (leaf.name, leaf.role or "", leaf.dtype, *map(_dims, (leaf.shape, leaf.chunk_shape)),
         readable_bytes(leaf.nbytes)) for leaf in found.leaves
    ]  # fmt: skip
    yield Table(("leaf", "role", "dtype", "shape", "chunks of", "bytes"), rows)
    if verified is not None:
        yield from _as_lines(found, verified)


def _saved_by(saved: Saved) -> str:
    axes = ", ".join(f"'{name}' of size {size}" for name, size in saved.axes.items())
    over = f" (mesh axes: {axes})" if axes else ""
    return named(f"Saved by jzero {saved.version} from a step at stage {saved.stage}{over}.", 400)


def _summary(found: Inspection) -> str:
    totals = found.totals()
    params = [row["elements"] for row in totals if row["role"] == PARAMETER]
    elements = sum(row["elements"] for row in totals)
    of_them = f", {sum(params):,} of them parameters" if params else ""
    nbytes = readable_bytes(sum(row["nbytes"] for row in totals))
    return f"{len(found.leaves):,} leaves, {elements:,} elements{of_them}: {nbytes}."


def _as_lines(found: Inspection, verified: Verified) -> Iterator[str]:
    num = len(found.leaves)
    damaged = sum(leaf.name in verified.damaged for leaf in found.leaves)
    yield f"Every chunk was read: {num - damaged} of {num} leaves are whole."
    if not verified.sealed:
        yield "It has no manifest: a flipped bit in the description of its leaves may go unseen."
    if verified.unchecked:
        yield (f"{len(verified.unchecked)} leaves have no checksums, as Orbax alone writes them: "
               "a flipped bit in them may go unseen.")  # fmt: skip


def _dims(shape: tuple[int, ...]) -> str:
    return ",".join(map(str, shape)) or "scalar"


def _write_files(checkpoint: str, out: str, **options: Any) -> Shown:
    files, left_out = _export.export_weights(checkpoint, out, **options)
    if left_out and "select" not in options:
        num = f"{len(left_out):,} {'leaf' if len(left_out) == 1 else 'leaves'}"
        yield f"Not exported, as no parameters: {num} ({first_of(left_out)}). --select REGEX exports others."
    for file in files:
        yield f"{file}: {readable_bytes(file.stat().st_size)}" if isinstance(file, Path) else file


def _write_checkpoint(source: str, checkpoint: str, **options: Any) -> Shown:
    num = _import.import_weights(source, checkpoint, **options)
    yield f"{checkpoint}: {num} leaves"


def _unlock(directory: str) -> Shown:
    owner = _lock.unlock("unlock", steps_in("unlock", directory).where)
    yield f"{directory}: {owner} may no longer write in it"


def _layout(what: str) -> dict[str, dict[str, str]]:
    return {
        "--layout": dict(metavar="NAME", help=f"{what}: {', '.join(LAYOUTS)}, table.py:NAME or table.json"),
        "--config": dict(metavar="FILE", help="the model's config.json: tensors are checked against it"),
    }  # fmt: skip


INSPECT = Command(
    _show, "the contents of a checkpoint, and whether it is complete",
    "Totals of a checkpoint, and its leaves.",
    "jzero inspect checkpoints --verify",
    {
        "checkpoint": dict(help=_CHECKPOINT),
        "--verify": dict(action="store_true", help="read all of it: exit status 1 if damaged"),
        "--json": JSON,
    },
)  # fmt: skip
EXPORT = Command(
    _write_files, "the parameters of a checkpoint, as safetensors",
    "Writes the parameters of a checkpoint to safetensors files. Tensors have the names of leaves with . for "
    "/, without params. if all have it. In another dtype, values come from the masters of "
    "jzero.master_weights where there are some.",
    "jzero export checkpoints model.safetensors --dtype bf16",
    {
        "checkpoint": dict(help=_CHECKPOINT),
        "out": dict(help="out.safetensors; also the name of the index, if there are several files"),
        "--dtype": dict(choices=FLOATS, help="of floats; by default their own"),
        "--select": dict(metavar="REGEX", help="instead of the parameters: leaves whose names match"),
        "--max-file-size": dict(type=_flags.num_bytes, metavar="SIZE",
                                help="5GB by default; in a bucket 256MB"),
        "--overwrite": dict(action="store_true", help="replace an older export"),
        **_layout("write tensors with the names and shapes of Hugging Face's"),
    },
)  # fmt: skip
IMPORT = Command(
    _write_checkpoint, "safetensors as a checkpoint",
    "Writes the tensors of safetensors files as a checkpoint of Orbax: a.b becomes the leaf params/a/b.",
    "jzero import model.safetensors pretrained",
    {
        "source": dict(
            help="in.safetensors, in.safetensors.index.json, or the directory of model.safetensors"),
        "checkpoint": dict(help="a new directory"),
        "--prefix": dict(help="what leaves are below: params by default, or ''"),
        "--dtype": dict(choices=FLOATS, help="of floats; by default the model's (--like), or their own"),
        **_layout("make Hugging Face's tensors the leaves of a model of Flax"),
        "--like": dict(metavar="MODULE:FUNCTION", type=_like,
                       help="returns the model's parameters, or their shapes by jax.eval_shape"),
    },
)  # fmt: skip
UNLOCK = Command(
    _unlock, "let another process save steps in a directory",
    "Removes the lock of a dead process, so that another one can save steps in a directory.",
    "jzero unlock checkpoints",
    {"directory": dict(help="a directory of steps")},
)  # fmt: skip
