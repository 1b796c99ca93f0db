# SPDX-License-Identifier: Apache-2.0
"""Activation offload: residuals of a forward pass are copied to pinned host memory and fetched backward.

A value is copied when it is made. The forward pass goes on with the device's copy, and the backward pass
fetches the host's where it first reads it. A loop writes its stack of residuals to the host slice by slice,
and the backward loop fetches it slice by slice::

    for x in xs: carry, ys = body(x)       ->  for x in xs: carry, to_host(ys) = body(x)
    for y in ys: carry = transposed(y)     ->  for y in ys: carry = transposed(to_device(y))

The pass `prefetch` then makes an iteration fetch for the next one, and places all other fetches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jzero.ir import _memory_spaces
from jzero.ir._loops import MICROBATCHES, Scan, SlicePort, StackPort
from jzero.ir._regions import Region, ValueIn
from jzero.ir._writer import JaxprWriter
from jzero.sharding.analysis import _residuals
from jzero.sharding.analysis._residuals import Residual
from jzero.sharding.passes import _origins, _waits
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Jaxpr, Var


class OnHost(NamedTuple):
    jaxpr: Jaxpr
    residuals: tuple[Residual, ...]


def activations(
    jaxpr: Jaxpr, rows: Sequence[frozenset[str]], microbatches: int, marks: bool = False
) -> OnHost:
    """One device's program whose residuals are offloaded; what is said of them is of one microbatch.

    `microbatches`: how many there are, in whose loops residuals are made and read.
    `marks`: both passes become programs of their own: what they pass on is marked, and nothing is copied.
    """
    program = Region(jaxpr, [])
    found = _origins.origins(program, rows)

    def varies(region: Region, var: Var) -> bool:
        origin = found.get((region, var))
        return origin is not None and bool(origin.differs | origin.of_rows)

    each = {
        value: residual._replace(times=residual.times // microbatches)
        for value, residual in _residuals.residuals(program, varies).items()
        if residual.times % microbatches == 0  # Else it is of all microbatches, behind their loops.
    }
    return OnHost(_OnHostWriter(program, each, marks).run(), tuple(each.values()))


def in_order(jaxpr: Jaxpr, marks: bool = False) -> Jaxpr:
    """What the step's own policies send to the host waits for what left before; with `marks` it is marked."""
    if not any(map(_memory_spaces.is_sent, _jaxpr.walk(jaxpr))):
        return jaxpr
    return _OnHostWriter(Region(jaxpr, []), {}, marks).run()


