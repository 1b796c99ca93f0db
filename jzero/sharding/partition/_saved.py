# SPDX-License-Identifier: Apache-2.0
"""Rematerialization between loops over microbatches: which values are saved, and which recomputed.

Saving a value takes memory for all microbatches, which is what microbatches are there to save; recomputing it
can take a whole forward pass. So values are saved that spare matrix products, the largest product first, as
long as all saved values together have no more bytes than the step gathers of its rows anyway; a minimum cut
chooses the fewest bytes that do (`sharding/cut/_min_cut.py`). Everything else is recomputed. Of CLIP's towers
the embeddings are saved, which are gathered anyway; a step that gathers no rows saves nothing. Some values
are saved whatever their size ([Note: bit-stable values]), and values that a loop returns anyway are always
read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Sequence

from jzero.ir import _rules
from jzero.ir._products import products
from jzero.ir._regions import Region
from jzero.sharding.cut._min_cut import MinCut
from jzero.tracing import _lines
from jzero.tracing._types import Eqn, Var


@dataclasses.dataclass(frozen=True)
class SavedValue:
    """A value that is saved for later loops, or computed from all microbatches at once."""

    what: str  # its type; of one microbatch if it is saved
    where: str  # the line that makes it
    nbytes: int  # on each device, of all its microbatches


@dataclasses.dataclass(frozen=True)
class Loops:
    """The report on the loops over a step's microbatches."""

    num: int
    saved: tuple[SavedValue, ...]  # values of earlier loops that later ones read
    repeats: float  # how often matrix products run, as a multiple of a single loop's
    begun_by: tuple[str, ...]  # lines of the reductions and gathers that later loops depend on
    at_once: tuple[SavedValue, ...] = ()  # values that are computed from all microbatches at once


def saved_value(var: Var, eqn: Eqn, num: int = 1) -> SavedValue:
    what = f"{var.aval.dtype}{list(var.aval.shape)}"
    return SavedValue(what, _lines.summary(eqn), _rules.size_in_bytes(var.aval) * num)


class RematPolicy:
    """Decides, loop after loop, which equations it runs and which saved values it reads.

    Args:
      num: how many microbatches there are.
      budget: bytes that may be saved.
      inputs: the variables that an equation, by index, reads and that its loop must compute or read.
      is_local: whether a variable differs between microbatches.
      compared: values that must not be recomputed, [Note: bit-stable values].
    """

    def __init__(
        self, region: Region, num: int, budget: int, inputs: Callable[[int], Iterable[Var]],
        is_local: Callable[[Var], bool], compared: Collection[Var],
    ):  # fmt: skip
        self._eqns, self._num, self._budget = region.jaxpr.eqns, num, budget
        self._inputs, self._is_local, self._compared = inputs, is_local, compared
        self._maker = region.makers
        self._products = [products(region, eqn) for eqn in self._eqns]
        self._first_run: dict[int, int] = {}  # of an equation: the first loop that runs it
        self._all_run = 0
        # Values that a loop returns for each microbatch, and the loop.
        self._stacks: dict[Var, int] = {}
        self._read: dict[Var, None] = {}  # those that later loops read
        self.saved: dict[Var, int] = {}  # those that are returned for later loops only

    def loop(
        self, number: int, makers: Sequence[int], stacks: Iterable[Var]
    ) -> tuple[tuple[int, ...], frozenset[int], tuple[Var, ...]]:
        """The equations of a loop, those among them that it recomputes, and the saved values that it reads.

        `makers` are the equations that make its results, `stacks` those that are returned for each
        microbatch. Call it in the order of the loops.
        """
        earlier = [v for v in self._compared if self._maker[v] in self._first_run]
        given = self._stacks.keys() | set(earlier)
        cut = self._cut(makers) if self._budget > 0 else set()
        run, saved = self._behind(makers, given | cut)
        self._read |= dict.fromkeys(saved)
        for var in saved:
            if var not in self._stacks:
                self.saved[var] = self._stacks[var] = self._first_run[self._maker[var]]
                self._budget -= self._nbytes(var)
        recomputed = frozenset(index for index in run if index in self._first_run)
        for index in run:
            self._first_run.setdefault(index, number)
        self._stacks |= {var: number for var in stacks if var not in self._stacks}
        self._all_run += sum(self._products[i] for i in run)
        return run, recomputed, saved

    def products_behind(self, makers: Sequence[int]) -> set[int]:
        """The equations with matrix products that `makers` depend on."""
        return {i for i in self._behind(makers, ())[0] if self._products[i]}

    def loops(self, num: int, begun_by: Sequence[int], at_once: Sequence[int]) -> Loops:
        """The report on `num` loops, what begins them, and products that run once for all microbatches."""
        once = sum(self._products[i] for i in self._first_run)
        lines = tuple(dict.fromkeys(_lines.user_line(self._eqns[i]) for i in begun_by))
        saved = [saved_value(var, self._eqns[self._maker[var]], self._num) for var in self._read]
        together = tuple(saved_value(self._eqns[i].outvars[0], self._eqns[i]) for i in at_once)
        return Loops(num, tuple(saved), self._all_run / once if once else 1.0, lines, together)

    def _nbytes(self, var: Var) -> int:
        return _rules.size_in_bytes(var.aval) * self._num

    def _behind(
        self, makers: Sequence[int], given: Collection[Var]
    ) -> tuple[tuple[int, ...], tuple[Var, ...]]:
        """The equations that `makers` depend on, in order, and the `given` values that they read."""
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
        """The values to save for this loop: local values of earlier loops that spare it products."""
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
        recomputed = [i for i in run if i in self._first_run and self._products[i]]
        for index in sorted(recomputed, key=lambda i: -self._products[i]):
            cut.add(self._eqns[index].outvars, most=self._budget)
        return cut.found()
