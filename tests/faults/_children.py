"""Processes that are killed by the hundred: forked from one that has imported everything and started nothing.

A process forked before JAX makes a backend is a new process for JAX, so a child costs a quarter of a second.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from typing import Any, NamedTuple

from . import _library

PATIENCE_SECONDS = 120.0  # A child that takes longer hangs.


class Ended(NamedTuple):
    """How a child ended.

    Attributes:
      status: its exit status; minus a signal's number, if one ended it; None if it hung and was killed.
      said: what it had said until then.
      errors: the end of what it wrote to stderr.
    """

    status: int | None
    said: list[Any]
    errors: str


class Child:
    """A child that is running."""

    def __init__(self, server: subprocess.Popen, errors: Any):
        self._server, self._errors = server, errors
        self.said: list[Any] = []
        self.pid: int = self._read()["pid"]
        self._ended: Ended | None = None

    def hear(self) -> Any:
        """The next thing that it says; None when it has ended."""
        if self._ended is not None:
            return None
        found = self._read()
        if "said" in found:
            self.said.append(found["said"])
            return found["said"]
        self._errors.seek(max(self._errors.seek(0, os.SEEK_END) - 4000, 0))
        self._ended = Ended(
            found["status"], self.said, self._errors.read().decode(errors="replace")
        )
        return None

    def wait(self) -> Ended:
        while self.hear() is not None:
            pass
        assert self._ended is not None
        return self._ended

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to it; its number is not another's, since its parent waits for us to hear of it."""
        os.kill(self.pid, number)

    def _read(self) -> dict[str, Any]:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        assert line, f"the parent of children has ended with {self._server.wait()}"
        return json.loads(line)


class Children:
    """Starts children, one after the other, with the library of faults loaded.

    Args:
      modules: those that children need.
    """

    def __init__(self, modules: Iterable[str] = ()):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        if _library.why_not() is None:
            environment["LD_PRELOAD"] = str(_library.compiled())
        self._errors = tempfile.TemporaryFile()
        self._server = subprocess.Popen(
            [sys.executable, "-m", "faults", *modules],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment,
        )  # fmt: skip

    def start(self, script: str, **arguments: Any) -> Child:
        """Runs `function(say, **arguments)` of a script `module:function` in a child.

        What it passes to `say` is heard here. Arguments and what is said are JSON.
        """
        assert self._server.stdin is not None
        job = {"script": script, "arguments": arguments, "seconds": PATIENCE_SECONDS}
        self._server.stdin.write(json.dumps(job).encode() + b"\n")
        self._server.stdin.flush()
        return Child(self._server, self._errors)

    def run(self, script: str, **arguments: Any) -> Ended:
        return self.start(script, **arguments).wait()

    def close(self) -> None:
        self._server.communicate()
        self._errors.close()

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
