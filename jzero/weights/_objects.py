# SPDX-License-Identifier: Apache-2.0
"""An export in a bucket: files are written and uploaded one at a time, and what names them last."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import re
import secrets
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from jzero._errors import CheckpointError, OptionError, first_of, message, named, warn
from jzero.checkpoint import _files, _lock, _mirror, _seal
from jzero.checkpoint._bucket import Bucket, Lost, Object
from jzero.weights import _private

PART = r"-\d{5,}-of-\d{5,}(-[0-9a-f]{8})?\.safetensors"  # what a part's name ends with
FILE_SIZE, MAX_FILE_SIZE = "256MB", 512 * 10**6
_MOST = 5 * 10**9  # bytes that S3 takes in one request: of a file that is one tensor
# Writes files of these names into a folder, and says when each is written; all of them, the index last.
WriteFiles = Callable[[Path, Sequence[str], Callable[[Path], None]], Sequence[Path]]


def write(who: str, out: Bucket, overwrite: bool, num: int, write_files: WriteFiles) -> list[str]:
    """Writes `num` files, and their index if they are several; their URLs.

    Parts get names that no object has. The object that was asked for, or its index, comes by one write, which
    without `overwrite` is refused where there is one. Then what only the replaced index named goes. A reader
    finds all of the older export or all of the new one. Parts of one that was killed go with the next; where
    neither has an index, nothing tells whether they are another one's that is under way, and it names them.

    Raises:
      OptionError: there is an export already.
      CheckpointError: it cannot be written, or another process writes it; nothing of it is left.
    """
    above, _, name = out.prefix.rpartition("/")
    bucket = dataclasses.replace(out, prefix=above)
    stem = name.removesuffix(".safetensors")
    index = f"{name}.index.json"
    older = bucket.read(index)  # First: see `_remove_older`.
    there = {f"{stem}{rest}" for rest in bucket.names(stem)}
    if not overwrite and (found := [x for x in (name, index) if x in there]):
        raise _exists(who, bucket / found[0])
    names = [name] if num == 1 else part_names(stem, num, there.__contains__)
    sent: list[str] = []

    def send(path: Path) -> None:
        data = _whole(who, bucket / path.name, path)
        if num == 1 and overwrite:
            bucket.write(path.name, data)
        else:
            _write_new(who, bucket, path.name, data)
        sent.append(path.name)
        path.unlink()

    with staging(who, out) as folder:
        try:
            last = write_files(folder, names, send)[-1]
        except BaseException:
            if num > 1:
                _remove_quietly(bucket, sent)
            raise
        if num > 1:
            try:
                bucket.write_if(index, last.read_bytes(), None if older is None else older.version)
            except (
                Lost
            ) as error:  # Of another error nobody knows whether it was written all the same.
                _remove_quietly(bucket, sent)
                raise _exists(who, bucket / index) from error
    parts = [x for x in there if re.fullmatch(re.escape(stem) + PART, x)]
    _remove_older(who, bucket, name, index, parts, older, num)
    return [str(bucket / x) for x in [*names, *[index] * (num > 1)]]


def staging(who: str, target: Bucket) -> contextlib.AbstractContextManager[Path]:
    """A private folder for what goes there; on one machine one process has it."""
    digest = hashlib.sha256(str(target).encode()).hexdigest()[:16]
    name = Path(tempfile.gettempdir(), f"jzero-{who}-{digest}")
    return _private.folder(f"{who} {target}", name)


def part_names(stem: str, num: int, is_there: Callable[[str], bool]) -> list[str]:
    """As Hugging Face calls them; with something new at the end if there is one of such a name."""
    tag = ""
    while True:
        names = [f"{stem}-{i + 1:05}-of-{num:05}{tag}.safetensors" for i in range(num)]
        if not any(map(is_there, names)):
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


def _remove_quietly(bucket: Bucket, names: Sequence[str]) -> None:
    with contextlib.suppress(CheckpointError):
        bucket.remove(names)


def _remove_older(
    who: str, bucket: Bucket, name: str, index: str, parts: Sequence[str], older: Object | None, num: int
) -> None:  # fmt: skip
    """What the older export was found by, and only then parts that were there before it was replaced.

    Another export that is under way has read the index before it wrote any of these. By now that index is
    another one, or gone, and so it cannot come to name them: its own comes by a conditional write.
    """
    try:
        if num > 1:
            bucket.remove([name])
        elif older is None:
            return _name_parts(who, bucket, parts)
        else:
            bucket.remove_if(index, older.version)
            if bucket.read(index) is not None:
                return
        bucket.remove(parts)
    except CheckpointError as error:
        raise CheckpointError(message(
            f"{who} {bucket / name}", f"the older export cannot be removed: {error}",
            "The new one is complete.", "Remove the older one's objects.")) from error  # fmt: skip


def _name_parts(who: str, bucket: Bucket, parts: Sequence[str]) -> None:
    """Says which ones no index names: of an export that was killed, or of one that is under way."""
    if parts:
        warn(message(
            f"{who} {bucket}", f"no index names {first_of([*map(named, parts)])}",
            "They are left of an export that was ended, unless another process writes them now.",
            "Remove them, if none does."))  # fmt: skip


def upload(who: str, directory: Path, bucket: Bucket) -> None:
    """Uploads a sealed checkpoint, its seal last; see [Note: steps in buckets].

    Raises:
      OptionError: there is something else already.
      CheckpointError: it cannot be uploaded, and counts nowhere; or another process does the same.
    """
    found = check_new(who, bucket)
    files = {str(path.relative_to(directory)): path for path in _files.files_below(directory)}
    seal = files.pop(_seal.NAME).read_bytes()
    try:
        claim = _new_claim()
        version = bucket.write_if(_seal.NAME, claim, found and found.version)
        owns = functools.partial(_mirror.check_claim, bucket, claim)
        left = _mirror.random_names(bucket.names())
        owns()  # After the list: what is in it is not of one that has begun since.
        bucket.remove(left)
        try:
            bucket.upload(files, owns)
            bucket.write_if(_seal.NAME, seal, version)
        except BaseException:
            _retreat(bucket, files, seal, version)
            raise
    except Lost as error:
        raise CheckpointError(message(
            f"{who} {bucket}", f"{error} was written by another process", "One writes at a time.",
            "Name another directory, or wait until it is done.")) from error  # fmt: skip
    if found is not None:  # Now that it is sealed nobody writes here again.
        _remove_quietly(bucket, sorted({*bucket.names()} - {*files, _seal.NAME}))


def _new_claim() -> bytes:
    return _seal.claim(f"{_lock.Owner.new()}, {secrets.token_hex(8)}")


def _retreat(bucket: Bucket, files: Iterable[str], seal: bytes, version: bytes) -> None:
    """Removes data files of an upload that failed, unless its seal is there all the same.

    What has no random name stays, with a claim: S3 removes under no condition, and it may be the next one's.
    """
    with contextlib.suppress(CheckpointError):
        with contextlib.suppress(Lost):  # So that the seal cannot come any more.
            bucket.write_if(_seal.NAME, _new_claim(), version)
        found = bucket.read(_seal.NAME)
        if found is None or found.data != seal:
            bucket.remove(_mirror.random_names(files))


def check_new(who: str, bucket: Bucket) -> Object | None:
    """That nothing is there, but what is left of an upload that was not completed; its claim.

    Raises:
      OptionError: something else is.
    """
    found = bucket.read(_seal.NAME)
    if not _mirror.is_claim(found) and bucket.names():
        raise OptionError(message(
            who, f"there is something below {bucket} already", "A checkpoint is a new directory.",
            "Name another, or remove it."))  # fmt: skip
    return found


def _exists(who: str, url: Bucket) -> OptionError:
    return OptionError(message(
        who, f"there is {url} already", "Objects are only overwritten when asked.",
        "Add --overwrite, or write another one; if another process wrote it just now, wait until it is done."
    ))  # fmt: skip
