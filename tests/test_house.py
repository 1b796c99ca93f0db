"""experiments/house: what it counts, in planted rooms and sources."""

import ast
import importlib
import pathlib
import sys
from typing import Any

import pytest

FOLDER = pathlib.Path(__file__).parents[1] / "experiments" / "house"


@pytest.fixture(scope="module", autouse=True)
def _importable():
    """Scripts of an experiment import each other by their bare names, and what they share by its full one."""
    paths = [str(FOLDER), str(FOLDER.parents[1])]
    sys.path += paths
    yield
    for path in paths:
        sys.path.remove(path)
    for name in ("rooms", "words"):
        sys.modules.pop(name, None)


def module(name: str) -> Any:
    return importlib.import_module(name)


def checkout(folder: pathlib.Path, **sources: str) -> pathlib.Path:
    for name, source in sources.items():
        path = folder / "jzero" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return folder


def test_rooms_that_point_down(tmp_path: pathlib.Path):
    sources = {"top": "from jzero.a import b\nimport jzero.low", "a__b": "from jzero import low"}
    assert module("rooms").numbers(checkout(tmp_path, low="x = 1", **sources)) == {
        "rooms": 3,
        "floors": 3,
        "arrows between rooms": 3,
        "circles of rooms": 0,
        "rooms in circles": 0,
        "arrows upward": 0,
    }


def test_a_circle_of_rooms_has_an_arrow_upward(tmp_path: pathlib.Path):
    # Of four arrows among three rooms, one remains upward: a -> b.
    sources = {"a": "import jzero.b", "b": "import jzero.c\nimport jzero.a", "c": "import jzero.a"}
    found = module("rooms").numbers(checkout(tmp_path, **sources))
    assert (found["floors"], found["rooms in circles"], found["arrows upward"]) == (1, 3, 1)


SOURCE = '''"""Two
lines."""

# A comment.
x: Any = 1  # fmt: skip
Anyone = "# none"  # Another.


@decorated
def f():
    """One."""
    return x
'''


def test_words(tmp_path: pathlib.Path):
    found = module("words").numbers(checkout(tmp_path, file=SOURCE))
    assert (found["lines"], found["lines of code"], found["Any, as a word"]) == (12, 5, 1)
    assert (found["comments per 100 lines"], found["docstrings, % of lines"]) == (16.7, 25.0)
    assert (found["functions"], found["lines of a function, most"]) == (1, 2)
    source = 'def f():\n    """One\n    two."""\n    def g(): ...\n    return g'
    assert module("words").length(ast.parse(source).body[0]) == 3
