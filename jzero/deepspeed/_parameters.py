# SPDX-License-Identifier: Apache-2.0
"""The `params` of an optimizer or a scheduler, checked against what it takes."""

from __future__ import annotations

from typing import Any

from jzero import _json
from jzero._errors import named
from jzero.deepspeed._keys import KINDS, Key
from jzero.deepspeed._settings import Settings, is_kind, nearest, refuse


def parameters(
    settings: Settings, section: str, name: str, takes: dict[str, Key]
) -> dict[str, Any]:
    """The parameters of `settings.given[section]`, those that are left out by their defaults.

    Those that change nothing, or can have one value only, are checked and left out.

    Raises:
      OptionError: unknown ones, missing ones, and values that cannot be obeyed; all of them.
    """
    where = f"{section}.params"
    given = settings.get(where) or {}
    found = [
        *(f"{where}.{named(k)}{nearest(k, list(takes))}, which {name} does not take"
          for k in given if k not in takes),
        *(f"{where}.{k} is missing" for k, p in takes.items() if p.required and k not in given),
        *(bad for k, v in given.items() if k in takes and (bad := _bad(f"{where}.{k}", v, takes[k]))),
    ]  # fmt: skip
    if found:
        raise refuse(found, f"They are the parameters of {name}.", "Correct them.")
    for key, value in given.items():
        settings.note(f"{where}.{key}", takes[key].note or f"{value!r}, of {name}.")
    defaults = {k: p.default for k, p in takes.items() if p.default is not None}
    unread = {k for k, p in takes.items() if p.note or len(p.accepts or ()) == 1}
    return {k: v for k, v in {**defaults, **given}.items() if k not in unread}


def _bad(key: str, value: Any, parameter: Key) -> str | None:
    """What is wrong with a value; None if nothing is."""
    shown = _json.shown(value)
    if not is_kind(value, parameter.kind):
        return f"{key} is {shown}, not {KINDS[parameter.kind]}"
    if parameter.accepts is not None:
        bad = f"{key} is {shown}. {parameter.refused.rstrip('.')}"
        return None if value in parameter.accepts else bad
    if parameter.kind in ("number", "int") and value < parameter.least:
        return f"{key} is {shown}, below {parameter.least}"
    return None
