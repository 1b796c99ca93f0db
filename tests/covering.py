"""Which of a test's cases run by default: as few as have every value, or every other one of many alike.

`@pytest.mark.covering` above a test with several parametrizations marks as slow all but some cases, in which
each value of each argument occurs at least once; `@pytest.mark.covering(pairs=["a", "b"])` keeps each pair of
values of these arguments that is among the cases, too.

`@pytest.mark.alternating` shares the cases that are left between JAX before 0.11 and newer releases: each
runs by default with one of the two, as its name's checksum says, so that `make test` and `make test-newest`
together run all of them. It is for tables whose cases prove one statement of different examples, in code
that does not ask which release runs it; and, above a whole file, for tests that kill, interrupt and start
processes, which are slow, and in which JAX has little to do.

What `@pytest.mark.one_release` marks runs by default with the older releases only: it reads files, computes
without JAX, or runs a script of an experiment.

`-m ""` runs all cases with either release, and whoever names a case gets it.
"""

import importlib.metadata
import itertools
import zlib
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import pytest

NEWER = importlib.metadata.version("jax") >= "0.11"


def of_this_release(names: Sequence[str], newer: bool = NEWER) -> list[int]:
    """Indices of the names that are this release's; at least one of them.

    By a checksum and not by position: should a release lack a case, the others stay where they are.
    """
    return [i for i, name in enumerate(names) if is_of_this_release(name, newer)] or [0]


def is_of_this_release(name: str, newer: bool = NEWER) -> bool:
    """Whether this release runs an alternating test of that name."""
    return zlib.crc32(name.encode()) % 2 == newer


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
    """Marks as slow what covers nothing, and what the other release runs; what is slow stands for nothing."""
    for item in items:
        if NEWER and item.get_closest_marker("one_release"):
            item.add_marker("slow")
    tests: dict[tuple[Any, ...], list[pytest.Function]] = {}
    for item in items:
        if not isinstance(item, pytest.Function) or item.get_closest_marker("slow"):
            continue
        if hasattr(item, "callspec"):
            tests.setdefault((item.path, item.originalname), []).append(item)
        elif item.get_closest_marker("alternating") and not is_of_this_release(item.name):
            item.add_marker("slow")
    for cases in tests.values():
        kept = cases
        if covering := cases[0].get_closest_marker("covering"):
            indices = chosen([case.callspec.params for case in cases], **covering.kwargs)
            kept = [cases[i] for i in indices]
        if cases[0].get_closest_marker("alternating"):
            kept = [kept[i] for i in of_this_release([case.name for case in kept])]
        for case in cases:
            if case not in kept:
                case.add_marker("slow")


def _needs(case: Mapping[str, Any], pairs: Collection[str]) -> set[Hashable]:
    values = [(name, repr(value)) for name, value in case.items()]
    together = [value for value in values if value[0] in pairs]
    return {*values, *itertools.combinations(together, 2)}
