# SPDX-License-Identifier: Apache-2.0
"""A translated configuration as a Python program that trains, but for the model and the data."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping
from typing import Any

from jzero.deepspeed._chain import SCHEDULE, Chain
from jzero.deepspeed._expressions import Expression

_COLUMNS = 72  # of a code block in a page
_HEAD = """\
A training: fill in {holes}.

What became of each key of the DeepSpeed configuration:
"""
_MAKE_OPTIMIZER = """\
def make_optimizer():
    raise NotImplementedError("the optimizer of your script, in optax")


"""
_MODEL = """

def init_params(key):
    raise NotImplementedError("the parameters of your model")


def loss_fn(params, batch):
    raise NotImplementedError("the loss of the whole batch")


def batches():
    raise NotImplementedError("{batches}")


def init_fn(key):
    params = init_params(key)
{cast}    return params, tx.init(params)


def step_fn(state, batch):
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return (params, opt_state), {{"loss": loss}}


"""
_CAST = """\
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
"""
_MAIN = """

def main():
    state = train_step.init(init_fn, jax.random.key(0))
    for step, batch in enumerate(batches()):
        state, metrics = train_step(state, batch)
        if step % {every} == 0:
            print(f"step {{step}}: loss {{metrics['loss']:.4f}}")


if __name__ == "__main__":
    main()"""


def program(
    options: Mapping[str, Any], chain: Chain, rows: int | None, mesh_axes: Mapping[str, int],
    notes: Mapping[str, str], half: bool, every: int,
) -> str:  # fmt: skip
    """The notes as comments, then the optimizer, the step, and a loop.

    Args:
      options: of `shard_train_step`.
      chain: the optimizer and its schedule.
      rows: of a batch; None if nothing tells.
      mesh_axes: the sizes of the axes that the options name.
      notes: what became of each key.
      half: whether parameters are made bfloat16.
      every: how many steps after another print their loss.
    """
    given = chain.optimizer.value is not None
    assigned = {SCHEDULE: chain.schedule, "tx": chain.optimizer, "batch_size": rows}
    if mesh_axes:
        shape = tuple(mesh_axes.values()), tuple(mesh_axes)
        assigned["mesh"] = Expression(None, "jax.make_mesh", tuple(("", x) for x in shape))
        options = {**options, "mesh": Expression(None, "mesh")}
    arguments = (("", Expression(None, "step_fn")), *options.items())
    body = [
        "" if given else f"\n{_MAKE_OPTIMIZER}",
        *(_line(name, value) for name, value in assigned.items() if value is not None),
        _MODEL.format(batches=f"batches of {rows or 'so many'} rows", cast=_CAST * half),
        _line("train_step", Expression(None, "jzero.shard_train_step", arguments)),
        _MAIN.format(every=every),
    ]
    text = "".join(body)
    holes = "make_optimizer, " * (not given) + "init_params, loss_fn and batches"
    head = "".join(f"# {line}".rstrip() + "\n" for line in _HEAD.format(holes=holes).splitlines())
    imports = "import jax\nimport jax.numpy as jnp\nimport optax\n\nimport jzero"
    return f"{head}{_comments(notes)}\n{imports}\n\n{text}"


def _line(name: str, value: Any) -> str:
    said = value.python(before=f"{name} = ") if isinstance(value, Expression) else repr(value)
    return f"{name} = {said}\n"


def _comments(notes: Mapping[str, str]) -> str:
    """One for each note; keys of one note that follow one another share it."""
    lines: list[str] = []
    for note, keys in itertools.groupby(notes, key=lambda key: notes[key]):
        lines += textwrap.wrap(
            f"{', '.join(keys)}: {note}", _COLUMNS, initial_indent="# ", subsequent_indent="#     ",
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
    return "".join(f"{line}\n" for line in lines)
