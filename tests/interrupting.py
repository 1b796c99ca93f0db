"""Runs a function under a trace function of Python's that may interrupt it."""

import sys
from collections.abc import Callable
from typing import Any


def interruption(
    run: Callable[[], Any], trace: Callable[[Any, str, Any], Any]
) -> KeyboardInterrupt | None:
    """The KeyboardInterrupt with which `run` ended, as `trace` raises one at a call or line; else None."""
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt as error:
        return error
    finally:
        sys.settrace(before)
    return None
