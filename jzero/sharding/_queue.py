"""How far the gathers of a pass run ahead of its compute: at most so many gathered bytes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(eq=False)
class GatherQueue:
    """The gathers of one pass (or loop body, or branch), in the order of their first uses.

    A gather waits until the compute before an earlier one's first use is done, the earliest for which
    all gathers from that one on fit in `limit` together::

        limit = 2 * m, gathers of m bytes    w1   w2   w3   w4
        may start after the compute of       -    -    w1   w2

    Attributes:
      limit: how many gathered bytes may be ahead of the compute that first uses them.
      start: a token from the pass before. Gathers wait for it, so that the compiler cannot let the gather
        of the previous pass serve this one and keep every parameter alive in between.
      latest: the value that differs between devices and was computed last: how far the pass has come.
    """

    limit: int
    start: Any = None
    latest: Any = None
    _sizes: list[int] = dataclasses.field(default_factory=list)
    _before: list[Any] = dataclasses.field(default_factory=list)

    def token(self, nbytes: int) -> Any:
        """What the next gather, of so many bytes, waits for; None if it may start at once."""
        self._sizes.append(nbytes)
        self._before.append(self.latest)
        first, ahead = len(self._sizes), 0
        while first and ahead + self._sizes[first - 1] <= self.limit:
            first -= 1
            ahead += self._sizes[first]
        done = self._before[min(first, len(self._before) - 1)] if first else None
        return self.start if done is None else token_of(done)

    def next_pass(self) -> GatherQueue:
        """The queue of the pass that starts now."""
        return GatherQueue(self.limit, token_of(self.latest), self.latest)


def token_of(x: jax.Array) -> jax.Array:
    """One element of `x`: depends on it without keeping it alive."""
    return x[(0,) * x.ndim] if math.prod(x.shape) else jnp.zeros((), x.dtype)
