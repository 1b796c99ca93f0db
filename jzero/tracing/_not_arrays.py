# SPDX-License-Identifier: Apache-2.0
"""Arguments that JAX does not accept as arrays, and what the user should write instead."""

from __future__ import annotations

import array
import dataclasses
import re
import sys
import types
from collections.abc import Iterable, Mapping, Set
from typing import Any

import jax
import numpy as np

from jzero._errors import escaped

_CONVERT = "Pass NumPy arrays: "
# Other packages' arrays, by the first part of the module of a leaf's class.
_PACKAGES = {
    "torch": f"{_CONVERT}np.asarray(tensor) or tensor.numpy(), in the DataLoader's collate_fn or before the "
    "call (of one on a GPU tensor.cpu()).",
    "tensorflow": f"{_CONVERT}tensor.numpy(), or iterate over tfds.as_numpy(dataset).",
    "pandas": f"{_CONVERT}frame.to_numpy().",
    "polars": f"{_CONVERT}frame.to_numpy().",
    "PIL": f"{_CONVERT}np.asarray(image).",
}
_TEXT = (
    "Leave text out of the batch ({k: v for k, v in batch.items() if k != 'text'}), or pass its token ids; "
    "declare an argument that is text in static_argnames."
)
_MAPPING = "Pass a dict, which JAX knows: dict(batch)."
_OBJECT = (
    "Register its class (jax.tree_util.register_dataclass), or pass a dict of its fields: vars(x)."
)
_RAGGED = (
    "Its rows differ in length: pad them to one length (np.pad, then np.stack), or leave it out."
)
_RECORDS = "Pass its fields, each as an array: {name: array[name] for name in array.dtype.names}."
_ITERATOR = "Pass one batch of it: next(iterator), or write for batch in loader."
_STATIC = (
    "Declare such an argument in static_argnames, or make it a static field of its container "
    "(flax.struct.field(pytree_node=False))."
)
_MODULES = (
    "Keep the arrays of Equinox modules, eqx.filter(state, eqx.is_array), or make it a static field of its "
    "container (flax.struct.field(pytree_node=False))."
)


def is_numeric(dtype: Any) -> bool:
    """Whether JAX has arrays of a NumPy dtype, which excludes text, objects, dates and records."""
    return dtype.kind not in "OSUMm" and dtype.names is None


def is_of_another_package(leaf: Any) -> bool:
    """Whether it is an array that JAX does not accept."""
    if isinstance(leaf, jax.Array) or not hasattr(leaf, "__array__"):
        return False
    return not (isinstance(leaf, np.ndarray | np.generic) or hasattr(leaf, "__jax_array__"))


def edits(leaves: Iterable[Any], in_state: bool) -> str:
    return " ".join(dict.fromkeys(_edit(leaf, in_state) for leaf in leaves))


def _edit(leaf: Any, in_state: bool) -> str:
    if isinstance(leaf, str | bytes) or _kind(leaf) in ("U", "S"):
        return _STATIC if in_state else _TEXT
    if isinstance(leaf, np.ndarray | np.generic):
        return _edit_of_array(leaf)
    package = type(leaf).__module__.partition(".")[0]
    if package in _PACKAGES and hasattr(leaf, "__array__"):
        return _PACKAGES[package]
    if isinstance(leaf, Mapping):
        return _MAPPING
    if dataclasses.is_dataclass(leaf) or isinstance(leaf, types.SimpleNamespace):
        fields = jax.tree.leaves(dict(getattr(leaf, "__dict__", {})))
        return _OBJECT if any(hasattr(x, "shape") for x in fields) else _STATIC
    if in_state and "equinox" in sys.modules:
        return _MODULES
    if isinstance(leaf, type | types.FunctionType):
        return _STATIC
    if hasattr(leaf, "__array__") or isinstance(leaf, range | memoryview | bytearray | array.array):
        return f"{_CONVERT}np.asarray(x)."
    if isinstance(leaf, Set):
        return f"{_CONVERT}np.asarray(sorted(x))."
    if hasattr(leaf, "__iter__"):
        return _ITERATOR
    return _STATIC


def _edit_of_array(leaf: Any) -> str:
    if leaf.dtype.names is not None:
        return _RECORDS
    try:
        leaf.astype(np.float32)
    except (TypeError, ValueError):
        return _RAGGED
    return f"{_CONVERT}array.astype(np.float32), or leave it out."


def _kind(leaf: Any) -> str:
    return leaf.dtype.kind if isinstance(leaf, np.ndarray | np.generic) else ""


def add_notes(error: Exception, arrays: Mapping[str, Any]) -> None:
    """Adds notes to an error of the user's step if numbers or lists among its arguments may be the cause."""
    named, lists = _needed(error), dict[str, int]()
    numbers = [name for name, x in arrays.items()
               if (named is None or name in named) and _may_be_number(x)]  # fmt: skip
    for path, leaf in jax.tree_util.tree_leaves_with_path(arrays):
        name, *keys = path
        if leaf.shape or not leaf.weak_type or not keys:
            continue
        if isinstance(keys[-1], jax.tree_util.SequenceKey):
            while keys and isinstance(keys[-1], jax.tree_util.SequenceKey):
                del keys[-1]
            text = name.key + jax.tree_util.keystr(tuple(keys))
            lists[text] = lists.get(text, 0) + 1
    if numbers:
        error.add_note(
            f"jzero: {_listed(numbers)} came as a number or bool, which a step gets as an array, as under "
            f"jax.jit. Where it needs the value itself, say so: shard_train_step(..., "
            f"static_argnames={tuple(numbers)})."
        )
    if lists:
        found = _listed(f"{text} ({num} numbers)" for text, num in lists.items())
        error.add_note(
            f"jzero: {found} is a Python list, of which every number is an argument by itself, as "
            "under jax.jit. If it stands for one array, pass np.asarray(...) of it."
        )


def _needed(error: Exception) -> list[str] | None:
    """The arguments whose values the step needed while it was traced; None if JAX's error names none."""
    if "Non-hashable static arguments" in str(error):
        return None
    found = re.search(r"depends on the values? of the arguments? (.*)\.", str(error))
    return re.split(", and |, | and ", found[1]) if found else []


def _may_be_number(x: Any) -> bool:
    is_scalar = isinstance(x, jax.ShapeDtypeStruct) and not x.shape
    return is_scalar and (x.weak_type or x.dtype == bool)


def _listed(texts: Iterable[str]) -> str:
    return escaped(", ".join(texts))
