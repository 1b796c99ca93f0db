# SPDX-License-Identifier: Apache-2.0
"""A value together with the Python that makes it: what is returned is what is printed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

_WIDTH = 72  # of a line of Python


@dataclasses.dataclass(frozen=True)
class Expression:
    """A name, or a call of one.

    Attributes:
      value: what it evaluates to.
      name: as Python has it, `jnp.bfloat16` or `optax.adamw`.
      arguments: of a call, each with its keyword ("" for positional ones); None for a name.
    """

    value: Any
    name: str
    arguments: tuple[tuple[str, Any], ...] | None = None

    def python(self, indent: str = "", before: str = "") -> str:
        """Its source, in one line if that has room behind `before`, else with an argument a line."""
        if self.arguments is None:
            return self.name
        parts = [f"{key}={_python(x)}" if key else _python(x) for key, x in self.arguments]
        line = f"{self.name}({', '.join(parts)})"
        if len(indent) + len(before) + len(line) <= _WIDTH and "\n" not in line:
            return line
        return "\n".join([f"{self.name}(", *self._lines(f"{indent}    "), f"{indent})"])

    def _lines(self, indent: str) -> Iterator[str]:
        for key, argument in self.arguments or ():
            before = f"{key}=" if key else ""
            yield f"{indent}{before}{_python(argument, indent, before)},"


def called(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Expression:
    """The call of a function whose name in Python is `name`; arguments are values or expressions.

    It has no value if one of them has none.
    """
    value = None
    if not any(isinstance(x, Expression) and x.value is None for x in (*args, *kwargs.values())):
        value = function(*map(value_of, args), **{key: value_of(x) for key, x in kwargs.items()})
    return Expression(value, name, (*(("", x) for x in args), *kwargs.items()))


def value_of(x: Any) -> Any:
    """The value of an expression; any other value is itself."""
    return x.value if isinstance(x, Expression) else x


def _python(x: Any, indent: str = "", before: str = "") -> str:
    if isinstance(x, Expression):
        return x.python(indent, before)
    return json.dumps(x) if isinstance(x, str) else repr(x)
