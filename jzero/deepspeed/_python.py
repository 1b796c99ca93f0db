# SPDX-License-Identifier: Apache-2.0
"""A translated configuration as a Python program."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from jzero.deepspeed._chain import SCHEDULE, Chain
from jzero.deepspeed._expressions import Expression

_COLUMNS = 88
_STEP = """\
def loss_fn(params, batch):
    raise NotImplementedError("the loss of the whole batch")


def step_fn(state, batch):
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), {"loss": loss}
"""
_HEAD = "# What became of each key of the DeepSpeed configuration."
_NO_OPTIMIZER = "tx = None  # The configuration has no optimizer: write yours in optax."


def program(
    options: Mapping[str, Any], chain: Chain, rows: int | None, mesh_axes: Mapping[str, int],
    notes: Mapping[str, str],
) -> str:  # fmt: skip
    """The notes as comments, the optimizer, a step whose loss is missing, and the sharded step."""
    body = "\n".join(_body(options, chain, rows, mesh_axes))
    imports = [
        "import jax",
        *["import jax.numpy as jnp"] * ("jnp." in body),
        "import optax",
        "",
        "import jzero",
    ]
    comments = [line for key, note in notes.items() for line in _comment(f"{key}: {note}")]
    return "\n".join([*imports, "", _HEAD, *comments, "", body])


def _body(
    options: Mapping[str, Any], chain: Chain, rows: int | None, mesh_axes: Mapping[str, int]
) -> Iterator[str]:
    if chain.schedule is not None:
        yield f"{SCHEDULE} = {chain.schedule.python(before=f'{SCHEDULE} = ')}"
    yield (
        _NO_OPTIMIZER
        if chain.optimizer is None
        else f"tx = {chain.optimizer.python(before='tx = ')}"
    )
    if rows is not None:
        yield f"batch_size = {rows}"
    if mesh_axes:
        names = ", ".join(f'"{name}"' for name in mesh_axes)
        yield f"mesh = jax.make_mesh({tuple(mesh_axes.values())}, ({names}))"
    yield f"\n\n{_STEP}\n"
    arguments = [("", Expression(None, "step_fn")), *options.items()]
    arguments += [("mesh", Expression(None, "mesh"))] if mesh_axes else []
    call = Expression(None, "jzero.shard_train_step", tuple(arguments))
    yield f"train_step = {call.python(before='train_step = ')}"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text, _COLUMNS, initial_indent="# ", subsequent_indent="#     ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
