# SPDX-License-Identifier: Apache-2.0
"""Arguments of a step: paths, shapes and kinds of their leaves, and over which axes each is split."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jzero._errors import STEP, BatchError, OptionError, StateError, a_type, describe_leaf, message
from jzero.tracing import _not_arrays
from jzero.tracing._state_arguments import StateArguments

WHO = STEP


def leaf_paths(tree: Any, root: str) -> list[str]:
    """`root['w']`, ... for every leaf, in the order of `jax.tree.leaves`.

    A state of several arguments needs no root: `params['w']`, ...
    """
    root = "" if isinstance(tree, StateArguments) else root
    return [
        root + jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]


def structure_paths(treedef: Any, root: str) -> list[str]:
    return leaf_paths(unfilled(treedef), root)


def unfilled(treedef: Any) -> Any:
    # Containers that check what they hold accept `object()`, which JAX uses itself.
    return jax.tree.unflatten(treedef, [object()] * treedef.num_leaves)


def argument_paths(arrays: Mapping[str, Any]) -> list[str]:
    return [path for name, tree in arrays.items() for path in leaf_paths(tree, name)]


def is_key(dtype: Any, shape: Sequence[int]) -> bool:
    """Whether it is an array of typed PRNG keys, or a single old-style one (`uint32[2]`)."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return True
    return dtype == np.uint32 and tuple(shape) == (2,)


def is_single_key(dtype: Any, shape: Sequence[int]) -> bool:
    """Whether it is one key. An array of typed keys has one for each device, or row."""
    return is_key(dtype, shape) and (not shape or dtype == np.uint32)


def signature_of(tree: Any) -> tuple[Any, ...]:
    """Structure, shapes and dtypes of a tree as a cache key. Leaves may be anything."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, marks(leaves)


def marks(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Shape, dtype and weak type of each array, the type of any other leaf."""
    return tuple([
        (leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False))
        if hasattr(leaf, "dtype") and hasattr(leaf, "shape")
        else type(leaf)
        for leaf in leaves
    ])  # fmt: skip


def abstract(tree: Any, root: str) -> Any:
    """The tree with `ShapeDtypeStruct`s as JAX will see them. Raises an error that names all non-arrays."""
    bad, out = [], []
    leaves, treedef = jax.tree.flatten(tree)
    for i, leaf in enumerate(leaves):
        try:
            out.append(abstract_leaf(leaf))
        except (TypeError, ValueError):
            bad.append(i)
    if bad:
        paths = leaf_paths(tree, root)  # Costs more than the check, which every step makes.
        found = [f"{paths[i]} is {a_type(leaves[i])}: {leaves[i]!r:.60}" for i in bad]
        cls = StateError if root == "state" else BatchError
        raise cls(message(
            WHO, found, "Every leaf must be an array, a NumPy array or a Python number.",
            _edits([leaves[i] for i in bad], root == "state"), shown=8))  # fmt: skip
    return jax.tree.unflatten(treedef, out)


def is_python_number(leaf: Any) -> bool:
    # `np.float64` and `np.complex128` are subclasses of Python's numbers.
    return isinstance(leaf, bool | int | float | complex) and not isinstance(leaf, np.generic)


def _edits(leaves: Sequence[Any], in_state: bool) -> str:
    if all(map(_holds_array, leaves)):
        return "Pass the array that each holds: jax.tree.map(lambda x: x.value, variables)."
    return _not_arrays.edits(leaves, in_state)


def _holds_array(leaf: Any) -> bool:
    """Whether it is a variable like those of Keras, which only eager operations accept."""
    return hasattr(leaf, "__jax_array__") and not isinstance(leaf, jax.Array)


