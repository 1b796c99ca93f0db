# SPDX-License-Identifier: Apache-2.0
"""Keys that become options of `shard_train_step`: the stage, what rests where, and dtypes on the wire."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jzero.deepspeed import _offloads
from jzero.deepspeed._expressions import Expression
from jzero.deepspeed._settings import Settings, refuse

_ZERO = "zero_optimization"
_WIRE = "communication_data_type"
_DTYPES = {
    "fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16",
    "fp16": "bfloat16", "float16": "bfloat16",  # Gradients have no loss scale here.
}  # fmt: skip
_INSTEAD = (
    " bfloat16 in place of float16: without a loss scale, small gradients would be 0 in float16."
)
_LOSS_TOO = " The loss that the step returns is added up in it, too, and has its few digits."


def options(settings: Settings, accumulate: int) -> dict[str, Any]:
    """The options, values or expressions, and what became of their keys.

    Raises:
      OptionError: keys that contradict each other, or cannot be obeyed.
    """
    stage = int(settings.get(f"{_ZERO}.stage", 0))
    if stage > 3:
        raise refuse(f"{_ZERO}.stage is {stage}", "Stages are 0, 1, 2 and 3.", "Correct it.")
    found: dict[str, Any] = {"stage": stage}
    settings.note(
        f"{_ZERO}.stage",
        ("" if f"{_ZERO}.stage" in settings.given else "Missing, as if 0 in DeepSpeed: ")
        + f"stage={stage}."
        + " Stage 1 communicates the same, and divides optimizer state by the devices."
        * (stage == 0),
    )
    if accumulate > 1:
        found["accumulate"] = accumulate
    found.update(_offloads.policies(settings, stage))
    found.update(_prefetch(settings, stage, "offload_params" in found))
    found.update(_dtypes(settings, accumulate))
    found.update(_codes(settings, stage))
    return found


def _codes(settings: Settings, stage: int) -> dict[str, Any]:
    """ZeRO++'s quantised collectives."""
    found: dict[str, Any] = {}
    for name, option, dtype, what in (
        ("zero_quantized_weights", "gather_dtype", "int8", "of weights that passes gather"),
        ("zero_quantized_gradients", "reduce_dtype", "int4", "of gradients, one mesh axis after the other"),
    ):  # fmt: skip
        key = f"{_ZERO}.{name}"
        if key not in settings.given:
            continue
        if not settings.get(key):
            settings.note(key, "Off, as in jzero.")
            continue
        if stage < 3:
            raise refuse(
                f"{key} is true, and {_ZERO}.stage is {stage}", "It is a part of stage 3 in DeepSpeed.",
                "Use stage 3, or set it to false."
            )  # fmt: skip
        if option == "reduce_dtype" and _WIRE in settings.given:
            raise refuse(
                f"{key} is true, with {_WIRE} {settings.get(_WIRE)!r}",
                "Gradients travel in one of the two.", "Drop one."
            )  # fmt: skip
        found[option] = Expression(getattr(jnp, dtype), f"jnp.{dtype}")
        settings.note(key, f"{option}=jnp.{dtype}: codes with a scale for each block, {what}.")
    return found


def _prefetch(settings: Settings, stage: int, streams: bool) -> dict[str, Any]:
    key = f"{_ZERO}.stage3_prefetch_bucket_size"
    if key not in settings.given:
        return {}
    elements = settings.get(key)
    if elements is None:
        settings.note(key, "Not set: prefetch_bytes is 256 MiB by default.")
    elif stage < 3:
        settings.note(key, f"Without effect at stage {stage}: nothing is gathered ahead.")
    elif streams:
        settings.note(key, "Not set: PinnedHost(device_bytes=...) bounds what is fetched ahead.")
    else:
        size = 2 if settings.is_half else 4
        settings.note(
            key, f"prefetch_bytes={int(elements) * size}: so many elements of {size} bytes."
        )
        return {"prefetch_bytes": int(elements) * size}
    return {}


def _dtypes(settings: Settings, accumulate: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    sums = "data_types.grad_accum_dtype"
    if _WIRE in settings.given:
        found["reduce_dtype"] = _dtype(settings, _WIRE)
        text = f"reduce_dtype={found['reduce_dtype'].name}, of gradients on the way."
        settings.note(_WIRE, text + _INSTEAD * _is_half(settings, _WIRE))
    if sums in settings.given:
        dtype = _dtype(settings, sums)
        if accumulate > 1:
            found["accumulate_dtype"] = dtype
        text = f"accumulate_dtype={dtype.name}." + _INSTEAD * _is_half(settings, sums)
        text += _LOSS_TOO * (dtype.name != "jnp.float32")
        settings.note(sums, text if accumulate > 1 else "Without effect: there is one microbatch.")
    return found


def _is_half(settings: Settings, key: str) -> bool:
    return str(settings.get(key)).lower() in ("fp16", "float16")


def _dtype(settings: Settings, key: str) -> Expression:
    name = _DTYPES.get(str(settings.get(key)).lower())
    if name is None:
        raise refuse(
            f"{key} is {settings.get(key)!r}", "It is 'fp32', 'bf16' or 'fp16'.", "Correct it."
        )
    return Expression(getattr(jnp, name), f"jnp.{name}")
