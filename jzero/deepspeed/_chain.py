# SPDX-License-Identifier: Apache-2.0
"""The optax chain: clipping, the optimizer and its schedule, and masters around them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import optax

from jzero.deepspeed import _schedules
from jzero.deepspeed._config import Config, Form
from jzero.deepspeed._python import SCHEDULE, Expression, called, name_of
from jzero.deepspeed._rules import CLIP, COSINE, CYCLES, LR, OVERFLOW, Made
from jzero.tracing._precision import master_weights

_MOMENTA = "cycle_min_mom", "cycle_max_mom", "decay_mom_rate"
_NEVER = 2**31 - 1  # so many steps in a row that are not finite before one is applied all the same


def chain(c: Config) -> tuple[Expression, Expression | None]:
    """What updates parameters, and the schedule of its learning rate, None without a scheduler.

    The chain has no value without an optimizer: the program's own `make_optimizer()` is in it.
    """
    schedule = None if c.scheduler is None else _scheduled(c, c.scheduler, c.scheduler.function)
    parts = [called(optax.clip_by_global_norm, float(c.get(CLIP)))] if c.get(CLIP) else []
    if c.optimizer is None:
        parts += [Expression(None, "make_optimizer", ())]
    else:
        parts += _optimizer(c, c.optimizer, schedule)
    tx = parts[0] if len(parts) == 1 else called(optax.chain, *parts)
    if c.is_half and c.get(OVERFLOW):
        tx = called(optax.apply_if_finite, tx, _NEVER)
    return called(master_weights, tx) if c.is_half else tx, schedule


def _scheduled(c: Config, scheduler: Form, function: Callable[..., Any]) -> Expression:
    """A schedule, with those parameters of the scheduler, and the learning rate, that it takes."""
    given = {"lr": c.get(LR), **c.arguments("scheduler", scheduler)}
    takes = inspect.signature(function).parameters
    return called(function, **{name: x for name, x in given.items() if name in takes})


def _sets_betas(c: Config) -> bool:
    return bool(c.get(CYCLES)) and c.optimizer is not None and "betas" in c.optimizer.takes


def _optimizer(c: Config, form: Form, schedule: Expression | None) -> list[Expression]:
    """The optimizer; before it decay, if that is added to the gradients."""
    function, given, decay = _function(c, form)
    rate = given.pop("lr")
    if "betas" in given:
        b1, b2 = given.pop("betas")
        given = {"b1": b1, "b2": b2, **given}
    if c.scheduler is not None and _sets_betas(c):
        # DeepSpeed's OneCycle sets the second beta, too.
        given |= {"b1": _scheduled(c, c.scheduler, _schedules.one_cycle_momentum), "b2": 0.99}
        function = called(optax.inject_hyperparams, function)
    if schedule is not None:
        rate = Expression(schedule.value, SCHEDULE)
    before = [called(optax.add_decayed_weights, decay)] if decay else []
    return [*before, called(function, rate, **given)]


def _function(c: Config, form: Form) -> tuple[Any, dict[str, Any], float]:
    """An optimizer, its arguments, and the decay that is added to gradients."""
    function, is_l2, given = form.function, form.is_l2, c.arguments("optimizer", form)
    if function is optax.adamw:
        # In DeepSpeed Adam is AdamW unless it says otherwise; only torch's AdamW decays by default.
        torch, decoupled = given.pop("torch_adam"), given.pop("adam_w_mode", True)
        given.setdefault("weight_decay", 0.01 if torch and decoupled else 0.0)
        if not decoupled:
            function, is_l2 = optax.adam, True
    if not given.get("momentum", True):
        given = {key: x for key, x in given.items() if key not in ("momentum", "nesterov")}
    return function, given, given.pop("weight_decay") if is_l2 else 0.0


def optimizer_type(c: Config, key: str) -> Made:
    assert c.optimizer is not None
    function, _, decay = _function(c, c.optimizer)
    return " ".join(filter(None, [
        f"{name_of(function)}, with DeepSpeed's defaults for what is not given.",
        "In DeepSpeed Adam is AdamW, unless adam_w_mode is false."
        * (c.get(key).lower() == "adam" and function is optax.adamw),
        "Decay is added to the gradients, before the moments." * bool(decay),
        "The scheduler sets the learning rate." * (c.scheduler is not None),
        "OneCycle sets both betas, the second to 0.99, unless cycle_momentum is false." * _sets_betas(c),
        "It has no betas for OneCycle to set." * bool(c.get(CYCLES) and not _sets_betas(c)),
    ])), {}  # fmt: skip


def scheduler_type(c: Config, key: str) -> Made:
    assert c.scheduler is not None
    return f"{c.scheduler.name}, by the number of updates made before.", {}


def argument(c: Config, key: str) -> Made:
    """A parameter of the optimizer or the scheduler; each may overrule those of the other."""
    section, _, name = key.partition(".params.")
    why = ""
    if key == LR and c.scheduler is not None and c.scheduler.name != COSINE:
        why = "the scheduler sets the learning rate."
    elif name == "betas" and _sets_betas(c):
        why = "OneCycle sets them."
    elif name in _MOMENTA and not _sets_betas(c):
        why = "the optimizer has no betas." if c.get(CYCLES) else "cycle_momentum is false."
    said = f"{c.get(key)!r}, of {c.get(f'{section}.type')}."
    return f"Without effect: {why}" if why else said, {}
