# SPDX-License-Identifier: Apache-2.0
"""Exceptions, and the one form that their messages have.

A message says *who* failed, *what* was found (every failing leaf, one a line), the *rule*, and *what to do*.
Names in it may come from files that others wrote. So what a terminal would obey or not show is escaped, here.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

# What the user called, for messages of code that several functions share.
_caller: contextvars.ContextVar[str | None] = contextvars.ContextVar("caller", default=None)
STEP, EVAL_STEP = "shard_train_step", "shard_eval_step"
_PACKAGE = str(Path(__file__).parent) + os.sep


class JzeroError(Exception):
    """Base of every error that jzero raises on purpose."""


class OptionError(JzeroError, ValueError):
    """An option of `shard_train_step` or `estimate` that cannot be obeyed."""


class MeshError(JzeroError, ValueError):
    """A mesh, or axis names, that the step cannot run on."""


class StateError(JzeroError, ValueError):
    """A state that is not what the step or its plan needs."""


class BatchError(JzeroError, ValueError):
    """An argument other than the state that cannot be sharded over the devices."""


class StepError(JzeroError, TypeError):
    """A train step that jzero cannot shard exactly; the message names the edit that makes it possible."""


class CheckpointError(JzeroError, ValueError):
    """A checkpoint that cannot be written, or cannot be restored as asked."""


class ProcessError(JzeroError, RuntimeError):
    """Processes of one run that do not do the same, or that are missing."""


class MismatchError(JzeroError, AssertionError):
    """An assertion of `jzero.testing` that does not hold."""


@contextlib.contextmanager
def called_as(who: str) -> Iterator[None]:
    """Within it messages about `shard_train_step` name `who` instead."""
    token = _caller.set(who)
    try:
        yield
    finally:
        _caller.reset(token)


def message(
    who: str, found: str | Sequence[str], rule: str, edit: str, things: str = "leaves",
    shown: int = 20,
) -> str:  # fmt: skip
    """Joins the four parts of a message. Several findings become one line each, the first `shown` of them."""
    who = (_caller.get() or who) if who == STEP else who
    if isinstance(found, str):
        return escaped(f"{who}: {found}. {rule} {edit}".rstrip())
    if len(found) == 1:
        return escaped(f"{who}: {found[0]}. {rule} {edit}".rstrip())
    more = len(found) - len(found[:shown])
    lines = "\n".join(
        f"  - {line}" for line in [*found[:shown], *[f"and {more} more"] * bool(more)]
    )
    return escaped(f"{who}: {len(found)} {things} fail:\n{lines}\n{rule} {edit}".rstrip())


def warn(text: str) -> None:
    """Warns at the line of the user's code that called jzero; Python shows each text once per line."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level + 1)


def escaped(text: str, keep: str = "\n\t") -> str:
    """Escapes what a terminal obeys or does not show (ESC, a change of direction)."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def named(name: str, most: int = 200) -> str:
    """A name chosen by somebody else, as one line of bounded length for a message."""
    name = escaped(name, keep="")
    return name if len(name) <= most else f"{name[: most // 2]}...{name[-most // 2 :]}"


# Rule and edit for a state that was consumed.
CONSUMED = (
    "A step consumes its state, and so may one that was interrupted or failed.",
    "Use the state that the last step returned, or restore the last checkpoint. To keep an old state, copy "
    "it before the step, jax.tree.map(jnp.copy, state), or, if none of it is in host memory or files, make "
    "the step with donate=False.",
)


def a_type(value: object) -> str:
    """`an int`: what something is, with its article."""
    name = type(value).__name__
    return f"{'an' if name.lower().startswith((*'aeio', 'nd')) else 'a'} {name}"


def counted(num: int, one: str, many: str) -> str:
    """`1 leaf`, `2 leaves`."""
    return f"{num} {one if num == 1 else many}"


def first_of(names: Sequence[str], most: int = 3) -> str:
    return ", ".join([*names[:most], *["..."] * (len(names) > most)])


def describe_leaf(path: str, shape: Sequence[int], dtype: object) -> str:
    """`state.params['w'] float32[16,32]`: how every message names a leaf."""
    dims = ",".join(str(size) for size in shape)
    return f"{path} {dtype}[{dims}]"