def abstract_leaf(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and weak type of a leaf. Raises TypeError if it is no array, number or key."""
    if is_python_number(leaf):
        aval = jnp.result_type(leaf)
        return jax.ShapeDtypeStruct((), aval, weak_type=not isinstance(leaf, bool))
    if isinstance(leaf, (np.ndarray, np.generic)):
        if not _not_arrays.is_numeric(leaf.dtype):
            raise TypeError(leaf)
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        return jax.ShapeDtypeStruct(leaf.shape, dtype)
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")) or isinstance(leaf, jax.Ref):
        raise TypeError(leaf)
    if _not_arrays.is_of_another_package(leaf) or _holds_array(leaf):
        raise TypeError(leaf)
    return jax.ShapeDtypeStruct(
        tuple(leaf.shape), leaf.dtype, weak_type=bool(getattr(leaf, "weak_type", False))
    )


class BatchSpecs(NamedTuple):
    specs: tuple[P, ...]  # For each leaf; `P()` replicates it.
    # The data axes that split rows, and count microbatches in: all of them, unless `in_specs` splits several
    # dims of an argument; then those of the first one.
    row_axes: tuple[str, ...]

    @property
    def are_of_several_dims(self) -> bool:
        return any(sum(map(bool, spec)) > 1 for spec in self.specs)

    def parts(self, axes: Mapping[str, int], accumulate: int) -> dict[str, int]:
        """Parts by data axis; microbatches count as devices of the last axis of rows."""
        last = self.row_axes[-1]
        return {**axes, last: axes[last] * accumulate}


def batch_specs(
    arrays: Mapping[str, Any], specs: Mapping[str, Any], axes: Mapping[str, int], accumulate: int
) -> BatchSpecs:
    """How each leaf is split: as `in_specs` says, by default along dim 0.

    By default, keys are replicated, and leaves with fewer rows than devices, unless none has more. The choice
    affects costs only.
    """
    given, bad = list[P | None](), list[str]()
    for path, leaf, spec in _with_specs(arrays, specs):
        bad += [] if spec is None else _misnamed(path, leaf, spec, axes)
        given.append(None if spec is None else _in_order(spec, axes))
    if bad:
        raise BatchError(message(
            WHO, bad, "A spec says which dims of an argument are split over the data axes.",
            "Correct it, or drop it to split dim 0."))  # fmt: skip
    several = (spec for spec in given if spec is not None and sum(map(bool, spec)) > 1)
    first = next((spec_axes(entry) for spec in several for entry in spec if entry), tuple(axes))
    every = [leaf for tree in arrays.values() for leaf in jax.tree.leaves(tree)]
    most = max((leaf.shape[0] for leaf in every if leaf.shape), default=1)
    fewest = max(1, min(most, math.prod(axes[axis] for axis in first) * accumulate))
    found = [
        _rows_spec(leaf, first, fewest) if spec is None else spec
        for leaf, spec in zip(every, given, strict=True)
    ]
    return BatchSpecs(tuple(found), first)


def _rows_spec(leaf: Any, axes: tuple[str, ...], fewest: int = 0) -> P:
    """Dim 0 over `axes`; keys, scalars and leaves with fewer rows are replicated."""
    if not leaf.shape or leaf.shape[0] < fewest or is_single_key(leaf.dtype, leaf.shape):
        return P()
    return P(axes if len(axes) > 1 else axes[0])


def _in_order(spec: P, axes: Mapping[str, int]) -> P:
    """The spec with each dim's axes in the mesh's order."""
    entries = [tuple(axis for axis in axes if axis in spec_axes(entry)) for entry in spec]
    return P(*(names if len(names) > 1 else names[0] if names else None for names in entries))


def checked_specs(in_specs: Any) -> Mapping[Any, Any]:
    if in_specs is None:
        return {}
    found = []
    if not isinstance(in_specs, Mapping):
        found = [f"in_specs={in_specs!r:.80}"]
    for key, tree in in_specs.items() if not found else ():
        specs = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, P))
        found += [f"in_specs[{key!r}] has {x!r:.80}" for x in specs if not isinstance(x, P)]
    if found:
        raise OptionError(message(
            WHO, found, "It maps names or positions of arguments to PartitionSpecs.",
            "Write in_specs={'batch': jax.P('data')} to split dim 0, jax.P(None, 'data') for dim 1, "
            "jax.P('data', 'context') for both, and jax.P() for an argument that is whole on every device.",
            things="specs"))  # fmt: skip
    return in_specs


def _misnamed(path: str, leaf: Any, spec: P, axes: Mapping[str, int]) -> list[str]:
    what = describe_leaf(path, leaf.shape, leaf.dtype)
    if len(spec) > len(leaf.shape):
        return [f"{what} has fewer dims than its spec {spec}"]
    names = [name for entry in spec for name in spec_axes(entry)]
    for i, name in enumerate(names):
        if name not in axes:
            return [f"{what}: its spec {spec} names axis {name!r}; the data axes are {tuple(axes)}"]
        if name in names[:i]:
            return [f"{what}: its spec {spec} names axis {name!r} twice"]
    return []


def argument_specs(
    arrays: Mapping[str, Any], specs: Mapping[str, Any], axes: Mapping[str, int], accumulate: int
) -> list[P]:
    """A spec for each leaf of a step written for one device: by default dim 0 over all data axes.

    Scalars and keys are replicated. The last of the `axes` includes microbatches. Raises an error that names
    all leaves whose dims the devices do not divide.
    """
    out: list[P] = []
    bad: list[str] = []
    for path, leaf, given in _with_specs(arrays, specs):
        spec = _rows_spec(leaf, tuple(axes)) if given is None else given
        bad += _misfits(path, leaf, spec, axes, accumulate)
        out.append(spec)
    if bad:
        raise BatchError(message(
            WHO, bad, "Each device gets an equal part of every argument.",
            "Change the batch size (drop or pad the remainder), use fewer devices, or replicate the "
            "argument with in_specs={'<argument>': jax.P()}.",
        ))  # fmt: skip
    return out


def _with_specs(
    arrays: Mapping[str, Any], specs: Mapping[str, Any]
) -> Iterator[tuple[str, Any, P | None]]:
    """`(path, leaf, spec)` for each leaf of the arguments; None if `in_specs` has no spec for it."""
    for name, tree in arrays.items():
        leaves, treedef = jax.tree.flatten(tree)
        given: list[P | None] = [None] * len(leaves)
        if name in specs:
            given = [*_broadcast_specs(name, specs[name], treedef)]
        yield from zip(leaf_paths(tree, name), leaves, given, strict=True)


def _broadcast_specs(name: str, spec: Any, treedef: Any) -> list[P]:
    def is_spec(x: Any) -> bool:
        return isinstance(x, P) or x is None

    try:
        tree = unfilled(treedef)
        spread = jax.tree.map(
            lambda s, sub: jax.tree.map(lambda _: s or P(), sub), spec, tree, is_leaf=is_spec
        )
        return jax.tree.leaves(spread, is_leaf=lambda x: isinstance(x, P))
    except (ValueError, TypeError) as error:
        raise OptionError(message(
            WHO, f"in_specs[{name!r}] does not fit the argument: {error}",
            "It is one PartitionSpec, or a tree prefix of them.", "Match the argument's structure.",
        )) from None  # fmt: skip


def _misfits(path: str, leaf: Any, spec: P, axes: Mapping[str, int], accumulate: int) -> list[str]:
    what = describe_leaf(path, leaf.shape, leaf.dtype)
    if wrong := _misnamed(path, leaf, spec, axes):
        return wrong
    for dim, entry in enumerate(spec):
        names = spec_axes(entry)
        parts = math.prod(axes[name] for name in names)
        if leaf.shape[dim] % parts:
            num = accumulate if tuple(axes)[-1] in names else 1
            times = f" x {num} microbatches" if num > 1 else ""
            return [
                f"{what}: dim {dim} of size {leaf.shape[dim]} does not divide by "
                f"{parts // num} devices{times}"
            ]
    split = {name for entry in spec for name in spec_axes(entry)}
    if accumulate > 1 and split and split != set(axes):
        return [f"{what}: microbatches need its spec {spec} to name all data axes {tuple(axes)}"]
    return []


def microbatch_dim(spec: P, row_axes: Sequence[str]) -> int | None:
    """The dim along which an argument is split into microbatches: that of the last axis of rows."""
    last = row_axes[-1]
    return next((dim for dim, entry in enumerate(spec) if last in spec_axes(entry)), None)


def spec_axes(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def local_aval(leaf: Any, spec: P, axes: Mapping[str, int]) -> jax.ShapeDtypeStruct:
    """The type of one device's part of an argument in one microbatch."""
    shape = list(leaf.shape)
    for dim, entry in enumerate(spec):
        for name in spec_axes(entry):
            shape[dim] //= axes[name]
    return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype, weak_type=leaf.weak_type)
