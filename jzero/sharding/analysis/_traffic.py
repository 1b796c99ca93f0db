# SPDX-License-Identifier: Apache-2.0
"""Lists the collectives of a program from its jaxpr, for `describe()` and tests."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from jzero.ir._regions import EdgeKind, Region, edges, trip_count
from jzero.ir._rules import size_in_bytes
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn

_OPS = {
    **dict.fromkeys(("all_gather", "all_gather_invariant"), "all-gather"),
    **dict.fromkeys(("psum", "psum_invariant", "pmax", "pmin"), "all-reduce"),
    "reduce_scatter": "reduce-scatter", "all_to_all": "all-to-all", "ppermute": "collective-permute",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Collective:
    op: str  # 'all-gather', 'reduce-scatter', 'all-reduce', ...
    axes: tuple[str, ...]
    dtype: str
    itemsize: float
    elements: int  # Gathered or reduced in all; for an all-to-all, of a device's part.
    times: int  # In a step, or in an iteration of a `while`.
    leaf: str  # The leaf that it serves, if known.
    each_iteration: bool = False  # It is inside a `while`, whose number of iterations is unknown.
    autodiff: str = ""  # The pass of `jax.grad`: 'forward', 'backward' or ''.

    @property
    def total_elements(self) -> int:
        return self.elements * self.times

    @property
    def nbytes(self) -> int:
        return math.ceil(self.total_elements * self.itemsize)


def collectives(
    jaxpr: Any, times: int = 1, each_iteration: bool = False, leaf: str = "", autodiff: str = ""
) -> Iterator[Collective]:
    """The collectives of a program; the other arguments are of the equations around it."""
    for eqn in _jaxpr.open_jaxpr(jaxpr)[0].eqns:
        op, around = op_of(eqn), _jaxpr.autodiff_pass(eqn) or autodiff
        own = leaf_of(eqn) or leaf
        values: Sequence[Atom] = eqn.outvars if op == "all-gather" else eqn.invars
        for aval in (atom.aval for atom in values if op is not None):
            yield Collective(
                str(op), _jaxpr.axes_of(eqn), str(aval.dtype), aval.dtype.itemsize, aval.size, times, own,
                each_iteration, around,
            )  # fmt: skip
        known = trip_count(eqn)
        inner = times if known is None else times * known
        for sub in _jaxpr.inner_jaxprs(eqn):
            yield from collectives(sub, inner, each_iteration or known is None, own, around)


def op_of(eqn: Eqn) -> str | None:
    """The name of a collective in the compiled program; None for other equations."""
    return _OPS.get(eqn.primitive.name)


def leaf_of(eqn: Eqn) -> str:
    """The leaf that a collective serves; '' if it serves none."""
    leaf = re.search(r"jzero\.\w+\[(.*)\]", str(eqn.source_info.name_stack))
    return leaf.group(1) if leaf else ""


def carried_bytes(jaxpr: Any, scope: str) -> int:
    """Bytes of the carries of the loop with the largest ones in a named scope."""
    most, region = 0, Region(*_jaxpr.open_jaxpr(jaxpr))
    for eqn in region.jaxpr.eqns:
        over = edges(region, eqn) if _jaxpr.in_scope(eqn, scope) else []
        if carried := [edge.target[1].aval for edge in over if edge.kind is EdgeKind.BACK]:
            most = max(most, sum(map(size_in_bytes, carried)))
        else:
            most = max([most, *(carried_bytes(sub, scope) for sub in _jaxpr.inner_jaxprs(eqn))])
    return most
