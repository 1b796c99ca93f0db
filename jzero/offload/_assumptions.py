# SPDX-License-Identifier: Apache-2.0
"""Updates that start before all their inputs exist, as if these decided what they did in the last step.

A clip is `select(norm < most, g, g / norm * most)`: where it does not clip, nothing depends on the norm. Or
it is `g * min(1, most / norm)`: where it does not clip, that factor is what it was in the last step.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jzero.ir._regions import variables
from jzero.offload.kernels._kernel import USUAL
from jzero.sharding.analysis._frames import Frame
from jzero.sharding.cut._subgraphs import Subgraph
from jzero.sharding.cut._transfers import is_scalar
from jzero.tracing._types import Eqn, Var

# All their combinations are examined.
_MOST_DECISIONS = 4

# A number on each device.
Numbers = Mapping[Var, Sequence[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Assumption:
    """Numbers decide as in the last step, or are what they were then, if more depends on them.

    An update with the last step's numbers is the same machine code: if this holds, it makes the same bits.
    """

    numbers: tuple[Var, ...]  # that come at the end of the backward pass
    decisions: tuple[Var, ...]  # booleans among them, by which the update selects one of two values
    # The numbers on which the update depends, for each outcome of the decisions in the order of
    # `itertools.product`.
    needs: tuple[frozenset[Var], ...]

    def is_likely(self, last: Numbers, before: Numbers) -> bool:
        """Whether an update needs decisions alone, or numbers that were the same in the last two steps."""
        if not self._needs(last).issubset(self.decisions) and not (
            before and self.holds(before, last)
        ):
            return False
        return self.holds(last, last)

    def holds(self, last: Numbers, now: Numbers) -> bool:
        """Whether an update with the last step's numbers makes the same bits as with those of this step."""
        needs = self._needs(last)
        return all(
            # Bits: zeros of two signs are equal and make other results, and NaN is the other way round.
            [x.tobytes() for x in last[var]] == [x.tobytes() for x in now[var]]
            if var in needs
            else all(map(_is_usual, now[var]))
            for var in self.numbers
        )

    def _needs(self, numbers: Numbers) -> frozenset[Var]:
        index = 0
        for var in self.decisions:
            index = 2 * index + bool(numbers[var][0])
        return self.needs[index]


class History(NamedTuple):
    """The numbers of a step's assumptions in its last two runs; empty before the first."""

    last: Numbers = {}
    before: Numbers = {}

    def allows(self, assumption: Assumption | None) -> bool:
        if assumption is None:
            return True
        return bool(self.last) and assumption.is_likely(self.last, self.before)

    def then(self, numbers: Numbers) -> History:
        return History(numbers, self.last)


def numbers_of(
    assumptions: Iterable[Assumption | None], reads: Mapping[Var, jax.Array], places: Sequence[int]
) -> Numbers:
    """The numbers of assumptions on the devices at these indices among the process's."""
    found = {var for each in assumptions if each for var in each.numbers}
    return {var: [np.array(reads[var].addressable_data(k)) for k in places] for var in found}


def _is_usual(x: np.ndarray) -> bool:
    # By an unusual number, even one that nothing selects, a kernel divides in another way; then it does so by
    # all others, too (`_kernel._reciprocals`).
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return True
    return bool(USUAL[0] <= abs(float(x)) <= USUAL[1])


def assumption_of(frame: Frame, subgraph: Subgraph, numbers: Sequence[Var]) -> Assumption | None:
    """What lets an elementwise subgraph start without the numbers that come last; None if nothing does."""
    eqns = [frame.jaxpr.eqns[i] for i in subgraph.eqns]
    chosen_by = _choices(eqns, numbers)
    decisions = tuple(dict.fromkeys(chosen_by.values()))
    if len(decisions) > _MOST_DECISIONS or _computes_numbers(eqns, numbers):
        return None
    outs = variables([frame.jaxpr.outvars[i] for i in subgraph.outs])
    needs = tuple(
        _read(eqns, outs, chosen_by, dict(zip(decisions, decided, strict=True))) & {*numbers}
        for decided in itertools.product((False, True), repeat=len(decisions))
    )
    return Assumption(tuple(numbers), decisions, needs)


def _choices(eqns: Sequence[Eqn], numbers: Sequence[Var]) -> dict[int, Var]:
    """The equations that choose by one of these numbers, by index, and by which."""
    spread = {var: var for var in numbers if var.aval.dtype == jnp.bool_}
    found: dict[int, Var] = {}
    for i, eqn in enumerate(eqns):
        by = next(iter(variables(eqn.invars[:1])), None)
        if by not in spread:
            continue
        if eqn.primitive.name == "broadcast_in_dim":  # as `jnp.where` does
            spread[eqn.outvars[0]] = spread[by]
        elif eqn.primitive.name == "select_n":
            found[i] = spread[by]
    return found


def _computes_numbers(eqns: Sequence[Eqn], numbers: Sequence[Var]) -> bool:
    """Whether other scalars follow from these, of which nobody would know whether they are usual."""
    read = {*numbers}
    return any(
        all(map(is_scalar, eqn.outvars)) and not read.isdisjoint(variables(eqn.invars))
        for eqn in eqns
    )


def _read(
    eqns: Sequence[Eqn], outs: Sequence[Var], chosen_by: Mapping[int, Var], decided: Mapping[Var, bool]
) -> frozenset[Var]:  # fmt: skip
    """All that outputs depend on under these decisions."""
    read = {*outs}
    for i, eqn in reversed([*enumerate(eqns)]):
        if read.isdisjoint(eqn.outvars):
            continue
        if i in chosen_by:
            read.add(chosen_by[i])
            read.update(variables([eqn.invars[1 + decided[chosen_by[i]]]]))
        else:
            read.update(variables(eqn.invars))
    return frozenset(read)
