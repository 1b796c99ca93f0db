# SPDX-License-Identifier: Apache-2.0
"""Kept: what a loop over the microbatches reads of earlier loops, and what it recomputes.

Keeping a local value costs memory for all microbatches, which they are there to spare; recomputing it
may cost a forward pass. So a loop reads what spares it products, the largest product first, as long as what
is kept in all has no more bytes than the step gathers of its rows anyway; of all values that would do, those
with the fewest bytes (`sharding/cut/_min_cut.py`). The rest it recomputes. What it keeps of CLIP's
towers are the embeddings, which are gathered; a step that gathers nothing keeps nothing.
Some values are kept whatever their bytes ([Note: bits of earlier loops]), and what is returned is read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Sequence

from jzero.ir import _rules
from jzero.ir._products import products
from jzero.ir._regions import Region
from jzero.sharding.cut._min_cut import MinCut
from jzero.tracing import _jaxpr
from jzero.tracing._types import Eqn, Var


@dataclasses.dataclass(frozen=True)
class SavedValue:
    """A value that is kept for later loops, or made of all microbatches at once.

    Attributes:
      what: its type, of one microbatch if it is kept.
      where: the line that makes it.
      nbytes: on each device, of all its microbatches.
    """

    what: str
    where: str
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Loops:
    """The loops over a step's microbatches.

    Attributes:
      num: how many there are.
      kept: what later ones read of earlier ones.
      repeats: how often products run, as a multiple of what they would in one loop.
      begun_by: lines of the reductions and gathers for which a later loop waits.
      at_once: what is made of all microbatches at once.
    """

    num: int
    kept: tuple[SavedValue, ...]
    repeats: float
    begun_by: tuple[str, ...]
    at_once: tuple[SavedValue, ...] = ()


def saved_value(var: Var, eqn: Eqn, num: int = 1) -> SavedValue:
    """What an equation makes, of each of so many microbatches."""
    what = f"{var.aval.dtype}{list(var.aval.shape)}"
    return SavedValue(what, _jaxpr.summary(eqn), _rules.size_in_bytes(var.aval) * num)


class Keeper:
    """Decides of one loop after the other which equations it runs, and what it reads of earlier ones.

    Args:
      region: the step.
      num: how many microbatches there are.
      room: bytes that may be kept.
      inputs: of an equation, by index: which variables it reads that its loop must have made, or read.
      is_local: whether a variable differs between microbatches.
      compared: what later loops must read as earlier ones made it, [Note: bits of earlier loops].
    """

    def __init__(
        self, region: Region, num: int, room: int, inputs: Callable[[int], Iterable[Var]],
        is_local: Callable[[Var], bool], compared: Collection[Var],
    ):  # fmt: skip
        self._eqns, self._num, self._room = region.jaxpr.eqns, num, room
        self._inputs, self._is_local, self._compared = inputs, is_local, compared
        self._maker = region.makers
        self._products = [products(region, eqn) for eqn in self._eqns]
        self._first_run: dict[int, int] = {}  # of an equation: the first loop that runs it
        self._all_run = 0
        self._stacks: dict[Var, int] = {}  # what is returned, and by which loop
        self._read: dict[Var, None] = {}  # what later loops read of it
        self.kept: dict[Var, int] = {}  # what is returned for them alone

    def loop(
        self, number: int, makers: Sequence[int], stacks: Iterable[Var]
    ) -> tuple[tuple[int, ...], frozenset[int], tuple[Var, ...]]:
        """The equations of a loop, in order; those that earlier ones ran, too; and what it reads of these.

        Args:
          number: of the loop; later ones ask later.
          makers: equations of what it returns.
          stacks: what of it is returned as every microbatch has it.
        """
        earlier = [v for v in self._compared if self._maker[v] in self._first_run]
        given = self._stacks.keys() | set(earlier)
        cut = self._cut(makers) if self._room > 0 else set()
        run, kept = self._behind(makers, given | cut)
        self._read |= dict.fromkeys(kept)
        for var in kept:
            if var not in self._stacks:
                self.kept[var] = self._stacks[var] = self._first_run[self._maker[var]]
                self._room -= self._nbytes(var)
        again = frozenset(index for index in run if index in self._first_run)
        for index in run:
            self._first_run.setdefault(index, number)
        self._stacks |= {var: number for var in stacks if var not in self._stacks}
        self._all_run += sum(self._products[i] for i in run)
        return run, again, kept

    def loops(self, num: int, begun_by: Sequence[int], at_once: Sequence[int]) -> Loops:
        """What is to be said of the loops.

        Args:
          num: how many there are.
          begun_by: the equations for which later ones wait.
          at_once: products that run once, for all microbatches.
        """
        once = sum(self._products[i] for i in self._first_run)
        lines = tuple(dict.fromkeys(_jaxpr.user_line(self._eqns[i]) for i in begun_by))
        kept = [saved_value(var, self._eqns[self._maker[var]], self._num) for var in self._read]
        together = tuple(saved_value(self._eqns[i].outvars[0], self._eqns[i]) for i in at_once)
        return Loops(num, tuple(kept), self._all_run / once if once else 1.0, lines, together)

    def _nbytes(self, var: Var) -> int:
        return _rules.size_in_bytes(var.aval) * self._num

    def _behind(
        self, makers: Sequence[int], given: Collection[Var]
    ) -> tuple[tuple[int, ...], tuple[Var, ...]]:
        """The equations behind some others, in order, and what they read of what is given."""
        needed: set[int] = set()
        read: dict[Var, None] = {}
        todo = list(makers)
        while todo:
            if (index := todo.pop()) not in needed:
                needed.add(index)
                for var in self._inputs(index):
                    if var in given:
                        read[var] = None
                    else:
                        todo.append(self._maker[var])
        return tuple(sorted(needed)), tuple(read)

    def _cut(self, makers: Sequence[int]) -> set[Var]:
        """What this loop reads of earlier ones: local values that they made, and that spare it products."""
        run, _ = self._behind(makers, ())
        sizes: dict[Var, float] = {}
        for index in run:
            for out in self._eqns[index].outvars:
                can = index in self._first_run and self._is_local(out)
                sizes[out] = (0 if out in self._stacks else self._nbytes(out)) if can else math.inf
        edges = [
            (var, out) for i in run for var in self._inputs(i) for out in self._eqns[i].outvars
        ]
        ends = [out for i in makers for out in self._eqns[i].outvars]
        cut = MinCut(sizes, edges, ends)
        again = [i for i in run if i in self._first_run and self._products[i]]
        for index in sorted(again, key=lambda i: -self._products[i]):
            cut.add(self._eqns[index].outvars, most=self._room)
        return cut.found()
