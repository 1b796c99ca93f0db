# SPDX-License-Identifier: Apache-2.0
"""The command `jzero bandwidth`."""

from __future__ import annotations

import os
from typing import Any

from jzero.cli import _flags
from jzero.cli._command import JSON, Command, Shown
from jzero.reports._bandwidth import bandwidth


def _bandwidth(json: bool = False, **options: Any) -> Shown:
    # Preallocation would leave no memory to other processes.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    found = bandwidth(**options)
    if json:
        yield found.to_dict()
        return
    yield found.header()
    yield from found.tables()
    yield from found.remarks()


COMMAND = Command(
    _bandwidth, "how fast devices, their host and the links are here",
    "Copies, gathers and updates on this machine: jzero.bandwidth.",
    "jzero bandwidth --size 16MiB",
    {
        "--size": dict(type=_flags.num_bytes, dest="nbytes", metavar="SIZE",
                       help="of each copy, 128MiB by default"),
        "--json": JSON,
    },
)  # fmt: skip
