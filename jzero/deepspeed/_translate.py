# SPDX-License-Identifier: Apache-2.0
"""`from_deepspeed`: a DeepSpeed configuration as options, an optax chain and notes."""

from __future__ import annotations

import dataclasses
import operator
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import optax

from jzero._errors import called_as
from jzero._groups import grouped
from jzero._shard_train_step import shard_train_step
from jzero.deepspeed import _python, _read, _rules
from jzero.deepspeed._python import called, value_of
from jzero.deepspeed._table import KINDS, WHO, Config, refuse


@dataclasses.dataclass(frozen=True)
class Translation:
    """What a DeepSpeed configuration says, in terms of jzero and optax.

    Attributes:
      options: of `shard_train_step`, by name.
      optimizer: gradient clipping, the optimizer and its schedule, and `jzero.master_weights` around them if
        parameters are bfloat16; None if the configuration has no optimizer.
      schedule: of the learning rate, a function of how many updates were made before; None if there is no
        scheduler. `optimizer` has it already.
      batch_size: rows of the whole batch, of all devices and microbatches; None if unknown.
      mesh_axes: the sizes of the axes that `options` name, `{"node": 8, "local": 8}`, for `jax.make_mesh`;
        empty if they name none.
      notes: what became of each key, by its dotted name, in the order of the configuration; last those that
        are missing and would change what is trained.
    """

    options: Mapping[str, Any]
    optimizer: optax.GradientTransformation | None
    schedule: optax.Schedule | None
    batch_size: int | None
    mesh_axes: Mapping[str, int]
    notes: Mapping[str, str]
    _python: str = dataclasses.field(repr=False)

    def python(self) -> str:
        """The translation as a Python program that trains, with the notes as comments.

        You write parameters, loss and data, and the optimizer if the configuration has none.
        """
        return self._python

    def __str__(self) -> str:
        return "\n".join(f"{key}: {note}" for key, note in self.notes.items())


def from_deepspeed(
    config: Mapping[str, Any] | str | os.PathLike[str], *, devices: int | None = None,
    auto: Mapping[str, Any] | None = None,
) -> Translation:  # fmt: skip
    """Translates a DeepSpeed configuration.

    Every key becomes an option, a part of the optimizer, or a note that says why there is nothing to set or
    where it belongs; or it is refused by name, and then nothing is translated. Nothing is dropped silently.

    >>> import jzero
    >>> translated = jzero.from_deepspeed({
    ...     "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4,
    ...     "zero_optimization": {"stage": 2, "overlap_comm": True},
    ...     "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "gradient_clipping": 1.0}, devices=8)
    >>> dict(translated.options), translated.batch_size
    ({'stage': 2, 'microbatches': 2}, 64)
    >>> translated.notes["zero_optimization.overlap_comm"]
    'Nothing to set: XLA runs collectives beside compute by itself.'

    Then `tx = translated.optimizer` is for the step that you write, and the step is
    `jzero.shard_train_step(step_fn, **translated.options)`. If there are `mesh_axes`, it needs also
    `mesh=jax.make_mesh(tuple(mesh_axes.values()), tuple(mesh_axes))`. `translated.python()`, or
    `jzero deepspeed ds_config.json`, has it all as a program.

    Sharp edges: keys are those of DeepSpeed 0.19. What is trained is what `jax.jit` trains with the loss of
    the whole batch; DeepSpeed's is the mean of the means of microbatches and devices, which differs if these
    are over different numbers (of tokens that are not padding, for example).

    Args:
      config: the configuration as a dict, or the path of its JSON file.
      devices: data-parallel devices; needed only where sizes in the configuration follow from it (a batch and
        a microbatch without gradient_accumulation_steps; hpZ and MiCS), and checked against its batch sizes.
      auto: what the Hugging Face Trainer would write where the configuration says "auto", by its names
        (`learning_rate`, `per_device_train_batch_size`, `max_grad_norm`, `warmup_ratio`, `bf16`) or by
        DeepSpeed's (`optimizer.params.lr`, `lr`). What follows from other keys needs none.

    Returns:
      A `Translation`.

    Raises:
      OptionError: the file is missing or is no JSON object; unknown keys; "auto" where a value matters and
        `auto` has none; names in `auto` that fill nothing, or contradict; values of another type; what jzero
        cannot obey; keys that contradict each other. It names the keys.

    Reference:
      DeepSpeed's documentation, "DeepSpeed Configuration JSON"; docs/from-deepspeed.md has all keys.
    """
    devices = _checked(devices)
    c = _read.checked(_read.filled(_read.read(config), auto), devices)
    _read.check_auto(c, auto)
    _rules.check(c)
    options, notes = _made(c)
    tx, schedule = _rules.chain(c)
    values = {name: value_of(x) for name, x in options.items()}
    with called_as(WHO):
        shard_train_step(**values)  # Checks them together; it makes no step without a function.
    rows, mesh_axes = _rules.batch(c)[0], _rules.mesh_axes(c)
    every = c.get("steps_per_print")
    every = int(every) if KINDS["count"][1](every) else 10  # Accelerate writes Infinity.
    return Translation(
        MappingProxyType(values), value_of(tx), value_of(schedule), rows,
        MappingProxyType(mesh_axes), MappingProxyType(notes),
        _python.program(options, tx, schedule, rows, mesh_axes, notes, c.is_half, every),
    )  # fmt: skip


def _made(c: Config) -> tuple[dict[str, Any], dict[str, str]]:
    """Options, and notes in the order of the configuration; those of missing keys come last."""
    options, notes = {"stage": c.stage}, dict[str, str]()
    missing = [key for key, row in c.rows.items() if "missing" in row.flags and key not in c.given]
    for key in [*(key for key in c.given if key in c.rows), *missing]:
        row = c.rows[key]
        note = row.note or "Empty." * (c.get(key) in ({}, []))
        if row.rule:
            made = getattr(_rules, row.rule)(c, key)
            note, more = made if isinstance(made, tuple) else (made, {})
            options |= more
        if note:
            notes[key] = note
    return grouped(options, called), notes


def _checked(devices: Any) -> int | None:
    if devices is None:
        return None
    try:
        num = 0 if isinstance(devices, bool) else operator.index(devices)
    except TypeError:
        num = 0
    refuse([f"devices={devices!r}"] * (num < 1), "It is how many devices share the batch, an int from 1.",
           "Write devices=8.")  # fmt: skip
    return num
