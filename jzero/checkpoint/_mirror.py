# SPDX-License-Identifier: Apache-2.0
"""A local copy of the small files of a checkpoint in a bucket.

What reads checkpoints reads the copy. Data files, which have the chunks, stay in the bucket: in the copy they
are holes of their sizes, and arrays are opened in `bucket_of`.
"""

from __future__ import annotations

import atexit
import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jzero._errors import CheckpointError, first_of, message, named
from jzero.checkpoint import _files, _seal
from jzero.checkpoint._bucket import Bucket, Lost, Object
from jzero.checkpoint._seal import Broken, Seal, Unfinished
from jzero.checkpoint._temporary import Temporary

# OCDBT's data files, and chunks that are files of their own.
_DATA = re.compile(r"(?:.*/)?(?:d/[0-9a-f]{32}|c(?:/\d+)+|\d+(?:\.\d+)*)", re.DOTALL)
_RANDOM = re.compile(r"(?:.*/)?d/[0-9a-f]{32}", re.DOTALL)
# Of steps: the version of the seal, and the folder.
_copies: dict[Bucket, tuple[bytes, Path]] = {}
_roots: list[str] = []


def local(who: str, path: Any) -> Path:
    """Where the files are that describe the checkpoint in `path`: there, or in a copy of a bucket."""
    bucket = Bucket.of(who, path)
    if bucket is None:
        return _files.local(who, path)
    above, _, item = bucket.prefix.rpartition("/")
    try:
        # The seal of `steps/100/state` is above it.
        if above and (found := sealed(step := Bucket(bucket.scheme, bucket.name, above))):
            return copy(step, found) / item
        return copy(bucket, sealed(bucket))
    except Broken as error:
        raise CheckpointError(message(
            f"{who} {bucket}", str(error), "A checkpoint counts once it is complete, and as long as it is.",
            "Use the latest complete step.")) from error  # fmt: skip


def copy(bucket: Bucket, found: tuple[Object, Seal] | None) -> Path:
    """A copy of a checkpoint of which `sealed` found this; raises `Broken` if objects are missing."""
    if found and bucket in _copies and _copies[bucket][0] == found[0].version:
        with contextlib.suppress(Broken, OSError):  # A cleaner of the temporary directory came by.
            _seal.check_sizes(_copies[bucket][1], found[1].files)
            return _copies[bucket][1]
    made = Path(tempfile.mkdtemp(dir=_root()), f"{bucket.scheme}:", bucket.name, bucket.prefix)
    made.mkdir(parents=True)
    try:
        names = bucket.names() if found is None else [*found[1].files]
        if odd := [name for name in names if {"", ".", ".."} & {*name.split("/")}]:
            raise Broken(f"an object is called {first_of([*map(named, odd)])}")
        bucket.download((name for name in names if not _DATA.fullmatch(name)), made)
        if found is not None:
            (made / _seal.NAME).write_bytes(found[0].data)
            _make_holes(bucket, made, found[1])
            # A later copy may be whole.
            _seal.check_sizes(made, found[1].files)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    _copies[bucket] = found[0].version if found else b"", made
    return made


def bucket_of(path: Any) -> Bucket | None:
    """The directory in the bucket of one in a copy; None for other directories."""
    root = next((root for root in _roots if Path(path).is_relative_to(root)), None)
    if root is None:
        return None
    _, *parts = Path(path).relative_to(root).parts  # k3x0a_9b/s3:/bucket/steps/100
    return Bucket.of("restore", "/".join(parts))


def shown(path: Path) -> str:
    return str(bucket_of(path) or path)


def sealed(bucket: Bucket) -> tuple[Object, Seal] | None:
    """The seal of a step, and what it says; None if it has none; raises `Broken` if it does not count."""
    found = bucket.read(_seal.NAME)
    return found and (found, _seal.parse(found.data))


def is_claim(found: Object | None) -> bool:
    """Whether an object is a claim: a process has begun to write or to remove the step."""
    try:
        _seal.parse(b"" if found is None else found.data)
    except Broken as error:
        return isinstance(error, Unfinished)
    return False


def check_claim(bucket: Bucket, claim: bytes) -> None:
    """Raises `Lost` if another process has begun to write a checkpoint."""
    found = bucket.read(_seal.NAME)
    if found is None or found.data != claim:
        raise Lost(f"{bucket / _seal.NAME}")


def random_names(names: Iterable[str]) -> list[str]:
    """Those of some objects whose names no other writer can choose."""
    return [name for name in names if _RANDOM.fullmatch(name)]


def _make_holes(bucket: Bucket, folder: Path, seal: Seal) -> None:
    """Makes sparse data files of the sizes that those in the bucket must have."""
    data = {name: file.nbytes for name, file in seal.files.items() if _DATA.fullmatch(name)}
    if bad := bucket.cut_short(data):
        names = first_of([*map(named, bad)])
        raise Broken(f"missing or cut short in the bucket: {names}")
    for name, nbytes in data.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("wb") as file:
            file.truncate(nbytes)


def _root() -> Path:
    """The folder of all copies of this process; removed at its end, or by a later process."""
    if not _roots or not Path(_roots[-1]).is_dir():
        made = Temporary("jzero-mirror-", Path(tempfile.gettempdir()))
        atexit.register(made.close)
        _roots.append(str(made.path))
    return Path(_roots[-1])
