"""Equality of two trees, leaf by leaf, with every failing leaf named."""

from typing import Any

from jzero import _compare
from jzero.testing import Tolerance


def assert_trees_close(actual: Any, desired: Any, tolerance: Tolerance, where: str) -> None:
    """Same paths, shapes and dtypes; floats within the tolerance, everything else equal."""
    problems = list(_compare.differences(actual, desired, where, tolerance))
    assert not problems, "\n".join(problems)
