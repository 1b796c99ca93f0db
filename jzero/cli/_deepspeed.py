# SPDX-License-Identifier: Apache-2.0
"""`jzero deepspeed`: its flags, and what it shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
        example="jzero deepspeed ds_config.json --devices 64")  # fmt: skip
    command.add_argument("config", help="its JSON file")
    command.add_argument(
        "--devices", type=_flags.positive, metavar="NUMBER", help="how many share the batch"
    )
    return {"deepspeed": _show}


def _show(config: str, devices: int | None) -> Shown:
    yield Verbatim(from_deepspeed(config, devices=devices).python())
