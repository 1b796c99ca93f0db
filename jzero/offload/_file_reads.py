# SPDX-License-Identifier: Apache-2.0
"""`FileReads`: what a segment reads of parameters in files, and the memory that this takes, bounded."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from jzero._errors import OptionError, first_of, message
from jzero._quantities import readable_bytes
from jzero.offload._file_run import FileRun, FileSource
from jzero.offload.memory._file_storage import FileStorage
from jzero.offload.memory._pinned_pool import PinnedPool
from jzero.offload.nvme._aligned import pages
from jzero.offload.nvme._job_threads import JobThreads
from jzero.offload.nvme._layout import PAGE
from jzero.offload.schedule._ops import Value, Wanted
from jzero.tracing import _call

WHO = _call.WHO
# So many threads keep a disk busy while each checks what it has read (experiments/infinity/disk.py).
_THREADS = 4


class FileReads:
    """What a segment reads of files; its memory is used over and over, by one run at a time."""

    def __init__(
        self, sources: Mapping[Value, FileSource], host_bytes: int,
        visits: Iterable[Sequence[Wanted]], between: Iterable[Sequence[Wanted]],
    ):  # fmt: skip
        """Reads nothing.

        Args:
          sources: the leaves in files.
          host_bytes: the most bytes of this process's memory, for all that is on its way.
          visits: what is fetched at a time.
          between: what is read when it is needed, and not ahead, at a time.

        Raises:
          OptionError: `host_bytes` do not hold what is fetched at a time.
        """
        self._sources, self._host_bytes = dict(sources), host_bytes
        self._kept = max(map(self._nbytes, between), default=0)
        each = {tuple(wanted): self._nbytes(wanted) for wanted in visits}
        most = max(each, key=each.__getitem__, default=())
        self._needed = self._kept + each.get(most, 0)
        if self._needed > host_bytes:
            self._refuse(self._needed, most)
        self._lock = threading.RLock()
        self._buffers: list[np.ndarray] = []
        self._pool: PinnedPool | None = None

    def _refuse(self, needed: int, most: Sequence[Wanted]) -> None:
        paths = list(dict.fromkeys(self._sources[x.value].leaf.path for x in most))
        raise OptionError(message(
            WHO, f"what one part of the step reads of parameters is {needed} bytes in this process "
            f"({first_of(paths)}), and host_bytes={self._host_bytes} of Memory(params=)",
            "Between the disk and the devices it is in the host's memory, all of it.",
            f"Use NVMe(host_bytes={2 * needed}) ({readable_bytes(2 * needed)}): then one part is read while "
            f"another is copied. {needed} is the least."))  # fmt: skip

    def _nbytes(self, wanted: Iterable[Wanted]) -> int:
        return sum(self._sources[x.value].nbytes(x.at) for x in wanted)

    @contextlib.contextmanager
    def run(self, leaves: Mapping[Value, FileStorage]) -> Iterator[FileRun]:
        """One run, of these leaves; others wait for it."""
        with self._lock:
            # A signal's handler that runs a step meanwhile has memory of its own.
            pool, buffers, self._pool = self._pool, self._buffers, None
            if pool is None:
                buffers = self._made_buffers(leaves)
                left = self._host_bytes - sum(buffer.nbytes for buffer in buffers)
                pool = PinnedPool(left)
            with JobThreads(buffers) as readers:
                run = FileRun(self._sources, leaves, pool, self._kept, readers)
                yield run
                run.end()
            # After an error nobody knows what is still copied from its memory.
            self._pool, self._buffers = pool, buffers

    def _made_buffers(self, leaves: Mapping[Value, FileStorage]) -> list[np.ndarray]:
        each = max(PAGE, *(leaf.buffer_bytes for leaf in leaves.values()))
        if self._needed + each > self._host_bytes:
            self._refuse(self._needed + each, [Wanted(value, None) for value in leaves])
        # Of what is left, half is for reading ahead.
        num = min(_THREADS, (self._host_bytes - self._needed) // (2 * each))
        return [pages(each) for _ in range(max(num, 1))]
