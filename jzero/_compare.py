# SPDX-License-Identifier: Apache-2.0
"""Compares two trees of arrays: leaves that differ by more than a tolerance, where, and by how many ULPs."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero._errors import describe_leaf
from jzero.tracing import _call


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far floats may be apart: `rtol` of the element plus `leaf_rtol` of its leaf's largest element.

    The second is relative to the leaf, so that second moments of 1e-6 are compared as strictly as
    parameters.
    """

    rtol: float
    leaf_rtol: float


# Bounds for sums in another order: some hundred ULPs of float32, a few of the 16-bit types.
TOLERANCES = {
    "float64": Tolerance(rtol=1e-11, leaf_rtol=1e-12),
    "float32": Tolerance(rtol=2e-5, leaf_rtol=1e-5),
    "float16": Tolerance(rtol=4e-3, leaf_rtol=2e-3),
    "bfloat16": Tolerance(rtol=2e-2, leaf_rtol=1e-2),
}
_EXACT = Tolerance(0.0, 0.0)


def to_host(tree: Any) -> Any:
    """Copies to NumPy arrays, which later donations cannot touch; typed keys become their key data."""

    def fetch(leaf: Any) -> np.ndarray:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.array(leaf)

    return jax.tree.map(fetch, tree)


def differences(
    actual: Any, desired: Any, name: str, tolerance: Tolerance | None = None
) -> Iterator[str]:
    """Yields a sentence for each leaf that differs; a tolerance of None is that of the leaf's dtype.

    Paths, shapes and dtypes must be the same. Structures need not: they hold functions, which a second `init`
    creates again.
    """
    found, wanted = (
        dict(zip(_call.leaf_paths(tree, name), jax.tree.leaves(tree), strict=True))
        for tree in (actual, desired)
    )
    for path in {**wanted, **found}:
        if path not in found or path not in wanted:
            yield f"{path} is {'new' if path in found else 'missing'}"
        elif (problem := _difference(found[path], wanted[path], tolerance)) is not None:
            yield f"{describe_leaf(path, wanted[path].shape, wanted[path].dtype)}: {problem}"


def _difference(actual: np.ndarray, desired: np.ndarray, tolerance: Tolerance | None) -> str | None:
    if (actual.shape, actual.dtype) != (desired.shape, desired.dtype):
        return f"it is {describe_leaf('', actual.shape, actual.dtype).strip()}"
    excess = _excess(actual, desired, tolerance)
    wrong = ~(excess <= 1)
    if not wrong.any():
        return None
    most = np.unravel_index(np.argmax(np.where(wrong, excess, 0)), excess.shape)
    at = f", most at [{', '.join(map(str, most))}]" if excess.shape else ""
    pair = actual[most], desired[most]
    ulps = ulps_apart(*pair)
    apart = f", {ulps:,} ULPs apart" if ulps is not None else ""
    return f"{wrong.sum()} of {wrong.size} elements differ{at}: {pair[0]!s} instead of {pair[1]!s}{apart}"


def _excess(actual: np.ndarray, desired: np.ndarray, tolerance: Tolerance | None) -> np.ndarray:
    """Each element's error as a multiple of what is allowed; infinite where only one of the two is finite."""
    if not jnp.issubdtype(desired.dtype, jnp.floating):
        return np.where(actual == desired, 0.0, np.inf)
    allowed = tolerance or TOLERANCES.get(desired.dtype.name, _EXACT)
    a, d = actual.astype(np.float64), desired.astype(np.float64)
    largest = np.abs(d[np.isfinite(d)]).max(initial=0.0)
    same = (a == d) | (np.isnan(a) & np.isnan(d))
    with np.errstate(all="ignore"):
        scale = allowed.leaf_rtol * largest + allowed.rtol * np.abs(d)
        error = np.abs(a - d)
        return np.where(same, 0.0, np.where(np.isfinite(error), error / scale, np.inf))


def ulps_apart(a: np.ndarray, b: np.ndarray) -> int | None:
    """How many representable floats two scalars are apart; None where that has no meaning."""
    if not jnp.issubdtype(a.dtype, jnp.floating) or np.isnan(a) or np.isnan(b):
        return None
    return abs(_ordinal(a) - _ordinal(b))


def _ordinal(x: np.ndarray) -> int:
    """The position of a float among those of its dtype; both zeros have position 0."""
    sign = 1 << (8 * x.dtype.itemsize - 1)
    bits = int.from_bytes(x.tobytes(), sys.byteorder)
    return bits if bits < sign else sign - bits
