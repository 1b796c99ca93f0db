# SPDX-License-Identifier: Apache-2.0
"""The optax chain of a DeepSpeed configuration: clipping, the optimizer, and masters around them."""

from __future__ import annotations

import dataclasses

import optax

from jzero.deepspeed import _optimizers, _schedulers
from jzero.deepspeed._auto import LINEAR
from jzero.deepspeed._expressions import Expression, called
from jzero.deepspeed._schedulers import Scheduled
from jzero.deepspeed._settings import AUTO, Settings, refuse
from jzero.deepspeed._transforms import lamb
from jzero.tracing._precision import master_weights

SCHEDULE = "schedule"  # the name of the learning rate's schedule in what is printed
_OVERFLOW = "bf16.check_grad_overflow"
_HALVES = {"bf16.enabled": "bf16", "fp16.enabled": "fp16"}
_MASTERS = (
    "jzero.master_weights(...) keeps float32 masters in the optimizer's state: make the parameters bfloat16, "
    "`jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)`."
)
_INSTEAD = "bfloat16 in place of float16: it has the range of float32, and needs no loss scale. "
_NEVER = 2**31 - 1  # so many steps in a row that are not finite before one is applied all the same


@dataclasses.dataclass(frozen=True)
class Chain:
    """What updates parameters.

    Attributes:
      optimizer: an optax transformation; without a value if the configuration names none, around the
        program's own `make_optimizer()`.
      schedule: of the learning rate; None if there is no scheduler.
    """

    optimizer: Expression
    schedule: Expression | None


def chain(settings: Settings, on_hosts: bool) -> Chain:
    """The chain, and what became of the keys that it is made of.

    Args:
      settings: the configuration; it is told what became of its keys.
      on_hosts: whether the hosts' processors run it, which take part in no collective.

    Raises:
      OptionError: optimizers, schedulers or precisions that jzero does not translate, or that contradict.
    """
    chosen = _optimizers.chosen(settings)
    scheduled = _schedulers.scheduled(settings, None if chosen is None else chosen.lr)
    parts = _clip(settings, chosen is None)
    schedule = None if scheduled is None else scheduled.rate
    masters = _precision(settings, on_hosts and bool(parts))
    if on_hosts:
        _check_on_hosts(settings, bool(parts), chosen)
    if chosen is None:
        _note_none(settings, scheduled)
        parts += [Expression(None, "make_optimizer", ())]
    else:
        rate = None if schedule is None else Expression(schedule.value, SCHEDULE)
        if schedule is None:
            settings.note(
                "scheduler", f"Missing: the learning rate is constant, {chosen.lr}. {LINEAR}"
            )
        if scheduled is not None:
            _overrule(settings, scheduled, "b1" in chosen.arguments)
        parts += _optimizers.parts(chosen, rate, scheduled)
        written = settings.get("optimizer.type")
        settings.note("optimizer.type", " ".join(_optimizers.sentences(chosen, written, scheduled)))
    tx = parts[0] if len(parts) == 1 else called("optax.chain", optax.chain, *parts)
    if masters and settings.get(_OVERFLOW):
        tx = called("optax.apply_if_finite", optax.apply_if_finite, tx, _NEVER)
    return Chain(called("jzero.master_weights", master_weights, tx) if masters else tx, schedule)


def _check_on_hosts(settings: Settings, clips: bool, chosen: _optimizers.Chosen | None) -> None:
    """What asks in the midst of the update for a sum over the devices' shards."""
    found = []
    if chosen is not None and chosen.function is lamb:
        found = ["the optimizer is Lamb"]
    elif clips and settings.is_half and settings.get(_OVERFLOW):
        found = ["gradient_clipping is on", f"{_OVERFLOW} is true"]
    if found:
        raise refuse(
            [*found, "zero_optimization.offload_optimizer is on"],
            "The hosts update each shard by itself; norms of whole parameters, and whether clipped updates "
            "of all are finite, are sums over the devices.",
            f"Drop {'one of them' if len(found) > 1 else 'offload_optimizer, or use AdamW'}.")  # fmt: skip


