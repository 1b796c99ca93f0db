# SPDX-License-Identifier: Apache-2.0
"""Publishes exports and imports atomically, in a directory or in a bucket.

[Note: an export replaces another] What is found by its name, the file or the index, comes by one write; the
parts that an index names come before it, under names that nothing has. Then the older export goes: first what
it was found by, and only then its parts, which nothing names any more. So at each moment, also after a kill
or a power cut, a reader finds all of the older export or all of the new one; and who has read an older index
and finds its parts gone gets an error, never parts of another export. If the older one had the other form,
both are there for a moment, and each is complete. In a directory one process writes at a time, and parts that
came before their index go with its folder, in which that index still is. In a bucket, where processes know
nothing of each other, the index comes by a conditional write.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from jzero import _json
from jzero._errors import CheckpointError, OptionError, first_of, message, named, warn
from jzero.checkpoint import _files, _lock, _mirror, _seal
from jzero.checkpoint._bucket import Bucket, Lost, Object
from jzero.checkpoint._temporary import Temporary

SUFFIX = ".safetensors"
FILE_SIZE, MAX_FILE_SIZE = "256MB", 512 * 10**6  # of files in a bucket
_PART = r"-\d{5,}-of-\d{5,}(-[0-9a-f]{8})?\.safetensors"  # what a part's name ends with
_MOST = 5 * 10**9  # bytes that S3 takes in one request: of a file that is one tensor
# Writes files of these names into a folder, calls back after each, and returns all, the index last.
WriteFiles = Callable[[Path, Sequence[str], Callable[[Path], None]], Sequence[Path]]


def checked_path(who: str, path: str | Path) -> Path:
    with contextlib.suppress(UnicodeEncodeError):
        if b"\0" not in os.fsencode(path):
            return Path(path)
    raise OptionError(message(
        who, f"the output is {str(path)!r}", "No file can be called that.", "Correct the path."))  # fmt: skip


@contextlib.contextmanager
def private(
    who: str, target: Path, ends: Callable[[Path], None] = lambda _: None
) -> Iterator[Path]:
    """A folder beside `target`, on the same file system, which is always removed at the end."""
    made = Temporary(f".{target.name}.tmp-", target.parent, ends)
    with contextlib.closing(made):
        if others := made.others():
            raise CheckpointError(message(
                who, f"another process is writing it, in {others[0]}", "One writes at a time.",
                "Wait until it is done; remove that folder if there is none."))  # fmt: skip
        yield made.path


def staging(who: str, target: Bucket) -> contextlib.AbstractContextManager[Path]:
    """A private folder for what will be uploaded; one process of a machine at a time has it."""
    digest = hashlib.sha256(str(target).encode()).hexdigest()[:16]
    return private(f"{who} {target}", Path(tempfile.gettempdir(), f"jzero-{who}-{digest}"))


def in_directory(
    who: str, target: Path, overwrite: bool, num: int, write_files: WriteFiles
) -> list[Path]:
    """Writes `num` files, and their index if they are several; see [Note: an export replaces another]."""
    os.stat(target.parent)  # raises if it does not exist
    with private(f"{who} {target}", target, functools.partial(_withdraw, target)) as folder:
        _check_free(who, target, overwrite)
        there = {path.name for path in target.parent.iterdir()}
        written = write_files(folder, _file_names(target.name, num, there), lambda _: None)
        _check_free(who, target, overwrite)  # Another process may have written meanwhile.
        *parts, last = [target.parent / path.name for path in written]
        for path in parts:
            (folder / path.name).rename(path)
        _files.sync(target.parent)
        (folder / last.name).replace(last)
        try:
            _files.sync(target.parent)
            for path in _older(target):
                if path not in (*parts, last):
                    path.unlink()
                    _files.sync(target.parent)
        except OSError as error:
            raise _not_removed(who, target, error) from error
    return [*parts, last]


def in_bucket(
    who: str, out: Bucket, overwrite: bool, num: int, write_files: WriteFiles
) -> list[str]:
    """Like `in_directory` in a bucket; each file is uploaded once it is written. Returns URLs.

    Parts of an export that was killed are removed by the next one. If neither has an index, nothing tells
    whether another process is writing them now, and a warning names them.
    """
    above, _, name = out.prefix.rpartition("/")
    bucket = dataclasses.replace(out, prefix=above)
    index, stem = f"{name}.index.json", name.removesuffix(SUFFIX)
    older = bucket.read(index)  # before anything else: see `_remove_older`
    there = {f"{stem}{rest}" for rest in bucket.names(stem)}
    if not overwrite and (found := [x for x in (name, index) if x in there]):
        raise _exists(who, bucket / found[0])
    names, sent = _file_names(name, num, there), list[str]()

    def send(path: Path) -> None:
        if (size := path.stat().st_size) > _MOST:
            raise CheckpointError(message(
                f"{who} {bucket / path.name}",
                f"a tensor has {size} bytes, more than the {_MOST} of one request",
                "An object is uploaded in one request.",
                "Export to a disk, and upload it with the bucket's tool."))  # fmt: skip
        if num == 1 and overwrite:
            bucket.write(path.name, path.read_bytes())
        else:
            _write_if(who, bucket, path, None)
        sent.append(path.name)
        path.unlink()

    with staging(who, out) as folder:
        try:
            last = write_files(folder, names, send)[-1]
        except BaseException:
            _remove_quietly(bucket, sent if num > 1 else [])
            raise
        if num > 1:
            try:
                _write_if(who, bucket, last, older and older.version)
            except OptionError:
                # After another error the index may have been written all the same.
                _remove_quietly(bucket, sent)
                raise
    parts = [x for x in there if _is_part(x, stem)]
    try:
        _remove_older(who, bucket, name, parts, older, num)
    except CheckpointError as error:
        raise _not_removed(who, bucket / name, error) from error
    return [str(bucket / x) for x in [*names, *[index] * (num > 1)]]


def upload(who: str, directory: Path, bucket: Bucket) -> None:
    """Uploads a sealed checkpoint, its seal last; see [Note: steps in buckets]."""
    found = check_new(who, bucket)
    files = {str(path.relative_to(directory)): path for path in _files.files_below(directory)}
    seal = files.pop(_seal.NAME).read_bytes()
    try:
        claim = _new_claim()
        version = bucket.write_if(_seal.NAME, claim, found and found.version)
        owns = functools.partial(_mirror.check_claim, bucket, claim)
        left = _mirror.random_names(bucket.names())
        owns()  # after listing: so these names are not those of a later upload
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
    if found is not None:  # Once it is sealed, nobody else writes here.
        _remove_quietly(bucket, sorted({*bucket.names()} - {*files, _seal.NAME}))


def check_new(who: str, bucket: Bucket) -> Object | None:
    """Refuses a bucket that has something else than the rest of an incomplete upload; returns its claim."""
    found = bucket.read(_seal.NAME)
    if not _mirror.is_claim(found) and bucket.names():
        raise OptionError(message(
            who, f"there is something below {bucket} already", "A checkpoint is a new directory.",
            "Name another, or remove it."))  # fmt: skip
    return found


def _new_claim() -> bytes:
    return _seal.claim(f"{_lock.Owner.new()}, {secrets.token_hex(8)}")


def _retreat(bucket: Bucket, files: Iterable[str], seal: bytes, version: bytes) -> None:
    """Removes data files of an upload that failed, unless its seal has been written all the same.

    Files without a random name stay, with a claim: S3 removes unconditionally, and they may be the next
    upload's.
    """
    with contextlib.suppress(CheckpointError):
        with contextlib.suppress(Lost):  # A seal that is still in flight now fails.
            bucket.write_if(_seal.NAME, _new_claim(), version)
        found = bucket.read(_seal.NAME)
        if found is None or found.data != seal:
            bucket.remove(_mirror.random_names(files))


def _file_names(name: str, num: int, there: Iterable[str]) -> list[str]:
    """Hugging Face's names; if parts of such names exist, new ones have a random suffix."""
    stem, tag = name.removesuffix(SUFFIX), ""
    while num > 1:
        names = [f"{stem}-{i + 1:05}-of-{num:05}{tag}{SUFFIX}" for i in range(num)]
        if not {*names} & {*there}:
            return names
        tag = f"-{secrets.token_hex(4)}"
    return [name]


