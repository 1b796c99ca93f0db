"""The text: the source files of Python's own standard library, as bytes, split by file."""

import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

# Not the library itself: installed packages, tests; and two folders of generated tables.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
SKIPPED_FOLDERS |= {"encodings", "pydoc_data"}
HELD_OUT_EVERY = 20  # one file in twenty, chosen by its name alone


class Text(NamedTuple):
    train: np.ndarray  # uint8[bytes]
    held_out: np.ndarray  # uint8[bytes]
    num_files: tuple[int, int]  # training, held-out


def load() -> Text:
    """Reads the library that this Python came with, so the bytes differ between Python versions."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    names = [name for name in names if not SKIPPED_FOLDERS & set(name.split("/"))]
    held_out = [name for name in names if zlib.crc32(name.encode()) % HELD_OUT_EVERY == 0]
    train = sorted(set(names) - set(held_out))
    return Text(_read(root, train), _read(root, held_out), (len(train), len(held_out)))


def _read(root: Path, names: list[str]) -> np.ndarray:
    return np.frombuffer(b"\n".join((root / name).read_bytes() for name in names), np.uint8)


def batches(
    text: np.ndarray, batch_size: int, length: int, seed: int, part: tuple[int, int] = (0, 1)
) -> Iterator[np.ndarray]:
    """Yields uint8[batch_size, length] windows of `text`, without end; one seed, one sequence.

    Of every batch only part `part[0]` of `part[1]` equal ones.
    """
    index, count = part
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(text) - length, size=(batch_size, 1))
        yield text[np.split(starts, count)[index] + np.arange(length)]