def _overrule(settings: Settings, scheduled: Scheduled, has_betas: bool) -> None:
    """What the scheduler sets, the optimizer does not, and the other way round."""
    if not scheduled.of_lr:
        settings.overrule(["optimizer.params.lr"], "the scheduler sets the learning rate.")
    if scheduled.first_beta is not None and has_betas:
        settings.overrule(["optimizer.params.betas"], "OneCycle sets them.")
    if scheduled.first_beta is not None and not has_betas:
        settings.overrule(_schedulers.MOMENTA, "the optimizer has no betas.")


def _clip(settings: Settings, alone: bool) -> list[Expression]:
    key = "gradient_clipping"
    if key not in settings.given:
        settings.note(
            key, "Missing: nothing is clipped. New versions of DeepSpeed clip at 1.0 by default, old ones "
            "did not: write it to say which.")  # fmt: skip
        return []
    norm = settings.get(key)
    if norm < 0:
        raise refuse(
            f"{key} is {norm}", "It is the largest norm of the gradient, or 0.", "Correct it."
        )
    if norm == 0:
        settings.note(key, "Off.")
        return []
    place = "The chain of the program begins with it. " if alone else ""
    settings.note(
        key, f"optax.clip_by_global_norm({float(norm)}). {place}DeepSpeed divides a gradient of a larger "
        "norm by norm + 1e-6, optax by norm.")  # fmt: skip
    return [called("optax.clip_by_global_norm", optax.clip_by_global_norm, float(norm))]


def _precision(settings: Settings, refuses_check: bool) -> bool:
    """Whether parameters rest in bfloat16 and need masters."""
    _autocast(settings)
    on = settings.is_half
    _enabled(settings)
    key = _OVERFLOW
    checks = settings.get(key, False)
    if key in settings.given:
        settings.note(
            key, "optax.apply_if_finite: a step whose gradients are not finite changes nothing."
            if checks and on else "Off.")  # fmt: skip
    elif on:
        settings.note(
            key, "Missing: gradients that are not finite are applied, too. New versions of DeepSpeed skip "
            "such a step by default, old ones did not: " + (
                "jzero cannot with gradient_clipping and offload_optimizer." if refuses_check
                else "write it to say which."))  # fmt: skip
    return on


def _enabled(settings: Settings) -> None:
    """Of the sections that say which 16 bits."""
    on = [key for key in _HALVES if settings.get(key)]
    if len(on) > 1:
        raise refuse(
            [f"{key} is true" for key in on], "Parameters have one dtype.", "Drop one of them."
        )
    for key, dtype in _HALVES.items():
        if key not in settings.given:
            continue
        off = "Off."
        if not on and settings.given[key] == AUTO:
            off = (
                f"Off, as nothing says it: parameters have the dtype that your model makes. {dtype}=True "
                "among auto makes them bfloat16, with float32 masters."
            )
        settings.note(key, _INSTEAD * (dtype == "fp16") + _MASTERS if key in on else off)


def _autocast(settings: Settings) -> None:
    on, dtype = (settings.get(f"torch_autocast.{name}") for name in ("enabled", "dtype"))
    dtype = (dtype or "bfloat16").removeprefix("torch.")
    if on and dtype not in ("bfloat16", "bf16"):
        raise refuse(
            f"torch_autocast.dtype is {dtype!r}", "float16 needs a loss scale, which is part of your step.",
            "Write 'bfloat16'.")  # fmt: skip
    said = "In your model: parameters are float32, and its layers cast them and their inputs to bfloat16."
    for name in ("enabled", "dtype"):
        if f"torch_autocast.{name}" in settings.given:
            settings.note(f"torch_autocast.{name}", said if on else "Off.")
    if on and settings.is_half:
        raise refuse(
            ["torch_autocast.enabled is true",
             *(f"{key} is true" for key in _HALVES if settings.get(key))],
            "The first has float32 parameters, and the second bfloat16 ones with float32 masters.",
            "Drop one of them.")  # fmt: skip


def _note_none(settings: Settings, scheduled: Scheduled | None) -> None:
    wrap = ", which the program wraps in jzero.master_weights" * settings.is_half
    settings.note("optimizer", f"Missing: write your own in optax{wrap}.")
    if scheduled is not None and scheduled.first_beta is not None:
        raise refuse(
            "scheduler is OneCycle with cycle_momentum, and there is no optimizer",
            "It sets the optimizer's betas.",
            "Write cycle_momentum: false, or the section optimizer.")  # fmt: skip
