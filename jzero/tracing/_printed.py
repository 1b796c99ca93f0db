# SPDX-License-Identifier: Apache-2.0
"""Prints a jaxpr with the user's line behind each equation, and a note behind each argument and result.

JAX does the printing. The user's line replaces an equation's name scopes, which JAX prints as a comment (its
own comment would be the innermost line, which may be a library's).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from jzero.tracing import _jaxpr, _lines
from jzero.tracing._types import Eqn, Jaxpr

_WIDTH = 60  # The column of comments, if equations are no longer.
_MOST = 120  # Characters of a parameter, such as a table or an FFI call's configuration.
_TOP = re.compile(r"^\{ lambda (?P<consts>[^;]*); (?P<args>.*?)\. let$", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"^(.*?) *# \[(.*)\]$", re.MULTILINE)
_END = re.compile(r"^  in \((?P<outs>[^()]*)\) \}\Z", re.MULTILINE)


class Note(NamedTuple):
    name: str
    layout: str = ""


def printed(jaxpr: Jaxpr, arguments: Sequence[Note], results: Sequence[Note]) -> str:
    """The text of a jaxpr, with a line for each argument and result."""
    noted = _Lines().of(jaxpr)
    text = _jaxpr.text_of(noted, 80)
    if _TOP.search(text) is None:  # All of it is in one line.
        text = _jaxpr.text_of(noted, 1)
    text = _COMMENT.sub(_with_comment, text)
    top, end = _TOP.search(text), _END.search(text)
    assert top is not None, text[:_MOST]
    assert end is not None, text[-_MOST:]
    consts, args = top["consts"].split(), top["args"].split()
    outs = [out for out in re.split(r",\s*", end["outs"]) if out]
    lines = ["{ lambda"]
    if consts:
        lines += _table(consts, [Note("a constant")] * len(consts))
    lines += [*_table(args, arguments), "  . let"]
    last = ["  in", *_table(outs, results), "}"]
    body = filter(str.strip, text[top.end() : end.start()].splitlines())
    return "\n".join([text[: top.start()] + lines[0], *lines[1:], *body, *last])


def _with_comment(found: re.Match[str]) -> str:
    equation, comment = found.groups()
    return f"{equation:<{_WIDTH}}  # {comment}" if comment else equation


def _table(values: Sequence[str], notes: Sequence[Note]) -> list[str]:
    rows = [(value, *note) for value, note in zip(values, notes, strict=True)]
    widths = [max((len(row[i]) for row in rows), default=0) for i in (0, 1)]
    return [
        f"    {value:<{widths[0]}}  # {name:<{widths[1]}}  {layout}".rstrip()
        for value, name, layout in rows
    ]


class _Lines:
    """Adds comments to jaxprs. Calls with the same comments share one, so that JAX prints it once."""

    def __init__(self) -> None:
        # By the old jaxpr's id; keeping the old one ensures that no other gets its id.
        self._done: dict[tuple[int, str, str], tuple[Jaxpr, Jaxpr]] = {}

    def of(self, jaxpr: Jaxpr, around: Eqn | None = None, autodiff: str = "") -> Jaxpr:
        lacks = around is not None and not all(map(_lines.has_line, jaxpr.eqns))
        key = id(jaxpr), autodiff, _line(around) if around is not None and lacks else ""
        if key not in self._done:
            eqns = [self._noted(eqn, around, autodiff) for eqn in jaxpr.eqns]
            self._done[key] = jaxpr, _jaxpr.replaced(jaxpr, eqns=eqns)
        return self._done[key][1]

    def _noted(self, eqn: Eqn, around: Eqn | None, autodiff: str) -> Eqn:
        at = eqn if around is None else _lines.with_line_of(eqn, around)
        autodiff = autodiff or _jaxpr.autodiff_pass(eqn) or ""
        notes = [_line(at), autodiff, *_jaxpr.users_scopes(eqn)]
        if not _jaxpr.inner_jaxprs(eqn):
            eqn = eqn.replace(params={name: _short(x) for name, x in eqn.params.items()})
        elif eqn.primitive.name != "pallas_call":  # JAX prints more of a kernel than its jaxpr.
            eqn = _jaxpr.with_inner(eqn, lambda inner: self.of(inner, at, autodiff))
        return _jaxpr.with_scope(eqn, ", ".join(filter(None, notes)))


def _line(eqn: Eqn) -> str:
    """`train.py:12 (step_fn), in <the package's file>:42:45 (apply_updates)`."""
    if not _lines.has_line(eqn):
        return ""
    own, called = (
        _lines.summary(eqn).replace(os.getcwd() + os.sep, ""),
        _lines.called_at(eqn),
    )
    if not called:
        return own
    own = re.sub(r"^.*(site|dist)-packages/", "", own)
    return f"{called.replace(os.getcwd() + os.sep, '')}, in {own}"


class _Short(str):
    __repr__ = str.__str__  # JAX prints parameters by their repr.


def _short(param: Any) -> Any:
    """A parameter, or the beginning and end of its text if that is long."""
    text = str(param)
    if len(text) <= _MOST:
        return param
    line = " ".join(text.split())
    return _Short(f"{line[: _MOST // 2]} ... {line[-_MOST // 4 :]}")
