"""The cases that run by default have every value, or every pair of values."""

import itertools
import os
import pathlib
import re

import pytest

import samples
from covering import chosen, of_this_release

ROOT = pathlib.Path(__file__).parents[1]
MAKEFILE, CI_RUN = ((ROOT / name).read_text() for name in ("Makefile", ".ci/run"))
CASES = [
    {"a": a, "b": b, "c": c} for a, b, c in itertools.product(range(4), "xyz", [None, {"k": 1}])
]


def test_every_value_occurs():
    found = [CASES[i] for i in chosen(CASES)]
    assert len(found) == 4
    for name in "abc":
        assert {str(case[name]) for case in found} == {str(case[name]) for case in CASES}


def test_every_pair_occurs():
    found = [CASES[i] for i in chosen(CASES, pairs=["a", "b"])]
    assert len(found) == 12
    assert len({(case["a"], case["b"]) for case in found}) == 12
    assert len({str(case["c"]) for case in found}) == 2


def test_one_case_is_kept():
    assert chosen(CASES[5:6]) == [0]


def test_each_name_is_of_one_release():
    names = [f"test[{i}]" for i in range(100)]
    older, newer = (of_this_release(names, release) for release in (False, True))
    assert sorted([*older, *newer]) == list(range(100))
    assert min(len(older), len(newer)) > 35
    assert of_this_release(names[50:], newer=False) == [i - 50 for i in older if i >= 50]


def test_one_name_is_of_both_releases():
    assert of_this_release(["test[0]"], newer=False) == of_this_release(["test[0]"], newer=True)


@pytest.mark.parametrize("name", samples.FILES)
def test_samples_are_of_files_that_are_there(name):
    assert all(map(os.path.exists, samples.paths(name)))
    target = re.findall(r"^([\w-]+):", MAKEFILE.partition(f"samples.py {name} ")[0], re.MULTILINE)[
        -1
    ]
    assert f"\nmake {target}\n" in CI_RUN


@pytest.mark.alternating
@pytest.mark.parametrize("a", range(8))
def test_cases_alternate(a, request):
    ours = of_this_release([f"test_cases_alternate[{i}]" for i in range(8)])
    assert (request.node.get_closest_marker("slow") is None) == (a in ours)


@pytest.mark.covering(pairs=["a"])
@pytest.mark.parametrize("b", [*"xy", pytest.param("z", marks=pytest.mark.slow)])
@pytest.mark.parametrize("a", range(3))
def test_cases_are_marked(a, b, request):
    """Of the nine cases these run by default, one of each `a`, and none that is slow anyway."""
    by_default = request.node.get_closest_marker("slow") is None
    assert by_default == ((a, b) in {(0, "x"), (1, "y"), (2, "x")})
