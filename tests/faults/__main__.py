"""Forks children as it is told on stdin, and says on stdout what they say: the other end of `Children`."""

import faulthandler
import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
from typing import Any


def serve() -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # What children print is not for our parent's parser.
    for line in sys.stdin:
        job = json.loads(line)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            _run(job, os.fdopen(write, "w", buffering=1))
        os.close(write)
        print(json.dumps({"pid": pid}), file=out)
        in_time = _forward(read, out, time.monotonic() + job["seconds"])
        if not in_time:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        os.close(read)
        status = os.waitstatus_to_exitcode(status)
        print(json.dumps({"status": status if in_time else None}), file=out)


def _run(job: dict[str, Any], pipe: Any) -> None:
    """A child's life. It ends at once after it: threads and exit handlers are not what is tested."""
    status = 1
    faulthandler.dump_traceback_later(0.9 * job["seconds"])  # Where it hangs, before it is killed.
    try:
        module, _, function = job["script"].partition(":")
        run = getattr(importlib.import_module(module), function)
        run(lambda found: print(json.dumps({"said": found}), file=pipe), **job["arguments"])
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _forward(pipe: int, out: Any, deadline: float) -> bool:
    """What the child says, until it has ended; whether that was in time."""
    rest = b""
    while select.select([pipe], [], [], max(deadline - time.monotonic(), 0))[0]:
        part = os.read(pipe, 65536)
        if not part:
            return True
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            print(line.decode(), file=out)
    return False


if __name__ == "__main__":
    for name in sys.argv[1:]:
        importlib.import_module(name)
    serve()
