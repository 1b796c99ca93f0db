# SPDX-License-Identifier: Apache-2.0
"""Values together with the Python that makes them, and the program that is printed of them."""

from __future__ import annotations

import itertools
import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

SCHEDULE = "schedule"  # the variable of the program
_COLUMNS = 72
_MAKE_OPTIMIZER = """
def make_optimizer():
    raise NotImplementedError("the optimizer of your script, in optax")


"""
_CAST = """\
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
"""


class Expression(NamedTuple):
    """A name in Python, or a call of one, and its value."""

    value: Any
    name: str
    # Of a call, each with its keyword, or ""; None for a name.
    arguments: tuple[tuple[str, Any], ...] | None = None


def called(function: Any, *args: Any, **kwargs: Any) -> Expression:
    """The call of a function, or of one that an expression returns; no value if an argument has none."""
    pairs = (*(("", x) for x in args), *kwargs.items())
    value = None
    if not any(isinstance(x, Expression) and x.value is None for _, x in pairs):
        given = {key: value_of(x) for key, x in kwargs.items()}
        value = value_of(function)(*map(value_of, args), **given)
    return Expression(value, _python(function), pairs)


def value_of(x: Any) -> Any:
    return x.value if isinstance(x, Expression) else x


def name_of(x: Any) -> str:
    """`optax.adamw`, `jzero.NVMe`, `jnp.int8`: a public function, class or dtype in Python."""
    for package, name in (("jzero.deepspeed", "jzero.deepspeed"), ("jax.numpy", "jnp")):
        if x.__module__.startswith(package):
            return f"{name}.{x.__name__}"
    return f"{x.__module__.partition('.')[0]}.{x.__name__}"


def program(
    options: Mapping[str, Any], tx: Expression, schedule: Expression | None, rows: int | None,
    mesh_axes: Mapping[str, int], notes: Mapping[str, str], is_half: bool, every: int,
) -> str:  # fmt: skip
    own = tx.value is None
    assigned = {SCHEDULE: schedule, "tx": tx, "batch_size": rows}
    if mesh_axes:
        shape = tuple(mesh_axes.values()), tuple(mesh_axes)
        assigned["mesh"] = Expression(None, "jax.make_mesh", tuple(("", x) for x in shape))
        options = {**options, "mesh": Expression(None, "mesh")}
    arguments = (("", Expression(None, "step_fn")), *options.items())
    lines = [_line(name, value) for name, value in assigned.items() if value is not None]
    return Template(Path(__file__).with_name("program.txt").read_text(encoding="utf-8")[:-1]).substitute(
        holes="make_optimizer, " * own + "init_params, loss_fn and batches", comments=_comments(notes),
        assigned="".join([_MAKE_OPTIMIZER * own, *lines]), rows=rows or "so many",
        cast=_CAST * is_half, every=every,
        train_step=_line("train_step", Expression(None, "jzero.shard_train_step", arguments)),
    )  # fmt: skip


def _line(name: str, value: Any) -> str:
    return f"{name} = {_python(value, before=f'{name} = ')}\n"


def _python(x: Any, indent: str = "", before: str = "") -> str:
    """The source of a value, in one line if that fits behind `before`, else with one argument per line."""
    if not isinstance(x, Expression):
        named = name_of(x) if hasattr(x, "__name__") else repr(x)
        return json.dumps(x) if isinstance(x, str) else named
    if x.arguments is None:
        return x.name
    pairs = [(f"{key}=" if key else "", value) for key, value in x.arguments]
    line = f"{x.name}({', '.join(key + _python(value) for key, value in pairs)})"
    if len(indent) + len(before) + len(line) <= _COLUMNS and "\n" not in line:
        return line
    more = f"{indent}    "
    lines = [f"{more}{key}{_python(value, more, key)}," for key, value in pairs]
    return "\n".join([f"{x.name}(", *lines, f"{indent})"])


def _comments(notes: Mapping[str, str]) -> str:
    """Consecutive keys with the same note share it."""
    fill = textwrap.TextWrapper(
        _COLUMNS, initial_indent="# ", subsequent_indent="#     ", break_long_words=False,
        break_on_hyphens=False).fill  # fmt: skip
    shared = itertools.groupby(notes, key=lambda key: notes[key])
    return "".join(fill(f"{', '.join(keys)}: {note}") + "\n" for note, keys in shared)
