# SPDX-License-Identifier: Apache-2.0
"""Reads JSON that others wrote, within bounds: all JSON files that jzero reads.

Python's parser accepts more than JSON (NaN, duplicate keys, halves of surrogate pairs, UTF-16), and a file
may be something that no parser should get: a pipe, a device, JSON deeper than the stack, numbers that take
minutes. Only ordinary files of JSON are accepted, which every reader understands in the same way.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import reprlib
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from jzero._errors import CheckpointError, message

MAX_BYTES = 100_000_000  # of a file; a description of 100,000 leaves has a quarter of them
_MAX_DEPTH = 100
_MAX_VALUES = 5_000_000  # a value takes up to 100 bytes of memory, and a microsecond
_MAX_DIGITS = 640  # of an integer; whatever Python's own limit is set to, it is no smaller
_SHOWN = 20
_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_SURROGATES = re.compile(rb"\\u[dD][89a-fA-F]")
_KINDS = {str: "a text", int: "an integer", float: "a number with a fraction", bool: "true or false",
          list: "a list", dict: "an object", type(None): "null"}  # fmt: skip


class Malformed(Exception):
    """A file that is no JSON or out of bounds; its arguments are findings."""


class NotRegular(OSError):
    """A path that is no file: a directory, a pipe, a device, or a link where none is allowed."""


class Maybe(NamedTuple):
    """A form whose value may be missing or null."""

    form: Any


def read(who: str, path: str | Path, form: Any = None, *, follow: bool = True) -> Any:
    """The value of a JSON file of the given form (see `check`); `follow` is as in `open_regular`.

    Raises:
      CheckpointError: it cannot be read, is no JSON, or has another form.
    """
    return decode(who, path, read_bytes(who, path, follow=follow), form)


def read_bytes(who: str, path: str | Path, *, follow: bool = True) -> bytes:
    try:
        with open_regular(path, follow=follow) as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(MAX_BYTES + 1) if size <= MAX_BYTES else b""
    except OSError as error:
        raise _refused(who, path, [f"it cannot be read: {error.strerror}"]) from error
    if (size := max(size, len(data))) > MAX_BYTES:
        raise _refused(who, path, [f"it has {size} bytes, more than {MAX_BYTES}"])
    return data


def decode(who: str, path: str | Path, data: bytes, form: Any = None) -> Any:
    """The value of a JSON file's bytes, checked as in `read`."""
    try:
        value = parse(data)
    except Malformed as error:
        raise _refused(who, path, error.args) from error
    if form is not None and (bad := check(value, form)):
        raise _refused(
            who, path, bad, "Its entries have the names and types that they had when written."
        )
    return value


