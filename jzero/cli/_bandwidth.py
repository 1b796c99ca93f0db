# SPDX-License-Identifier: Apache-2.0
"""`jzero bandwidth`: its flags, and what it shows."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from jzero.cli import _flags
from jzero.cli._checkpoints import Shown
from jzero.reports._bandwidth import bandwidth


def add(commands: Any) -> dict[str, Callable[..., Shown]]:
    """Adds the command to a parser; what runs it, with its flags as arguments."""
    command = commands.add_parser(
        "bandwidth", help="how fast devices, their host and the links are here",
        description="Copies, gathers and updates on this machine: jzero.bandwidth.",
        example="jzero bandwidth --size 16MiB")  # fmt: skip
    command.add_argument(
        "--size", type=_flags.num_bytes, dest="nbytes", default="128MiB", metavar="SIZE",
        help="of each copy, 128MiB by default",
    )  # fmt: skip
    command.add_argument("--json", action="store_true", help="numbers instead of tables")
    return {"bandwidth": _bandwidth}


def _bandwidth(nbytes: str, json: bool) -> Shown:
    # Nothing is left for others where all of a device's memory is taken first.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    found = bandwidth(nbytes=nbytes)
    if json:
        yield found.to_dict()
        return
    yield found.header()
    yield from found.tables()
    yield from found.remarks()
