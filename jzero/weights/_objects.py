# SPDX-License-Identifier: Apache-2.0
"""An export in a bucket: files are written and uploaded one at a time, and what names them last."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import secrets
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from jzero import _json
from jzero._errors import CheckpointError, OptionError, message
from jzero.checkpoint._bucket import Bucket, Lost, Object
from jzero.weights import _private

FILE_SIZE, MAX_FILE_SIZE = "256MB", 512 * 10**6
_MOST = 5 * 10**9  # bytes that S3 takes in one request: of a file that is one tensor
# Writes files of these names into a folder, and says when each is written; all of them, the index last.
WriteFiles = Callable[[Path, Sequence[str], Callable[[Path], None]], Sequence[Path]]


def write(who: str, out: Bucket, overwrite: bool, num: int, write_files: WriteFiles) -> list[str]:
    """Writes `num` files, and their index if they are several; their URLs.

    Parts get names that no object has. The object that was asked for, or its index, comes by one write, which
    without `overwrite` is refused where there is one. Then what only the replaced index named goes. A reader
    finds all of the older export or all of the new one; parts of one that was killed stay, and nothing
    names them.

    Raises:
      OptionError: there is an export already.
      CheckpointError: it cannot be written, or another process writes it; nothing of it is left.
    """
    above, _, name = out.prefix.rpartition("/")
    bucket = dataclasses.replace(out, prefix=above)
    stem = name.removesuffix(".safetensors")
    index = f"{name}.index.json"
    there = {f"{stem}{rest}" for rest in bucket.names(stem)}
    if not overwrite and (found := [x for x in (name, index) if x in there]):
        raise _exists(who, bucket / found[0])
    older = bucket.read(index)
    names = [name] if num == 1 else _part_names(stem, num, there)
    digest = hashlib.sha256(str(out).encode()).hexdigest()[:16]
    staging = Path(tempfile.gettempdir(), f"jzero-export-{digest}")
    sent: list[str] = []

    def send(path: Path) -> None:
        data = _whole(who, bucket / path.name, path)
        if num == 1 and overwrite:
            bucket.write(path.name, data)
        else:
            _write_new(who, bucket, path.name, data)
        sent.append(path.name)
        path.unlink()

    with _private.folder(f"{who} {out}", staging) as folder:
        try:
            last = write_files(folder, names, send)[-1]
            if num > 1:
                _write_index(who, bucket, last, older if overwrite else None)
        except BaseException:
            with contextlib.suppress(CheckpointError):
                bucket.remove(sent if num > 1 else [])
            raise
    _remove_older(bucket, name, index, names, older, num)
    return [str(bucket / x) for x in [*names, *[index] * (num > 1)]]


def _part_names(stem: str, num: int, there: set[str]) -> list[str]:
    """As Hugging Face calls them; with something new at the end if there is an object of such a name."""
    tag = ""
    while True:
        names = [f"{stem}-{i + 1:05}-of-{num:05}{tag}.safetensors" for i in range(num)]
        if there.isdisjoint(names):
            return names
        tag = f"-{secrets.token_hex(4)}"


def _whole(who: str, url: Bucket, path: Path) -> bytes:
    if (size := path.stat().st_size) > _MOST:
        raise CheckpointError(message(
            f"{who} {url}", f"a tensor has {size} bytes, more than the {_MOST} of one request",
            "An object is uploaded in one request.", "Export to a disk, and upload it with the bucket's tool."
        ))  # fmt: skip
    return path.read_bytes()


def _write_new(who: str, bucket: Bucket, name: str, data: bytes) -> None:
    try:
        bucket.write_if(name, data, None)
    except Lost as error:
        raise _exists(who, bucket / name) from error


def _write_index(who: str, bucket: Bucket, path: Path, older: Object | None) -> None:
    try:
        bucket.write_if(path.name, path.read_bytes(), None if older is None else older.version)
    except Lost as error:
        raise _exists(who, bucket / path.name) from error


def _remove_older(
    bucket: Bucket, name: str, index: str, names: Sequence[str], older: Object | None, num: int
) -> None:
    """What the older export was found by, and only then its parts; not what another process is writing."""
    if num > 1:
        bucket.remove([name])
    elif older is not None:
        bucket.remove_if(index, older.version)
    with contextlib.suppress(_json.Malformed):
        found = _json.parse(older.data) if older is not None else {}
        parts = found.get("weight_map", {}) if isinstance(found, dict) else {}
        stem = name.removesuffix(".safetensors")
        bucket.remove({
            x for x in parts.values()
            if isinstance(x, str) and x not in names and "/" not in x and x.startswith(f"{stem}-")
        })  # fmt: skip


def _exists(who: str, url: Bucket) -> OptionError:
    return OptionError(message(
        who, f"there is {url} already", "Objects are only overwritten when asked.",
        "Add --overwrite, or write another one; if another process wrote it just now, wait until it is done."
    ))  # fmt: skip
