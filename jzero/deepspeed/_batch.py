# SPDX-License-Identifier: Apache-2.0
"""The batch of a DeepSpeed configuration: rows of a step, of a microbatch, microbatches and devices."""

from __future__ import annotations

import dataclasses

from jzero.deepspeed._settings import Settings, refuse

ROWS = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATE = "gradient_accumulation_steps"
_RULE = f"In DeepSpeed, {ROWS} = {MICRO} * {ACCUMULATE} * devices."


@dataclasses.dataclass(frozen=True)
class BatchSizes:
    """How a step's rows are worked through.

    Attributes:
      rows: of the whole batch, None if neither the configuration nor `devices` tell.
      accumulate: microbatches on each device.
    """

    rows: int | None
    accumulate: int


def batch(settings: Settings, devices: int | None) -> BatchSizes:
    """The sizes, from those that are given. It tells the settings what became of them.

    Raises:
      OptionError: they contradict each other, or more must be known.
    """
    rows, micro, accumulate = (_size(settings, key) for key in (ROWS, MICRO, ACCUMULATE))
    if rows is None and micro is None:
        raise refuse(
            f"neither {ROWS} nor {MICRO} is given", _RULE,
            'Write one of them, or auto={"train_batch_size": 64}.')  # fmt: skip
    if rows is not None and micro is not None and accumulate is None:
        accumulate = _quotient(rows, micro, devices)
    accumulate = 1 if accumulate is None else accumulate
    if rows is None and devices is not None and micro is not None:
        rows = micro * accumulate * devices
    _check(rows, micro, accumulate, devices)
    found = BatchSizes(rows, accumulate)
    _note(settings, found)
    return found


def _size(settings: Settings, key: str) -> int | None:
    size = settings.get(key)
    if size == 0:
        raise refuse(f"{key} is 0", "It is a whole number from 1.", "Correct it.")
    return None if size is None else int(size)


def _quotient(rows: int, micro: int, devices: int | None) -> int:
    if devices is None:
        raise refuse(
            f"{ROWS} and {MICRO} are given, and not {ACCUMULATE}", _RULE,
            "Say how many devices there are with devices=8.")  # fmt: skip
    return max(1, rows // (micro * devices))


def _check(rows: int | None, micro: int | None, accumulate: int, devices: int | None) -> None:
    """Where all of them are known, or the rest is no whole number."""
    if rows is None:
        return
    parts = {MICRO: micro, ACCUMULATE: accumulate, "devices": devices}
    known = {name: size for name, size in parts.items() if size is not None}
    product = 1
    for size in known.values():
        product *= size
    if rows != product if len(known) == len(parts) else rows % product:
        said = ", ".join(f"{name} {size}" for name, size in known.items())
        raise refuse(f"{ROWS} is {rows}, with {said}", _RULE, "Correct one of them.")


def _note(settings: Settings, found: BatchSizes) -> None:
    rows = "so many rows" if found.rows is None else f"{found.rows} rows"
    texts = {
        ROWS: f"Give each call of the step the whole batch, {rows}.",
        MICRO: "Follows from the batch, the devices and accumulate: jzero cuts the batch itself.",
        ACCUMULATE: f"accumulate={found.accumulate}."
        + " DeepSpeed takes the mean of the microbatches' means; jzero trains the loss of the whole batch."
        * (found.accumulate > 1),
    }
    for key, text in texts.items():
        if key in settings.given:
            settings.note(key, text)
    if ACCUMULATE not in settings.given and found.accumulate > 1:
        settings.note(ACCUMULATE, f"Follows from the sizes: {texts[ACCUMULATE]}")
