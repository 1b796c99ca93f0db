# SPDX-License-Identifier: Apache-2.0
"""The command `jzero deepspeed`."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from typing import Any

from jzero._errors import OptionError, message
from jzero.cli import _flags
from jzero.cli._command import Command, Shown, Verbatim
from jzero.deepspeed._translate import from_deepspeed


def _show(config: str, devices: int | None = None, auto: Sequence[tuple[str, Any]] = ()) -> Shown:
    values = dict(auto)
    if len(values) < len(auto):
        raise OptionError(message(
            "deepspeed", "--auto has a name twice", "It has one value for each.",
            "Drop one of them."))  # fmt: skip
    yield Verbatim(from_deepspeed(config, devices=devices, auto=values).python())


def _values(text: str) -> list[tuple[str, Any]]:
    """Pairs of `lr=1e-4,betas=[0.9,0.95],bf16=true`; commas separate only before a name."""
    pairs = [part.partition("=") for part in re.split(r",(?=[\w.]+=)", text)]
    if not all(name and value for name, _, value in pairs):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not of the form learning_rate=1e-4,bf16=true"
        )
    return [(name, _value(value)) for name, _, value in pairs]


def _value(text: str) -> Any:
    """The value as JSON, else the text."""
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return text


COMMAND = Command(
    _show, "a DeepSpeed configuration as Python",
    "Translates a DeepSpeed configuration, and says what became of each key: jzero.from_deepspeed.",
    "jzero deepspeed ds_config.json --devices 64 --auto lr=1e-4",
    {
        "config": dict(help="its JSON file"),
        "--devices": dict(type=_flags.positive, metavar="NUMBER", help="how many share the batch"),
        "--auto": dict(type=_values, action="extend", metavar="NAME=VALUE,...",
                       help='what the Hugging Face Trainer writes where the file says "auto"'),
    },
)  # fmt: skip
