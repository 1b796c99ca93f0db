"""Equality of two trees, leaf by leaf, with every failing leaf named."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._entry import Tolerance


def to_host(tree: Any) -> Any:
    """NumPy arrays that later donations cannot touch; typed keys become their key data."""

    def fetch(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.array(leaf)

    return jax.tree.map(fetch, tree)


def assert_trees_close(actual: Any, desired: Any, tolerance: Tolerance, where: str) -> None:
    """Same paths, shapes and dtypes; floats within the tolerance, everything else equal.

    Not the same structures: theirs holds functions, of which a second `init` makes others.
    """
    paths = [[path for path, _ in jax.tree.leaves_with_path(tree)] for tree in (actual, desired)]
    assert paths[0] == paths[1], where
    pairs = zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(desired), strict=True)
    problems = [
        f"{where}{jax.tree_util.keystr(path)}: {problem}"
        for (path, a), d in pairs
        if (problem := _difference(a, d, tolerance))
    ]
    assert not problems, "\n".join(problems)


def _difference(actual: np.ndarray, desired: np.ndarray, tolerance: Tolerance) -> str | None:
    if (actual.shape, actual.dtype) != (desired.shape, desired.dtype):
        return f"{actual.dtype}{actual.shape} instead of {desired.dtype}{desired.shape}"
    if not jnp.issubdtype(desired.dtype, jnp.floating):
        return None if np.array_equal(actual, desired) else f"{actual} instead of {desired}"
    actual, desired = actual.astype(np.float64), desired.astype(np.float64)
    largest = np.abs(desired[np.isfinite(desired)]).max(initial=0.0)
    atol = tolerance.leaf_rtol * largest
    close = np.isclose(actual, desired, rtol=tolerance.rtol, atol=atol, equal_nan=True)
    if close.all():
        return None
    error = np.abs(actual - desired)[~close].max()
    return f"{(~close).sum()} of {close.size} differ, by up to {error:.2g} of {largest:.2g}"
