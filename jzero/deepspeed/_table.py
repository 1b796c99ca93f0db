# SPDX-License-Identifier: Apache-2.0
"""The keys of a DeepSpeed configuration, which are a table, keys.tsv; and a checked configuration."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from jzero import _json
from jzero._errors import OptionError, message
from jzero.deepspeed import _schedules, _transforms

WHO = "from_deepspeed"
AUTO = "auto"
DTYPES = {
    "fp32": jnp.float32, "float32": jnp.float32, "bf16": jnp.bfloat16, "bfloat16": jnp.bfloat16,
    "fp16": jnp.bfloat16, "float16": jnp.bfloat16,  # Gradients have no loss scale here.
}  # fmt: skip
# Other names that DeepSpeed takes for a key.
ALIASES = {
    "bfloat16": "bf16",
    **{f"zero_optimization.{name}": f"zero_optimization.stage3_{name}" for name in (
        "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold",
        "max_live_parameters", "max_reuse_distance", "gather_16bit_weights_on_model_save",
        "module_granularity_threshold", "use_all_reduce_for_fetch_params", "allgather_sequential")},
}  # fmt: skip


def _number(
    low: float = -math.inf, high: float = math.inf, whole: bool = False
) -> Callable[[Any], bool]:
    def test(x: Any) -> bool:
        # An integer may be beyond the largest float, and NaN is below nothing. 5e8 is a whole number.
        if (
            not isinstance(x, int | float)
            or isinstance(x, bool)
            or not abs(x) <= sys.float_info.max
        ):
            return False
        return low <= x <= high and not (whole and x != int(x))

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


def _compresses_nothing(section: Mapping[str, Any]) -> bool:
    """Whether each method is off; `enabled` is in its `shared_parameters`, if it has these."""
    shared = [
        x.get("shared_parameters", x) if isinstance(x, Mapping) else x for x in section.values()
    ]
    return all(isinstance(x, Mapping) and x.get("enabled", False) is False for x in shared)


_ACCEPTS: dict[str, Callable[[Any], bool]] = {
    "": lambda value: True,
    "empty": operator.not_,
    "off": lambda section: section.get("enabled", False) in (False, AUTO),
    "uncompressed": _compresses_nothing,
}


class Row(NamedTuple):
    """A key: the columns of keys.tsv, which explains them."""

    kind: str
    default: Any
    accepts: Callable[[Any], bool] | list[Any]
    rule: str
    note: str
    becomes: str
    refused: str
    flags: str

    @property
    def is_auto(self) -> bool:
        return "auto" in self.flags or self._is_inert

    @property
    def is_read(self) -> bool:
        return not (
            self._is_inert or "unread" in self.flags or (self.kind == "object" and self.refused)
        )

    @property
    def _is_inert(self) -> bool:
        return bool(self.note) and not (self.rule or self.becomes or self.refused)


class Form(NamedTuple):
    """An optimizer or a scheduler."""

    function: Callable[..., Any]
    takes: Mapping[str, Row]  # its parameters


def rows_of(file: str) -> Iterator[list[str]]:
    """The rows of a table beside this file: cells separated by tabs, of which the last may be missing."""
    lines = Path(__file__).with_name(file).read_text(encoding="utf-8").splitlines()
    return (line.split("\t") for line in lines if not line.startswith("#"))


def _tables() -> tuple[dict[str, Row], dict[str, str], dict[tuple[str, str], dict[str, Row]]]:
    """Rows by key; why values are refused, by key and value; rows of parameters, by section and form."""
    keys: dict[str, Row] = {}
    refusals: dict[str, str] = {}
    params: dict[tuple[str, str], dict[str, Row]] = {}
    for where, names, kind, *cells in rows_of("keys.tsv"):
        default, accepts, *texts = [*cells, *[""] * (7 - len(cells))]
        accepted = json.loads(accepts) if accepts[:1] == "[" else _ACCEPTS[accepts]
        row = Row(kind, json.loads(default or "null"), accepted, *texts)
        section, *forms = where.lstrip("-").split(" ")
        for name in names.split():
            key = f"{section}.{name}".lstrip(".")
            if kind == "value":
                refusals[key] = row.refused
            elif not forms:
                keys[key] = row
            for form in forms:
                params.setdefault((section, form), {})[name] = row
    return keys, refusals, params


KEYS, REFUSALS, _PARAMS = _tables()


def _forms(section: str, functions: Mapping[str, Callable[..., Any]]) -> dict[str, Form]:
    params = {name: _PARAMS[f"{section}.params", name] for name in ("*", *functions)}
    return {
        name: Form(function, params[name] | params["*"]) for name, function in functions.items()
    }


OPTIMIZERS = _forms("optimizer", {
    "adam": optax.adamw, "adamw": optax.adamw, "lamb": _transforms.lamb, "lion": optax.lion,
    "adagrad": _transforms.adagrad, "sgd": optax.sgd})  # fmt: skip
SCHEDULERS = _forms("scheduler", {
    "LRRangeTest": _schedules.lr_range_test, "OneCycle": _schedules.one_cycle,
    "WarmupLR": _schedules.warmup_lr, "WarmupDecayLR": _schedules.warmup_decay_lr,
    "WarmupCosineLR": _schedules.warmup_cosine_lr})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Config:
    """A checked configuration. `given` and `rows` are by dotted key, `{"fp16.enabled": True}`."""

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
        """`"bf16.enabled is true"`, a finding of a message, if `when` is true; else ""."""
        value = self.get(key)
        return f"{key} is {'missing' if value is None else shown(value)}" if when else ""

    def arguments(self, section: str, form: Form) -> dict[str, Any]:
        """The parameters of an optimizer or a scheduler that its function takes."""
        names = [name for name, row in form.takes.items() if row.rule]
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
    if found:
        raise OptionError(message(WHO, found, rule, edit, "keys"))


def nearest(name: str, names: Sequence[str]) -> str:
    """`" (perhaps 'overlap_comm')"`, or nothing if no name is like it."""
    by_lower = {x.lower(): x for x in names}
    like = difflib.get_close_matches(name.lower(), by_lower, 1, 0.7)
    return f" (perhaps {by_lower[like[0]]!r})" if like else ""


def shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else _json.shown(value)
