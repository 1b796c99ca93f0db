# SPDX-License-Identifier: Apache-2.0
"""`jzero deepspeed`: its flags, and what it shows."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from typing import Any

from jzero._errors import OptionError, message
from jzero.cli import _flags
from jzero.cli._checkpoints import Shown
from jzero.deepspeed._translate import from_deepspeed


class Verbatim(str):
    """Text whose lines stay as they are, however wide the terminal is: a program."""


def add(commands: Any) -> dict[str, Callable[..., Shown]]:
    """Adds the command to a parser; what runs it, with its flags as arguments."""
    command = commands.add_parser(
        "deepspeed", help="a DeepSpeed configuration as Python",
        description="Translates a DeepSpeed configuration, and says what became of each key: "
        "jzero.from_deepspeed.",
        example="jzero deepspeed ds_config.json --devices 64 --auto lr=1e-4")  # fmt: skip
    command.add_argument("config", help="its JSON file")
    command.add_argument(
        "--devices", type=_flags.positive, metavar="NUMBER", help="how many share the batch"
    )
    command.add_argument(
        "--auto", type=_values, action="extend", metavar="NAME=VALUE,...",
        help='what the Hugging Face Trainer writes where the file says "auto"')  # fmt: skip
    return {"deepspeed": _show}


def _show(config: str, devices: int | None, auto: list[tuple[str, Any]] | None) -> Shown:
    values = dict(auto or ())
    if len(values) < len(auto or ()):
        raise OptionError(message(
            "deepspeed", "--auto has a name twice", "It has one value for each.",
            "Drop one of them."))  # fmt: skip
    yield Verbatim(from_deepspeed(config, devices=devices, auto=values).python())


def _values(text: str) -> list[tuple[str, Any]]:
    """Names and values, `lr=1e-4,betas=[0.9,0.95],bf16=true`; a comma before a name parts them."""
    pairs = [part.partition("=") for part in re.split(r",(?=[\w.]+=)", text)]
    if not all(name and value for name, _, value in pairs):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not of the form learning_rate=1e-4,bf16=true"
        )
    return [(name, _value(value)) for name, _, value in pairs]


def _value(text: str) -> Any:
    """What it is in JSON, or itself."""
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return text
