"""Names: one noun, one thing. No class and no type has the name of another one of jzero."""

import ast
import functools
import re
from collections.abc import Iterator, Mapping

import pytest

from test_layering import FILES

pytestmark = pytest.mark.one_release

# Names that still say several things: none may be added.
CAMEL_CASE = re.compile(r"_?[A-Z]\w*[a-z]\w*")


@functools.cache
def defined_types(source: str) -> tuple[str, ...]:
    return tuple(_defined_types(source))


def _defined_types(source: str) -> Iterator[str]:
    """The names of a file's classes, and of types that it names by an assignment.

    Neither `Var = _types.Var`, which is the same one, nor type variables.
    """
    module = ast.parse(source)
    yield from (node.name for node in ast.walk(module) if isinstance(node, ast.ClassDef))
    for node in module.body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                called = ast.unparse(value).split("(")[0].split(".")[-1]
                if CAMEL_CASE.fullmatch(name) and called not in (name, "TypeVar"):
                    yield name


def doubles(files: Mapping[str, str]) -> dict[str, list[str]]:
    """Names that are defined more than once, and the files that do."""
    places: dict[str, list[str]] = {}
    for file, source in files.items():
        for name in defined_types(source):
            places.setdefault(name, []).append(file)
    return {name: found for name, found in places.items() if len(found) > 1}


def test_a_name_is_defined_once():
    found = doubles(FILES)
    assert found == {}


# The check can fail: a name of another file, planted.
@pytest.mark.parametrize(
    "source",
    [
        "class Layout: pass",
        "def f():\n    class Layout: pass",
        "Layout = tuple[int, int]",
        "Layout: TypeAlias = tuple[int, int]",
    ],
)
def test_planted_double_is_found(source: str):
    assert doubles({**FILES, "_new": source})["Layout"] == ["ir/_layout", "_new"]


@pytest.mark.parametrize(
    "source",
    [
        "ROWS = 1",
        "rows = 1",
        "from x import Rows",
        "x: Rows",
        "Rows = _rows.Rows",
        "Rows = TypeVar('Rows')",
    ],
)
def test_what_defines_no_type_passes(source: str):
    assert "Rows" not in doubles({**FILES, "_new": source})
