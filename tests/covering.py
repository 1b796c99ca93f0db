"""Which of a test's cases run by default: as few as have every value, or every pair of values.

`@pytest.mark.covering` above a test with several parametrizations marks as slow all but some cases, in which
each value of each argument occurs at least once; `@pytest.mark.covering(pairs=["a", "b"])` keeps each pair of
values of these arguments that is among the cases, too. `-m ""` runs all of them, and whoever names a case
gets it.
"""

import itertools
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import pytest


def chosen(cases: Sequence[Mapping[str, Any]], pairs: Collection[str] = ()) -> list[int]:
    """Indices of cases that have all values, and all pairs of values of the arguments named so.

    Greedily: each is the first of those that have most of what is still missing.
    """
    needs = [_needs(case, pairs) for case in cases]
    missing = set[Hashable]().union(*needs)
    found = []
    while missing:
        best = max(range(len(cases)), key=lambda i: len(needs[i] & missing))
        missing -= needs[best]
        found.append(best)
    return sorted(found)


def mark(items: Sequence[pytest.Item]) -> None:
    """Marks as slow what covers nothing; what is slow already stands for nothing."""
    tests: dict[tuple[Any, ...], list[pytest.Function]] = {}
    for item in items:
        if not isinstance(item, pytest.Function) or item.get_closest_marker("slow"):
            continue
        if item.get_closest_marker("covering") and hasattr(item, "callspec"):
            tests.setdefault((item.path, item.originalname), []).append(item)
    for cases in tests.values():
        covering = cases[0].get_closest_marker("covering")
        assert covering
        kept = chosen([case.callspec.params for case in cases], **covering.kwargs)
        for i, case in enumerate(cases):
            if i not in kept:
                case.add_marker("slow")


def _needs(case: Mapping[str, Any], pairs: Collection[str]) -> set[Hashable]:
    values = [(name, repr(value)) for name, value in case.items()]
    together = [value for value in values if value[0] in pairs]
    return {*values, *itertools.combinations(together, 2)}
