# SPDX-License-Identifier: Apache-2.0
"""The clocks of a device: one compute stream, copies to and from its host, and collectives beside it."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

COMPUTE, COLLECTIVES, TO_HOST, FROM_HOST = "compute", "collectives", "to host", "from host"


class _Transfer(NamedTuple):
    """A transfer that is not over."""

    ready: float
    latency: float
    seconds: float


class Link:
    """What moves data beside the compute stream.

    Up to `under_way` transfers share its bandwidth equally; later ones wait, in order.
    """

    def __init__(self, under_way: int = 1):
        # Seconds for which something waited while the transfer ran. Transfers that run at the same time
        # share the wait equally, so that it is at most what the transfer takes alone.
        self.exposed: dict[Hashable, float] = defaultdict(float)
        self._under_way = under_way
        self._now = 0.0
        self._left: dict[Hashable, _Transfer] = {}
        self._ends: dict[Hashable, float] = {}

    def begin(self, key: Hashable, seconds: float, ready: float, latency: float = 0.0) -> None:
        """Starts a transfer of `seconds` (alone, after its latency) whose data is there at `ready`."""
        self._advance(ready)
        self._left[key] = _Transfer(ready, latency, seconds)

    def end(self, key: Hashable, since: float = math.inf) -> float:
        """When the transfer ends if nothing else begins before; 0 if there was none.

        From `since` on something waits for it, which counts as exposed.
        """
        self._advance(math.inf, key, since)
        return self._ends.get(key, 0.0)

    def last(self, since: float = math.inf) -> float:
        """When all transfers end; something waits for them from `since` on."""
        self._advance(math.inf, since=since)
        return self._now

    def _advance(self, until: float, key: Hashable = None, since: float = math.inf) -> None:
        """Runs the transfers until a time, or until the transfer `key` is over."""
        while self._left and self._now < until and (key is None or key in self._left):
            first = dict(itertools.islice(self._left.items(), self._under_way))
            running = {x: left for x, left in first.items() if left.ready <= self._now}
            if not running:
                self._now = min(until, *(left.ready for left in first.values()))
                continue
            flowing = sum(not left.latency for left in running.values())
            needs = {x: left.latency or left.seconds * flowing for x, left in running.items()}
            step = min(until - self._now, *needs.values())
            before, self._now = self._now, min(until, self._now + step)
            waited = max(0.0, self._now - max(before, since))
            for each, (ready, latency, seconds) in running.items():
                self.exposed[each] += waited / len(running)
                over = needs[each] == step
                if latency:
                    self._left[each] = _Transfer(ready, 0.0 if over else latency - step, seconds)
                elif over:
                    del self._left[each]
                    self._ends[each] = self._now
                else:
                    self._left[each] = _Transfer(ready, 0.0, seconds - step / flowing)
        if key is None and math.isfinite(until):
            self._now = max(self._now, until)


class Clocks:
    """The time of what a device starts, in order.

    Kernels run one after the other: all programs of a device share one compute stream. Transfers run beside
    it until the compute stream waits for them.
    """

    def __init__(self, under_way: int = 1):
        self.now = 0.0  # seconds of the compute stream
        # Seconds of work of each of the four, as if every transfer were alone; callers may add keys, which
        # loops multiply, too.
        self.busy: dict[str, float] = defaultdict(float)
        # Seconds for which the compute stream waits, for each of the others.
        self.waited: dict[str, float] = defaultdict(float)
        self._links = {COLLECTIVES: Link(under_way), TO_HOST: Link(), FROM_HOST: Link()}

    def compute(self, seconds: float) -> None:
        self.now += seconds
        self.busy[COMPUTE] += seconds

    def begin(
        self, stream: str, key: Hashable, seconds: float, source: Hashable = None,
        latency: float = 0.0,
    ) -> None:  # fmt: skip
        """Starts a transfer of what is there now, or when the transfer `source` is over."""
        ready = self.now
        if source is not None:
            ready = max(ready, *(link.end(source) for link in self._links.values()))
        self._links[stream].begin(key, seconds, ready, latency)
        self.busy[stream] += seconds + latency

    def wait(self, key: Hashable) -> None:
        for stream, link in self._links.items():
            self._wait(stream, link.end(key, self.now))

    def exposed(self, stream: str, key: Hashable) -> float:
        """Seconds for which the compute stream waited for that transfer, in all its runs."""
        return self._links[stream].exposed.get(key, 0.0)

    def finish(self) -> None:
        for stream, link in self._links.items():
            self._wait(stream, link.last(self.now))

    def _wait(self, stream: str, end: float) -> None:
        self.waited[stream] += max(0.0, end - self.now)
        self.now = max(self.now, end)

    def repeat(self, run: Callable[[], None], times: int) -> None:
        """Runs a loop: iterations after the second are taken to be like it, and end what they begin."""
        if times > 0:
            run()
        if times > 1:
            now, sums = self.now, self._sums()
            firsts = [dict(found) for found in sums]
            run()
            self.now += (times - 2) * (self.now - now)
            for found, first in zip(sums, firsts, strict=True):
                for key, seconds in found.items():
                    found[key] += (times - 2) * (seconds - first.get(key, 0.0))

    def _sums(self) -> list[dict[Any, float]]:
        return [self.busy, self.waited, *(link.exposed for link in self._links.values())]
