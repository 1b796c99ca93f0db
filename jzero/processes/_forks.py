# SPDX-License-Identifier: Apache-2.0
"""A forked child of a process that uses JAX has none of its threads: what it asks of devices never ends.

Forking itself is fine: data loaders do it, and their children touch no device.
"""

from __future__ import annotations

import os

from jzero._errors import ProcessError, message
from jzero.tracing import _jaxpr

_forked = False


def check_not_forked(who: str) -> None:
    """Refuses a call in a forked child that would use devices.

    Raises:
      ProcessError: this process was forked from one that had used JAX's devices.
    """
    if _forked:
        raise ProcessError(message(
            who, f"process {os.getpid()} was forked from one that had already used JAX's devices",
            "A forked child has none of the threads of JAX's backends: what it asks of a device never ends.",
            "Start it with multiprocessing.get_context('spawn') or 'forkserver', or keep jzero out of it: "
            "data loaders may fork."))  # fmt: skip


def _note_fork() -> None:
    global _forked
    _forked = _forked or _jaxpr.has_backends()


os.register_at_fork(after_in_child=_note_fork)
