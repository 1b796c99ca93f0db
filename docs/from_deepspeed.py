"""Writes the public files and the table of keys in from-deepspeed.md, so that they are what jzero does.

python docs/from_deepspeed.py
"""

import json
import pathlib
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import jzero
from jzero.deepspeed._table import KEYS

PAGE = pathlib.Path(__file__).parent / "from-deepspeed.md"
TITLE = "## Every key\n"
TEMPLATE = "a template"
OTHERS = """
The other keys become no option. Some are refused unless they ask for what jzero does. When a file is
translated, a message or a note says why.

"""
FILES = PAGE.parents[1] / "tests" / "deepspeed_public.json"


def page() -> str:
    """The page, with what follows its last title as it must be."""
    prose = PAGE.read_text().partition(TITLE)[0]
    becomes: dict[str, list[str]] = {}
    others: dict[str, tuple[list[str], list[str]]] = {}  # by section: refused, nothing to set
    for key, row in KEYS.items():
        section, _, name = key.rpartition(".")
        if text := row.becomes.replace("|", "\\|"):
            becomes.setdefault(text, []).append(".".join(key.split(".")[-2:]))
        elif row.refused or (row.note and not row.rule):
            others.setdefault(section, ([], []))[not row.refused].append(name)
    rows = [(names(keys), text) for text, keys in becomes.items()]
    sections = [
        (f"`{section}`" if section else "none", *map(names, keys))
        for section, keys in others.items()
    ]
    return "".join([
        prose, TITLE, "\n", table(("key", "becomes"), rows), OTHERS,
        table(("section", "refused", "nothing to set"), sections), "\n", files(),
    ])  # fmt: skip


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n".replace("|  |", "| |") for cells in lines)


def names(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)


def files() -> str:
    """How many of the public files are translated, and why the others are not."""
    found = {name: refusal(file) for name, file in json.loads(FILES.read_text()).items()}
    refused = [text for text in found.values() if text]
    text = (
        f"{len(found) - len(refused)} of {len(found)} public files of Hugging Face, accelerate, axolotl, "
        "LLaMA-Factory, DeepSpeedExamples and Megatron-DeepSpeed are translated. The others are templates "
        f"that are no JSON, or have {names(sorted({key for key in refused if key != TEMPLATE}))}."
    )
    return textwrap.fill(text, 118, break_on_hyphens=False) + "\n"


def refusal(file: dict[str, Any]) -> str:
    """What a message names; nothing for a file that is translated."""
    if "text" in file:
        return TEMPLATE
    try:
        jzero.from_deepspeed(file["config"], devices=8, auto=file.get("auto"))
    except jzero.OptionError as error:
        _, key = re.findall(r"[\w.]*\w", str(error))[:2]  # The first is who says it.
        return key
    return ""


if __name__ == "__main__":
    PAGE.write_text(page())
