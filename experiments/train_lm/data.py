"""The text: the source files of Python's own standard library, as bytes, split by file."""

import sysconfig
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

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


class Windows:
    """uint8[batch_size, length] windows of `text`, without end; one seed, one sequence.

    Of every batch only part `part[0]` of `part[1]` equal ones. A checkpoint keeps its state.
    """

    def __init__(
        self,
        text: np.ndarray,
        batch_size: int,
        length: int,
        seed: int,
        part: tuple[int, int] = (0, 1),
    ):
        self.text, self.shape, self.part = text, (batch_size, length), part
        self.rng = np.random.default_rng(seed)

    def __next__(self) -> np.ndarray:
        batch_size, length = self.shape
        index, count = self.part
        starts = self.rng.integers(0, len(self.text) - length, size=(batch_size, 1))
        return self.text[np.split(starts, count)[index] + np.arange(length)]

    def get_state(self) -> Mapping[str, Any]:
        return self.rng.bit_generator.state

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.rng.bit_generator.state = state
