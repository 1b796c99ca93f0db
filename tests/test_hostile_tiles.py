"""Files of tiles with hostile headers and descriptions: refused by name, or read as they were written."""

import collections
import functools
import json
import os
import pathlib
import random
import time
import zlib
from typing import Any

import pytest

import jzero
from jzero.offload.nvme._tile_layout import PAGE
from nvme_state import check, made, reopen
from test_hostile_files import mutated


def page_of(text: bytes) -> bytes:
    """A header page with a right checksum, whatever it says."""
    text = text[: PAGE - 30]
    return (b"jzero tiles %08x\n" % zlib.crc32(text) + text).ljust(PAGE, b"\0")


def text_of(page: bytes) -> bytes:
    return page.rstrip(b"\0").partition(b"\n")[2]


def altered(rng: random.Random, text: bytes, but: str = "") -> bytes:
    """Another value that a run could have written, in one or two fields."""
    fields = json.loads(text)
    for name in rng.sample(sorted(fields.keys() - {but}), rng.choice([1, 1, 2])):
        old = fields[name]
        if isinstance(old, int):
            fields[name] = rng.choice(
                [old + 1, old - 1, 0, 1, 2, -1, old * 2, old ^ 1, 2**31, 2**62]
            )
        else:
            fields[name] = rng.choice(["empty", "writing", "complete"])
    return json.dumps(fields, indent=1).encode()


class Disk:
    """What a run left after step 1, of which parts are written over, and put back."""

    def __init__(self, root: pathlib.Path, in_place: bool) -> None:
        self.root, self.in_place = root, in_place
        with made(root, in_place):
            pass
        self.whole = {path: path.read_bytes() for path in sorted((root / "run").iterdir())}
        self.seconds = 0.0

    def outcome(self, path: pathlib.Path, changes: dict[int, bytes]) -> str:
        """What becomes of files of which one has other bytes from some places on."""
        for at, data in changes.items():
            write(path, at, data)
        before, start = path.read_bytes(), time.process_time()
        try:
            with reopen(self.root, self.in_place) as files:
                assert files.step in ((1,) if self.in_place else (0, 1))
                check(files, files.step)
            return f"step {files.step}"
        except (jzero.StateError, jzero.OptionError) as error:
            text = str(error)
            assert text.startswith("jzero.NVMe: ")
            assert len(text) < 2000
            assert text.replace("\n", "").isprintable()
            return "refused"
        finally:
            self.seconds = max(self.seconds, time.process_time() - start)
            assert path.read_bytes() == before  # Nothing was overwritten.
            for at, data in changes.items():
                write(path, at, self.whole[path][at : at + len(data)])


def write(path: pathlib.Path, at: int, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY)
    os.pwrite(fd, data, at)
    os.close(fd)


def run(disk: Disk, num: int) -> collections.Counter[str]:
    """Headers of one file, one or both, changed in a place; every tenth time its description."""
    rng, counts = random.Random(f"{num} {disk.in_place}"), collections.Counter[str]()
    for i in range(num):
        path = rng.choice(list(disk.whole))
        data = disk.whole[path]
        heads = [text_of(data[k * PAGE : (k + 1) * PAGE]) for k in range(2)]
        if i % 10 == 9:
            fields = [json.loads(head) for head in heads]
            length = fields[0]["about_bytes"]
            about = mutated(rng, data[2 * PAGE : 2 * PAGE + length])
            room = data[2 * PAGE :].index(bytes(64)) // PAGE * PAGE + PAGE
            about = about[:room]
            says = {"about_bytes": len(about), "about_crc": zlib.crc32(about)}
            changes = {2 * PAGE: about} | {
                k * PAGE: page_of(json.dumps({**fields[k], **says}).encode()) for k in range(2)
            }
        else:
            chosen = rng.choice([(0,), (1,), (0, 1)])
            # That two headers exchange their steps no checksum can tell.
            alter: Any = functools.partial(altered, but="step" if len(chosen) == 2 else "")
            change = rng.choice([mutated, alter, alter])
            changes = {k * PAGE: page_of(change(rng, heads[k])) for k in chosen}
        counts[disk.outcome(path, changes)] += 1
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [False, True])
def test_mutated_headers_with_right_checksums(in_place, tmp_path):
    """3,000 in all: nothing else is raised, nothing is written, and what is read is what was written."""
    disk, num = Disk(tmp_path, in_place), 1500
    counts = run(disk, num)
    print(num, in_place, dict(counts), f"{disk.seconds:.3f} s at worst")
    assert counts["refused"] > num // 3
    assert disk.seconds < 5
    with reopen(tmp_path, in_place) as files:
        check(files, 1)
