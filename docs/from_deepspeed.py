"""Writes the table of keys in from-deepspeed.md, so that it has what jzero.from_deepspeed does.

python docs/from_deepspeed.py
"""

import pathlib

from jzero.deepspeed._keys import Key
from jzero.deepspeed._table import KEYS

PAGE = pathlib.Path(__file__).parent / "from-deepspeed.md"
TITLE = "## Every key\n"
INTRODUCTION = """
Written by `python docs/from_deepspeed.py`, from the table that the translation reads
(`jzero/deepspeed/_table.py`).
"""


def page() -> str:
    """The page, with the tables as they must be."""
    prose = PAGE.read_text().partition(TITLE)[0]
    sections: dict[str, dict[str, list[str]]] = {}
    for key, entry in KEYS.items():
        section, _, name = key.rpartition(".")
        if text := outcome(entry):
            sections.setdefault(section, {}).setdefault(text, []).append(f"`{name}`")
    tables = [table(section, rows) for section, rows in sections.items()]
    return "".join([prose, TITLE, INTRODUCTION, *tables])


def table(section: str, rows: dict[str, list[str]]) -> str:
    """Of the keys of a section; those with one outcome are in one row."""
    title = f"`{section}`" if section else "Outside of sections"
    lines = "".join(f"| {', '.join(names)} | {text} |\n" for text, names in rows.items())
    return f"\n### {title}\n\n| key | what it becomes |\n| --- | --- |\n{lines}"


def outcome(entry: Key) -> str:
    """In a cell of a table; nothing for an object whose keys have rows of their own."""
    becomes = f"{entry.becomes[:1].upper()}{entry.becomes[1:]}." if entry.becomes else entry.note
    refused = f"{condition(entry)} is refused. {entry.refused}" if entry.refused else ""
    return " ".join(filter(None, [becomes, refused])).replace("|", "\\|")


def condition(entry: Key) -> str:
    """What is refused."""
    if entry.inside == "enabled":
        return "`enabled: true`"
    allowed = " and ".join(f"`{str(value).lower()}`" for value in entry.accepts or ())
    return f"All but {allowed}" if allowed else "It"


if __name__ == "__main__":
    PAGE.write_text(page())
