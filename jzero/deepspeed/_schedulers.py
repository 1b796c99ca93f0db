# SPDX-License-Identifier: Apache-2.0
"""The section `scheduler` of a DeepSpeed configuration, as one of `_schedules.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jzero import _json
from jzero.deepspeed import _schedules
from jzero.deepspeed._expressions import Expression, called
from jzero.deepspeed._keys import Key
from jzero.deepspeed._parameters import parameters
from jzero.deepspeed._settings import Settings, nearest, refuse

_SECTION = "scheduler"
_RESUMED = Key(
    "number", accepts=(-1,), refused="A schedule counts the updates of the optimizer's state."
)
_RATE = Key("number")
_COUNT = Key("int")
_STEPS = Key("int", least=1)
_WARMUP = {
    "warmup_num_steps": _COUNT,  # Below 2 counts as 2.
    "warmup_type": Key("text", accepts=("log", "linear"), refused="It is 'log' or 'linear'."),
    "last_batch_iteration": _RESUMED,
}
_WARMUP_RATES = {"warmup_min_lr": _RATE, "warmup_max_lr": _RATE}
_TOTAL = {"total_num_steps": Key("int", least=1, required=True)}
_CYCLE = {
    "cycle_first_step_size": Key("number", least=1), "cycle_second_step_size": _RATE,
    "cycle_first_stair_count": _COUNT, "cycle_second_stair_count": _COUNT,
    "decay_step_size": _RATE,
}  # fmt: skip
_CYCLE_RATES = {
    "cycle_min_lr": Key("number", required=True), "cycle_max_lr": Key("number", required=True),
    "decay_lr_rate": _RATE,
}  # fmt: skip
_CYCLE_MOMENTA = {"cycle_min_mom": _RATE, "cycle_max_mom": _RATE, "decay_mom_rate": _RATE}
MOMENTA = tuple(f"scheduler.params.{name}" for name in _CYCLE_MOMENTA)


@dataclasses.dataclass(frozen=True)
class _Kind:
    function: Callable[..., Any]
    takes: dict[str, Key]


_KINDS = {
    "LRRangeTest": _Kind(_schedules.lr_range_test, {
        "lr_range_test_min_lr": _RATE, "lr_range_test_step_size": _STEPS, "lr_range_test_step_rate": _RATE,
        "lr_range_test_staircase": Key("bool"), "last_batch_iteration": _RESUMED}),
    "OneCycle": _Kind(_schedules.one_cycle, {
        **_CYCLE_RATES, **_CYCLE, "cycle_momentum": Key("bool"), **_CYCLE_MOMENTA,
        "last_batch_iteration": _RESUMED}),
    "WarmupLR": _Kind(_schedules.warmup_lr, {**_WARMUP_RATES, **_WARMUP}),
    "WarmupDecayLR": _Kind(_schedules.warmup_decay_lr, {**_TOTAL, **_WARMUP_RATES, **_WARMUP}),
    "WarmupCosineLR": _Kind(_schedules.warmup_cosine_lr, {
        **_TOTAL, "warmup_min_ratio": _RATE, "cos_min_ratio": _RATE, **_WARMUP}),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Scheduled:
    """What a scheduler sets.

    Attributes:
      rate: the learning rate, an optax schedule.
      of_lr: whether that depends on the optimizer's own.
      first_beta: the first beta, a schedule too; None if the optimizer's own stays.
    """

    rate: Expression
    of_lr: bool
    first_beta: Expression | None = None


def scheduled(settings: Settings, lr: float | None) -> Scheduled | None:
    """The section as schedules; None if there is none.

    Args:
      settings: the configuration; it is told what became of each key of the section.
      lr: of the optimizer; None if the configuration has none.

    Raises:
      OptionError: another scheduler, or parameters that it does not take.
    """
    if _SECTION not in settings.given:
        return None
    name = settings.get("scheduler.type")
    if name not in _KINDS:
        found = (
            "no type"
            if name is None
            else f"the type {_json.shown(name)}{nearest(name, list(_KINDS))}"
        )
        raise refuse(
            f"scheduler has {found}", f"jzero has {', '.join(_KINDS)}.",
            "Write one of them, or drop the section and give your optimizer an optax schedule.")  # fmt: skip
    kind = _KINDS[name]
    given = parameters(settings, _SECTION, name, kind.takes)
    if name == "WarmupCosineLR":
        given = {"lr": _rate_of(lr), **given}
    if name == "WarmupLR" and "warmup_max_lr" not in given:
        raise refuse(
            "scheduler.params has no warmup_max_lr",
            "It is the optimizer's lr in new versions of DeepSpeed, and 0.001 in old ones.",
            "Write the one you mean.")  # fmt: skip
    cycles = given.pop("cycle_momentum", True) and name == "OneCycle"
    momenta = {key: given.pop(key) for key in _CYCLE_MOMENTA if key in given}
    function = f"jzero.deepspeed.{kind.function.__name__}"
    settings.note("scheduler.type", f"{function}, by the number of updates made before.")
    first_beta = None
    if cycles:
        shape = {key: x for key, x in given.items() if key in _CYCLE}
        first_beta = called(
            "jzero.deepspeed.one_cycle_momentum", _schedules.one_cycle_momentum, **momenta, **shape
        )
    else:
        settings.overrule(MOMENTA, "cycle_momentum is false.")
    return Scheduled(called(function, kind.function, **given), "lr" in given, first_beta)


def _rate_of(lr: float | None) -> float:
    if lr is None:
        raise refuse(
            "scheduler is WarmupCosineLR, and there is no optimizer", "It scales the optimizer's lr.",
            "Write the section optimizer, or drop scheduler.")  # fmt: skip
    return lr
