"""Reasons that stand in the source name the tests that hold them; these exist."""

import pathlib
import re

import pytest

pytestmark = pytest.mark.one_release

TESTS = pathlib.Path(__file__).parent
SOURCES = {
    path.relative_to(TESTS.parent).as_posix(): path.read_text()
    for path in sorted((TESTS.parent / "jzero").rglob("*.py"))
}


def missing_tests(source):
    """The cited tests, `test_x.py::test_y`, that there are not."""
    cited = re.findall(r"(test_\w+\.py)::(test_\w+)", source)
    return [
        f"{file}::{name}"
        for file, name in cited
        if not (TESTS / file).exists() or f"def {name}(" not in (TESTS / file).read_text()
    ]


@pytest.mark.parametrize("file", [file for file, text in SOURCES.items() if ".py::test_" in text])
def test_cited_tests_exist(file):
    assert missing_tests(SOURCES[file]) == []


def test_a_missing_test_is_found():
    here = "test_notes.py::"
    assert missing_tests(f"{here}test_cited_tests_exist {here}test_gone") == [f"{here}test_gone"]
