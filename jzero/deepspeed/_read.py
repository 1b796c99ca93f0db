# SPDX-License-Identifier: Apache-2.0
"""Reads a DeepSpeed configuration, fills in "auto", and checks it key by key against the table."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jzero import _json
from jzero._errors import OptionError, message, named
from jzero.deepspeed import _table
from jzero.deepspeed._rules import ACCUMULATE, LINEAR, LR, MICRO, ROWS
from jzero.deepspeed._table import AUTO, KEYS, KINDS, WHO, Config, Row, nearest, refuse, shown

_MAX_LR, _TOTAL = "scheduler.params.warmup_max_lr", "scheduler.params.total_num_steps"
_STEPS = "num_training_steps", "max_steps"
_SIZES = MICRO, ACCUMULATE, ROWS


class _Fill(NamedTuple):
    """A row of auto.tsv, which explains them: keys that arguments of the Trainer fill together."""

    names: list[str]
    defaults: list[Any]
    keys: list[str]
    how: str


_HOW: dict[str, Callable[..., Any]] = {
    "": lambda x: x,
    "pair": lambda *x: list(x),
    "share": lambda x, n: math.ceil(x * n),
    "square": lambda n: n * n,
    "most of square": lambda n: int(0.9 * n * n),
    "ten times": lambda n: 10 * n,
}
_FILLS = list[_Fill]()
_ELSEWHERE = dict[str, str]()
for _names, _defaults, _keys, *_rest in _table.rows_of("auto.tsv"):
    if _keys:
        _FILLS.append(_Fill(_names.split(), json.loads(_defaults), _keys.split(), "".join(_rest)))
    else:
        _ELSEWHERE |= dict.fromkeys(_names.split(), _rest[1])
_NAMES = {name for fill in _FILLS for name in fill.names}
_is_number = KINDS["number"][1]


def read(config: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """A configuration by dotted key: `{"bf16": {...}, "bf16.enabled": True}`.

    Keys have DeepSpeed's names of today. Comments (`_note`, `//`) and keys that are null are left out.
    """
    pairs = list(_flat(_clean(config if isinstance(config, Mapping) else _parsed(config)), ""))
    times = Counter(key for key, _ in pairs)
    refuse([f"{key} is there twice, by two names" for key, num in times.items() if num > 1],
           "DeepSpeed takes two names for it.", "Drop one of them.")  # fmt: skip
    sections = {key for key, row in KEYS.items() if row.kind == "object"}
    refuse([f'{key} is "auto", not an object' for key, x in pairs if x == AUTO and key in sections],
           "The keys of a section may be auto, and not the section.",
           'Write its keys, as {"enabled": "auto"} of bf16, or drop it.')  # fmt: skip
    return dict(pairs)


def checked(given: Mapping[str, Any], devices: int | None) -> Config:
    """The configuration, if the table has its keys and accepts its values."""
    optimizer = _table.OPTIMIZERS.get(str(given.get("optimizer.type")).lower())
    scheduler = _table.SCHEDULERS.get(str(given.get("scheduler.type")))
    rows = dict(KEYS)
    for params, form in (("optimizer.params", optimizer), ("scheduler.params", scheduler)):
        if form is not None:
            rows[params] = rows[params]._replace(flags="")
            rows |= {f"{params}.{name}": row for name, row in form.takes.items()}
    found = [wrong for key, x in given.items() if (wrong := _wrong(key, x, given, rows))]
    found += [f"{key} is missing. {row.refused.rstrip('.')}" for key, row in rows.items()
              if "required" in row.flags and key not in given and key.partition(".")[0] in given]  # fmt: skip
    refuse(found, "The keys are those of DeepSpeed 0.19, each of one type; what jzero cannot obey is "
           "refused, and nothing is dropped in silence.", "Correct or drop them.")  # fmt: skip
    return Config(given, rows, optimizer, scheduler, devices)


def _parsed(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    if not isinstance(path, str | os.PathLike):
        refuse([f"config is {_json.shown(path)}"], "It is a dict, or the path of a JSON file.",
               "Write from_deepspeed('ds_config.json').")  # fmt: skip
    try:
        # Accelerate writes infinite steps_per_print; no other key takes them.
        value = _json.load(Path(path).expanduser(), 1_000_000, infinities=True)
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
    """Without comments and null; NumPy's numbers become Python's, as a program prints them."""
    if isinstance(x, np.generic):
        return x.item()
    if isinstance(x, list | tuple):
        return [*map(_clean, x)]
    if not isinstance(x, Mapping):
        return x
    pairs = ((k, v) for k, v in x.items() if v is not None and not str(k).startswith(("_", "//")))
    return {key: _clean(value) for key, value in pairs}


def _flat(config: Mapping[str, Any], section: str) -> Iterator[tuple[str, Any]]:
    for written, value in config.items():
        key = _table.ALIASES.get(f"{section}{written}", f"{section}{written}")
        # ZeRO's first configurations had true for what is now stage 1.
        if key == "zero_optimization" and isinstance(value, bool):
            value = {"stage": int(value)}
        yield key, value
        if isinstance(value, Mapping):
            yield from _flat(value, f"{key}.")


def _wrong(key: str, value: Any, given: Mapping[str, Any], rows: Mapping[str, Row]) -> str:
    """What is wrong with a key or its value; "" if nothing is."""
    section, _, name = key.rpartition(".")
    if key not in rows:
        if section in given and (section not in rows or not rows[section].is_read):
            return ""  # jzero does not read the section, or refuses it as a whole.
        if elsewhere := [k for k in (*KEYS, *_table.ALIASES) if k.rpartition(".")[2] == name]:
            meant = _table.ALIASES.get(elsewhere[0], elsewhere[0])
            return f"{named(key)} is no key (it is {meant!r})"
        return f"{named(key)} is no key{nearest(key, [k for k in rows if k.rpartition('.')[0] == section])}"
    row, found, like = rows[key], f"{key} is {shown(value)}", ""
    words, test = KINDS[row.kind]
    if value == AUTO:
        return ""
    if not test(value):
        return f"{found}, not {words}"
    if callable(row.accepts):
        is_obeyed = row.accepts(value)
    elif isinstance(value, str):
        is_obeyed = value in row.accepts or value.lower() in row.accepts
        like = nearest(value, row.accepts)
    else:
        is_obeyed = value in row.accepts
    if is_obeyed:
        return ""
    if reason := _table.REFUSALS.get(f"{key}.{str(value).lower()}"):
        return f"{found}. {reason.rstrip('.')}"
    return f"{found}{like}. {row.refused.rstrip('.')}"


def filled(given: Mapping[str, Any], auto: Any) -> dict[str, Any]:
    """A configuration with what is given, or follows from other keys, in place of "auto"."""
    result, used = dict(given), set[str]()
    found: list[str] = []
    values = _named_values(auto, given)
    for names, key, value, is_guess in _said(values, given):
        now = result.get(key)
        if now == AUTO or (now is None and key in _SIZES):
            result[key] = value
        elif now is None:
            continue
        elif now != value and not is_guess:
            found.append(f"{', '.join(names)} is {shown(value)}, and {key} is {shown(now)}")
        used.update(names)
    unused = [name for name in values if name not in used]
    edit = "Correct or drop them."
    if "scheduler" not in given and {"warmup_steps", "warmup_ratio", *_STEPS} & {*unused}:
        edit = f"Without a scheduler the learning rate is constant. {LINEAR} Or drop them."
    refuse([*found, *(_unused(name, given) for name in unused)],
           'Each fills an "auto" of the configuration, or is the same as what it says.', edit)  # fmt: skip
    rates = result.get(LR), result.get(_MAX_LR)
    for key, x in zip((_MAX_LR, LR, "scheduler.params.warmup_min_lr"), (*rates, 0), strict=True):
        if result.get(key) == AUTO and _is_number(x):
            result[key] = x
    return result


def check_auto(c: Config, auto: Mapping[str, Any] | None) -> None:
    """Refuses keys that say what is trained and are still "auto"."""
    missing = list(_missing(c))
    fills = [
        next((f for f in _FILLS if key in f.keys), _Fill([key], [None], [], "")) for key in missing
    ]
    given = {name: repr(value) for name, value in (auto or {}).items() if value is not None}
    for fill in fills:
        for name, value in zip(fill.names, fill.defaults, strict=False):
            given.setdefault(name, "..." if value is None else str(value))
    edit = ", ".join(f'"{name}": {value}' for name, value in given.items())
    edit = f"Write auto={{{edit}}}, with the values of your run."
    if any(fill.defaults != [None] for fill in fills):
        edit += " Those that you did not pass are the Trainer's defaults."
    refuse([f'{key} is "auto"' for key in missing],
           "The Hugging Face Trainer fills it from its own arguments, which are not in the file.",
           edit)  # fmt: skip


def _named_values(auto: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(auto, Mapping | None) or not all(isinstance(x, str) for x in auto or ()):
        refuse([f"auto is {_json.shown(auto)}"], "It has values by names of the Trainer or of DeepSpeed.",
               'Write auto={"learning_rate": 1e-4}.')  # fmt: skip
    values = {name: _clean(value) for name, value in (auto or {}).items() if value is not None}
    bad = [f"{name} is {shown(values[name])}" for name in ("warmup_ratio", *_STEPS, "hidden_size")
           if name in values and not _is_number(values[name])]  # fmt: skip
    refuse(bad, "It is a number.", "Correct it.")
    steps = values.get("warmup_steps")
    if "warmup_ratio" in values and steps == 0:
        del values["warmup_steps"]  # The Trainer's default, by which the ratio says how many.
    elif "warmup_ratio" not in values and isinstance(steps, float) and 0 < steps < 1:
        values["warmup_ratio"] = values.pop("warmup_steps")  # As in the Trainer of transformers 5.
    if "warmup_ratio" in values and not values.keys() & {*_STEPS} and _is_number(given.get(_TOTAL)):
        values["num_training_steps"] = given[_TOTAL]
    return values


def _said(
    values: Mapping[str, Any], given: Mapping[str, Any]
) -> Iterator[tuple[list[str], str, Any, bool]]:
    """Names, the key that they fill, the value, and whether the configuration may say otherwise."""
    for fill in _FILLS:
        if all(name in values for name in fill.names):
            value = _HOW[fill.how](*(values[name] for name in fill.names))
            for key in fill.keys:
                yield fill.names, key, value, fill.names == ["hidden_size"]
    for name, value in values.items():
        keys = [name] if name in given else _called(name, given)
        if name not in _NAMES and len(keys) == 1:
            yield [name], keys[0], list(value) if isinstance(value, tuple) else value, False


def _called(name: str, given: Mapping[str, Any]) -> list[str]:
    return [key for key in given if key.rpartition(".")[2] == name]


def _unused(name: str, given: Mapping[str, Any]) -> str:
    if fills := [fill for fill in _FILLS if name in fill.names]:
        keys = ", ".join(dict.fromkeys(key for fill in fills for key in fill.keys))
        others = " or ".join(other for fill in fills for other in fill.names if other != name)
        return f"{name} fills nothing: it is of {keys}" + (f", with {others}" if others else "")
    if several := _called(name, given):
        return f"{name} is the name of {', '.join(several)}: write one of them"
    if name in _ELSEWHERE:
        return f"{name} of the Trainer fills nothing: {_ELSEWHERE[name]}"
    like = nearest(name, [*_NAMES, *given])
    return f"{named(name)} is no name of the Trainer that fills a key, and no key here{like}"


def _missing(c: Config) -> Iterator[str]:
    """The keys that are "auto", and whose values do not follow from others."""
    rows, micro, accumulate = (c.given.get(key) for key in (ROWS, MICRO, ACCUMULATE))
    if {rows, micro} <= {None, AUTO} and AUTO in (rows, micro):
        yield MICRO if micro == AUTO else ROWS
    if accumulate == AUTO and not {None, AUTO}.isdisjoint({rows, micro}):
        yield ACCUMULATE
    for key, value in c.given.items():
        section, _, name = key.rpartition(".")
        row = c.rows.get(key) or c.rows.get(section)
        is_read = key in c.rows or (name == "enabled" and section in c.rows)
        if value == AUTO and row is not None and is_read and not row.is_auto:
            yield key
