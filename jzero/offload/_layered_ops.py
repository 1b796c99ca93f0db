# SPDX-License-Identifier: Apache-2.0
"""The operations of a segment that runs part by part: what it fetches, runs and sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from jzero.ir._loops import MICROBATCHES
from jzero.ir._rules import size_in_bytes
from jzero.offload._part_values import CutSegment
from jzero.offload.schedule._ops import Fetch, Loop, Op, Run, Send, Update, Value
from jzero.sharding.cut._layer_parts import (
    HOSTED,
    SENT,
    UNREAD,
    LayerLoop,
    LayerPart,
    NestedLoop,
    Stretch,
)  # fmt: skip
from jzero.tracing import _jaxpr
from jzero.tracing._types import Eqn, Var


class PartOps:
    """The operations of parts, in order."""

    def __init__(
        self,
        cut: CutSegment,
        send: Callable[[Var, bool], Send],
        updates: Mapping[int, Sequence[Update]],
    ):
        """Of a cut segment.

        Args:
          cut: the segment.
          send: makes the operation that sends an output to the host, whole or slice by slice.
          updates: those that begin after a part, or after each of its turns, by its index.
        """
        self._cut, self._send, self._updates = cut, send, updates
        self._leaves = {var: Value.of_leaf(leaf) for var, leaf in cut.leaf_of.items()}
        self._values: dict[Var, Value] = {}

    def all(self) -> Iterator[Op]:
        """What all parts do."""
        for index, part in enumerate(self._cut.parts):
            begins = self._updates.get(index, ())
            yield from self._of([part], [x for x in begins if x.sliced])
            yield from (x for x in begins if not x.sliced)

    def _of(self, parts: Sequence[LayerPart], updates: Sequence[Update] = ()) -> Iterator[Op]:
        for part in parts:
            takes = tuple(map(self._value, part.reads))
            gives = tuple(map(self._value, self._handed_on(part)))
            if isinstance(part, NestedLoop):
                body = tuple(self._of(part.parts))
                yield Loop(body, part.loop.length, _line_of(part.eqn), takes, gives)
                yield from self._sends(part.eqn.outvars)
                continue
            for var in part.reads if isinstance(part, LayerLoop) else (*part.leaves, *part.reads):
                if var in self._leaves:
                    yield self._fetch(var)
            if isinstance(part, LayerLoop):
                slices = [*part.made(HOSTED), *part.made(SENT)]
                yield self._loop(part, takes, gives, slices, updates)
                yield from self._sends([v for v in part.eqn.outvars if v not in slices])
            else:
                yield Run("a stretch of layers", takes, gives)
                yield from self._sends(part.gives)

    def _loop(
        self, part: LayerLoop, takes: tuple[Value, ...], gives: tuple[Value, ...],
        slices: Sequence[Var], updates: Sequence[Update],
    ) -> Loop:  # fmt: skip
        body: tuple[Op, ...] = (
            *(self._fetch(var, sliced=True) for var in part.leaves),
            Run("a turn of the loop over layers"),
            *self._sends(slices, sliced=True),
            *updates,
        )
        return Loop(body, part.parts.length, _line_of(part.eqn), takes, gives)

    def _sends(self, made: Sequence[Var], sliced: bool = False) -> Iterator[Send]:
        """Of what is made, what goes to the host."""
        yield from (self._send(var, sliced) for var in made if var in self._cut.hosted)

    def _fetch(self, var: Var, sliced: bool = False) -> Fetch:
        return Fetch(self._leaves[var], self._cut.leaf_of[var].tier, sliced)

    def _value(self, var: Var) -> Value:
        if var not in self._values:
            aval = var.aval
            self._values[var] = Value("value", str(aval.dtype), aval.size, size_in_bytes(aval))
        return self._values[var]

    def _handed_on(self, part: LayerPart) -> Sequence[Var]:
        """What a part makes that stays on the devices."""
        if isinstance(part, Stretch):
            made: Sequence[Var] = part.gives
        elif isinstance(part, LayerLoop):
            pairs = zip(part.results[1], part.ys, strict=True)
            kept = [y for y, kind in pairs if kind not in (HOSTED, SENT, UNREAD)]
            made = [*part.results[0], *kept]
        else:
            made = part.eqn.outvars
        away = self._cut.hosted | self._cut.waiting
        return [var for var in made if var not in away]


def _line_of(loop: Eqn) -> str:
    """Where the user wrote it; nothing if it is jzero's own, over microbatches."""
    return "" if _jaxpr.in_scope(loop, MICROBATCHES) else _jaxpr.summary(loop)