def _is_part(name: str, stem: str) -> bool:
    return bool(re.fullmatch(re.escape(stem) + _PART, name))


def _check_free(who: str, target: Path, overwrite: bool) -> None:
    there = _older(target)
    if directories := [path for path in there if path.is_dir()]:
        raise OptionError(message(
            who, f"{directories[0]} is a directory", "An export is files.", "Write another file."
        ))  # fmt: skip
    if there and not overwrite:
        raise OptionError(message(
            who, f"there is {there[0]} already", "Files are only overwritten when asked.",
            "Add --overwrite, or write another file."))  # fmt: skip


def _older(target: Path) -> list[Path]:
    """The files and index of an earlier export to the same name; those that it is found by come first."""
    parts = sorted(path for path in target.parent.iterdir() if _is_part(path.name, target.stem))
    return [path for path in (target, _index(target)) if os.path.lexists(path)] + parts


def _index(target: Path) -> Path:
    return target.with_name(target.name + ".index.json")


def _withdraw(target: Path, folder: Path) -> None:
    """Removes parts that were moved before their index, which is still in the folder and names them."""
    index = folder / _index(target).name
    with contextlib.suppress(CheckpointError):  # If there is no complete index, no part was moved.
        found = _json.read("export", index, {"weight_map": {str: str}})
        for name in {*found["weight_map"].values()}:
            if _is_part(name, target.stem) and not (folder / name).exists():
                (target.parent / name).unlink(missing_ok=True)
        index.unlink()


