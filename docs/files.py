"""Writes files.md: every file of jzero with the first sentence of its docstring, so that the list is true.

python docs/files.py
"""

import ast
import itertools
import pathlib

DOCS = pathlib.Path(__file__).parent
PACKAGE = DOCS.parent / "jzero"
HEAD = """\
# Every file in a line

Written by `python docs/files.py`. [The house](house.md) says what the rooms are.
"""


def page() -> str:
    files = sorted(PACKAGE.rglob("*.py"), key=lambda path: (path.parent, path))
    rooms = itertools.groupby(filter(docstring, files), key=lambda path: path.parent)
    return "".join([HEAD, *(section(room, list(paths)) for room, paths in rooms)])


def section(room: pathlib.Path, paths: list[pathlib.Path]) -> str:
    rows = [f"| [`{path.name}`]({link(path)}) | {docstring(path)} |\n" for path in paths]
    title = room.relative_to(PACKAGE.parent).as_posix()
    return f"\n## {title}\n\n| file | what it is |\n| --- | --- |\n{''.join(rows)}"


def link(path: pathlib.Path) -> str:
    return f"../{path.relative_to(DOCS.parent).as_posix()}"


def docstring(path: pathlib.Path) -> str:
    """The first paragraph of the docstring, as one line; none of the empty `__init__` of a room."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.partition("\n\n")[0].split()).replace("|", "\\|")


if __name__ == "__main__":
    (DOCS / "files.md").write_text(page())
