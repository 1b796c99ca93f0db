# SPDX-License-Identifier: Apache-2.0
"""The command line, `jzero` or `python -m jzero`: parses and runs a command, and prints its output."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import warnings
from collections.abc import Sequence

import jax

from jzero._errors import CheckpointError, JzeroError, escaped
from jzero._version import __version__
from jzero.cli import _bandwidth, _checkpoints, _deepspeed, _estimate, _preflight
from jzero.cli._command import Parser, Shown, Verbatim, terminal_columns
from jzero.cli._flags import in_flags
from jzero.reports._lines import wrapped
from jzero.reports._tables import Table

_COMMANDS = {
    "estimate": _estimate.COMMAND, "preflight": _preflight.COMMAND, "bandwidth": _bandwidth.COMMAND,
    "deepspeed": _deepspeed.COMMAND, "inspect": _checkpoints.INSPECT, "export": _checkpoints.EXPORT,
    "import": _checkpoints.IMPORT, "unlock": _checkpoints.UNLOCK,
}  # fmt: skip
_UNWRAPPED = 200  # columns of tables in a file or a pipe, unless COLUMNS is set


def main(arguments: Sequence[str] | None = None, prog: str = "jzero") -> None:
    """Runs `jzero <arguments>`, by default those of the process.

    Invalid arguments end with a message and exit status 2, a faulty checkpoint with 1.
    """
    parser = Parser(
        prog=prog,
        description="ZeRO for JAX: memory and traffic of a training, contents of checkpoints.",
    )
    # What a bug report should contain.
    others = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib")]
    versions = ", ".join([f"jzero {__version__}", *others])
    parser.add_argument("--version", action="version", version=versions)
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    for name, command in _COMMANDS.items():
        command.add_to(commands, name)
    typed = list(sys.argv[1:] if arguments is None else arguments)
    if typed[:1] == ["help"]:
        typed = [*typed[1:2], "--help"]
    if not typed:
        parser.print_help(sys.stderr)
        parser.exit(2)
    given = vars(parser.parse_args(typed))
    name = given.pop("command")
    command = _COMMANDS[name]
    if name != "bandwidth":  # The others need no accelerators, which may be training.
        jax.config.update("jax_platforms", "cpu")
    width = _columns()
    # The line of a warning is not the user's.
    warnings.formatwarning = lambda text, *_, **__: f"{prog} {name}: {text}\n"
    try:
        _print(command.run(**given), width or _UNWRAPPED)
    except BrokenPipeError:  # The reader has seen enough; Python's own flush would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except CheckpointError as error:
        sys.exit(_in_lines(f"{prog} {error}", width))
    except JzeroError as error:
        text = f"{prog} {name}: {in_flags(str(error), command.flag_of)}"
        parser.exit(2, f"{_in_lines(text, width)}\n")


def _columns() -> int | None:
    """Columns of the terminal; None for a file or a pipe, unless `COLUMNS` is set."""
    if not sys.stdout.isatty() and not os.environ.get("COLUMNS"):
        return None
    return terminal_columns()


def _in_lines(message: str, width: int | None) -> str:
    """Wraps a message to the terminal; paths are never cut, so that they can be copied."""
    lines = message.splitlines()
    if width is not None:
        lines = [part for line in lines for part in wrapped(line, "  ", width, cut=False)]
    return "\n".join(lines)


def _print(shown: Shown, width: int) -> None:
    """Prints tables with an empty line above and below."""
    below: list[str] = []
    for what in shown:
        if isinstance(what, dict):
            print(json.dumps(what, indent=2))
        elif isinstance(what, Verbatim):
            print(what)
        elif isinstance(what, Table):
            print("\n".join(["", *what.text(width)]))
            below = [""]
        else:  # Paths are not cut, so that they can be copied.
            print("\n".join([*below, *wrapped(escaped(what), "  ", width, cut=False)]), flush=True)
            below = []
