"""The safetensors format, headers only: who reads and writes the data between them does so a block at a time.

A file is 8 bytes (the length of the header, little-endian), the header (JSON: dtype, shape and place of each
tensor), and the tensors, one after the other without gaps. https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jzero._errors import CheckpointError, message

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"),
    "BF16": np.dtype(jnp.bfloat16),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn), "F8_E5M2": np.dtype(jnp.float8_e5m2),
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"), "U32": np.dtype("<u4"), "U16": np.dtype("<u2"), "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_METADATA = "__metadata__"
_MAX_HEADER = 100_000_000  # bytes; the safetensors library refuses longer ones


class Tensor(NamedTuple):
    """A tensor of a file, without its data; `start` is where they begin in the file, once it is known."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _Malformed(Exception):
    """Findings."""


def can_hold(dtype: Any) -> bool:
    """Whether the format has this dtype."""
    return dtype in _NAMES


def header(tensors: Sequence[Tensor]) -> bytes:
    """What a file of these tensors, in this order, begins with."""
    entries: dict[str, Any] = {_METADATA: {"format": "flax"}}
    start = 0
    for t in tensors:
        offsets = [start, start := start + t.nbytes]
        entries[t.name] = {"dtype": _NAMES[t.dtype], "shape": t.shape, "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(math.ceil(len(text) / 8) * 8)  # So tensors are aligned.
    return len(text).to_bytes(8, "little") + text


def read_header(who: str, path: Path) -> list[Tensor]:
    """The tensors of a file, in the order of their data.

    Raises:
      CheckpointError: the file cannot be read, or is not whole and consistent.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size - 8
            if not 2 <= length <= min(size, _MAX_HEADER):
                raise _Malformed(
                    f"its header would have {length} bytes, of {max(size, 0)} that follow"
                )
            entries = _parse(file.read(length))
        tensors = sorted(_tensors(entries), key=lambda t: (t.start, t.nbytes))
        _check_places(tensors, size - length)
    except OSError as error:
        raise CheckpointError(message(
            who, f"{path} cannot be read: {error.strerror}", "It is a safetensors file, or an index of some.",
            "Correct the path, or its permissions.")) from error  # fmt: skip
    except _Malformed as error:
        raise CheckpointError(message(
            f"{who} {path}", list(error.args), "Its header says where in the file each tensor is.",
            "It is damaged, incomplete, or no safetensors file: get it again.", "entries", shown=20,
        )) from error  # fmt: skip
    return [t._replace(start=t.start + 8 + length) for t in tensors]


def _parse(text: bytes) -> Mapping[str, Any]:
    try:
        entries = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:  # also what is not UTF-8
        raise _Malformed(f"its header is not JSON: {error}") from error
    if not isinstance(entries, dict):
        raise _Malformed("its header is not a JSON object")
    return {name: entry for name, entry in entries.items() if name != _METADATA}


def _without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    times = Counter(name for name, _ in pairs)
    if twice := [name for name, num in times.items() if num > 1]:
        raise _Malformed(*(f"{name!r} is there twice" for name in twice))
    return dict(pairs)


def _tensors(entries: Mapping[str, Any]) -> list[Tensor]:
    found = [_tensor(name, entry) for name, entry in entries.items()]
    if bad := [problem for problem in found if isinstance(problem, str)]:
        raise _Malformed(*bad)
    return [t for t in found if isinstance(t, Tensor)]


def _tensor(name: str, entry: Any) -> Tensor | str:
    """A tensor, with where its data starts after the header; or what is wrong with it."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(stop)]}:
            if dtype not in DTYPES:
                return f"{name!r} has dtype {dtype!r}, not one of {', '.join(DTYPES)}"
            if not all(type(size) is int and size >= 0 for size in shape):
                return f"{name!r} has shape {shape}"
            tensor = Tensor(name, DTYPES[dtype], tuple(shape), start)
            if stop - start != tensor.nbytes:
                return f"{name!r} has bytes {start} to {stop}, and needs {tensor.nbytes}"
            return tensor
    return f"{name!r} has no dtype, shape and data_offsets, but {str(entry)[:80]}"


def _check_places(tensors: Iterable[Tensor], nbytes: int) -> None:
    """One after the other, without gaps, to the end of the file."""
    bad, end = [], 0
    for t in tensors:
        if t.start < end:
            bad.append(
                f"{t.name!r} begins at byte {t.start}, before the end of the one before, {end}"
            )
        elif t.start > end:
            bad.append(
                f"{t.name!r} begins at byte {t.start}, and nothing is said of those from {end}"
            )
        end = t.start + t.nbytes
    if end != nbytes:
        bad.append(f"tensors have {end} bytes, and {nbytes} follow the header")
    if bad:
        raise _Malformed(*bad)
