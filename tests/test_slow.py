"""tests/slow.py: of a small file, which tests run by default and in each share."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

import samples

HERE = pathlib.Path(__file__).parent
MAKEFILE, CI_RUN = ((HERE.parent / name).read_text() for name in ("Makefile", ".ci/run"))
CONFTEST = """
import os, slow
def pytest_configure(config):
    config.addinivalue_line("markers", "slow(but): x")
def pytest_collection_modifyitems(config, items):
    slow.unmark(config, items)
    if share := os.environ.get("JZERO_TEST_SHARE"):
        slow.keep_share(config, items, share)
"""
TESTS = """
import pytest
def test_fast(): pass
@pytest.mark.slow
def test_slow(): pass
@pytest.mark.slow(but=["1-a", "2-b"])
@pytest.mark.parametrize("y", "ab")
@pytest.mark.parametrize("x", [1, 2])
def test_some(x, y): pass
@pytest.mark.slow(but=2)
@pytest.mark.parametrize("x", range(4))
def test_spread(x): pass
@pytest.mark.slow(but=[1])
@pytest.mark.parametrize("x", "ab")
def test_second(x): pass
"""
FAST = {"fast", "some[1-a]", "some[2-b]", "spread[0]", "spread[2]", "second[b]"}
SLOW = {"slow", "some[1-b]", "some[2-a]", "spread[1]", "spread[3]", "second[a]"}


def collected(folder, *args, **environment):
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", *args]
    own = {"PYTHONPATH": str(HERE), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment = os.environ | own | environment
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return re.findall(r"::test_(\S+)", done.stdout), done.stdout + done.stderr


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(TESTS)
    return tmp_path


def test_slow_tests_but_for_the_cases_that_are_named(folder):
    assert {*collected(folder, "-m", "not slow")[0]} == FAST
    assert {*collected(folder, "-m", "slow")[0]} == SLOW
    named = "test_it.py::test_slow", "test_it.py::test_some[2-a]"
    assert collected(folder, "-m", "not slow", *named)[0] == ["slow", "some[2-a]"]
    shares = [collected(folder, JZERO_TEST_SHARE=f"{k}/2")[0] for k in range(2)]
    assert sorted(sum(shares, [])) == sorted(FAST | SLOW)


def test_a_marker_that_names_no_case_is_an_error(folder):
    (folder / "test_it.py").write_text(TESTS.replace('["1-a", "2-b"]', '["1-a", "1-c"]'))
    assert "names no cases of test_it.py::test_some[1-a]: {'1-c'}" in collected(folder)[1]


@pytest.mark.parametrize("name", samples.FILES)
def test_samples_are_of_files_that_are_there(name):
    assert all(map(os.path.exists, samples.paths(name)))
    before = MAKEFILE.partition(f"samples.py {name} ")[0]
    target = re.findall(r"^([\w-]+):", before, re.MULTILINE)[-1]
    assert f"\nmake {target}\n" in CI_RUN
