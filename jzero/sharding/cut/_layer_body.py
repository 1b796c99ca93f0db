# SPDX-License-Identifier: Apache-2.0
"""`LayerBody`: the body of scanned layers, split from what an iteration gathers for the next one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jzero.ir import _by_parts, _rules
from jzero.ir._regions import variables
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._rewrite import Excerpt
from jzero.tracing._types import Jaxpr, Var


@dataclasses.dataclass(frozen=True, eq=False)
class LayerBody:
    """An iteration's equations.

    Attributes:
      invars: what the loop closes over, its carry, and slices of its stacks.
      consts: values of the body's own.
      slices: those of leaves.
      gathered: what is gathered of them, and of nothing else, in the iteration before; none if nothing is.
      gathers: `slices -> gathered`, of the slices that it reads.
      compute: the body's results, of `gathered` and the other inputs.
    """

    invars: tuple[Var, ...]
    consts: dict[Var, Any]
    slices: tuple[Var, ...]
    gathered: tuple[Var, ...]
    gathers: Excerpt
    compute: Excerpt

    @classmethod
    def of(
        cls, jaxpr: Jaxpr, consts: Sequence[Any], slices: Sequence[Var], gathered: Sequence[Var]
    ) -> LayerBody:
        """A body, apart from what makes `gathered`."""
        gathers = _rewrite.excerpt(jaxpr, gathered, effects=False)
        compute = _rewrite.excerpt(jaxpr, jaxpr.outvars, gathered)
        known = dict(zip(jaxpr.constvars, consts, strict=True))
        return cls(tuple(jaxpr.invars), known, tuple(slices), tuple(gathered), gathers, compute)

    @property
    def used_sharded(self) -> list[int]:
        """The leaves, by index, that the rest reads as they are fetched."""
        return [i for i, var in enumerate(self.slices) if var in self.compute.reads]

    @property
    def sharded_bytes(self) -> int:
        """Bytes on a device of leaves that are still there when those of the next iteration are."""
        if not self.gathered:
            return 0
        return sum(_rules.size_in_bytes(self.slices[i].aval) for i in self.used_sharded)


def gathered_of(jaxpr: Jaxpr, slices: Sequence[Var]) -> list[Var]:
    """What a body gathers that follows from `slices`, and from nothing else that it is given.

    Of gathers of gathers, those that other equations read.
    """
    known, found = set(slices), list[Var]()
    for eqn in jaxpr.eqns:
        inner = _by_parts.inside(eqn)
        opens = _jaxpr.has_side_effects(inner) or _jaxpr.inner_jaxprs(inner)
        if opens or not known.issuperset(variables(eqn.invars)):
            continue
        known.update(eqn.outvars)
        if inner.primitive.name == "all_gather":
            found += eqn.outvars
    reads = _rewrite.excerpt(jaxpr, jaxpr.outvars, found).reads
    return [var for var in found if var in reads]
