"""Functions that fail in a call, or are interrupted by a trace function of Python's."""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock


class Stop(BaseException):
    """As Ctrl-C, and no error of jzero's."""


@contextlib.contextmanager
def failing(
    where: Any, name: str, at: int | None = None, error: Any = Stop
) -> Iterator[Iterator[int]]:
    """`where.name` raises in call `at`, from 0, or in every call; gives what counts the calls."""
    calls, call = itertools.count(), getattr(where, name)

    def fails(*args: Any, **kwargs: Any) -> Any:
        number = next(calls)
        if at is None or number == at:
            raise error
        return call(*args, **kwargs)

    with mock.patch.object(where, name, fails):
        yield calls


def from_the_first(where: Any, name: str, at: int, run: Callable[[], Any]) -> int:
    """The number of a call from the first; `at` below 0 counts from the last of those that `run` makes."""
    if at >= 0:
        return at
    with failing(where, name, at) as calls:
        run()
    return at + next(calls)


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
