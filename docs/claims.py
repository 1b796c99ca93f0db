"""Writes claims.md: every sentence of the README, and the tests and results that hold it.

python docs/claims.py            # fails if one has no entry in claims.toml, or an entry names nothing
python docs/claims.py --missing  # the sentences that have none, as entries to fill in
"""

import argparse
import ast
import functools
import json
import pathlib
import re
import sys
import tomllib
from collections.abc import Iterator

DOCS = pathlib.Path(__file__).parent
ROOT = DOCS.parent
ENTRIES, PAGE = DOCS / "claims.toml", DOCS / "claims.md"
HEAD = """\
# What holds each sentence of the README

Written by `python docs/claims.py` from `docs/claims.toml`. Each sentence, row and command of [the
README](../README.md) stands here with the tests that fail when it stops to be true, or with the result that
it was read from. *Read* means that nothing that runs here can hold it, and says where it is from.
"""


def sentences(readme: str) -> list[str]:
    """What a page says, in order: sentences, rows of tables, commands, the first line of other code."""
    return [text for block in blocks(readme) for text in said(block)]


def blocks(readme: str) -> Iterator[list[str]]:
    """Its paragraphs, tables and code blocks, as lines; headings say nothing."""
    block: list[str] = []
    in_code = False
    for line in [*readme.splitlines(), ""]:
        ends = line.startswith("```")
        if in_code and not ends or line.strip() and not ends and not line.startswith("#"):
            block.append(line)
        elif not in_code and ends:
            yield block
            block = [line]
        else:
            yield block
            block = []
        in_code ^= ends


def said(block: list[str]) -> list[str]:
    if not block:
        return []
    if block[0] == "```sh":
        return [" ".join(line.split()) for line in block[1:]]
    if block[0].startswith("```"):
        return [f"The code from `{block[1]}` on."]
    if block[0].startswith("|"):  # Its head says what is in the columns.
        return [plain(row.strip("| ")) for row in block[2:]]
    return re.split(r"(?<=[.!?])\s+(?=[A-Z\d`]|jzero)", plain(" ".join(block)))


def plain(text: str) -> str:
    """Without links, pictures and bold face."""
    return re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("**", "")


def page() -> str:
    """The page.

    Raises:
      SystemExit: a sentence without an entry, an entry without its sentence, or a name of nothing.
    """
    readme = sentences((ROOT / "README.md").read_text())
    wrong = faults(readme, entries())
    if wrong:
        sys.exit("docs/claims.toml: " + "\n".join(wrong))
    rows = [f"| {escaped(text)} | {'<br>'.join(map(link, entries()[text]))} |\n" for text in readme]
    return f"{HEAD}\n| the README says | held by |\n| --- | --- |\n{''.join(rows)}"


@functools.cache
def entries() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for entry in tomllib.loads(ENTRIES.read_text())["sentence"]:
        found[entry["says"]] = entry["held_by"]
    return found


def faults(readme: list[str], held: dict[str, list[str]]) -> list[str]:
    """What does not fit together, a line each."""
    return [
        *(f"no entry for {text!r}" for text in readme if text not in held),
        *(f"the README no longer says {text!r}" for text in held if text not in readme),
        *(f"nothing holds {text!r}" for text, names in held.items() if not names),
        *(f"there is no {name!r}" for names in held.values() for name in names if not there(name)),
    ]


def there(name: str) -> bool:
    """Whether a test `tests/x.py::test_y`, or a file, exists; or a reason is given where none can."""
    if name.startswith("Read: "):
        return len(name) > 20
    path, _, function = name.partition("::")
    return (ROOT / path).is_file() and (not function or function in functions(ROOT / path))


@functools.cache
def functions(path: pathlib.Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def link(name: str) -> str:
    if name.startswith("Read: "):
        return escaped(f"*{name.replace(':', '*:', 1)}")
    path, _, function = name.partition("::")
    shown = f"`{function or path}`"
    return f"[{shown}](../{path})" if pathlib.Path(path).suffix else shown


def escaped(text: str) -> str:
    """For a cell of a table; links are gone, so nothing else needs it."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--missing", action="store_true", help="print entries for sentences that have none"
    )
    if parser.parse_args().missing:
        held = entries() if ENTRIES.exists() else {}
        for text in sentences((ROOT / "README.md").read_text()):
            if text not in held:
                print(
                    f"[[sentence]]\nsays = {json.dumps(text, ensure_ascii=False)}\nheld_by = []\n"
                )
    else:
        PAGE.write_text(page())


if __name__ == "__main__":
    main()
