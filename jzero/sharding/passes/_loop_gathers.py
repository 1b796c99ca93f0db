# SPDX-License-Identifier: Apache-2.0
"""Hoists gathers of what an evaluation's loops close over, as far as there is memory for it.

Where there is too little memory, the gathers wait for a value of the iteration, so that the compiler cannot
hoist them either.
"""

from __future__ import annotations

from collections.abc import Sequence

from jzero.ir._loops import ConstPort, Scan, ScanBuilder
from jzero.ir._writer import JaxprWriter
from jzero.sharding.passes import _waits
from jzero.sharding.passes._chains import GatherChain, chains
from jzero.sharding.passes._keep_gathered import keep_gathered
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Jaxpr, Var


def loop_gathers(jaxpr: Jaxpr, nbytes: int) -> Jaxpr:
    """One device's program whose loops gather what they close over before them, if all of a loop's fits.

    `nbytes`: the most that one loop keeps gathered through its iterations; of a loop with more, each
      iteration gathers.
    """
    eqns = list[Eqn]()
    for eqn in jaxpr.eqns:
        find = _LOOPS.get(eqn.primitive.name)
        hoisted = None
        if find is not None:  # Iterations gather stacks before inner loops.
            stacked = _jaxpr.with_inner(eqn, lambda body: keep_gathered(body, in_all_loops=True))
            hoisted = find(stacked, nbytes, False)
        if hoisted is None:
            eqn = _jaxpr.with_inner(eqn, lambda body: loop_gathers(body, nbytes))
            hoisted = [eqn] if find is None else find(eqn, nbytes, True)
        eqns += hoisted or [eqn]
    return _waits.with_equations(jaxpr, eqns)


def _of_scan(eqn: Eqn, nbytes: int, waits: bool) -> list[Eqn] | None:
    """The loop behind its gathers; if they do not fit, None, or with gathers in each iteration."""
    scan = Scan.of(eqn)
    outer = {port.inner: port.outer for port in scan.consts}
    found = [chain for chain in chains(scan.body) if chain.root in outer]
    if not found or not waits and not _fits(found, nbytes):
        return None
    builder = ScanBuilder(scan)
    if _fits(found, nbytes):
        builder.eqns = tuple(_without(scan.eqns, found))
        for chain in found:
            made = _outside(builder.before, chain, outer[chain.root])
            builder.consts.append(ConstPort(made, chain.out))
    else:
        iteration = [*(port.before for port in scan.carries), *(port.row for port in scan.xs)]
        builder.eqns = tuple(_inside(scan.eqns, found, iteration))
    return builder.build().equations()


def _of_while(eqn: Eqn, nbytes: int, waits: bool) -> list[Eqn] | None:
    loop = _jaxpr.while_parts(eqn)
    first, last = loop.num_cond_consts, loop.num_cond_consts + loop.num_body_consts
    consts, carry = loop.body.invars[: last - first], loop.body.invars[last - first :]
    outer = dict(zip(consts, eqn.invars[first:last], strict=True))
    found = [chain for chain in chains(loop.body) if chain.root in outer]
    writer, fits = JaxprWriter(eqn), _fits(found, nbytes)
    if not found or not waits and not fits:
        return None
    eqns = _without(loop.body.eqns, found) if fits else _inside(loop.body.eqns, found, carry)
    hoisted = found if fits else []
    made = [_outside(writer, chain, outer[chain.root]) for chain in hoisted]
    ins = [*consts, *(chain.out for chain in hoisted), *carry]
    body = _jaxpr.replaced(loop.body, invars=ins, eqns=eqns)
    closed = eqn.params["body_jaxpr"].replace(jaxpr=body)
    params = eqn.params | dict(body_jaxpr=closed, body_nconsts=loop.num_body_consts + len(made))
    operands = [*eqn.invars[:last], *made, *eqn.invars[last:]]
    return [*writer.eqns, eqn.replace(invars=operands, params=params)]


_LOOPS = {"scan": _of_scan, "while": _of_while}


def _fits(found: Sequence[GatherChain], nbytes: int) -> bool:
    return _waits.nbytes(chain.out for chain in found) <= nbytes


def _without(eqns: Sequence[Eqn], found: Sequence[GatherChain]) -> list[Eqn]:
    gone = {id(chain.eqns[-1]) for chain in found}
    return [eqn for eqn in eqns if id(eqn) not in gone]


def _outside(writer: JaxprWriter, chain: GatherChain, x: Atom) -> Var:
    for eqn in chain.eqns:
        (x,) = writer.clone(_jaxpr.within_scope(eqn, outer=writer.source), [x, *eqn.invars[1:]])
    return _jaxpr.variable(x)


def _inside(
    eqns: Sequence[Eqn], found: Sequence[GatherChain], iteration: Sequence[Var]
) -> list[Eqn]:
    """An iteration whose gathers depend on a value of that iteration."""
    ours, written = {id(chain.eqns[-1]) for chain in found}, list[Eqn]()
    token = next((var for var in iteration if _waits.is_float(var)), iteration[0])
    for eqn in eqns:
        if id(eqn) in ours:
            barriers, eqn = _waits.waiting(eqn, [token], _waits.PREFETCH)
            written += barriers
        written.append(eqn)
    return written