def open_regular(path: str | Path, *, follow: bool = True) -> BinaryIO:
    """Opens a regular file; a pipe would wait for a writer, and a device may never end.

    `follow` accepts a link to a file, as Hugging Face's cache has them. An OSError says what else it is.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        fd = os.open(path, flags)
    except ValueError as error:  # A NUL, or half a surrogate pair, in the path.
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), os.fspath(path)) from error
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(fd, "rb")
    os.close(fd)
    reason = os.strerror(errno.EISDIR) if stat.S_ISDIR(mode) else "Not a regular file"
    raise NotRegular(errno.EINVAL, reason, os.fspath(path))


def load(path: str | Path, most: int, infinities: bool = False) -> Any:
    """The value of a JSON file of at most `most` bytes.

    Raises:
      OSError: it cannot be read.
      Malformed: it is no JSON, or larger.
    """
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise Malformed(f"it has more than {most} bytes")
    return parse(data, infinities=infinities)


def parse(data: bytes, what: str = "it", infinities: bool = False) -> Any:
    """The value of JSON in UTF-8, which findings call `what`; `infinities` accepts `Infinity`."""
    _check_nesting(data, what)
    try:
        value = json.loads(
            data.decode(),
            object_pairs_hook=_without_duplicates,
            parse_int=_integer,
            parse_float=_float,
            parse_constant=_infinity if infinities else _constant,
        )
        if _SURROGATES.search(data):
            json.dumps(value, ensure_ascii=False).encode()  # This finds halves of pairs.
    except ValueError as error:
        raise Malformed(f"{what} is not JSON: {error}") from error
    return value


def check(value: Any, form: Any) -> list[str]:
    """What in a value does not have the form; all findings.

    A form is a type; a `Maybe`; a list of one form, for all items; `{str: form}`, for all values; a dict with
    a form for each key (other keys are ignored); or a tuple of forms, one of which must fit.
    """
    return list(_problems(value, form, ""))


def shown(value: Any) -> str:
    """A value in a message; a large or deep one is abbreviated."""
    return _short.repr(value)


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
_short.maxlevel = 3


def _refused(
    who: str, path: str | Path, found: Sequence[str],
    rule: str = "It is a JSON file of ordinary size and depth.",
) -> CheckpointError:  # fmt: skip
    return CheckpointError(message(
        f"{who} {path}", list(found), rule,
        "It is damaged, incomplete or another file: get it again, or use an earlier step.", "entries",
        shown=_SHOWN))  # fmt: skip


def _check_nesting(data: bytes, what: str) -> None:
    """Bounds depth and size before the parser recurses and allocates."""
    _check_number(data.count(b'"') // 2, what)
    bare = _STRINGS.sub(b"", data)
    brackets = np.frombuffer(bare.translate(None, _NO_BRACKETS), np.uint8)
    _check_number(bare.count(b",") + brackets.size, what)
    opens = (brackets == ord("[")) | (brackets == ord("{"))
    depth = np.cumsum(np.where(opens, 1, -1)).max(initial=0)
    if depth > _MAX_DEPTH:
        raise Malformed(f"{what} is {depth} values deep, more than {_MAX_DEPTH}")


def _check_number(num: int, what: str) -> None:
    if num > _MAX_VALUES:
        raise Malformed(f"{what} has up to {num} values, more than {_MAX_VALUES}")


def _without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        times = Counter(name for name, _ in pairs)
        raise Malformed(*(f"{shown(name)} is there twice" for name in times if times[name] > 1))
    return found


def _integer(text: str) -> int | float:
    if len(text) > _MAX_DIGITS:
        raise Malformed(f"an integer has {len(text)} digits, more than {_MAX_DIGITS}")
    return int(text) if text != "-0" else -0.0  # as other parsers read it


def _float(text: str) -> float:
    if math.isinf(number := float(text)):
        raise Malformed(f"{shown(text)} is beyond the largest number")
    return number


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is no number")


def _infinity(text: str) -> Any:
    return _constant(text) if text == "NaN" else float(text)


def _problems(value: Any, form: Any, where: str) -> Iterator[str]:
    match form:
        case Maybe():
            if value is not None:
                yield from _problems(value, form.form, where)
        case tuple():
            if all(any(True for _ in _problems(value, one, where)) for one in form):
                yield from _problems(value, form[0], where)
        case list():
            yield from _is(value, list, where) or _items(enumerate(value), lambda _: form[0], where)
        case dict():
            yield from _is(value, dict, where) or _entries(value, form, where)
        case _:
            yield from _is(value, form, where)


def _is(value: Any, kind: type, where: str) -> list[str]:
    """A finding unless the type is exact: true is no integer."""
    if type(value) is kind:
        return []
    return [f"{where or 'it'} is {shown(value)}, not {_KINDS[kind]}"]


def _entries(value: dict[str, Any], form: dict[Any, Any], where: str) -> Iterator[str]:
    if str in form:
        yield from _items(value.items(), lambda _: form[str], where)
        return
    named = [(key, value[key]) for key in form if key in value]
    yield from _items(named, form.__getitem__, where)
    for key, one in form.items():
        if key not in value and not isinstance(one, Maybe):
            yield f"{_at(where, key)} is missing"


def _items(pairs: Any, form_of: Callable[[Any], Any], where: str) -> Iterator[str]:
    for key, item in pairs:
        yield from _problems(item, form_of(key), _at(where, key))


def _at(where: str, key: str | int) -> str:
    """`custom_metadata.roles.'params/w'`; quotes show where a name that others chose ends."""
    name = str(key) if isinstance(key, int) or key.isidentifier() else shown(key)
    return f"{where}.{name[:100]}".lstrip(".")
