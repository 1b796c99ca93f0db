# SPDX-License-Identifier: Apache-2.0
"""`LoopRun`: one run of a loop over layers, turn by turn."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import jax

from jzero.ir._regions import variables
from jzero.offload._part_values import PartValues
from jzero.offload._pinned import Visit
from jzero.segments._segment import Arrays, Var
from jzero.sharding.cut._layer_parts import HOSTED, SENT, SLICES, STACK, LayerLoop, LayerPart
from jzero.tracing import _jaxpr

# Called when a part, or the turn of a loop at this place in stacks, is over.
OnEnd = Callable[[LayerPart, int | None], None]


class LoopRun:
    """One run of a loop: what its turns have made."""

    def __init__(self, values: PartValues, loop: LayerLoop, over: OnEnd):
        self._values, self._loop, self._over = values, loop, over
        self._programs = values.cut.programs
        length, reverse = loop.parts.length, loop.parts.reverse
        self._order = range(length)[:: -1 if reverse else 1]
        self._positions = self._programs.positions(length)
        self._gathered: Arrays = []
        self._came: dict[int, dict[Var, jax.Array]] = {}

    def visits(self) -> Iterator[Visit]:
        """A visit for each turn, and before them one that gathers for the first, if turns do so.

        Then one turn's leaves are fetched while the turn before gathers the next one's::

            fetch 1, fetch 2, gather 1, fetch 3, run 1 and gather 2, fetch 4, run 2 and gather 3, ...

        A visit's bytes are those of the shards that it fetches, and of what is gathered when it begins: what
        it gathers itself is among those of the visit after it, which begins its fetch before.
        """
        ahead, nbytes = bool(self._loop.body.gathered), self._loop.nbytes
        following = [*self._order[1:], None] if ahead else [*self._order]
        if ahead:
            first = functools.partial(self._fetch_leaves, self._order[0])
            reads = self._values.wanted(self._loop.leaves, self._order[0])
            yield Visit(nbytes, first, self._gather, reads=reads)
        for at, fetched in zip(self._order, following, strict=True):
            fetch = functools.partial(self._fetch, at, fetched)
            turn = functools.partial(self._turn, at)
            reads = () if fetched is None else self._values.wanted(self._loop.leaves, fetched)
            yield Visit(nbytes, fetch, turn, functools.partial(self._turn_over, at), reads)

    def _fetch_leaves(self, at: int) -> Arrays:
        if self._values.files:
            return self._values.files.fetched(self._values.wanted(self._loop.leaves, at))
        stacks = [self._values.env[var] for var in self._loop.leaves]  # as they are then
        leaves: Arrays = self._programs.fetch(self._loop)(stacks, self._positions[at])
        return leaves

    def _fetch(self, at: int, fetched: int | None) -> Arrays:
        """Leaves of one turn, and what another one reads that waits on the host, on their way."""
        if at == self._order[0]:
            self._values.back(self._loop.reads)
        env = self._values.env
        slices = {a: env[a][at] for a in self._sliced if a in env}
        self._came[at] = self._values.brought(slices, slices)
        return [] if fetched is None else self._fetch_leaves(fetched)

    @property
    def _sliced(self) -> list[Var]:
        """The stacks that are there in slices."""
        return variables(self._loop.taken(SLICES))

    def _gather(self, leaves: Arrays) -> Arrays:
        """Gathers for the first turn, of its leaves."""
        gather = self._programs.gather(self._loop)
        self._gathered, done = gather(leaves, self._positions[0])
        self._keep(leaves)
        return [done]

    def _keep(self, leaves: Arrays) -> None:
        """Holds what a turn reads of its leaves as they are fetched, and nothing of the turn before."""
        self._kept = [leaves[j] for j in self._loop.body.kept] if leaves else []

    def _begin(self) -> None:
        loop, values = self._loop, self._values
        values.back(loop.reads)
        env = values.env | values.held(loop.reads)
        self._consts = [env[v] for v in variables(loop.operands[0])]
        self._carry = self._programs.enter(loop)(env)
        self._stacks = [env[v] for v in variables(loop.taken(STACK))]
        # What a forward loop kept for this turn, nobody reads after it.
        self._frees = [env[a] for a in self._sliced if values.cut.last[a] is loop]
        new = self._programs.empty(loop)
        self._made = [new.pop(0) if old is None else env[old] for old in loop.renewed]
        self._hosted: Arrays | None = None
        self._ys = {y: [None] * loop.parts.length for y in loop.made(SLICES)}

    def _turn(self, at: int, leaves: Arrays) -> Arrays:
        """Runs a turn; after the last one, the loop's results are there.

        Args:
          at: its place in stacks.
          leaves: its own, or where turns gather, those of the next one, none in the last turn.
        """
        loop, programs, i = self._loop, self._programs, self._positions[at]
        if at == self._order[0]:
            self._begin()
        slices = {a: self._values.env[a][at] for a in self._sliced} | self._came.pop(at)
        slices |= self._values.brought(slices, slices)
        if not loop.body.gathered:
            self._keep(leaves)
            leaves = []
        turn = programs.turn(loop, gathers=bool(leaves))
        self._carry, new, leaving, self._made, done, self._gathered = turn(
            self._consts, self._carry, self._gathered, self._kept,
            [slices[_jaxpr.variable(a)] for a in loop.taken(SLICES)], self._stacks, self._made, i, leaves,
        )  # fmt: skip
        self._keep(leaves)
        made = dict(zip(loop.made(SLICES), new, strict=True))
        copies = self._values.away(made, made)
        for y, x in made.items():
            self._ys[y][at] = x
        hosted = leaving[: len(loop.made(HOSTED))]
        copies += self._send(at, leaving[len(hosted) :])
        if hosted:
            store = programs.store(loop, begins=self._hosted is None)
            self._hosted, done = store(self._hosted, hosted, i)
        for stack in self._frees:
            stack[at] = None
        if at == self._order[-1]:
            copies += self._end()
        return [done, *copies]

    def _turn_over(self, at: int) -> None:
        self._over(self._loop, at)
        if at == self._order[-1]:
            self._over(self._loop, None)

    def _send(self, at: int, slices: Arrays) -> Arrays:
        """A turn's slices, on their way to the host."""
        sent = self._loop.made(SENT)
        places = [self._programs.home_of_slice(y) for y in sent]
        copies: Arrays = jax.device_put(slices, places) if sent else []
        self._values.there.update(zip([(y, at) for y in sent], copies, strict=True))
        return copies

    def _end(self) -> Arrays:
        loop, values = self._loop, self._values
        values.env |= zip(loop.results[0], self._carry, strict=True)
        values.env |= self._ys
        values.env |= zip(loop.made(STACK), self._made, strict=True)
        values.there |= zip(loop.made(HOSTED), self._hosted or [], strict=True)
        copies = values.send([*loop.results[0], *loop.made(STACK)])
        copies += values.away(loop.made(STACK), values.env)
        values.drop(loop)
        # What comes after it needs its place alone.
        self.__dict__ = {"_loop": loop, "_order": self._order, "_over": self._over}
        return copies
