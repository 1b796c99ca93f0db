# SPDX-License-Identifier: Apache-2.0
"""A DeepSpeed configuration, read and checked key by key against the table."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jzero import _json
from jzero._errors import OptionError, message, named
from jzero.deepspeed._config import AUTO, KINDS, WHO, Config, Form, Row, nearest, refuse, shown
from jzero.deepspeed._table import ALIASES, KEYS, OPTIMIZERS, SCHEDULERS

_MAX_BYTES = 1_000_000


def read(config: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """A configuration, a dict or a JSON file, by dotted key: `{"bf16": {...}, "bf16.enabled": True}`.

    Keys have DeepSpeed's names of today. Comments (`_note`, `//`) and keys that are null are left out.

    Raises:
      OptionError: it is neither, the file cannot be read, a key is there twice, or a section is "auto".
    """
    if not isinstance(config, Mapping):
        config = _parsed(config)
    pairs = list(_flat(_clean(config), ""))
    times = Counter(key for key, _ in pairs)
    refuse([f"{key} is there twice, by two names" for key, num in times.items() if num > 1],
           "DeepSpeed takes two names for it.", "Drop one of them.")  # fmt: skip
    sections = {key for key, row in KEYS.items() if row.kind == "object"}
    refuse([f'{key} is "auto", not an object' for key, x in pairs if x == AUTO and key in sections],
           "The keys of a section may be auto, and not the section.",
           'Write its keys, as {"enabled": "auto"} of bf16, or drop it.')  # fmt: skip
    return dict(pairs)


def checked(given: Mapping[str, Any], devices: int | None) -> Config:
    """The configuration, if the table has its keys and accepts its values.

    Raises:
      OptionError: unknown keys, missing ones, values of another type, and what jzero cannot obey.
    """
    optimizer = OPTIMIZERS.get(str(given.get("optimizer.type")).lower())
    scheduler = SCHEDULERS.get(str(given.get("scheduler.type")))
    rows = {**KEYS, **_parameters("optimizer", optimizer), **_parameters("scheduler", scheduler)}
    found = [wrong for key, x in given.items() if (wrong := _wrong(key, x, given, rows))]
    found += [f"{key} is missing. {row.required.rstrip('.')}" for key, row in rows.items()
              if row.required and key not in given and key.partition(".")[0] in given]  # fmt: skip
    refuse(found, "The keys are those of DeepSpeed 0.19, each of one type; what jzero cannot obey is "
           "refused, and nothing is dropped in silence.", "Correct or drop them.")  # fmt: skip
    return Config(given, rows, optimizer, scheduler, devices)


def _parsed(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    if not isinstance(path, str | os.PathLike):
        refuse([f"config is {_json.shown(path)}"], "It is a dict, or the path of a JSON file.",
               "Write from_deepspeed('ds_config.json').")  # fmt: skip
    try:
        with _json.open_regular(Path(path).expanduser()) as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise _json.Malformed(f"it has more than {_MAX_BYTES} bytes")
        # Accelerate writes infinite steps_per_print; no other key takes them.
        value = _json.parse(data, infinities=True)
    except OSError as error:
        raise OptionError(message(
            WHO, f"{os.fspath(path)} cannot be read: {error.strerror}", "It is the path of a JSON file.",
            "Correct the path.")) from None  # fmt: skip
    except _json.Malformed as error:
        raise OptionError(message(
            f"{WHO} {os.fspath(path)}", list(error.args), "A configuration is a JSON file.",
            "Correct it, or fill it in if it is a template.", "entries")) from None  # fmt: skip
    if not isinstance(value, dict):
        refuse([f"{os.fspath(path)} has {_json.shown(value)}"], "A configuration is one JSON object.",
               'Write {"zero_optimization": {"stage": 3}, ...}.')  # fmt: skip
    return value


def _clean(x: Any) -> Any:
    if not isinstance(x, Mapping):
        return x
    pairs = ((k, v) for k, v in x.items() if v is not None and not str(k).startswith(("_", "//")))
    return {key: _clean(value) for key, value in pairs}


def _flat(config: Mapping[str, Any], section: str) -> Iterator[tuple[str, Any]]:
    """Every key with its value, the keys of a section after it."""
    for written, value in config.items():
        key = ALIASES.get(f"{section}{written}", f"{section}{written}")
        # ZeRO's first configurations had true for what is now stage 1.
        if key == "zero_optimization" and isinstance(value, bool):
            value = {"stage": int(value)}
        yield key, value
        if isinstance(value, Mapping):
            yield from _flat(value, f"{key}.")


def _parameters(section: str, form: Form | None) -> dict[str, Row]:
    """The rows of an optimizer's or a scheduler's parameters; none if the configuration does not have it."""
    params = f"{section}.params"
    own = {f"{params}.{name}": row for name, row in form.takes.items()} if form else {}
    return own and {params: dataclasses.replace(KEYS[params], inside="rows"), **own}


def _wrong(key: str, value: Any, given: Mapping[str, Any], rows: Mapping[str, Row]) -> str:  # fmt: skip
    """What is wrong with a key or its value; "" if nothing is."""
    if key not in rows:
        return "" if _is_unread(key, given, rows) else f"{named(key)} is no key{_meant(key, rows)}"
    row, found = rows[key], f"{key} is {shown(value)}"
    words, test = KINDS[row.kind]
    if value == AUTO or (test(value) and (not row.refused or _is_obeyed(key, value, row, given))):
        return ""
    if not test(value):
        return f"{found}, not {words}"
    if reason := row.refusals.get(str(value).lower()):
        return f"{found}. {reason.rstrip('.')}"
    like = nearest(value, row.accepts or ()) if isinstance(value, str) else ""
    return f"{found}{like}. {row.refused.rstrip('.')}"


def _is_unread(key: str, given: Mapping[str, Any], rows: Mapping[str, Row]) -> bool:
    """Whether it is in a section that jzero does not read, or that is unknown itself."""
    section = key.rpartition(".")[0]
    return section in given and (section not in rows or rows[section].inside != "rows")


def _meant(key: str, rows: Mapping[str, Row]) -> str:
    """Which key was meant: of the same name elsewhere, or of nearly the same one there."""
    section, _, name = key.rpartition(".")
    if elsewhere := [k for k in (*KEYS, *ALIASES) if k.rpartition(".")[2] == name]:
        return f" (it is {ALIASES.get(elsewhere[0], elsewhere[0])!r})"
    return nearest(key, [k for k in rows if k.rpartition(".")[0] == section])


def _is_obeyed(key: str, value: Any, row: Row, given: Mapping[str, Any]) -> bool:
    if row.inside == "enabled":
        return given.get(f"{key}.enabled", False) in (False, AUTO)
    if row.inside == "parts":
        return all(map(_is_off, value.values()))
    if row.kind in ("object", "list") and not value:
        return True
    accepts = row.accepts or ()
    return value in accepts or (isinstance(value, str) and value.lower() in accepts)


def _is_off(part: Any) -> bool:
    """A part of compression_training: what switches it is in it, or in its `shared_parameters`."""
    shared = part.get("shared_parameters", part) if isinstance(part, Mapping) else None
    return isinstance(shared, Mapping) and shared.get("enabled", False) is False
