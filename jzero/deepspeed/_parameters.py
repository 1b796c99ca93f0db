# SPDX-License-Identifier: Apache-2.0
"""The `params` of an optimizer or a scheduler, checked against what it takes."""

from __future__ import annotations

import dataclasses
from typing import Any

from jzero import _json
from jzero.deepspeed._keys import KINDS
from jzero.deepspeed._settings import Settings, is_kind, nearest, refuse


@dataclasses.dataclass(frozen=True)
class Parameter:
    """What a parameter may be.

    Attributes:
      kind: one of `KINDS`, or 'betas', two numbers from 0 and below 1.
      default: DeepSpeed's, where what it is translated to has another one.
      least: of a number.
      required: whether there is no default.
      only: the values that can be obeyed, if not all.
      refused: why others cannot be.
      unread: why it changes nothing, if it does not.
    """

    kind: str
    default: Any = None
    least: float = 0
    required: bool = False
    only: tuple[Any, ...] | None = None
    refused: str = ""
    unread: str = ""


def parameters(
    settings: Settings, section: str, name: str, takes: dict[str, Parameter]
) -> dict[str, Any]:
    """The parameters of `settings.given[section]`, those that are left out by their defaults.

    Those that change nothing, or can have one value only, are checked and left out.

    Raises:
      OptionError: unknown ones, missing ones, and values that cannot be obeyed; all of them.
    """
    where = f"{section}.params"
    given = {k: v for k, v in (settings.get(where) or {}).items() if v is not None}
    found = [
        *(f"{where}.{k}{nearest(k, list(takes))}, which {name} does not take"
          for k in given if k not in takes),
        *(f"{where}.{k} is missing" for k, p in takes.items() if p.required and k not in given),
        *(bad for k, v in given.items() if k in takes and (bad := _bad(f"{where}.{k}", v, takes[k]))),
    ]  # fmt: skip
    if found:
        raise refuse(found, f"They are the parameters of {name}.", "Correct them.")
    for key, value in given.items():
        settings.note(f"{where}.{key}", takes[key].unread or f"{value!r}, of {name}.")
    defaults = {k: p.default for k, p in takes.items() if p.default is not None}
    unread = {k for k, p in takes.items() if p.unread or len(p.only or ()) == 1}
    return {k: v for k, v in {**defaults, **given}.items() if k not in unread}


def _bad(key: str, value: Any, parameter: Parameter) -> str | None:
    """What is wrong with a value; None if nothing is."""
    shown = _json.shown(value)
    if parameter.kind == "betas":
        two = is_kind(value, "list") and len(value) == 2
        if not two or not all(is_kind(x, "number") and 0 <= x < 1 for x in value):
            return f"{key} is {shown}, not two numbers from 0 and below 1"
        return None
    if not is_kind(value, parameter.kind):
        return f"{key} is {shown}, not {KINDS[parameter.kind]}"
    if parameter.only is not None:
        return (
            None
            if value in parameter.only
            else f"{key} is {shown}. {parameter.refused.rstrip('.')}"
        )
    if parameter.kind in ("number", "int") and value < parameter.least:
        return f"{key} is {shown}, below {parameter.least}"
    return None
