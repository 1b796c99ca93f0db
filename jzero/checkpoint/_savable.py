# SPDX-License-Identifier: Apache-2.0
"""Whether a checkpoint can hold a state, before anything is written."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
import tensorstore

from jzero._errors import StateError, a_type, describe_leaf, message
from jzero.checkpoint._match import leaf_names, name_at
from jzero.offload.memory._leaf_array import is_coded

TreePath: TypeAlias = tuple[Any, ...]

_ARRAYS = (jax.Array, np.ndarray)
_NUMBERS = (int, float, complex, np.number, np.bool_)


def check_savable(who: str, state: Any) -> None:
    """Raises a `StateError` unless every leaf can be written, under a name of its own."""
    nodes, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=_is_empty)
    leaves = [(path, leaf) for path, leaf in nodes if not _is_empty(leaf)]
    pairs = [(name_at(path), leaf) for path, leaf in leaves]
    if not pairs:
        raise StateError(message(
            who, f"the state is {state!r:.80}, without leaves", "A checkpoint holds arrays.",
            "Pass the state that the step returned."))  # fmt: skip
    bad = [problem for name, leaf in pairs if (problem := _problem(name, leaf))]
    bad += [*_without_names([path for path, _ in leaves]), *_mixed(path for path, _ in nodes)]
    bad += _of_one_name([name for name, _ in pairs])
    if bad:
        raise StateError(message(
            who, bad, "A checkpoint holds arrays and numbers, of dtypes that Zarr has.",
            "Cast them, rename them, or keep them out of the state.", shown=20))  # fmt: skip


def described(state: Any) -> list[str]:
    """Each leaf in a line: what processes that save together must have alike."""
    pairs = zip(leaf_names(state), jax.tree.leaves(state), strict=True)
    return [describe_leaf(name, getattr(leaf, "shape", ()), _dtype(leaf)) for name, leaf in pairs]


def _problem(name: str, leaf: Any) -> str | None:
    if not isinstance(leaf, (*_ARRAYS, *_NUMBERS)):
        return f"{name} is {a_type(leaf)}"
    if is_coded(leaf):
        return f"{name} is quantized; eval_step.rows gives it as a plain array"
    dtype = _dtype(leaf)
    if not isinstance(leaf, jax.Array) and np.issubdtype(dtype, np.integer):
        restored = jax.dtypes.canonicalize_dtype(dtype)
        if restored != dtype and not np.array_equal(np.asarray(leaf).astype(restored), leaf):
            return f"{name} has values beyond {restored}, as which JAX restores it without jax_enable_x64"
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) or _can_hold(dtype):
        return None
    return f"{describe_leaf(name, np.shape(leaf), dtype)} has a dtype that cannot be written"


def _dtype(leaf: Any) -> Any:
    if hasattr(leaf, "dtype"):
        return leaf.dtype
    return np.asarray(leaf).dtype if isinstance(leaf, _NUMBERS) else type(leaf).__name__


@functools.cache
def _can_hold(dtype: Any) -> bool:
    metadata = {"data_type": str(dtype), "shape": [1]}
    spec = {"driver": "zarr3", "kvstore": {"driver": "memory"}, "metadata": metadata}
    try:
        tensorstore.open(spec, create=True).result()
    except (ValueError, TypeError):
        return False
    return True


def _is_empty(node: Any) -> bool:
    """Whether it has no children, and is no leaf."""
    found = jax.tree_util.default_registry.flatten_one_level(node)
    return found is not None and not found[0]


def _without_names(paths: Sequence[TreePath]) -> list[str]:
    """Leaves with a key that no file in the store can have: a slash ends a path's part."""
    keys = {key: jax.tree_util.keystr((key,), simple=True) for key in {x for y in paths for x in y}}
    bad = {
        x
        for x, key in keys.items()
        if not key or key.strip("/") != key or "//" in key or not _is_text(key)
    }
    return [
        f"{jax.tree_util.keystr(path)[:200]!r} has the key {keys[key][:80]!r}"
        for path in (paths if bad else ())
        for key in path
        if key in bad
    ]


def _mixed(paths: Iterable[TreePath]) -> list[str]:
    """Nodes, also empty ones, with both names and sequence indices: Orbax cannot read them."""
    kinds: dict[TreePath, set[bool]] = {}
    while paths := dict.fromkeys(path for path in paths if path):
        for path in paths:
            is_index = isinstance(path[-1], jax.tree_util.SequenceKey)
            kinds.setdefault(path[:-1], set()).add(is_index)
        paths = [path[:-1] for path in paths]
    return [
        f"{jax.tree_util.keystr(path)[:200]!r} has names and numbers (of NNX objects save nnx.state(objects))"
        for path, both in kinds.items()
        if len(both) > 1
    ]


def _is_text(key: str) -> bool:
    try:
        key.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return "\0" not in key


def _of_one_name(names: Sequence[str]) -> list[str]:
    """Orbax calls the array of `c/d` `c.d`: as that of a leaf whose name is `c.d`."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(name.replace("/", "."), []).append(name)
    return [f"the leaves {' and '.join(x)} have one name" for x in alike.values() if len(x) > 1]
