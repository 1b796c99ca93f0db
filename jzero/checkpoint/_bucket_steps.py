# SPDX-License-Identifier: Apache-2.0
"""A directory of steps in a bucket: each process writes a local folder, and uploads it behind training.

[Note: steps in buckets] A step is committed by its manifest, an object (see `_seal`). Before anything is
uploaded, process 0 writes there that it has begun the step (`claim`); the manifest replaces that claim and
nothing else. A process that goes on after a dead one replaces the claim first: if the dead one comes back to
life, the manifest that it is about to write finds another claim. It may come back within any request, and
then:

* S3 cannot remove conditionally. So of a step that may be written again only data files are removed, whose
  names are random. All of a step is removed once a later one is committed, since then nobody writes it again.
* An object is written only where none exists, or in place of what existed before the writer checked that the
  claim is still its own: never in place of what the next writer has written after it replaced the claim.

The lock's object names the steps that may exist, since to list a bucket is to list all objects of all steps.
A step is noted there before it is claimed, and forgotten when none of its objects is left.

So no byte of a committed step changes. One request remains: the one that makes the manifest of a step that is
to be removed a claim again. A process that stalls there beyond its lease removes an old step, or one whose
commit it could not confirm, though the next writer wanted to keep it. And S3's version of an object is a
digest: if a dead process and the one after the next write the same bytes as a description, a process that
stalls in between, about to write other bytes, replaces them. Held by tests/test_buckets.py and
tests/test_bucket_faults.py.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jzero._errors import CheckpointError, OptionError, message
from jzero.checkpoint import _files, _lock, _mirror, _seal
from jzero.checkpoint._bucket import Bucket, Lost, Object
from jzero.checkpoint._lock import WHO, ObjectLock
from jzero.checkpoint._orbax import STATE
from jzero.checkpoint._seal import File, Seal, Unfinished
from jzero.checkpoint._steps import Steps
from jzero.checkpoint._temporary import Temporary

_PREFIX = "jzero-staging-"
_MANIFEST = "manifest.ocdbt"


def steps_in(who: str, path: Any, staging: Any = None) -> Steps:
    """The directory of steps of a path or URL; steps for a bucket are written to `staging` first."""
    bucket = Bucket.of(who, path)
    if bucket is None:
        return Steps(_files.local(who, path))
    folder = tempfile.gettempdir() if staging is None else staging
    if Bucket.of(who, folder) is not None:
        raise OptionError(message(
            who, f"staging={folder!r:.100}", "What goes to a bucket is written to a local directory first.",
            "Name a directory."))  # fmt: skip
    return BucketSteps(bucket, _files.local(who, folder))


class BucketSteps(Steps):
    """Steps in a bucket; see [Note: steps in buckets]."""

    def __init__(self, bucket: Bucket, staging: Path):
        self.where: Bucket = bucket
        self._parent = staging
        self._forget()

    def _forget(self) -> None:
        """Forgets what holds only as long as no other process writes."""
        self._is_unknown = True
        self._may_lag = False  # whether the steps are those of a list of objects
        self._latest: int | None = None
        self._claims: dict[int, bytes] = {}  # the versions of what this one has begun
        self._uncleared: set[int] = set()  # steps that it is to remove

    @functools.cached_property
    def lock(self) -> ObjectLock:
        return ObjectLock(self.where)

    def open(self) -> None:
        """Checks that the bucket exists and may be read, which reading one object does not tell."""
        self.where.names(_lock.NAME)

    def is_there(self, step: int) -> bool:
        return step == self._latest or self.where.read(f"{step}/{_seal.NAME}") is not None

    def path(self, step: int) -> Path:
        return _mirror.copy(self.where / str(step), self._sealed(step))

    def begin(self, step: int) -> None:
        """Does nothing, so that training waits for no request; `claim` finds other writers."""

    def folder(self, step: int, nbytes: int) -> Path:
        if not self._staging.path.is_dir():  # Somebody has tidied up.
            del self._staging
        for left in self._staging.path.iterdir():  # of a step that could not be written
            _files.discard(left)
        if (free := shutil.disk_usage(self._parent).free) < nbytes:
            raise CheckpointError(message(
                WHO, f"{self._parent} has {free:,} bytes free, and this process writes {nbytes:,}",
                "What goes to a bucket is written to a local directory first.",
                "Free some of it, or name another directory by staging=."))  # fmt: skip
        (self._folder(step) / STATE).mkdir(parents=True)
        return self._folder(step)

    def claim(self, step: int) -> str:
        if self.lock.ensure():  # Others may have written since what is remembered.
            self._forget()
        if self._is_unknown:
            names = {f"{x}/{_seal.NAME}": x for x in self._candidates()}
            there = {names[name]: found for name, found in self.where.objects(names)}
            self._latest = self.latest()
            self._uncleared = {x for x, found in there.items() if _mirror.is_claim(found)}
            self._may_lag = self.lock.steps is None
            self.lock.steps, self._is_unknown = [*there], False
        for each in sorted(self._uncleared):
            self.remove(each)
        if self._latest is not None and step <= self._latest:
            self.check_is_last(step)
        found = self.where.read(f"{step}/{_seal.NAME}")
        with self._not_lost(step):
            is_sealed = found is not None and not _mirror.is_claim(found)
            if is_sealed and not self._may_lag:  # A copied step, which must never count.
                raise Lost(f"{self.where / str(step)}")
            self.lock.steps = sorted({*(self.lock.steps or ()), step})
            self.lock.check()  # After the look, as in `remove`.
            version = found.version if found and not is_sealed else None
            self._claims[step] = self._write_claim(step, version)
        return self.lock.owner

    def hand_in(self, step: int, owner: str) -> dict[str, File]:
        return {} if jax.process_count() == 1 else self._upload(step, owner)

    def base(self, step: int) -> dict[str, Any]:
        """One process merges its part before the upload; several merge theirs in the bucket."""
        if jax.process_count() == 1:
            return super().base(step)
        # What names the parts is uploaded, like all that has no random name.
        manifest = f"{self._folder(step) / STATE / _MANIFEST}"
        return {"driver": "kvstack", "path": "", "layers": [
            {"base": (self.where / str(step)).spec(STATE)},
            {"exact": _MANIFEST, "base": {"driver": "file", "path": manifest}},
        ]}  # fmt: skip

    def publish(self, step: int, parts: Mapping[str, File]) -> None:
        files = {**parts, **self._upload(step, self.lock.owner), **self._put_together(step)}
        self.lock.check()
        with self._not_lost(step):
            seal = f"{step}/{_seal.NAME}"
            self.where.write_if(seal, _seal.text(files), self._claims[step])
        del self._claims[step]
        self._latest = step
        with contextlib.suppress(CheckpointError):  # Some goes when the next one begins.
            self._tidy(step, files)

    def _tidy(self, step: int, files: Mapping[str, File]) -> None:
        """Removes what belongs to no step, and what cannot be written again once this one is committed."""
        if step in self._uncleared:
            self._uncleared.discard(step)
            there = self.where / str(step)
            there.remove({*there.names()} - {*files, _seal.NAME})
        for older in sorted(self._uncleared):
            if older < step:
                self.remove(older)

    def discard(self, step: int) -> None:
        """Removes a step that this process has begun; the rest of it goes when the next one begins."""
        shutil.rmtree(self._folder(step), ignore_errors=True)
        if step in self._claims:  # Else somebody else may have saved it.
            self._uncleared.add(step)
            with contextlib.suppress(CheckpointError):
                self.remove(step)

    def remove(self, step: int) -> None:
        """Removes a step: first its seal, or what would let another process seal it."""
        bucket = self.where / str(step)
        found = bucket.read(_seal.NAME)
        # After the look: who was taken for dead before it may have seen another's seal.
        self.lock.check()
        with self._not_lost(step):
            claim = self._write_claim(step, found and found.version)
        is_over = self._latest is not None and step < self._latest
        there = [name for name in bucket.names() if name != _seal.NAME]
        check = functools.partial(self.lock.check, now=False)
        # Of a step that may be written again only objects with random names go; it does not count.
        bucket.remove(there if is_over else _mirror.random_names(there), check)
        self._claims.pop(step, None)
        if is_over:
            bucket.remove_if(_seal.NAME, claim)
            self._uncleared.discard(step)
            self.lock.steps = [each for each in self.lock.steps or () if each != step]

    def close(self) -> None:
        super().close()
        self._forget()
        if "_staging" in self.__dict__:
            self.__dict__.pop("_staging").close()

    def _upload(self, step: int, owner: str) -> dict[str, File]:
        """Moves the files of this process into the bucket; returns what the manifest says of them."""
        folder = self._folder(step)
        files = _seal.files_in(folder)
        with self._not_lost(step):
            paths = {name: folder / name for name in files}
            check = functools.partial(self.lock.check, now=False)
            leads, bucket = jax.process_index() == 0, self.where / str(step)
            owns = functools.partial(_mirror.check_claim, bucket, _seal.claim(owner))
            bucket.upload(paths, owns, check if leads else lambda: None)
        shutil.rmtree(folder, ignore_errors=True)
        return files

    def _put_together(self, step: int) -> dict[str, File]:
        if jax.process_count() == 1:
            return {}
        bucket = self.where / str(step)
        names = (f"{STATE}/d/{x}" for x in bucket.names(f"{STATE}/d/"))
        return {name: _seal.file(name, found.data) for name, found in bucket.objects(names)}

    def _write_claim(self, step: int, version: bytes | None) -> bytes:
        return self.where.write_if(f"{step}/{_seal.NAME}", _seal.claim(self.lock.owner), version)

    @contextlib.contextmanager
    def _not_lost(self, step: int) -> Iterator[None]:
        try:
            yield
        except Lost as error:
            raise CheckpointError(message(
                WHO, f"{error} was written by another process",
                "One process at a time saves steps in a directory, each of them once.",
                "End one of the two, or save to another directory; if no other writes there, remove "
                f"what is in {self.where / str(step)}.")) from error  # fmt: skip

    def _folder(self, step: int) -> Path:
        return self._staging.path / str(step)

    @functools.cached_property
    def _staging(self) -> Temporary:
        return Temporary(_PREFIX, self._parent)

    def _names(self) -> list[str]:
        """The names of steps in the lock's object; without it only a list of all objects tells."""
        steps, is_own = self.lock.noted()
        if steps is not None:  # While no other writes, not those that this process could not end.
            return [str(step) for step in steps if not is_own or step not in self._uncleared]
        names = [name.partition("/") for name in self.where.names()]
        return list(dict.fromkeys(first for first, slash, _ in names if slash))

    def _check(self, step: int) -> None:
        self._sealed(step)

    def _sealed(self, step: int) -> tuple[Object, Seal]:
        found = _mirror.sealed(self.where / str(step))
        if found is None:
            raise Unfinished("it has no manifest")
        return found
