# SPDX-License-Identifier: Apache-2.0
"""A checked DeepSpeed configuration, and what a row of the table says of one of its keys."""

from __future__ import annotations

import dataclasses
import difflib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jzero import _json
from jzero._errors import OptionError, message
from jzero.deepspeed._python import name_of

WHO = "from_deepspeed"
AUTO = "auto"
DTYPES = {
    "fp32": jnp.float32, "float32": jnp.float32, "bf16": jnp.bfloat16, "bfloat16": jnp.bfloat16,
    "fp16": jnp.bfloat16, "float16": jnp.bfloat16,  # Gradients have no loss scale here.
}  # fmt: skip


def _number(
    low: float = -math.inf, high: float = math.inf, whole: bool = False
) -> Callable[[Any], bool]:
    def test(x: Any) -> bool:
        # An integer may be beyond the largest float, and NaN is below nothing. 5e8 is a whole number.
        is_number = isinstance(x, int | float) and not isinstance(x, bool)
        is_number = is_number and abs(x) <= sys.float_info.max
        return is_number and low <= x <= high and not (whole and x != int(x))

    return test  # fmt: skip


def _is_list(x: Any) -> bool:
    return isinstance(x, Sequence) and not isinstance(x, str)


_below_1 = _number(0, math.nextafter(1, 0))
# What a value may be: how a message says it, and the test.
KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "any": ("any value", lambda x: True),
    "bool": ("true or false", lambda x: isinstance(x, bool)),
    "number": ("a number", _number()),
    "size": ("a number from 0", _number(0)),
    "length": ("a number from 1", _number(1)),
    "share": ("a share, from 0 to 1", _number(0, 1)),
    "whole": ("a whole number", _number(whole=True)),
    "int": ("a whole number from 0", _number(0, whole=True)),
    "count": ("a whole number from 1", _number(1, whole=True)),
    "stage": ("0, 1, 2 or 3", _number(0, 3, whole=True)),
    "betas": ("two numbers from 0 and below 1",
              lambda x: _is_list(x) and len(x) == 2 and all(map(_below_1, x))),
    "text": ("a string", lambda x: isinstance(x, str)),
    "dtype": ("'fp32', 'bf16' or 'fp16'", lambda x: isinstance(x, str) and x.lower() in DTYPES),
    "object": ("an object", lambda x: isinstance(x, Mapping)),
    "list": ("a list", _is_list),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """What becomes of one key.

    Attributes:
      kind: of its value, one of `KINDS`.
      note: what is said of it, "" for sections. Where several keys decide, a function of the configuration
        and the key, which returns that, and the options by name.
      becomes: what such a function makes of it, for docs/from-deepspeed.md.
      options: what it becomes; `off` is said instead if the value is false.
      accepts: the values that can be obeyed; None for all of its kind.
      refused: why other values cannot be, and the edit; `refusals` for single values, in lower case.
      tuning: it does not change what is trained, so "auto" needs no value.
      inside: of an object: 'rows' if its keys have rows; 'anything' if jzero reads none of them; 'enabled' if
        besides it is refused unless its key `enabled` is false; 'parts' if each part has such a key.
      default: DeepSpeed's; `required` is why the key cannot be missing where its section is there.
      missing: whether its function also speaks of the key where it is missing.
    """

    kind: str
    note: str | Callable[[Config, str], tuple[str, Mapping[str, Any]]] = ""
    becomes: str = ""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    off: str = ""
    accepts: tuple[Any, ...] | None = None
    refused: str = ""
    refusals: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tuning: bool = False
    inside: str = "rows"
    default: Any = None
    required: str = ""
    missing: bool = False


@dataclasses.dataclass(frozen=True)
class Form:
    """An optimizer or a scheduler: its function, and a row for each parameter.

    `is_l2` says that weight decay is not the function's, but is added to the gradients before it.
    """

    function: Callable[..., Any]
    takes: Mapping[str, Row]
    is_l2: bool = False

    @property
    def name(self) -> str:
        return name_of(self.function)


@dataclasses.dataclass(frozen=True)
class Config:
    """A configuration whose keys and values the table has, by dotted key: `{"fp16.enabled": True}`."""

    given: Mapping[str, Any]
    rows: Mapping[str, Row]
    optimizer: Form | None
    scheduler: Form | None
    devices: int | None

    def get(self, key: str) -> Any:
        """The value of a key; DeepSpeed's default if it is missing or "auto"."""
        value = self.given.get(key, AUTO)
        return value if value != AUTO else self.rows[key].default if key in self.rows else None

    def says(self, key: str, when: Any) -> str:
        """`"bf16.enabled is true"`, a finding of a message, if that is so; else ""."""
        value = self.get(key)
        return f"{key} is {'missing' if value is None else shown(value)}" if when else ""

    def arguments(self, section: str, form: Form) -> dict[str, Any]:
        """The parameters of an optimizer or a scheduler that its function takes."""
        names = [name for name, row in form.takes.items() if callable(row.note)]
        values = {name: self.get(f"{section}.params.{name}") for name in names}
        return {name: x for name, x in values.items() if x is not None}

    @property
    def stage(self) -> int:
        return int(self.get("zero_optimization.stage"))

    @property
    def is_half(self) -> bool:
        """Whether parameters are bfloat16 with float32 masters, also where float16 is written."""
        return bool(self.get("bf16.enabled") or self.get("fp16.enabled"))


def refuse(found: Sequence[str], rule: str, edit: str) -> None:
    """Raises an error about keys of the configuration, if anything is found."""
    if found:
        raise OptionError(message(WHO, found, rule, edit, "keys"))


def nearest(name: str, names: Sequence[str]) -> str:
    """`" (perhaps 'overlap_comm')"`, or nothing if no name is like it."""
    by_lower = {x.lower(): x for x in names}
    like = difflib.get_close_matches(name.lower(), by_lower, 1, 0.7)
    return f" (perhaps {by_lower[like[0]]!r})" if like else ""


def shown(value: Any) -> str:
    """A value in a message."""
    return str(value).lower() if isinstance(value, bool) else _json.shown(value)
