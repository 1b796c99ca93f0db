# SPDX-License-Identifier: Apache-2.0
"""`GivenFields`: checks and prints groups of options and policies."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import operator
from typing import Any, Self

import numpy as np

from jzero._errors import OptionError, message


class _OfInit:
    """`__signature__` of a class: that of `__init__`, since Sphinx would show that of `__new__`."""

    def __get__(self, instance: object, owner: Any) -> inspect.Signature:
        found = inspect.signature(owner.__init__)
        return found.replace(parameters=[*found.parameters.values()][1:])


class GivenFields:
    """Base of frozen dataclasses of options; `repr` shows the fields that differ from their defaults."""

    __signature__ = _OfInit()

    def __new__(cls, *_: Any, **given: Any) -> Self:
        """Refuses unknown fields with a better message than Python's own."""
        fields: list[str] = [*cls.__dataclass_fields__]  # type: ignore[attr-defined]
        if unknown := [name for name in given if name not in fields]:
            like = [x for name in unknown for x in difflib.get_close_matches(name, fields, 1)]
            edit = f"Its fields are {', '.join(fields)}." if fields else "It has none."
            if like:
                edit = f"Did you mean {' and '.join(f'{x}=' for x in like)}?"
            named = ", ".join(f"{name}=" for name in unknown)
            raise OptionError(message(cls.__name__, f"there is no field {named}", edit, ""))
        return super().__new__(cls)

    def __repr__(self) -> str:
        given = [f"{name}={shown(value)}" for name, value in given_fields(self).items()]
        return f"{type(self).__name__}({', '.join(given)})"

    def _make_int(
        self, name: str, least: int, rule: str, edit: str, most: int | None = None
    ) -> None:
        """Makes a field an int; None is left where it is the default."""
        fields: dict[str, Any] = type(self).__dataclass_fields__  # type: ignore[attr-defined]
        if getattr(self, name) is not None or fields[name].default is not None:
            make_int(self, type(self).__name__, name, least, most, rule, edit)

    def _check_bools(self, *names: str) -> None:
        for name in names:
            if not isinstance(value := getattr(self, name), bool):
                raise self._refused(f"{name}={value!r}", "It is True or False.", "Drop it.")

    def _refused(self, found: str, rule: str, edit: str) -> OptionError:
        return OptionError(message(type(self).__name__, found, rule, edit))


def given_fields(group: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults."""
    values = {x.name: (getattr(group, x.name), x.default) for x in dataclasses.fields(group)}
    return {
        name: value for name, (value, default) in values.items()
        if type(value) is not type(default) or value != default  # `!=` of an array is elementwise.
    }  # fmt: skip


def make_int(
    options: Any, who: str, name: str, least: int, most: int | None, rule: str, edit: str
) -> None:
    """Makes a field of frozen options an int, also from NumPy's; refuses bools and what is out of range."""
    value = getattr(options, name)
    try:
        num = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        num = None
    if num is None or num < least or (most is not None and num > most):
        raise OptionError(message(who, f"{name}={value!r}", rule, edit))
    object.__setattr__(options, name, num)


def shown(value: Any) -> str:
    return repr(value.name if isinstance(value, np.dtype) else value)
