# SPDX-License-Identifier: Apache-2.0
"""What may become of a key of a DeepSpeed configuration."""

from __future__ import annotations

import dataclasses
from typing import Any

# What a value may be, and how a message says it.
KINDS = {
    "bool": "true or false", "int": "a whole number from 0", "whole": "a whole number", "number": "a number",
    "text": "a string",
    "object": "an object", "list": "a list", "any": "any value",
    "betas": "two numbers from 0 and below 1",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Key:
    """What becomes of a key, or of a parameter of an optimizer or a scheduler.

    Attributes:
      kind: of its value, one of `KINDS`.
      note: what is said of a key that changes nothing; "" for one that a translator reads, and speaks of.
      default: of a parameter, DeepSpeed's, where what it is translated to has another one.
      least: of a parameter that is a number.
      required: whether a parameter has no default.
      becomes: what a translator makes of it, as the table of docs/from-deepspeed.md has it.
      accepts: the values that can be obeyed; None for all of its kind.
      refused: why others cannot be, and what to do.
      tuning: it has no say in what is trained, so that "auto" needs no value.
      inside: of an object, 'keys' that this table has too, 'anything', or 'enabled': anything too, and all of
        it is off unless its key `enabled` is true; 'parts' if each part has such a key.
    """

    kind: str
    note: str = ""
    accepts: tuple[Any, ...] | None = None
    refused: str = ""
    tuning: bool = False
    inside: str = "keys"
    default: Any = None
    least: float = 0
    required: bool = False
    becomes: str = ""


def read(kind: str, becomes: str, tuning: bool = False) -> Key:
    """A key that a translator reads, and speaks of."""
    return Key(kind, tuning=tuning, becomes=becomes)


def section() -> Key:
    """An object of more keys of the table."""
    return Key("object")


def noted(kind: str, note: str) -> Key:
    """A key that changes nothing here."""
    return Key(kind, note, tuning=True, inside="anything")


def only(kind: str, accepts: tuple[Any, ...], note: str, refused: str) -> Key:
    """A key with values that change nothing here; others are refused."""
    return Key(kind, note, accepts, refused)


def off(refused: str) -> Key:
    """A section that must be off."""
    return Key("object", "Off.", refused=refused, inside="enabled")
