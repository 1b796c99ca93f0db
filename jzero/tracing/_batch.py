# SPDX-License-Identifier: Apache-2.0
"""The arguments of a step, with another number of rows in its batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jzero._errors import BatchError, message
from jzero.tracing import _call
from jzero.tracing._signature import Call, Signature


@dataclasses.dataclass(frozen=True)
class Batch:
    signature: Signature
    shapes: Call  # With `ShapeDtypeStruct`s in the place of arrays.
    dims: tuple[int | None, ...]  # For each leaf of the arguments, the sharded dim.
    rows: int  # Rows of a device in a microbatch, in the leaf that has fewest.

    @staticmethod
    def of(
        who: str, signature: Signature, call: Call, dims: tuple[int | None, ...], parts: Sequence[int]
    ) -> Batch:  # fmt: skip
        """The batch of a call whose `dims` are split in `parts` (devices times microbatches)."""
        arrays = {name: _call.abstract(value, name) for name, value in call.arrays.items()}
        state = _call.abstract(call.state, "state")
        leaves = jax.tree.leaves(arrays)
        each = zip(leaves, dims, parts, strict=True)
        rows = [leaf.shape[dim] // num for leaf, dim, num in each if dim is not None]
        fewest = min(rows, default=0)
        if any(n % fewest for n in rows):
            raise BatchError(message(
                who, f"arguments with {sorted(set(rows))} rows for each device and microbatch",
                "The rows of all change together, so they must be multiples of the fewest.",
                "Make them so, or replicate an argument with in_specs={'<argument>': jax.P()}.",
            ))  # fmt: skip
        return Batch(signature, call._replace(state=state, arrays=arrays), dims, fewest)

    def call(self, fn: Callable[..., Any], rows: int) -> Any:
        leaves, tree = jax.tree.flatten(self.shapes.arrays)
        changed = [
            leaf if dim is None else _resized(leaf, dim, leaf.shape[dim] // self.rows * rows)
            for leaf, dim in zip(leaves, self.dims, strict=True)
        ]
        arrays = jax.tree.unflatten(tree, changed)
        outs = self.signature.call(fn, self.shapes.state, arrays, self.shapes.static)
        return self.shapes.result(outs)


def _resized(leaf: Any, dim: int, size: int) -> jax.ShapeDtypeStruct:
    shape = (*leaf.shape[:dim], size, *leaf.shape[dim + 1 :])
    return jax.ShapeDtypeStruct(shape, leaf.dtype, weak_type=leaf.weak_type)
