# SPDX-License-Identifier: Apache-2.0
"""Bits: local values that later loops must read as an earlier one made them.

[Note: bits of earlier loops] What a loop computes again may differ in its last bit. No row would then be the
largest (`losses == losses.max()`), and a row would be at some distance from itself. So what is compared with
what all rows made is kept whatever its bytes, and so is what is gathered in another shape
(test_collected_rows.py::test_what_is_the_largest_of_all_rows_is_so_in_every_loop).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import jax.numpy as jnp

from jzero.ir import _rules
from jzero.ir._regions import Region, variables
from jzero.ir._rules import Cost
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._types import Var

_MOVES = (Cost.COPY, Cost.VIEW, Cost.REPEAT)


class LoopLevels(Protocol):
    """What runs in which loop: as `_levels.Levels`."""

    @property
    def frame(self) -> Region: ...

    of: dict[Var, int]
    of_eqns: list[int]
    maker: dict[Var, int]
    loop: set[int]

    def is_local(self, var: Var) -> bool:
        """Whether a variable differs between microbatches."""

    def is_made_in_loop(self, var: Var) -> bool:
        """Whether an equation that runs for each microbatch makes a variable."""


def compared(levels: LoopLevels, boundary: Iterable[Var]) -> set[Var]:
    """Local values that are compared with what is complete only when the loop that makes them is done."""
    jaxpr = levels.frame.jaxpr
    # AD leaves comparisons that nothing reads, of the place of a maximum.
    read = set(
        map(id, _rewrite.without_unread(jaxpr.eqns, [*jaxpr.outvars, *boundary], _rules.compares))
    )
    return {
        var
        for index, eqn in enumerate(jaxpr.eqns)
        if _rules.compares(eqn) and index in levels.loop and id(eqn) in read
        for var in variables(eqn.invars)
        if levels.is_made_in_loop(var) and levels.is_local(var)
        and levels.of[var] < levels.of_eqns[index]
        and jnp.issubdtype(var.aval.dtype, jnp.inexact)
    }  # fmt: skip


def moved_into(levels: LoopLevels, stacks: Iterable[Var]) -> set[Var]:
    """What is gathered in another shape: a row then has the bits that others see of it."""
    found: set[Var] = set()
    for var in stacks:
        while levels.is_made_in_loop(var):
            eqn = levels.frame.jaxpr.eqns[levels.maker[var]]
            if not _rules.costs(eqn, *_MOVES) or _jaxpr.is_literal(eqn.invars[0]):
                break
            var = eqn.invars[0]
            if levels.is_made_in_loop(var) and levels.is_local(var):
                found.add(var)
    return found
