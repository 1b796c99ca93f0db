# SPDX-License-Identifier: Apache-2.0
"""The collectives of a program, counted from its jaxpr: what describe() reports and tests assert."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

from jzero.ir._regions import EdgeKind, Region, edges, trip_count
from jzero.ir._rules import size_in_bytes
from jzero.tracing import _jaxpr
from jzero.tracing._types import Eqn

_OPS = {
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a step.

    Attributes:
      op: 'all-gather', 'reduce-scatter', 'all-reduce', ...
      axes: mesh axes it runs over.
      dtype: dtype on the wire.
      itemsize: bytes of an element.
      elements: of the whole value: gathered by an all-gather, reduced by a reduction; of an all-to-all, those
        of a device.
      times: how often a step runs it (trip counts of the loops around it); of a `while`, in each iteration.
      leaf: the leaf it serves, where known.
      each_iteration: a `while` is around it, and nobody knows how many iterations it has.
    """

    op: str
    axes: tuple[str, ...]
    dtype: str
    itemsize: float
    elements: int
    times: int
    leaf: str
    each_iteration: bool = False

    @property
    def total_elements(self) -> int:
        """Elements a step moves through it; of a `while`, an iteration."""
        return self.elements * self.times

    @property
    def nbytes(self) -> int:
        """Bytes of these elements."""
        return math.ceil(self.total_elements * self.itemsize)


def collectives(
    jaxpr: Any, times: int = 1, each_iteration: bool = False, leaf: str = ""
) -> Iterator[Collective]:
    """Every collective in `jaxpr` and the jaxprs inside it; `leaf` is what an equation around it serves."""
    for eqn in _jaxpr.open_jaxpr(jaxpr)[0].eqns:
        name = eqn.primitive.name
        if name in _OPS:
            yield from _collectives_of(eqn, times, each_iteration, leaf_of(eqn) or leaf)
        known = trip_count(eqn)
        inner = times if known is None else times * known
        for sub in _jaxpr.inner_jaxprs(eqn):
            yield from collectives(
                sub, inner, each_iteration or known is None, leaf_of(eqn) or leaf
            )


def op_of(eqn: Eqn) -> str | None:
    """The collective that an equation is, by its name in the compiled program."""
    return _OPS.get(eqn.primitive.name)


def leaf_of(eqn: Eqn) -> str:
    """The leaf that a collective serves; of one of the batch, nothing."""
    leaf = re.search(r"jzero\.\w+\[(.*)\]", str(eqn.source_info.name_stack))
    return leaf.group(1) if leaf else ""


def _collectives_of(eqn: Eqn, times: int, each_iteration: bool, leaf: str) -> Iterator[Collective]:
    gathers = _OPS[eqn.primitive.name] == "all-gather"
    for atom in eqn.outvars if gathers else eqn.invars:
        yield Collective(
            _OPS[eqn.primitive.name],
            _jaxpr.axes_of(eqn),
            str(atom.aval.dtype),
            atom.aval.dtype.itemsize,
            atom.aval.size,
            times,
            leaf,
            each_iteration,
        )


def carried_bytes(jaxpr: Any, scope: str) -> int:
    """Bytes that the largest `scan` made under the named scope carries from one iteration to the next."""
    most, region = 0, Region(*_jaxpr.open_jaxpr(jaxpr))
    for eqn in region.jaxpr.eqns:
        over = edges(region, eqn) if _jaxpr.in_scope(eqn, scope) else []
        if carried := [edge.target[1].aval for edge in over if edge.kind is EdgeKind.BACK]:
            most = max(most, sum(map(size_in_bytes, carried)))
        else:
            most = max([most, *(carried_bytes(sub, scope) for sub in _jaxpr.inner_jaxprs(eqn))])
    return most
