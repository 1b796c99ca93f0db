# SPDX-License-Identifier: Apache-2.0
"""A DeepSpeed configuration, read and checked key by key against the table of keys."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jzero import _json
from jzero._errors import OptionError, message, named
from jzero.deepspeed._keys import KINDS, Key
from jzero.deepspeed._table import ALIASES, KEYS

WHO = "from_deepspeed"
AUTO = "auto"
_SHOWN = 20
_MAX_BYTES = 1_000_000
_UNKNOWN = Key("any", inside="anything")


class Settings:
    """The values of a configuration by dotted key, and what is said of each.

    Attributes:
      given: every key, `{"zero_optimization.stage": 3}`.
      notes: a sentence or two for each key, in the order of the configuration; see `note`.
    """

    def __init__(self, config: dict[str, Any]):
        self.given = dict(_flat(config, ""))
        self.notes: dict[str, str] = {}
        # The first that fails says all that fail in its way.
        _check(_unknown(self.given), "The keys are those of DeepSpeed 0.19.", "Correct or drop it.")
        _check(_wrong_kinds(self.given), "Each key has a type.", "Correct them.")
        _check(
            _refused(self.given),
            "What jzero cannot obey is refused, and nothing dropped in silence.",
            "",
        )
        for key, value in self.given.items():
            if (note := _note(key, value)) is not None:
                self.notes[key] = note

    @property
    def is_half(self) -> bool:
        """Whether parameters are of 16 bits, with masters: bfloat16 also where float16 is written."""
        return bool(self.get("bf16.enabled") or self.get("fp16.enabled"))

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key; `default` if it is missing, null or "auto"."""
        value = self.given.get(key, default)
        return default if value == AUTO else value

    def note(self, key: str, text: str) -> None:
        """Says what became of a key, or of one that is missing."""
        assert key not in self.notes, key
        self.notes[key] = text

    def overrule(self, keys: Iterable[str], text: str) -> None:
        """Says of those of the keys that were spoken of that they have no effect, and why."""
        self.notes.update({key: f"Without effect: {text}" for key in keys if key in self.notes})

    def ordered(self) -> dict[str, str]:
        """The notes in the order of the configuration; those of missing keys come last."""
        silent = [key for key, value in self.given.items() if not _is_section(key, value)]
        assert set(silent) <= set(self.notes), set(silent) - set(self.notes)
        place = {key: i for i, key in enumerate(self.given)}

        def rank(key: str) -> int:
            # A parameter is not in the table, and is where its `params` are.
            section = key.rpartition(".")[0]
            return place.get(key, place[section] if section.endswith(".params") else len(place))

        return {key: self.notes[key] for key in sorted(self.notes, key=rank)}


def read(config: Mapping[str, Any] | str | os.PathLike[str]) -> Mapping[str, Any]:
    """The configuration itself, or what a JSON file has.

    Raises:
      OptionError: it is neither, or the file cannot be read.
    """
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, str | os.PathLike):
        raise OptionError(message(
            WHO, f"config is {_json.shown(config)}", "It is a dict, or the path of a JSON file.",
            "Write from_deepspeed('ds_config.json')."))  # fmt: skip
    try:
        # Accelerate writes infinite steps_per_print; no other key takes them.
        value = _json.parse(_bytes(Path(config).expanduser()), infinities=True)
    except OSError as error:
        raise OptionError(message(
            WHO, f"{os.fspath(config)} cannot be read: {error.strerror}", "It is the path of a JSON file.",
            "Correct the path.")) from None  # fmt: skip
    except _json.Malformed as error:
        raise OptionError(message(
            f"{WHO} {os.fspath(config)}", list(error.args), "A configuration is a JSON file.",
            "Correct it, or fill it in if it is a template.", "entries", _SHOWN)) from None  # fmt: skip
    if not isinstance(value, dict):
        raise OptionError(message(
            WHO, f"{os.fspath(config)} has {_json.shown(value)}", "A configuration is one JSON object.",
            'Write {"zero_optimization": {"stage": 3}, ...}.'))  # fmt: skip
    return value