def _write_if(who: str, bucket: Bucket, path: Path, version: bytes | None) -> None:
    try:
        bucket.write_if(path.name, path.read_bytes(), version)
    except Lost as error:
        raise _exists(who, bucket / path.name) from error


def _remove_quietly(bucket: Bucket, names: Sequence[str]) -> None:
    with contextlib.suppress(CheckpointError):
        bucket.remove(names)


def _remove_older(
    who: str, bucket: Bucket, name: str, parts: Sequence[str], older: Object | None, num: int
) -> None:
    """Removes what the older export is found by, and only then its parts.

    Another export that is under way has read the index before it wrote any of these. By now that index is
    another one, or gone, so that it cannot come to name them: its own is written conditionally.
    """
    index = f"{name}.index.json"
    if num > 1:
        bucket.remove([name])
    elif older is not None:
        bucket.remove_if(index, older.version)
        if bucket.read(index) is not None:
            return
    elif parts:
        return warn(message(
            f"{who} {bucket}", f"no index names {first_of([*map(named, parts)])}",
            "They are left of an export that was ended, unless another process writes them now.",
            "Remove them, if none does."))  # fmt: skip
    bucket.remove(parts)


def _exists(who: str, url: Bucket) -> OptionError:
    return OptionError(message(
        who, f"there is {url} already", "Objects are only overwritten when asked.",
        "Add --overwrite, or write another one; if another process wrote it just now, wait until it is done."
    ))  # fmt: skip


def _not_removed(who: str, target: Path | Bucket, error: Exception) -> CheckpointError:
    return CheckpointError(message(
        f"{who} {target}", f"the older export cannot be removed: {error}", "The new one is complete.",
        "Remove the older one's files."))  # fmt: skip
