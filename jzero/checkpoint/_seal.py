# SPDX-License-Identifier: Apache-2.0
"""The manifest of a step, its seal: the file, written last, that lists what belongs to it.

It has every file of the step with its size, and the digest of those that have no checksums of their own; its
last line is the digest of what is above. So a missing file, or a flipped bit in what describes the step, is
found before the step is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jzero import _json
from jzero._errors import CheckpointError, named
from jzero._json import NotRegular
from jzero.checkpoint import _files

NAME = "_JZERO_SEAL"
_FORMAT = 1
# In a bucket, in place of a seal: who has begun to write or to remove the step.
_BEGUN = b"begun by "


class Broken(Exception):
    """What is wrong with a step, in a few words."""


class Unfinished(Broken):
    """It is being written or removed, or whoever did so is dead."""


class File(NamedTuple):
    """A file of a step; data files have no digest."""

    nbytes: int
    digest: str | None


class Seal(NamedTuple):
    files: Mapping[str, File]


def write(directory: Path) -> None:
    """Seals a directory whose files are complete: syncs all of it, and lists it in one more file."""
    (directory / NAME).write_bytes(text(files_in(directory)))
    _files.sync_tree(directory)


def files_in(directory: Path) -> dict[str, File]:
    return {
        name: File(size, None) if _is_data(name) else file(name, (directory / name).read_bytes())
        for name, size in _sizes(directory).items()
    }


def file(name: str, data: bytes) -> File:
    return File(len(data), None if _is_data(name) else _digest(data))


def text(files: Mapping[str, File]) -> bytes:
    found = json.dumps({"format": _FORMAT, "files": files})
    return f"{found}\n{_digest(found.encode())}\n".encode()


def claim(owner: object) -> bytes:
    """The content of a seal's place once a step is begun."""
    return _BEGUN + str(owner).encode()


def read(directory: Path) -> Seal | None:
    """The seal of a directory; None if Orbax alone wrote it; raises `Broken` if files are missing."""
    path = directory / NAME
    if not path.exists():
        return None
    with malformed_is_broken():
        data = _json.read_bytes("seal", path)
    seal = parse(data)
    check_sizes(directory, seal.files)
    return seal


def parse(data: bytes) -> Seal:
    """What a seal says; raises `Broken` if it is damaged, of a later format, or not written yet."""
    if data.startswith(_BEGUN):
        raise Unfinished(f"it was never finished: {data.decode(errors='replace')[:200]}")
    body, _, digest = data.rstrip(b"\n").rpartition(b"\n")
    if _digest(body) != digest.decode(errors="replace"):
        raise Broken(f"{NAME} is damaged")
    try:
        found = _json.parse(body)
    except _json.Malformed as error:
        raise Broken(f"{NAME}: {'; '.join(map(str, error.args))}") from error
    version = found.get("format") if isinstance(found, dict) else None
    if type(version) is int and version != _FORMAT:
        raise Broken(f"{NAME} has format {version}, and this jzero reads {_FORMAT}: update it")
    if bad := _json.check(found, {"format": int, "files": {}}):
        raise Broken(f"{NAME}: {'; '.join(bad)}")
    return Seal({name: _file(name, entry) for name, entry in found["files"].items()})


def _file(name: str, entry: Any) -> File:
    match entry:
        case [int(nbytes), None | str() as digest]:
            return File(nbytes, digest)
    raise Broken(f"{NAME} has {_json.shown(entry)} of {named(name)}")


@contextlib.contextmanager
def malformed_is_broken() -> Iterator[None]:
    """A file that is not what it should be is `Broken`; one that cannot be read now is an error."""
    try:
        yield
    except CheckpointError as error:
        if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, NotRegular):
            raise
        raise Broken(str(error)) from error


def check_sizes(directory: Path, files: Mapping[str, File]) -> None:
    found = _sizes(directory)
    bad = [
        f"{named(name)} is missing" if name not in found else
        f"{named(name)} has {found[name]} of {file.nbytes} bytes"
        for name, file in files.items() if found.get(name) != file.nbytes
    ]  # fmt: skip
    if bad:
        more = f", and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise Broken("; ".join(bad[:3]) + more)


def check_digests(
    directory: Path, seal: Seal, which: Callable[[str], bool] = lambda name: True
) -> dict[str, str]:
    """What is wrong with each file that has a digest and whose name `which` selects."""
    wanted = {name: file for name, file in seal.files.items() if file.digest and which(name)}
    found = {name: _damage(directory / name, file) for name, file in wanted.items()}
    return {name: damage for name, damage in found.items() if damage}


def _damage(path: Path, file: File) -> str | None:
    try:
        with _json.open_regular(path) as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()  # type: ignore[arg-type]
        return None if found == file.digest else "is damaged"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _sizes(directory: Path) -> dict[str, int]:
    """Every file in a directory and below, but for the seal."""
    try:
        paths = sorted(_files.files_below(directory))
    except NotRegular as error:
        raise Broken(str(error.strerror)) from error
    sizes = {path.relative_to(directory).as_posix(): path.stat().st_size for path in paths}
    return {name: size for name, size in sizes.items() if name != NAME}


def _is_data(name: str) -> bool:
    """Whether it is one of OCDBT's data files, in which each chunk and node has a checksum."""
    return name.split("/")[-2:-1] == ["d"]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
