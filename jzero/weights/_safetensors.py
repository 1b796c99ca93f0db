# SPDX-License-Identifier: Apache-2.0
"""The safetensors format, headers only: who reads and writes the data between them does so a block at a time.

A file is 8 bytes (the length of the header, little-endian), the header (JSON: dtype, shape and place of each
tensor), and the tensors, one after the other without gaps. https://github.com/huggingface/safetensors
Its library maps files, and reads none in a bucket.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jzero import _json
from jzero._errors import CheckpointError, OptionError, message
from jzero._json import Malformed, Maybe, shown
from jzero.weights._sources import WeightFile

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"),
    "BF16": np.dtype(jnp.bfloat16),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn), "F8_E5M2": np.dtype(jnp.float8_e5m2),
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"), "U32": np.dtype("<u4"), "U16": np.dtype("<u2"), "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
FLOATS = {
    "bf16": jnp.bfloat16, "fp16": jnp.float16, "fp32": jnp.float32,
    "bfloat16": jnp.bfloat16, "float16": jnp.float16, "float32": jnp.float32,
}  # fmt: skip
METADATA = "__metadata__"  # an entry that is no tensor
_MAX_HEADER = 100_000_000  # bytes; the safetensors library refuses longer ones
_MAX_RANK = 32  # of arrays that tensorstore writes
_ENTRY = {"dtype": str, "shape": [int], "data_offsets": [int]}
_MAX_SIZE = 2**63  # of a dim, and of the product of those above 0: NumPy's limit


class Tensor(NamedTuple):
    """A tensor of a file, without its data; `start` is its offset in the file, once that is known."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def check_dtype(who: str, dtype: str | None) -> None:
    if dtype is not None and dtype not in FLOATS:
        raise OptionError(message(
            who, f"dtype={dtype!r:.100}", f"It is of floats: {', '.join(FLOATS)}.",
            "Choose one of them."))  # fmt: skip


def is_float(dtype: Any) -> bool:
    return not str(dtype).endswith("string") and jnp.issubdtype(dtype, jnp.floating)


def cast(x: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, bool]:
    """The values in a dtype, and whether no number became infinite."""
    with np.errstate(over="ignore"):  # The caller checks.
        made = x.astype(dtype, copy=False)
    return made, made is x or np.array_equal(np.isfinite(x), np.isfinite(made))


def header(tensors: Sequence[Tensor], framework: str = "flax") -> bytes:
    """The beginning of a file of these tensors, in this order."""
    entries: dict[str, Any] = {METADATA: {"format": framework}}
    start = 0
    for t in tensors:
        offsets = [start, start := start + t.nbytes]
        entries[t.name] = {"dtype": NAMES[t.dtype], "shape": t.shape, "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(math.ceil(len(text) / 8) * 8)  # aligns the tensors
    return len(text).to_bytes(8, "little") + text


def read_header(who: str, file: WeightFile) -> list[Tensor]:
    """The tensors of a file, in the order of their data."""
    try:
        length = int.from_bytes(file.read(0, 8).tobytes(), "little")
        if not 2 <= length <= _MAX_HEADER:
            raise Malformed(f"its header would have {length} bytes, not 2 to {_MAX_HEADER}")
        tensors = _parse(file.read(8, length).tobytes())
        end = 8 + length + sum(t.nbytes for t in tensors)
        if not file.ends_at(end):
            raise Malformed(f"its tensors end at byte {end}, and it does not")
    except OSError as error:
        raise CheckpointError(message(
            who, f"{file} cannot be read: {error.strerror}", "It is a safetensors file, or an index of some.",
            "Correct the path, or its permissions; do it again if it was replaced meanwhile."
        )) from error  # fmt: skip
    except Malformed as error:
        raise CheckpointError(message(
            f"{who} {file}", list(error.args), "Its header says where in the file each tensor is.",
            "It is damaged, incomplete, or no safetensors file: get it again.", "entries"
        )) from error  # fmt: skip
    return [t._replace(start=t.start + 8 + length) for t in tensors]


def _parse(text: bytes) -> list[Tensor]:
    """The tensors of a header, which must be contiguous; `start` is relative to the end of the header."""
    entries = _json.parse(text, "its header")
    if type(entries) is not dict or text[:1] != b"{":
        raise Malformed("its header is not a JSON object")
    bad = _json.check(entries, {METADATA: Maybe({str: str})})
    entries.pop(METADATA, None)
    if bad := bad or _json.check(entries, {str: _ENTRY}):
        raise Malformed(*bad)
    tensors, end = [], 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        start, end = end, [end, *entry["data_offsets"]][-1]
        if problem := _problem(entry):
            bad.append(f"{shown(name)} {problem}")
            continue
        tensor = Tensor(name, DTYPES[entry["dtype"]], tuple(entry["shape"]), start)
        if entry["data_offsets"] != (place := [start, start + tensor.nbytes]):
            bad.append(f"{shown(name)} has bytes {shown(entry['data_offsets'])}, not {place}")
        tensors.append(tensor)
    if bad:
        raise Malformed(*bad)
    return tensors


def _problem(entry: Mapping[str, Any]) -> str | None:
    if (dtype := entry["dtype"]) not in DTYPES:
        return f"has dtype {shown(dtype)}, not one of {', '.join(DTYPES)}"
    sizes = entry["shape"]
    nbytes = math.prod(size for size in sizes if size) * DTYPES[dtype].itemsize
    is_shape = len(sizes) <= _MAX_RANK and all(0 <= size < _MAX_SIZE for size in sizes)
    return None if is_shape and nbytes < _MAX_SIZE else f"has shape {shown(sizes)}"