class _OnHostWriter:
    """Writes a program. With `marks` nothing moves here: what others are to move is marked."""

    def __init__(self, region: Region, waiting: Mapping[ValueIn, Residual], marks: bool = False):
        self.region, self.waiting, self.marks = region, waiting, marks
        # Copies on the host that the backward pass is yet to fetch, by what they are copies of.
        self.there = dict[Var, Var]()
        self.leaving = list[Var]()  # copies on the host that nobody has waited for yet, in order
        eqns = region.jaxpr.eqns
        self.writer = JaxprWriter(eqns[0]) if eqns else None

    def run(self) -> Jaxpr:
        """The program; itself if nothing of it is offloaded."""
        jaxpr, writer = self.region.jaxpr, self.writer
        if writer is None:
            return jaxpr
        kept = True
        for eqn in jaxpr.eqns:
            start = len(writer.eqns)
            self._one(writer, eqn)
            kept = kept and writer.eqns[start:] == [eqn]
        assert not writer.consts, "copies have no constants"
        outs = [*map(writer.read, jaxpr.outvars)]
        return jaxpr if kept else _waits.with_equations(jaxpr, writer.eqns, outs)

    def _one(self, writer: JaxprWriter, eqn: Eqn) -> None:
        writer.source = eqn
        if self.marks:
            self._marked(writer, eqn)
            return
        in_pass = self.region.pass_of(eqn)
        if in_pass == "backward":
            for var in [v for v in _jaxpr.variables_read(eqn) if v in self.there]:
                writer.names[var] = self._fetched(writer, self.there.pop(var))
        sent = _memory_spaces.is_sent(eqn) and not self.region.autodiff and in_pass == "forward"
        if sent and not _jaxpr.is_literal(eqn.invars[0]):
            operand = eqn.invars[0]
            writer.names[operand] = self._behind(writer, writer.read(operand))
        new = self._with_inner(eqn)
        if new.primitive.name == "scan":
            new = self._loop(writer, new, eqn)
        new = writer.renamed(new)
        writer.eqns.append(new)
        if sent:
            self.leaving.append(new.outvars[0])
        for out in eqn.outvars:
            residual = self.waiting.get((self.region, out))
            if residual is not None and residual.iterations == 1:
                here = writer.names[out] = self._behind(writer, out)
                (copy,) = writer.trace(_memory_spaces.to_host, here)
                self.there[out] = _jaxpr.variable(copy)
                self.leaving.append(self.there[out])

    # -- marks -----------------------------------------------------------------------------------------

    def _marked(self, writer: JaxprWriter, eqn: Eqn) -> None:
        """Writes an equation where passes become programs of their own."""
        if self.region.pass_of(eqn) == "backward":
            read = [v for v in _jaxpr.variables_read(eqn) if v in self.there]
            writer.names |= {v: self.there.pop(v) for v in read}
        if _jaxpr.changes_memory(eqn):
            here = writer.read(eqn.invars[0])
            if _memory_spaces.is_sent(eqn):
                (here,) = writer.trace(_residuals.marked, here)
            writer.names[eqn.outvars[0]] = here
            return
        # The iterations of another loop with both passes are whole programs.
        apart = self.region.pass_of(eqn) is not None or _jaxpr.in_scope(eqn, MICROBATCHES)
        is_loop = eqn.primitive.name == "scan" and apart
        new = self._marked_loop(writer, eqn) if is_loop else self._with_inner(eqn)
        writer.eqns.append(writer.renamed(new))
        for out in eqn.outvars:
            residual = self.waiting.get((self.region, out))
            if residual is not None and residual.iterations == 1:
                (mark,) = writer.trace(_residuals.marked, writer.read(out))
                self.there[out] = _jaxpr.variable(mark)

    def _marked_loop(self, writer: JaxprWriter, eqn: Eqn) -> Eqn:
        """A loop whose iterations mark the residuals that they return, and read marked ones."""
        scan, (body,) = Scan.of(eqn), self.region.inner(eqn)
        inner = _OnHostWriter(body, self.waiting, marks=True)
        own = inner.writer
        if own is None:
            return eqn
        xs = list[SlicePort]()
        for port in scan.xs:
            stack, row = writer.read(port.stack), port.row
            if _jaxpr.is_on_host(row.aval) and not _jaxpr.is_on_host(stack.aval):
                row = _jaxpr.var_like(stack.aval, row.aval.shape)
                own.names[port.row] = row
            xs.append(SlicePort(stack, row))
        for each in body.jaxpr.eqns:
            inner._one(own, each)
        ys = list[StackPort]()
        for made in scan.ys:
            x, out = own.read(made.row), made.stack
            residual = self.waiting.get((self.region, out))
            if residual is not None and residual.iterations > 1 and not _jaxpr.is_literal(x):
                (x,) = own.trace(_residuals.marked, x)
            if _jaxpr.is_on_host(out.aval) and not _jaxpr.is_on_host(x.aval):
                out = writer.names[made.stack] = _jaxpr.var_like(x.aval, out.aval.shape)
            ys.append(StackPort(x, out))
        carries = [port._replace(after=own.read(port.after)) for port in scan.carries]
        assert not own.consts, "marks have no constants"
        new = dataclasses.replace(
            scan, eqns=(*own.eqns,), carries=(*carries,), xs=(*xs,), ys=(*ys,)
        )
        return new.equation()

    # -- copies ----------------------------------------------------------------------------------------

    def _with_inner(self, eqn: Eqn) -> Eqn:
        return self.region.with_inner(eqn, lambda body: _OnHostWriter(body, self.waiting).run())

    def _loop(self, writer: JaxprWriter, eqn: Eqn, old: Eqn) -> Eqn:
        """A loop that makes stacks on the host, and fetches slices of those that it reads."""
        scan, first, last = Scan.of(eqn), JaxprWriter(eqn), JaxprWriter(eqn)
        xs, ys = list[SlicePort](), list[StackPort]()
        for taken in scan.xs:
            stack = writer.read(taken.stack)
            if stack is not taken.stack and _jaxpr.is_on_host(stack.aval):
                row = _jaxpr.var_like(stack.aval, stack.aval.shape[1:])
                (here,) = first.trace(_memory_spaces.to_device, row)
                first.names[taken.row] = here
                taken = SlicePort(stack, row)
            xs.append(taken)
        for made, out in zip(scan.ys, old.outvars[len(scan.carries) :], strict=True):
            residual = self.waiting.get((self.region, out))
            if residual is not None and residual.iterations > 1 and not _jaxpr.is_literal(made.row):
                (there,) = last.trace(_memory_spaces.to_host, first.read(made.row))
                stack = _jaxpr.var_like(there.aval, out.aval.shape)
                writer.names[out], made = stack, StackPort(there, stack)
            ys.append(made)
        if not [*first.eqns, *last.eqns]:
            return eqn
        body = JaxprWriter(eqn, first.names)
        body.keep(scan.eqns)
        carries = [port._replace(after=body.read(port.after)) for port in scan.carries]
        rows = [port._replace(row=body.read(port.row)) for port in ys]
        eqns = (*first.eqns, *body.eqns, *last.eqns)
        new = dataclasses.replace(
            scan, eqns=eqns, carries=tuple(carries), xs=tuple(xs), ys=tuple(rows)
        )
        return new.equation()

    def _behind(self, writer: JaxprWriter, x: Atom) -> Atom:
        """`x`, when all but the last copies to the host are there.

        What the forward pass makes of it waits for the copies before: the compiler would else start them when
        the backward pass asks for them, and keep all values on the device until then.
        """
        arrived = list[Var]()
        limit = _residuals.ON_THEIR_WAY - _waits.nbytes([x])
        while self.leaving and _waits.nbytes(self.leaving) > limit:
            arrived.append(self.leaving.pop(0))
        return _waits.write_behind(writer, x, arrived)

    def _fetched(self, writer: JaxprWriter, copy: Var) -> Atom:
        (here,) = writer.trace(_memory_spaces.to_device, copy)
        return here
