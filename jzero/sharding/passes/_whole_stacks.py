# SPDX-License-Identifier: Apache-2.0
"""Moves casts and small reductions of a loop's stacked results behind it: once for the whole stack.

A step that casts each layer's gradient to float32 in its loop stacks twice the bytes that it reduced. And the
gradient of a vector, reduced in each iteration, takes a latency of its own if no other one has its dtype.
"""

from __future__ import annotations

import dataclasses

from jzero.ir._loops import Scan, StackPort
from jzero.ir._writer import JaxprWriter
from jzero.sharding.passes import _waits
from jzero.sharding.passes._chains import on_stack
from jzero.sharding.passes._order import SMALLEST_GROUP
from jzero.sharding.passes._waits import WHOLE_STACKS as SCOPE
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Jaxpr, Var

# [Note: what is done to whole stacks]
# An iteration stacks the operand of its last equations instead of their result, and the equations run once,
# on the stack: elementwise equations and sums over devices do the same to a stack as to its slices. These are
# casts, if the stack is smaller without them, and reductions (with the casts behind them) if the stack is
# small, so that holding it unreduced and waiting for its reduction cost little. Nothing else may read a value
# in between.

# [Note: slices that are only copied]
# XLA:GPU copies a slice into its stack as soon as it is there, beside the products. It waits at once for a
# reduction that is only copied: nothing hides it (jaxlib 0.12.0.1, H200; a barrier until the end of the
# iteration makes it worse). So such a slice is selected, by a condition that XLA cannot know to be true.


def whole_stacks(jaxpr: Jaxpr, nbytes: int = SMALLEST_GROUP) -> Jaxpr:
    """Loops leave to the end what can be done to whole stacks, of up to `nbytes` if they are reduced."""
    eqns = list[Eqn]()
    for eqn in jaxpr.eqns:
        inner = _jaxpr.with_inner(eqn, lambda body: whole_stacks(body, nbytes))
        eqns += _loop(inner, nbytes) if eqn.primitive.name == "scan" else [inner]
    return _waits.with_equations(jaxpr, eqns)


def _loop(eqn: Eqn, nbytes: int) -> list[Eqn]:
    scan = Scan.of(eqn)
    if not scan.length:
        return [eqn]
    makers = {out: each for each in scan.eqns for out in each.outvars}
    num_readers = _waits.num_readers(scan)
    ys, late, after = list[StackPort](), set[int](), JaxprWriter(eqn)
    for port in scan.ys:
        last = _last(port, makers, num_readers, nbytes // scan.length)
        late |= {*map(id, last)}
        if last:
            (row,) = last[-1].invars
            stack = _jaxpr.var_like(row.aval, (scan.length, *row.aval.shape))
            on_stack(after, last[::-1], stack, port.stack)
            port = StackPort(row, stack)
        ys.append(port)
    new = scan
    if late:
        kept = tuple(each for each in scan.eqns if id(each) not in late)
        new = dataclasses.replace(scan, eqns=kept, ys=tuple(ys))
    new = _computed(new, makers)
    return [eqn] if new is scan else [new.equation(), *after.eqns]


def _computed(scan: Scan, makers: _waits.Makers) -> Scan:
    """The loop, in which no stack is a copy of a reduction's result, [Note: slices that are only copied]."""
    known = next((port.before for port in _waits.carried(scan)), None)
    writer, ys = JaxprWriter(_jaxpr.within_scope(scan.eqn, SCOPE)), list[StackPort]()
    for port in scan.ys:
        eqn = None if _jaxpr.is_literal(port.row) else makers.get(port.row)
        if known is not None and eqn is not None and _is_sum(eqn) and _is_read(port):
            (bits,) = writer.trace(_waits.bits_of, known)
            port = port._replace(row=writer.trace(_waits.unless_never, port.row, bits)[0])
        ys.append(port)
    if not writer.eqns:
        return scan
    return dataclasses.replace(scan, eqns=(*scan.eqns, *writer.eqns), ys=tuple(ys))


def _last(
    port: StackPort, makers: _waits.Makers, num_readers: dict[Var, int], most: int
) -> list[Eqn]:
    """A slice's last equations, last first, if its stack can take them; they reduce up to `most` bytes."""
    atom: Atom = port.row
    chain, best, least = list[Eqn](), 0, _waits.nbytes([atom])
    while _is_read(port) and not _jaxpr.is_literal(atom):
        eqn = makers.get(atom)
        if eqn is None or num_readers[atom] != 1 or len(eqn.invars) != 1:
            break
        if eqn.primitive.name != "convert_element_type" and not _is_sum(eqn):
            break
        chain.append(eqn)
        (atom,) = eqn.invars
        nbytes = _waits.nbytes([atom])
        if _is_sum(eqn) and nbytes > most:
            break
        if _is_sum(eqn) or nbytes < least:
            best, least = len(chain), nbytes
    return chain[:best]


def _is_read(port: StackPort) -> bool:
    return not _jaxpr.is_dropped(port.stack)


def _is_sum(eqn: Eqn) -> bool:
    """Whether it is a sum over devices, all-reduced or reduce-scattered."""
    if _waits.is_reduction(eqn):
        return bool(eqn.params["tiled"]) and eqn.params["axis_index_groups"] is None
    return eqn.primitive.name == "psum" and eqn.params["axis_index_groups"] is None
