"""The tested releases are those that run here, and those that pages and pyproject.toml name."""

import importlib.metadata
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

import jzero
import versions
from jzero._tested import TESTED

ROOT = pathlib.Path(jzero.__file__).parents[1]


def numbers(version: str) -> list[int]:
    return [int(x) for x in re.findall(r"\d+", version.partition("+")[0])]


@pytest.mark.parametrize("name", TESTED)
def test_what_runs_is_in_the_range(name):
    """If a newer release is installed and all else passes, raise the newest one in `TESTED` and the page."""
    oldest, newest = TESTED[name]
    assert numbers(oldest) <= numbers(importlib.metadata.version(name)) <= numbers(newest)


def test_bounds_in_pyproject():
    """None is above, and what is below is no newer than the oldest that is tested."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = dict(re.split(">=", x, maxsplit=1) for x in project["dependencies"])
    assert bounds.keys() == {*TESTED, "numpy"}
    for name, (oldest, _) in TESTED.items():
        assert re.fullmatch(r"[\d.]+", bounds[name])
        assert numbers(bounds[name]) <= numbers(oldest)


def test_the_page_has_the_table():
    page = (ROOT / "docs" / "guide" / "quick-start.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert {name: (oldest, newest) for name, oldest, newest in rows} == TESTED
    assert versions.NAMES == tuple(TESTED)


def test_the_page_says_which_python_belongs_to_which_jax():
    """Of each release that tests run with; this one's row is held against what is installed."""
    between = re.search(r"PINS := jax==([\d.]+) jaxlib==\1\n", (ROOT / "Makefile").read_text())
    assert between is not None
    page = (ROOT / "docs" / "guide" / "quick-start.md").read_text()
    rows = re.findall(r"^\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    found = {release: others for release, *others in rows}
    assert found.keys() == {*TESTED["jax"], between[1]}
    needs = importlib.metadata.metadata("jax")["Requires-Python"].removeprefix(">=")
    assert found[importlib.metadata.version("jax")][0] == needs


@pytest.mark.slow
def test_a_jax_that_lacks_something_is_named():
    """As a newer one may: a name that jzero imports from it is gone."""
    program = "import jax._src.lax.lax as x; del x.empty2; import jzero"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    last = found.stderr.splitlines()[-1]
    jax = importlib.metadata.version("jax")
    assert last.startswith(
        f"ImportError: import jzero: JAX {jax} lacks what jzero uses of it (cannot"
    )
    assert last.endswith(f"Install jax=={TESTED['jax'][1]}, or a newer jzero.")
