"""The pages: their lines, links and names hold, and what scripts write of them is what they write."""

import pathlib
import re
import runpy
from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.one_release

ROOT = pathlib.Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [
    *DOCS,
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples" / "README.md",
    *sorted(ROOT.glob("experiments/**/README.md")),
]
# Where a path that a page names may begin.
STARTS = (ROOT, ROOT / "jzero", ROOT / "tests", ROOT / "experiments", ROOT / "docs")


def name_of(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose(page: str) -> Iterator[str]:
    """The lines of a page that are in no code block."""
    in_code = False
    for line in page.splitlines():
        in_code ^= line.startswith("```")
        if not in_code:
            yield line


def long_lines(page: str) -> list[str]:
    return [line for line in prose(page) if len(line) >= 120 and not line.startswith("|")]


def wide_code(page: str) -> list[str]:
    """The lines of code that a browser's column scrolls for; what a terminal printed is as wide as that."""
    blocks = re.findall(r"^ *```([\w -]*)\n(.*?)^ *```$", page, re.DOTALL | re.MULTILINE)
    code = [text for language, text in blocks if language not in ("text", "console")]
    return [line for text in code for line in text.splitlines() if len(line) > 72]


def anchors(page: str) -> set[str]:
    """What `#...` may name in a page: its headings, as sites that show them make links of them."""
    titles = [line.lstrip("#").strip() for line in prose(page) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: str, folder: pathlib.Path) -> list[str]:
    """The relative links of a page in a folder to a file, or a heading, that is not there."""
    links = re.findall(r"\]\(([^)\s]+)\)", "\n".join(prose(page)))
    return [link for link in links if not link.startswith("http") and not leads(link, page, folder)]


def leads(link: str, page: str, folder: pathlib.Path) -> bool:
    file, _, heading = link.partition("#")
    target = folder / file
    if not file or (heading and target.is_file()):
        return heading in anchors(target.read_text() if file else page)
    return target.exists()


def unknown_files(page: str) -> list[str]:
    """The `folder/file.py` that a page or a file of code names and that is nowhere; JAX's left out."""
    paths = re.findall(r"(?<![\w/.-])((?!jax/)[\w-]+(?:/[\w-]+)*/[\w-]+\.(?:py|md))\b", page)
    return [path for path in paths if not any((start / path).is_file() for start in STARTS)]


@pytest.mark.parametrize("path", [*DOCS, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_lines_are_short(path: pathlib.Path):
    assert long_lines(path.read_text()) == []


@pytest.mark.parametrize(
    "path",
    [page for page in PAGES if "experiments" not in name_of(page)],
    ids=name_of,
)
def test_code_is_narrow(path: pathlib.Path):
    assert wide_code(path.read_text()) == []


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_lead_somewhere(path: pathlib.Path):
    assert broken_links(path.read_text(), path.parent) == []


@pytest.mark.parametrize("path", DOCS, ids=name_of)
def test_named_files_are_there(path: pathlib.Path):
    assert unknown_files(path.read_text()) == []


def test_code_names_pages_and_files_that_are_there():
    sources = [path for name in ("jzero", "tests") for path in (ROOT / name).rglob("*.py")]
    found = {
        path: unknown_files(path.read_text()) for path in sources if path.name != "test_docs.py"
    }
    assert {name_of(path): files for path, files in found.items() if files} == {}


def test_every_chapter_is_on_the_map():
    page = ROOT / "docs" / "design.md"
    links = re.findall(r"\((\S+\.md)\)", page.read_text())
    others = {"design.md", "systems.md", "performance.md"}  # These stand beside the design.
    assert {path.name for path in page.parent.glob("*.md")} - others <= set(links)


def test_pictures_are_what_their_script_draws():
    for name, draw in runpy.run_path(str(ROOT / "docs/pictures/draw.py"))["PICTURES"].items():
        assert (ROOT / "docs/pictures" / name).read_text() == draw()


def test_list_of_files_is_what_its_script_writes():
    page = runpy.run_path(str(ROOT / "docs/files.py"))["page"]()
    assert (ROOT / "docs/files.md").read_text() == page, "run `python docs/files.py`"


# The checks above can fail.
def test_planted_faults_are_found():
    page = f"# A title\n{'x' * 120}\n```\n{'x' * 120}\n```\n| {'x' * 120} |\n"
    assert long_lines(page) == ["x" * 120]
    page = f"```python no-test\n{'x' * 73}\n{'y' * 72}\n```\n{'x' * 99}\n```text\n{'x' * 99}\n```\n"
    assert wide_code(page) == ["x" * 73]
    links = "[a](nowhere.md) [b](house.md#nothing) [c](#a-title) [d](#b)\n[e](house.md) [f](http://x.md)"
    found = broken_links(f"# A title\n{links}", ROOT / "docs")
    assert found == ["nowhere.md", "house.md#nothing", "#b"]
    assert unknown_files("`run/_attic.py` `tests/test_docs.py` `sharding/plan/_plan.py`") == [
        "run/_attic.py"
    ]
