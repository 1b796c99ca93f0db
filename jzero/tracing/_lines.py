# SPDX-License-Identifier: Apache-2.0
"""Where the user wrote an equation: file, line and function."""

from __future__ import annotations

import functools
import pathlib
import traceback

from jzero.tracing._internals import internal_source_info, source_info_util
from jzero.tracing._jaxpr import replaced, with_inner
from jzero.tracing._types import Eqn, Jaxpr


def not_the_users(path: str) -> None:
    """Excludes a file of jzero from the lines that JAX records."""
    source_info_util.register_exclusion(path)


def has_line(eqn: Eqn) -> bool:
    """Whether JAX knows a line; inside a function that a library jits, it knows only that of the call."""
    return bool(source_info_util.summarize(eqn.source_info))


def with_line_of(eqn: Eqn, outer: Eqn) -> Eqn:
    """The equation, at the line of `outer`, which holds it, if JAX does not know its own."""
    if has_line(eqn):
        return eqn
    return eqn.replace(source_info=eqn.source_info.replace(traceback=outer.source_info.traceback))


def written_for(jaxpr: Jaxpr, source: Eqn) -> Jaxpr:
    """The program with all equations at the line and scopes of `source`."""

    def moved(eqn: Eqn) -> Eqn:
        inside = with_inner(eqn, lambda inner: written_for(inner, source))
        return inside.replace(source_info=source.source_info)

    return replaced(jaxpr, eqns=[*map(moved, jaxpr.eqns)])


def at_line(eqn: Eqn) -> str:
    """` at file.py:12 (train_step)`; '' if JAX knows no line."""
    return f" at {user_line(eqn)}" if has_line(eqn) else ""


def user_line(eqn: Eqn) -> str:
    """`summary(eqn)`, and for a line of an installed package also where the user called it."""
    called = called_at(eqn)
    return f"{summary(eqn)}, called at {called}" if called else summary(eqn)


def called_at(eqn: Eqn) -> str:
    """Where the user called the installed package that wrote the equation; '' for the user's own."""
    frames = [*internal_source_info.user_frames(eqn.source_info.traceback)]
    ours = [frame for frame in frames if not _is_installed(frame.file_name)]
    if not ours or ours[0] is frames[0]:
        return ""
    return f"{ours[0].file_name}:{ours[0].start_line} ({ours[0].function_name})"


def line_of_error(error: Exception) -> str:
    """The user's line at which JAX raised an error, like `summary`; '' if there is none."""
    frames = [*traceback.extract_tb(error.__traceback__)]
    ours = [frame for frame in frames if not _is_installed(frame.filename)]
    return f"{ours[-1].filename}:{ours[-1].lineno} ({ours[-1].name})" if ours else ""


@functools.cache
def _is_installed(file: str) -> bool:
    path = pathlib.PurePath(file)
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts) or _JZERO in path.parents


_JZERO = pathlib.PurePath(__file__).parents[1]


def summary(eqn: Eqn) -> str:
    """`file.py:12 (train_step)`: where the user wrote the equation."""
    return source_info_util.summarize(eqn.source_info)
