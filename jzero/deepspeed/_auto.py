# SPDX-License-Identifier: Apache-2.0
"""Values for "auto": what the Hugging Face Trainer fills in, and what follows from other keys."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jzero import _json
from jzero._errors import named
from jzero.deepspeed._config import AUTO, KINDS, Config, nearest, refuse, shown
from jzero.deepspeed._rules import ACCUMULATE, LINEAR, LR, MICRO, ROWS

_MAX_LR, _TOTAL = "scheduler.params.warmup_max_lr", "scheduler.params.total_num_steps"
_BETAS, _WARMUP = "optimizer.params.betas", "scheduler.params.warmup_num_steps"
_STEPS = "num_training_steps", "max_steps"
_SIZES = MICRO, ACCUMULATE, ROWS


@dataclasses.dataclass(frozen=True)
class _Fill:
    """The keys that arguments fill, and the value of these, if all of the arguments are given.

    `default` is the Trainer's, for where its own command line says nothing.
    """

    names: tuple[str, ...]
    keys: tuple[str, ...]
    value: Callable[..., Any] = lambda x: x
    default: Any = None


# As `transformers.integrations.deepspeed` has them.
_FILLS = (
    _Fill(("per_device_train_batch_size",), (MICRO,), default=8),
    *(_Fill((key,), (key,), default=1 if key == ACCUMULATE else None) for key in _SIZES),
    _Fill(("max_grad_norm",), ("gradient_clipping",), default=1.0),
    _Fill(("learning_rate",), (LR, _MAX_LR), default=5e-5),
    _Fill(("weight_decay",), ("optimizer.params.weight_decay",), default=0.0),
    _Fill(("adam_beta1", "adam_beta2"), (_BETAS,), lambda *betas: list(betas), (0.9, 0.999)),
    _Fill(("adam_epsilon",), ("optimizer.params.eps",), default=1e-8),
    _Fill(("warmup_steps",), (_WARMUP,), default=0),
    *(_Fill(("warmup_ratio", steps), (_WARMUP,), lambda x, n: math.ceil(x * n)) for steps in _STEPS),
    *(_Fill((steps,), (_TOTAL,)) for steps in _STEPS),
    *(_Fill((half,), (f"{half}.enabled",)) for half in ("bf16", "fp16")),
    *(_Fill(("hidden_size",), (f"zero_optimization.{key}",), value) for key, value in {
        "reduce_bucket_size": lambda h: h * h, "stage3_prefetch_bucket_size": lambda h: int(0.9 * h * h),
        "stage3_param_persistence_threshold": lambda h: 10 * h}.items()),
)  # fmt: skip
# Of the Trainer's other arguments: where a training with jzero has what they say.
_ELSEWHERE = {
    "lr_scheduler_type": "the section scheduler sets it: WarmupDecayLR is linear, WarmupCosineLR cosine",
    "num_train_epochs": "your loop sets it; max_steps fills total_num_steps",
    "optim": "the section optimizer sets it",
    "tf32": "jax.config.update('jax_default_matmul_precision', 'tensorfloat32') sets it",
    "gradient_checkpointing": "jax.checkpoint around each layer of the model sets it",
    "torch_compile": "XLA compiles every step",
    "seed": "the key passed to init sets it",
    "per_device_eval_batch_size": "your loop sets it, with jzero.shard_eval_step",
    **dict.fromkeys(("output_dir", "save_steps", "save_strategy", "save_total_limit"),
                    "jzero.Checkpointer sets it"),
    **dict.fromkeys(("logging_steps", "report_to"), "your loop sets it; steps_per_print is in the program"),
}  # fmt: skip
_NAMES = {name for fill in _FILLS for name in fill.names}
_is_number = KINDS["number"][1]


def filled(given: Mapping[str, Any], auto: Any) -> dict[str, Any]:
    """A configuration with what is given, or follows from other keys, in place of "auto".

    Raises:
      OptionError: names in `auto` that fill nothing, or that contradict the configuration; all of them.
    """
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
    found += [_unused(name, given) for name in unused]
    edit = "Correct or drop them."
    if "scheduler" not in given and {"warmup_steps", "warmup_ratio", *_STEPS} & {*unused}:
        edit = f"Without a scheduler the learning rate is constant. {LINEAR} Or drop them."
    refuse(
        found, 'Each fills an "auto" of the configuration, or is the same as what it says.', edit
    )
    rates = result.get(LR), result.get(_MAX_LR)
    for key, x in zip((_MAX_LR, LR, "scheduler.params.warmup_min_lr"), (*rates, 0), strict=True):
        if result.get(key) == AUTO and _is_number(x):
            result[key] = x
    return result


def check(c: Config, auto: Mapping[str, Any] | None) -> None:
    """No key that says what is trained is "auto" any more.

    Raises:
      OptionError: some are; it names all, and what to write.
    """
    missing = list(_missing(c))
    fills = [next((f for f in _FILLS if key in f.keys), _Fill((key,), ())) for key in missing]
    given = {name: repr(value) for name, value in (auto or {}).items() if value is not None}
    for fill in fills:
        defaults = fill.default if isinstance(fill.default, tuple) else (fill.default,)
        for name, value in zip(fill.names, defaults, strict=False):
            given.setdefault(name, "..." if value is None else str(value))
    values = ", ".join(f'"{name}": {value}' for name, value in given.items())
    known = any(fill.default is not None for fill in fills)
    refuse(
        [f'{key} is "auto"' for key in missing],
        "The Hugging Face Trainer fills it from its own arguments, which are not in the file.",
        f"Write auto={{{values}}}, with the values of your run."
        + " Those that you did not pass are the Trainer's defaults." * known)  # fmt: skip


def _named_values(auto: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(auto, Mapping | None) or not all(isinstance(x, str) for x in auto or ()):
        refuse([f"auto is {_json.shown(auto)}"], "It has values by names of the Trainer or of DeepSpeed.",
               'Write auto={"learning_rate": 1e-4}.')  # fmt: skip
    values = {name: value for name, value in (auto or {}).items() if value is not None}
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
) -> Iterator[tuple[tuple[str, ...], str, Any, bool]]:
    """Names, the key that they fill, its value, and whether the configuration may have another one."""
    for fill in _FILLS:
        if all(name in values for name in fill.names):
            value = fill.value(*(values[name] for name in fill.names))
            is_guess = fill.names == ("hidden_size",)
            yield from ((fill.names, key, value, is_guess) for key in fill.keys)
    for name, value in values.items():
        keys = [name] if name in given else _called(name, given)
        if name not in _NAMES and len(keys) == 1:
            yield (name,), keys[0], list(value) if isinstance(value, tuple) else value, False


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
    """The keys that are "auto", and whose value does not follow from others."""
    rows, micro, accumulate = (c.given.get(key) for key in (ROWS, MICRO, ACCUMULATE))
    if {rows, micro} <= {None, AUTO} and AUTO in (rows, micro):
        yield MICRO if micro == AUTO else ROWS
    if accumulate == AUTO and not {None, AUTO}.isdisjoint({rows, micro}):
        yield ACCUMULATE
    for key, value in c.given.items():
        section, _, name = key.rpartition(".")
        row = c.rows.get(key) or c.rows.get(section)
        is_read = key in c.rows or (name == "enabled" and section in c.rows)
        if value == AUTO and row is not None and is_read and not row.tuning:
            yield key