def is_kind(value: Any, kind: str) -> bool:
    """Whether a value is of one of `KINDS`; 5e8 is a whole number, and true is none."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # An integer may be beyond the largest float; no NaN is below anything.
    number = number and abs(value) <= sys.float_info.max
    match kind:
        case "bool":
            return isinstance(value, bool)
        case "number":
            return number
        case "int":
            return number and value >= 0 and value == int(value)
        case "whole":
            return number and value == int(value)
        case "text":
            return isinstance(value, str)
        case "object":
            return isinstance(value, Mapping)
        case "betas":
            return (
                is_kind(value, "list")
                and len(value) == 2
                and all(is_kind(x, "number") and 0 <= x < 1 for x in value)
            )
        case "list":
            return isinstance(value, Sequence) and not isinstance(value, str)
    return True


def refuse(found: str | Sequence[str], rule: str, edit: str) -> OptionError:
    """An error about keys of the configuration."""
    return OptionError(message(WHO, found, rule, edit, "keys", _SHOWN))


def nearest(name: str, names: Sequence[str]) -> str:
    """`" (perhaps 'overlap_comm')"`, or nothing if no name is like it."""
    like = difflib.get_close_matches(name, names, 1, 0.7)
    return f" (perhaps {like[0]!r})" if like else ""


def _bytes(path: Path) -> bytes:
    with _json.open_regular(path) as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise _json.Malformed(f"it has more than {_MAX_BYTES} bytes")
    return data


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy by DeepSpeed's names of today, without comments (`_note`, `//`) and keys that are null.

    Raises:
      OptionError: a key is there by two names.
    """
    doubles: list[str] = []
    found = _plain(config, "", doubles)
    _check(doubles, "DeepSpeed takes two names for it.", "Drop one of them.")
    sections = [f'{key} is "auto", not an object' for key in _auto_sections(found, "")]
    _check(sections, "The keys of a section may be auto, and not the section.",
           'Write its keys, as {"enabled": "auto"} of bf16, or drop it.')  # fmt: skip
    return found


def _auto_sections(config: Mapping[str, Any], section: str) -> Iterator[str]:
    for name, value in config.items():
        key = f"{section}.{name}".lstrip(".")
        if value == AUTO and KEYS.get(key, _UNKNOWN).kind == "object":
            yield key
        elif isinstance(value, Mapping):
            yield from _auto_sections(value, key)


def _plain(config: Mapping[str, Any], section: str, doubles: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for written, value in config.items():
        if value is None or str(written).startswith(("_", "//")):
            continue
        key = f"{section}.{written}".lstrip(".")
        key = ALIASES.get(key, key)
        name = key.removeprefix(f"{section}.")
        if name in found:
            doubles.append(f"{key} is there twice, by two names")
        # ZeRO's first configurations had true for what is now stage 1.
        if key == "zero_optimization" and isinstance(value, bool):
            value = {"stage": int(value)}
        found[name] = _plain(value, key, doubles) if isinstance(value, Mapping) else value
    return found


def _flat(config: Mapping[str, Any], section: str) -> Iterator[tuple[str, Any]]:
    """Every key with its value, those of sections after their section's."""
    for name, value in config.items():
        key = f"{section}.{name}".lstrip(".")
        yield key, value
        if isinstance(value, Mapping) and KEYS.get(key, _UNKNOWN).inside == "keys":
            yield from _flat(value, key)


def _unknown(given: Mapping[str, Any]) -> list[str]:
    return [f"{named(key)} is no key{_meant(key)}" for key in given if key not in KEYS]


def _meant(key: str) -> str:
    """Which key of the table was meant: of the same name elsewhere, or of nearly the same one there."""
    section, _, name = key.rpartition(".")
    elsewhere = [k for k in (*KEYS, *ALIASES) if k.rpartition(".")[2] == name]
    if elsewhere:
        return f" (it is {ALIASES.get(elsewhere[0], elsewhere[0])!r})"
    return nearest(key, [k for k in KEYS if k.rpartition(".")[0] == section])


def _wrong_kinds(given: Mapping[str, Any]) -> list[str]:
    return [
        f"{key} is {_json.shown(value)}, not {KINDS[KEYS[key].kind]}"
        for key, value in given.items()
        if value != AUTO and not is_kind(value, KEYS[key].kind)
    ]


def _refused(given: Mapping[str, Any]) -> list[str]:
    return [
        f"{key} is {_json.shown(value)}. {entry.refused.rstrip('.')}"
        for key, value in given.items()
        if (entry := KEYS[key]).refused and not _obeyed(entry, value)
    ]


def _obeyed(entry: Key, value: Any) -> bool:
    if entry.inside == "enabled":
        return value.get("enabled", False) in (False, AUTO)
    if entry.inside == "parts":
        return all(_is_off(part) for part in value.values())
    return (
        value == AUTO
        or _is_empty(value)
        or (value.lower() if isinstance(value, str) else value) in (entry.accepts or ())
    )


def _is_off(part: Any) -> bool:
    """A part of compression_training: what switches it is in it, or in its `shared_parameters`."""
    if not isinstance(part, Mapping):
        return False
    shared = part.get("shared_parameters", part)
    return isinstance(shared, Mapping) and shared.get("enabled", False) is False


def _note(key: str, value: Any) -> str | None:
    """What the table says of a key; None if a translator will, or what is inside of it."""
    entry = KEYS[key]
    if entry.note:
        return entry.note
    return "Empty." if _is_empty(value) else None


def _is_empty(value: Any) -> bool:
    """Whether it is a section, or a list, that says nothing."""
    return isinstance(value, Mapping | list) and not value


def _is_section(key: str, value: Any) -> bool:
    return bool(value) and KEYS[key].kind == "object" and not KEYS[key].note


def _check(found: list[str], rule: str, edit: str) -> None:
    if found:
        raise refuse(found, rule, edit)
