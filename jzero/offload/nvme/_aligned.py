# SPDX-License-Identifier: Apache-2.0
"""Buffers for tiles: whole pages, made once, within a budget."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from jzero._errors import OptionError, StateError, message
from jzero._quantities import readable_bytes
from jzero.offload.nvme._tile_layout import WHO

LEAST = 3  # One tile is read, one updated and one written at the same time.


def pages(nbytes: int) -> np.ndarray:
    """`uint8[nbytes]`, zeros that start on a page; `nbytes` a multiple of 4096, at least one of them.

    O_DIRECT needs private memory to be left out of forked children: a page that both have is copied at the
    next write, and a transfer would go on with the wrong copy (open(2), "O_DIRECT").
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        with contextlib.suppress(AttributeError, OSError):  # A kernel may have no huge pages.
            memory.madvise(getattr(mmap, advice))
    return np.frombuffer(memory, np.uint8)


class Claim:
    """The right to use a ring's buffers, until it is released, or dropped."""

    __slots__ = ("__weakref__", "is_live")

    def __init__(self) -> None:
        self.is_live = True

    def release(self) -> None:
        self.is_live = False


class TileRing:
    """Buffers that sweeps use again and again, one sweep at a time.

    >>> ring = TileRing(host_bytes=2**20, tile_bytes=2**18)
    >>> ring.num, ring.buffers[0].shape
    (4, (262144,))
    """

    def __init__(self, host_bytes: int, tile_bytes: int) -> None:
        """Makes as many buffers of `tile_bytes`, a multiple of 4096, as `host_bytes` hold: three or more."""
        num = host_bytes // tile_bytes
        if num < LEAST:
            raise OptionError(message(
                WHO, f"host_bytes={host_bytes} hold {num} tiles of {tile_bytes} bytes",
                "One tile is read, one updated and one written at the same time.",
                f"Use host_bytes={LEAST * tile_bytes} ({readable_bytes(LEAST * tile_bytes)}) or more.",
            ))  # fmt: skip
        self.num, self.nbytes = num, tile_bytes
        self.buffers = list(pages(num * tile_bytes).reshape(num, tile_bytes))
        self.owner: Any = None  # the sweep that uses them
        self._claim: Callable[[], Claim | None] = lambda: None

    def claim(self) -> Claim:
        """The buffers for one call; refuses one in a signal's handler in its middle, which no lock could."""
        claim = self._claim()
        if claim is not None and claim.is_live:
            raise StateError(message(
                WHO, "it is called in the middle of a call that moves tiles through the same "
                "memory, as by a signal's handler", "Tiles of one state are in memory at a time.",
                "Set a flag there, and look at it after the step."))  # fmt: skip
        found = Claim()
        self._claim = weakref.ref(found)
        return found
