# SPDX-License-Identifier: Apache-2.0
"""A command as data, and its parser."""

from __future__ import annotations

import argparse
import difflib
import itertools
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from jzero._errors import escaped, named
from jzero.reports._lines import WIDTH, wrapped
from jzero.reports._tables import Table

# Flags of jzero 0.x, for one release.
_MOVED = {"--accumulate": "--microbatches", "--accumulate-dtype": "--accumulator-dtype"}
JSON = {"action": "store_true", "help": "numbers instead of tables"}


class Verbatim(str):
    """A text whose lines are never wrapped: a program."""


Shown = Iterator[str | Table | dict[str, Any]]  # A dict is shown as JSON.


class Command(NamedTuple):
    """A command of the command line."""

    run: Callable[..., Shown]  # called with the flags that were given, by name
    help: str  # in the list of commands; the two below are in the command's own help
    description: str
    example: str
    flags: Mapping[
        str, Mapping[str, Any]
    ]  # or arguments: the keywords of argparse's `add_argument`
    one_of: tuple[tuple[str, ...], ...] = ()  # Exactly one flag of each group must be given.

    @property
    def flag_of(self) -> dict[str, str]:
        """The last flag of each argument of `run` that has one."""
        return {
            settings.get("dest", flag.removeprefix("--").replace("-", "_")): flag
            for flag, settings in self.flags.items() if flag.startswith("--")
        }  # fmt: skip

    def add_to(self, commands: Any, name: str) -> None:
        parser = commands.add_parser(
            name, help=self.help, description=self.description, example=self.example
        )
        groups = {
            names: parser.add_mutually_exclusive_group(required=True) for names in self.one_of
        }
        for flag, settings in self.flags.items():
            group = next((groups[names] for names in self.one_of if flag in names), parser)
            if flag.startswith("--"):  # Flags that are not given have the defaults of `run`.
                settings = {"default": argparse.SUPPRESS, **settings}
            group.add_argument(flag, **settings)


class Parser(argparse.ArgumentParser):
    """Suggests corrections of mistyped names; help, and errors about missing flags, show an example."""

    def __init__(self, *, description: str, example: str = "", **settings: Any):
        lines = wrapped(description, width=terminal_columns())
        super().__init__(
            description="\n".join(lines), allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            epilog=f"example:\n  {example}" if example else None, **settings,
        )  # fmt: skip

    # argparse has overloads that differ in the namespace only.
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Reports mistyped flags first: for `--param` argparse would say that `--params` is missing."""
        given = list(sys.argv[1:] if args is None else args)
        if bad := self._mistyped(given):
            self.error(" And ".join(bad))
        return super().parse_known_args(given, namespace)

    def _mistyped(self, given: Sequence[str]) -> list[str]:
        flags = [*self._option_string_actions]
        choices = [a.choices for a in self._actions if isinstance(a, argparse._SubParsersAction)]
        commands = [name for names in choices for name in names]
        mine = list(itertools.takewhile(lambda text: text != "--", given))
        if commands:  # Flags after the command belong to it.
            mine = list(itertools.takewhile(lambda text: text.startswith("-"), mine))
        typed = [text.partition("=")[0] for text in mine if re.match(r"-+[A-Za-z_]", text)]
        bad = [_no(name, flags) for name in typed if name not in flags]
        command = next(iter(given[len(mine) :]), None) if commands else None
        if not bad and command is not None and command not in commands:
            return [_no(command, commands, all_of_them=True)]
        return bad

    def error(self, message: str) -> NoReturn:
        """Exits with status 2."""
        text = f"{self.prog}: {message.removeprefix('argument ')}"
        lines = wrapped(escaped(text), "  ", terminal_columns(), cut=False)
        if "required" in message and self.epilog:
            lines += self.epilog.splitlines()
        self.exit(2, "\n".join([*lines, f"See {self.prog} --help.", ""]))


def _no(name: str, names: Sequence[str], all_of_them: bool = False) -> str:
    """Says that there is no such name, and which was meant."""
    if name in _MOVED and _MOVED[name] in names:
        return f"there is no {name}. Write {_MOVED[name]}."
    like = difflib.get_close_matches(name, [x for x in names if x not in ("-h", "--help")], 1, 0.6)
    meant = f" Did you mean {like[0]}?" if like else f" There are {', '.join(names)}." * all_of_them
    return f"there is no {named(name)}.{meant}"


def terminal_columns() -> int:
    """Columns of the terminal; the environment's `COLUMNS` comes first."""
    return shutil.get_terminal_size((WIDTH, 24)).columns
