# SPDX-License-Identifier: Apache-2.0
"""When the collectives of a pass run: gathers ahead by so many bytes, reductions group after group."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Sequence

import jax

from jzero.sharding.passes._order import SMALLEST_GROUP as SMALLEST_GROUP
from jzero.sharding.passes._order import WAITS_THROUGH_LOOPS as WAITS_THROUGH_LOOPS
from jzero.sharding.passes._waits import PRODUCTS, not_before, token_of
from jzero.sharding.run._values import Value, rows_of, waits

# [Note: tokens of a pass]
# A gather that starts too early is the gather of the pass before: the compiler lets one serve both, and
# every parameter is alive in between. One that starts too late has nothing to hide behind. So each waits,
# by an optimization barrier, for tokens, elements of values that are computed before: one of the pass
# before (`start`), and one of a product, so far back that only `limit` bytes are ahead of their use
# (test_memory.py::test_peak_memory_grows_with_one_layer_not_with_all,
# test_prefetch.py::test_gathers_of_an_unrolled_model_wait_for_compute).

# [Note: reductions in order]
# The compiler combines the reductions of a pass, or of a loop's body, into one at its end: all gradients
# wait for it, whole. One after the other each would take a latency, which grows with the devices. So they
# run in two groups, of about half of the bytes each, or in more of up to `together`. Of layers that are
# unrolled, two groups and what was made meanwhile are alive: each has up to half of it, or a sixteenth of the
# bytes if that is more, but no more than `together`. An update reads them in about the reverse of the order
# in which they were made (`Unreduced.made`). Those of a group do not wait for each other, so that the
# compiler combines them, but for all of the group before: it would else combine one that nothing waits for
# with those of a later group
# (test_reductions.py::test_reductions_of_an_unrolled_model_run_in_the_order_of_its_gradients). Small ones
# count like all others: many of them are as much as a large one. But a group of few bytes goes on, and few
# more join a full one: a bias before, between or after matrices would else take a latency of its own
# (test_reductions.py::test_many_small_reductions).


def _counts(nbytes: int) -> bool:
    """Whether others wait for a reduction of so many bytes, if there is a larger one in its group."""
    return nbytes > SMALLEST_GROUP / 8


@dataclasses.dataclass(eq=False)
class _Group:
    """Reductions that do not wait for each other, but for those of the group before.

    Attributes:
      after: a token of these, if there are any.
      made: which of those that count, and are no biases, was made last.
      nbytes: of all together.
      late: of those that joined when the group was full.
      shards: bytes of each, and what it is reduced to.
    """

    after: list[jax.Array] = dataclasses.field(default_factory=list)
    made: int = -1
    nbytes: int = 0
    late: int = 0
    shards: list[tuple[int, jax.Array]] = dataclasses.field(default_factory=list)

    def next_group(self) -> _Group:
        """The one that waits for this one: for biases only if nothing else is in it."""
        large = [shard for nbytes, shard in self.shards if _counts(nbytes)]
        first, *rest = map(token_of, large or [shard for _, shard in self.shards])
        return _Group([not_before(first, rest)], self.made)


@dataclasses.dataclass(eq=False)
class GatherQueue:
    """The gathers of one pass (or loop body, or branch), in the order of their first uses.

    A gather waits for the products before the first use of an earlier one: the earliest for which all
    gathers from that one on fit in `limit` together, and one product earlier than its own use however
    large they are::

        limit = 3 * m, products with weights of so many bytes:   m    m    m    m    9 * m   m
        whose gather may start after the product with            -    -    -    1st  3rd     4th

    Attributes:
      limit: how many gathered bytes may be ahead of the compute that first uses them; with 0, none are.
      together: how many bytes of whole gradients are reduced together at most, if more than one is.
      in_order: whether reductions wait for each other ([Note: reductions in order]).
      start: a token from the pass before, for which every gather waits ([Note: tokens of a pass]).
      latest: what was computed last and differs between devices; the next pass starts after it.
      product: the latest of these that came out of a matrix product or a loop.
      before_loop: tokens of reductions so large that the next loop waits for them.
    """

    limit: int
    together: int = 0
    in_order: bool = True
    start: jax.Array | None = None
    latest: jax.Array | None = None
    product: jax.Array | None = None
    before_loop: list[jax.Array] = dataclasses.field(default_factory=list)
    _ahead: deque[tuple[int, jax.Array | None]] = dataclasses.field(default_factory=deque)
    _ahead_bytes: int = 0
    _all_ahead: bool = True
    _half: float = math.inf
    _most: float = 0
    _group: _Group = dataclasses.field(default_factory=_Group)

    def tokens(self, nbytes: int) -> list[jax.Array]:
        """What the next gather, of so many bytes, waits for."""
        if not self.limit:
            return self._after(self.product)
        ahead = self._ahead
        ahead.append((nbytes, self.product))
        self._ahead_bytes += nbytes
        # Whatever its size, a gather has a product to hide behind. What fits no more never fits again, so
        # that each gather is dropped once (test_growth.py).
        while self._ahead_bytes > self.limit and len(ahead) > 1 and ahead[1][1] is not self.product:
            self._ahead_bytes -= ahead.popleft()[0]
            self._all_ahead = False
        return self._after(None if self._all_ahead else ahead[0][1])

    def decoding_tokens(self) -> list[jax.Array]:
        """What it waits for that codes become numbers: the product before their use."""
        return self._after(self.product)

    def _after(self, product: jax.Array | None) -> list[jax.Array]:
        """Tokens of the pass before and of a product of this one, as far as there are any."""
        tokens = [] if self.start is None else [self.start]
        return tokens if product is None else [*tokens, token_of(product)]

    def note(self, x: jax.Array, primitive: str) -> None:
        """Remembers a value that the pass has computed."""
        self.latest = x
        if primitive in PRODUCTS:
            self.product = x

    def expect(self, values: Sequence[Value], of_turn: bool = True) -> None:
        """What is reduced next, of a loop's turn or of a whole pass: in two groups, or in more."""
        nbytes = sum(v.x.nbytes for v in values if waits(v) and not rows_of(v))
        self._half = nbytes / 2
        most = self.together if of_turn else max(self.together / 2, nbytes / 16)
        self._most = min(self.together, most)

    def reduction_tokens(self, made: int, nbytes: int) -> list[jax.Array]:
        """What the reduction of the `made`th value, of so many bytes, waits for: the group before its own.

        The reason is in [Note: reductions in order].
        """
        group = self._group
        if not self.in_order or made < group.made:
            return []
        least = min(SMALLEST_GROUP, self.together / 2)
        # Matrices that just fit are no more because of their biases.
        most = self._most + least / 8
        full = group.nbytes + nbytes / 2 > self._half or group.nbytes + nbytes > most
        if full and group.shards and group.nbytes >= least:
            group.late += nbytes
            if group.late > least / 8:
                self._group, self._half = group.next_group(), math.inf
        return self._group.after

    def note_reduction(self, shard: jax.Array, made: int, nbytes: int) -> None:
        """Remembers a reduction of so many bytes."""
        group = self._group
        group.nbytes += nbytes
        if _counts(nbytes):
            group.made = max(made, group.made)
        group.shards.append((nbytes, shard))
        if nbytes > WAITS_THROUGH_LOOPS:
            self.before_loop.append(token_of(shard))

    def next_pass(self, limit: int | None = None) -> GatherQueue:
        """The queue of the pass that starts now; the one before has computed something."""
        assert self.latest is not None
        limit = self.limit if limit is None else limit
        return GatherQueue(
            limit, self.together, self.in_order, start=token_of(self.latest), latest=self.latest
        )
