"""Writes the public files and the table of keys in from-deepspeed.md, so that they are what jzero does.

python docs/from_deepspeed.py
"""

import json
import pathlib
import re
from typing import Any

import jzero
from jzero.deepspeed._config import Row
from jzero.deepspeed._table import KEYS

PAGE = pathlib.Path(__file__).parent / "from-deepspeed.md"
TITLE = "## 38 public configurations\n"
FILES = PAGE.parents[1] / "tests" / "deepspeed_public.json"
INTRODUCTION = """
## Every key

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
    return "".join([prose, TITLE, files(), INTRODUCTION, *tables])


def files() -> str:
    """How many of the public files are translated, and why the others are not."""
    found = {name: refusal(file) for name, file in json.loads(FILES.read_text()).items()}
    rows = [f"| `{name}` | {text} |\n" for name, text in found.items() if text]
    return (
        f"\nOf {len(found)} files of Hugging Face, accelerate, axolotl, LLaMA-Factory, DeepSpeedExamples and "
        f"Megatron-DeepSpeed\n(their keys and values are in `tests/deepspeed_public.json`) "
        f'{len(found) - len(rows)} are translated, with values for "auto". The\nothers are refused:\n\n'
        f"| file | for |\n| --- | --- |\n{''.join(rows)}"
    )


def refusal(file: dict[str, Any]) -> str:
    """What a message names; nothing for a file that is translated."""
    if "text" in file:
        return "A template of Megatron-DeepSpeed, which is no JSON."
    try:
        jzero.from_deepspeed(file["config"], devices=8, auto=file.get("auto"))
    except jzero.OptionError as error:
        _, key = re.findall(r"[\w.]*\w", str(error))[:2]  # The first is who says it.
        return f"`{key}`"
    return ""


def table(section: str, rows: dict[str, list[str]]) -> str:
    """Of the keys of a section; those with one outcome are in one row."""
    title = f"`{section}`" if section else "Outside of sections"
    lines = "".join(f"| {', '.join(names)} | {text} |\n" for text, names in rows.items())
    return f"\n### {title}\n\n| key | what it becomes |\n| --- | --- |\n{lines}"


def outcome(entry: Row) -> str:
    """In a cell of a table; nothing for an object whose keys have rows of their own."""
    becomes = f"{entry.becomes[:1].upper()}{entry.becomes[1:]}." if entry.becomes else entry.note
    refused = f"{condition(entry)} is refused. {entry.refused}" if entry.refused else ""
    return " ".join(filter(None, [becomes, refused])).replace("|", "\\|")


def condition(entry: Row) -> str:
    """What is refused."""
    if entry.inside == "enabled":
        return "`enabled: true`"
    if len(entry.accepts or ()) > 3:
        return "Another one"
    allowed = " and ".join(f"`{str(value).lower()}`" for value in entry.accepts or ())
    return f"All but {allowed}" if allowed else "It"


if __name__ == "__main__":
    PAGE.write_text(page())
