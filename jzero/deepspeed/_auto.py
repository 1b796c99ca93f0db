# SPDX-License-Identifier: Apache-2.0
"""Values for "auto" in a DeepSpeed configuration: the Hugging Face Trainer's, and what follows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jzero import _json
from jzero._errors import named
from jzero.deepspeed._batch import ACCUMULATE, MICRO, ROWS
from jzero.deepspeed._settings import AUTO, Settings, is_kind, nearest, refuse
from jzero.deepspeed._table import KEYS

_LR, _MAX_LR = "optimizer.params.lr", "scheduler.params.warmup_max_lr"
_BETAS, _WARMUP = "optimizer.params.betas", "scheduler.params.warmup_num_steps"
_TOTAL = "scheduler.params.total_num_steps"
_STEPS = ("num_training_steps", "max_steps")
# What a key is where nothing else says it: what another key is, or a number.
_FOLLOWS = ((_MAX_LR, _LR), (_LR, _MAX_LR), ("scheduler.params.warmup_min_lr", 0))


@dataclasses.dataclass(frozen=True)
class _Fill:
    """What arguments say of keys, if all of them are given.

    Attributes:
      names: of the arguments.
      keys: what they fill.
      value: of the arguments' values.
      must_match: whether another value of a key contradicts.
    """

    names: tuple[str, ...]
    keys: tuple[str, ...]
    value: Callable[..., Any] = lambda x: x
    must_match: bool = True


# As `transformers.integrations.deepspeed` has them.
_FILLS = (
    _Fill(("per_device_train_batch_size",), (MICRO,)),
    *(_Fill((key,), (key,)) for key in (MICRO, ACCUMULATE, ROWS)),
    _Fill(("max_grad_norm",), ("gradient_clipping",)),
    _Fill(("learning_rate",), (_LR, _MAX_LR)),
    _Fill(("weight_decay",), ("optimizer.params.weight_decay",)),
    _Fill(("adam_beta1", "adam_beta2"), (_BETAS,), lambda *betas: list(betas)),
    _Fill(("adam_epsilon",), ("optimizer.params.eps",)),
    _Fill(("warmup_steps",), (_WARMUP,)),
    *(_Fill(("warmup_ratio", steps), (_WARMUP,), lambda x, n: math.ceil(x * n)) for steps in _STEPS),
    *(_Fill((steps,), (_TOTAL,)) for steps in _STEPS),
    _Fill(("bf16",), ("bf16.enabled",)),
    _Fill(("fp16",), ("fp16.enabled",)),
    *(_Fill(("hidden_size",), (f"zero_optimization.{key}",), value, must_match=False)
      for key, value in {"reduce_bucket_size": lambda h: h * h,
                         "stage3_prefetch_bucket_size": lambda h: int(0.9 * h * h),
                         "stage3_param_persistence_threshold": lambda h: 10 * h}.items()),
)  # fmt: skip
LINEAR = (
    "The Hugging Face Trainer would decay it linearly, after warmup_steps: for that write "
    '"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", '
    '"warmup_num_steps": "auto", "warmup_max_lr": "auto", "warmup_type": "linear"}}.'
)
# Of the Trainer's other arguments: where a training with jzero has what they say.
_ELSEWHERE = {
    "lr_scheduler_type": "the section scheduler says it: WarmupDecayLR is linear, WarmupCosineLR cosine",
    "num_train_epochs": "your loop says it; max_steps fills total_num_steps",
    "optim": "the section optimizer says it",
    "tf32": "jax.config.update('jax_default_matmul_precision', 'tensorfloat32') says it",
    "gradient_checkpointing": "jax.checkpoint around each layer of the model says it",
    "torch_compile": "XLA compiles every step",
    "seed": "the key that init is given says it",
    "per_device_eval_batch_size": "your loop says it, with jzero.shard_eval_step",
    **dict.fromkeys(("output_dir", "save_steps", "save_strategy", "save_total_limit"),
                    "jzero.Checkpointer says it"),
    **dict.fromkeys(("logging_steps", "report_to"), "your loop says it; steps_per_print is in the program"),
}  # fmt: skip
_NAMES = {name for fill in _FILLS for name in fill.names}
_SCHEDULED = {"warmup_steps", "warmup_ratio", *_STEPS}
_NUMBERS = ("warmup_ratio", *_STEPS, "hidden_size")
# The Trainer's defaults, which it gives where its own command line says nothing.
_DEFAULTS = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_grad_norm": 1.0,
    "learning_rate": 5e-5, "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999,
    "adam_epsilon": 1e-8, "warmup_steps": 0,
}  # fmt: skip


class _Places:
    """Every key of a configuration, wherever it is, by its dotted name."""

    def __init__(self, config: dict[str, Any]):
        self.config = config
        self.found = dict(_places(config, ""))

    def get(self, key: str) -> Any:
        """Its value; None if it is missing."""
        inside, name = self.found.get(key, ({}, ""))
        return inside.get(name)

    def put(self, key: str, value: Any) -> None:
        inside, name = self.found.setdefault(key, (self.config, key))
        inside[name] = value

    def key_of(self, name: str) -> str | None:
        """The one key of a name, dotted or not."""
        like = self.keys_of(name)
        return name if name in self.found else like[0] if len(like) == 1 else None

    def keys_of(self, name: str) -> list[str]:
        """All keys whose last part is the name."""
        return [key for key in self.found if key.rpartition(".")[2] == name]


def fill(config: dict[str, Any], auto: Any) -> None:
    """Replaces "auto" in a configuration by what is given for it, and by what follows from the rest.

    Args:
      config: as `_settings.plain` makes it; changed in place.
      auto: values by names of the Trainer or of DeepSpeed; None for none.

    Raises:
      OptionError: names that nothing here has, or that contradict the configuration; all of them.
    """
    places = _Places(config)
    given = _named_values(auto, places)
    found, used = [], set()
    for name, key, value, must_match in _filled(given, places):
        now = places.get(key)
        if now == AUTO or (now is None and key in (MICRO, ACCUMULATE, ROWS)):
            places.put(key, value)
        elif now is None:
            continue
        elif must_match and now != value:
            found.append(f"{name} is {_json.shown(value)}, and {key} is {_json.shown(now)}")
        used.update(name.split(", "))
    unused = [name for name in given if name not in used]
    found += [_unused(name, places) for name in unused]
    if found:
        constant = "scheduler" not in places.found and not _SCHEDULED.isdisjoint(unused)
        raise refuse(
            found, 'Each fills an "auto" of the configuration, or is the same as what it says.',
            "Without a scheduler the learning rate is constant. " * constant
            + f"{LINEAR} Or drop them." * constant + "Correct or drop them." * (not constant))  # fmt: skip
    for key, source in _FOLLOWS:
        value = places.get(source) if isinstance(source, str) else source
        if places.get(key) == AUTO and is_kind(value, "number"):
            places.put(key, value)


def check(settings: Settings, auto: Mapping[str, Any] | None) -> None:
    """Nothing that matters is "auto" any more.

    Raises:
      OptionError: it is; it names all, and what to write.
    """
    missing = list(_missing(settings.given))
    if not missing:
        return
    asked = [name for key in missing for name in _asked(key)]
    given = {name: repr(value) for name, value in (auto or {}).items() if value is not None}
    for name in asked:
        given.setdefault(name, str(_DEFAULTS.get(name, "...")))
    shown = ", ".join(f'"{name}": {value}' for name, value in given.items())
    default = "Those that you did not give are the Trainer's defaults."
    default *= not _DEFAULTS.keys().isdisjoint(asked)
    raise refuse(
        [f'{key} is "auto"' for key in missing],
        "The Hugging Face Trainer fills it from its own arguments, which are not in the file.",
        f"Write auto={{{shown}}}, with the values of your run. {default}".rstrip())  # fmt: skip


def _places(
    config: dict[str, Any], section: str
) -> Iterator[tuple[str, tuple[dict[str, Any], str]]]:
    for name, value in config.items():
        key = f"{section}.{name}".lstrip(".")
        yield key, (config, name)
        if isinstance(value, dict):
            yield from _places(value, key)


def _named_values(auto: Any, places: _Places) -> dict[str, Any]:
    if not isinstance(auto, Mapping | None) or not all(
        isinstance(name, str) for name in auto or ()
    ):
        raise refuse(
            f"auto is {_json.shown(auto)}", "It has values by names of the Trainer or of DeepSpeed.",
            'Write auto={"learning_rate": 1e-4}.')  # fmt: skip
    given = {name: value for name, value in (auto or {}).items() if value is not None}
    bad = [f"{name} is {_json.shown(given[name])}" for name in _NUMBERS
           if name in given and not is_kind(given[name], "number")]  # fmt: skip
    if bad:
        raise refuse(bad, "It is a number.", "Correct it.")
    steps = given.get("warmup_steps")
    if "warmup_ratio" in given and steps == 0:
        del given["warmup_steps"]  # The Trainer's default, by which the ratio says how many.
    elif "warmup_ratio" not in given and isinstance(steps, float) and 0 < steps < 1:
        given["warmup_ratio"] = given.pop("warmup_steps")  # So says the Trainer of transformers 5.
    total = places.get(_TOTAL)
    if "warmup_ratio" in given and not given.keys() & {*_STEPS} and is_kind(total, "number"):
        given["num_training_steps"] = total
    return given


def _filled(given: dict[str, Any], places: _Places) -> Iterator[tuple[str, str, Any, bool]]:
    """The names, key and value of all that is said, and whether the configuration must not say otherwise."""
    for fill in _FILLS:
        if all(name in given for name in fill.names):
            value = fill.value(*(given[name] for name in fill.names))
            for key in fill.keys:
                yield ", ".join(fill.names), key, value, fill.must_match
    for name, value in given.items():
        if name not in _NAMES and (one := places.key_of(name)) is not None:
            yield name, one, list(value) if isinstance(value, tuple) else value, True


def _unused(name: str, places: _Places) -> str:
    if fills := [fill for fill in _FILLS if name in fill.names]:
        keys = dict.fromkeys(key for fill in fills for key in fill.keys)
        others = [other for fill in fills for other in fill.names if other != name]
        needs = f", with {' or '.join(others)}" if others else ""
        return f"{name} fills nothing: it is of {', '.join(keys)}{needs}"
    if several := places.keys_of(name):
        return f"{name} is the name of {', '.join(several)}: write one of them"
    if name in _ELSEWHERE:
        return f"{name} of the Trainer fills nothing: {_ELSEWHERE[name]}"
    like = nearest(name, [*_NAMES, *places.found])
    return f"{named(name)} is no name of the Trainer that fills a key, and no key here{like}"


def _missing(given: Mapping[str, Any]) -> Iterator[str]:
    """The keys that are "auto", and of which nothing else tells the value."""
    yield from _missing_sizes(given)
    for key, value in given.items():
        entry = KEYS[key]
        if value == AUTO and not entry.tuning:
            yield key
        elif isinstance(value, Mapping) and entry.inside != "keys" and not entry.tuning:
            names = value if entry.inside == "anything" else {"enabled"} & value.keys()
            yield from (f"{key}.{name}" for name in names if value[name] == AUTO)


def _missing_sizes(given: Mapping[str, Any]) -> Iterator[str]:
    rows, micro, accumulate = (given.get(key) for key in (ROWS, MICRO, ACCUMULATE))
    if rows in (None, AUTO) and AUTO in (rows, micro) and micro in (None, AUTO):
        yield MICRO if micro == AUTO else ROWS
    if accumulate == AUTO and (rows in (None, AUTO) or micro in (None, AUTO)):
        yield ACCUMULATE


def _asked(key: str) -> tuple[str, ...]:
    """The Trainer's names for a key, or its own."""
    return next((fill.names for fill in _FILLS if key in fill.keys), (key,))
