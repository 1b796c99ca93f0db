"""docs/design.md has what its steps print, and the files that it names are there; so are facts' anchors."""

import pathlib
import re
import runpy

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = ("design", "facts", "systems", "performance", "what-is-missing")
# A file of which a page may leave out the folders.
FILE = re.compile(r"`((?:[\w.]+/)*\w+\.py)`")


def test_the_blocks_are_what_the_steps_print():
    page = runpy.run_path(str(DOCS / "design.py"))["page"]()
    old = (DOCS / "design.md").read_text()
    if jax.__version_info__[:2] != (0, 10):  # Another release has some equations more or less.
        old, page = unnamed(old), unnamed(page)
    assert old == page, "run `python docs/design.py`"


def unnamed(page: str) -> str:
    """Without the names of variables, and the columns that their lengths decide."""
    return re.sub(r" +", " ", re.sub(r"\b[a-z]{1,2}\b", "x", page))


def places(name: str) -> list[pathlib.Path]:
    return [
        path
        for root in ("jzero", "tests", "docs", "experiments")
        for path in (ROOT / root).rglob(name)
    ]


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_are_there(page):
    named = set(FILE.findall((DOCS / f"{page}.md").read_text())) - {"step.py"}
    assert {name for name in named if not any(found(name))} == set()


def found(name: str) -> list[pathlib.Path]:
    folder, _, file = name.rpartition("/")
    return [path for path in places(file) if str(path.parent).endswith(folder)]


def test_anchors_that_code_names_are_there():
    """`docs/facts.md#an-anchor`, in comments and docstrings."""
    headings = re.findall(r"^#+ (.*)$", (DOCS / "facts.md").read_text(), re.MULTILINE)
    headings += re.findall(r"^#+ (.*)$", (DOCS / "design.md").read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}
    sources = "".join(
        path.read_text()
        for root in ("jzero", "tests", "experiments", "examples")
        for path in sorted((ROOT / root).rglob("*.py"))
    )
    named = set(re.findall(r"docs/(?:facts|design)\.md#([\w-]+)", sources))
    assert len(named) >= 8
    assert named - {"an-anchor"} - anchors == set()
