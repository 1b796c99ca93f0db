# SPDX-License-Identifier: Apache-2.0
"""Dataflow facts for passes: which values differ by their rows, are gradients, or views of arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jzero.ir import _dataflow, _rules
from jzero.ir._regions import Region, ValueIn
from jzero.ir._rules import Cost
from jzero.ir._writer import JaxprWriter
from jzero.sharding.analysis import _frames
from jzero.sharding.passes import _waits
from jzero.tracing import _jaxpr
from jzero.tracing._types import Eqn, Jaxpr

_Axes = frozenset[str]
_NOWHERE: _Axes = frozenset()
_COMPUTED = frozenset([-1])
# Each element of a result is one of the first operand, cast perhaps.
VIEWS = (Cost.IDENTITY, Cost.COPY, Cost.VIEW, Cost.PART, Cost.CAST)
SUMS = _frames.REDUCTIONS | {"reduce_scatter"}
_EXTREMES = frozenset({"pmax", "pmin"})


class ValueOrigin(NamedTuple):
    """What a value comes from."""

    # Axes over which it differs because rows of the batch do; it may be a term of a sum of them.
    differs: _Axes = _NOWHERE
    # Axes that shard the rows it is computed of, gathered or not, but not summed.
    of_rows: _Axes = _NOWHERE
    is_gradient: bool = False  # it differs, and a backward pass made it, or what it is computed of
    # Arguments of the program that it is a view of: one, or -1 for what is computed.
    args: frozenset[int] = frozenset()

    @property
    def arg(self) -> int | None:
        """The argument that it is a view of, by index; None if it is computed."""
        (arg,) = self.args if len(self.args) == 1 else (-1,)
        return None if arg < 0 else arg


Origins = dict[ValueIn, ValueOrigin]


def origins(program: Region, rows: Sequence[_Axes]) -> Origins:
    start: Origins = {
        (program, var): ValueOrigin(axes, axes, False, _COMPUTED if axes else frozenset([i]))
        for i, (var, axes) in enumerate(zip(program.jaxpr.invars, rows, strict=True))
    }
    computed = ValueOrigin(args=_COMPUTED)
    start |= {(program, var): computed for var in program.jaxpr.constvars}
    return _dataflow.forward(
        program, start, _made, _join, ValueOrigin(), literal=lambda _: computed
    )


def _join(a: ValueOrigin, b: ValueOrigin) -> ValueOrigin:
    return ValueOrigin(
        a.differs | b.differs, a.of_rows | b.of_rows, a.is_gradient or b.is_gradient, a.args | b.args
    )  # fmt: skip


def _made(region: Region, eqn: Eqn, ins: Sequence[ValueOrigin]) -> list[ValueOrigin]:
    name = eqn.primitive.name
    if name == "optimization_barrier":
        return [*ins]
    differs = _NOWHERE.union(*(x.differs for x in ins))
    of_rows = _NOWHERE.union(*(x.of_rows for x in ins))
    over = frozenset(_jaxpr.axes_of(eqn)) if name in _frames.COLLECTIVES else _NOWHERE
    if name in SUMS | _EXTREMES:
        differs, of_rows = differs - over, of_rows - over
    elif name in _frames.GATHERS:
        differs -= over
    elif over:  # Rows that are exchanged, or go back to where they came from, are rows.
        differs |= of_rows & over
    made = region.pass_of(eqn) == "backward" or any(x.is_gradient for x in ins)
    is_view = name in _frames.GATHERS or ins and _rules.costs(eqn, *VIEWS)
    args = ins[0].args if is_view else _COMPUTED
    return [ValueOrigin(differs, of_rows, bool(differs) and made, args) for _ in eqn.outvars]


# Writes the replacement of an equation; False where it stays.
Rewrite = Callable[[Region, Eqn, JaxprWriter], bool]


def rewritten(region: Region, rewrite: Rewrite) -> Jaxpr:
    """The program with equations replaced where `rewrite` returns True, in loops and branches too.

    It gets the operands as they are in the program, to ask facts of them; `writer.read` has their names.
    """
    jaxpr = region.jaxpr
    if not jaxpr.eqns:
        return jaxpr
    writer, kept = JaxprWriter(jaxpr.eqns[0]), True
    for eqn in jaxpr.eqns:
        writer.source = eqn
        if rewrite(region, eqn, writer):
            kept = False
            continue
        new = writer.renamed(region.with_inner(eqn, lambda body: rewritten(body, rewrite)))
        writer.eqns.append(new)
        kept = kept and new is eqn
    assert not writer.consts, "what a pass writes has no constants"
    if kept:
        return jaxpr
    return _waits.with_equations(jaxpr, writer.eqns, [*map(writer.read, jaxpr.outvars)])
