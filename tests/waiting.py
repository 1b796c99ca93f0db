"""Waiting for another process or thread, but not for ever."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], what: str, seconds: float) -> None:
    """Returns when the condition holds; fails with `what` did not happen in so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)
