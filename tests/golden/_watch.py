"""What a step of several programs does while it runs, which neither its plan nor its result says."""

import contextlib
import dataclasses
import functools
import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import jax
from jax.extend import backend

from jzero.offload.execute import _stream
from jzero.offload.execute._stream import StreamSlot


@dataclasses.dataclass
class Watched:
    """Lines of what was seen.

    Attributes:
      started: each program where it first runs, as JAX logs it, among copies between memories.
      aliased: of these programs, see `aliased`.
      streamed: of each stream of offloaded leaves, the most on the devices at a time, and what it waits for.
    """

    started: list[str] = dataclasses.field(default_factory=list)
    aliased: list[str] = dataclasses.field(default_factory=list)
    streamed: list[str] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def watched() -> Iterator[Watched]:
    """Adds to it whatever runs in the context."""
    seen = Watched()
    with (
        _logged(_Programs(seen)),
        mock.patch.object(jax, "device_put", _recorded(jax.device_put, seen.started)),
        mock.patch.object(_stream, "stream", functools.partial(_run, _stream.stream, seen)),
    ):
        yield seen


# -- programs --------------------------------------------------------------------------------------


class _Programs(logging.Handler):
    """Of programs on meshes, which JAX logs before and after it compiles them."""

    def __init__(self, seen: Watched):
        super().__init__()
        self._seen = seen
        self._compiling: dict[int, str] = {}  # by thread

    def emit(self, log: logging.LogRecord) -> None:
        text, thread = log.getMessage(), threading.get_ident()
        found = re.match(
            r"Compiling (?:jit\()?(\S+?)\)? with global shapes and types \((.*)\)\. ", text
        )
        if found and "NamedSharding" in text:
            name = self._compiling[thread] = found.group(1)
            types = re.findall(r"ShapedArray\((\w+(?:<\w+>)?\[[\d,]*\])", found.group(2))
            self._seen.started.append(f"{name}: {', '.join(types)}")
        elif text.startswith("Finished XLA compilation") and thread in self._compiling:
            name = self._compiling.pop(thread)
            self._seen.aliased += aliased(name, _latest(name).get_compiled_memory_stats())


def aliased(name: str, memory: Any) -> list[str]:
    """How much of what a program makes lies in memory that was donated to it, if any does."""
    num = memory.alias_size_in_bytes
    return [f"{name}: {num:,} bytes"] if num else []


def _latest(name: str) -> Any:
    """The last program of this name that was compiled; the client has the latest first."""
    programs, module = backend.get_backend().live_executables(), f"jit_{name}"
    module = re.sub(r"[^\w.-]", "_", module).rstrip(
        "_"
    )  # as JAX names it: jit_<lambda> is jit__lambda
    return next(x for x in programs if x.hlo_modules()[0].name == module)


@contextlib.contextmanager
def _logged(handler: logging.Handler) -> Iterator[None]:
    logger = logging.getLogger("jax")
    level, passes_on = logger.level, logger.propagate
    before: bool = getattr(jax.config, "jax_log_compiles")  # noqa: B009  # typed nowhere
    logger.addHandler(handler)
    logger.propagate = False
    jax.config.update("jax_log_compiles", True)
    try:
        yield
    finally:
        jax.config.update("jax_log_compiles", before)
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = passes_on


# -- copies ----------------------------------------------------------------------------------------


def _recorded(put: Callable[..., Any], lines: list[str]) -> Callable[..., Any]:
    thread = threading.current_thread()

    def device_put(x: Any, *args: Any, **kwargs: Any) -> Any:
        made = put(x, *args, **kwargs)
        if threading.current_thread() is thread:  # Others are as fast as they are.
            pairs = list(zip(jax.tree.leaves(x), jax.tree.leaves(made), strict=True))
            moved = [b for a, b in pairs if _memory(a) not in ("", _memory(b))]
            kinds = sorted({_memory(x) for x in moved})
            if moved:
                types = ", ".join(f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in moved)
                lines.append(f"copy to {', '.join(kinds)}: {types}")
        return made

    return device_put


def _memory(x: Any) -> str:
    """The memory of an array; nothing of a tracer and of what is not JAX's."""
    is_array = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    return str(x.sharding.memory_kind) if is_array else ""


# -- streams ---------------------------------------------------------------------------------------


def _run(
    stream: Callable[..., None], seen: Watched, visits: Iterable[StreamSlot | None],
    device_bytes: int, under_way: int | None = None,
) -> None:  # fmt: skip
    """Runs a `stream`; equal lines, as of several steps, are one, and one without leaves is none."""
    window = _Window(jax.block_until_ready)
    with mock.patch.object(jax, "block_until_ready", window.wait):
        stream(window.watched(visits), device_bytes, under_way)
    line = window.text(device_bytes)
    seen.streamed += [line] * (device_bytes > 0 and line not in seen.streamed)


class _Window:
    """The visits of one stream that are on the devices: fetched, and not waited for since their update.

    Those that run no program of the step, and give values other names, are left out.
    """

    def __init__(self, block: Callable[[Any], Any]):
        self._block = block
        self._here: list[int] = []  # bytes of each
        # By the identity of what is to be waited for: the visit's bytes, and that.
        self._leaving: dict[int, tuple[int, Any]] = {}
        self._waits = Counter[str]()
        self._num, self._most, self._most_bytes = 0, 0, 0

    def watched(self, visits: Iterable[StreamSlot | None]) -> Iterator[StreamSlot | None]:
        for visit in visits:
            if visit is None or not visit.counts:
                yield visit
                continue
            yield visit._replace(
                fetch=functools.partial(self._fetch, visit),
                update=functools.partial(self._update, visit),
            )

    def _fetch(self, visit: StreamSlot) -> Any:
        self._here.append(visit.nbytes)
        self._num += 1
        self._most = max(self._most, len(self._here))
        self._most_bytes = max(self._most_bytes, sum(self._here))
        return visit.fetch()

    def _update(self, visit: StreamSlot, arrays: Any) -> list[jax.Array]:
        copies = visit.update(arrays)
        self._leaving[id(copies)] = visit.nbytes, copies
        return copies

    def wait(self, x: Any) -> Any:
        """As `jax.block_until_ready`; other threads may call it, too."""
        made = self._block(x)
        if id(x) in self._leaving:
            nbytes, copies = self._leaving.pop(id(x))
            self._here.remove(nbytes)
            for copy in copies:
                self._waits[_memory(copy)] += copy.nbytes
        return made

    def text(self, device_bytes: int) -> str:
        """Bytes are those on each device; of what is waited for, those of whole arrays."""
        waits = [f"{num:,} bytes in {kind}" for kind, num in sorted(self._waits.items())]
        return (
            f"{self._num} visits, at a time at most {self._most} and {self._most_bytes:,} of "
            f"{device_bytes:,} bytes; waits for {', '.join(waits) or 'nothing'}"
        )
