# SPDX-License-Identifier: Apache-2.0
"""A sum over the devices that a loop only adds up is done once, behind it, of what its turns have added up.

The gradient of what all layers read (a bias by position) is cast to its dtype in each turn, and no sum waits
through a cast to another one. So the turns add up what is to be summed, in its own dtype.
"""

from __future__ import annotations

import dataclasses

from jzero.ir import _rules
from jzero.ir._loops import CarryPort, Scan
from jzero.ir._rules import Cost
from jzero.ir._writer import JaxprWriter
from jzero.sharding.passes import _waits
from jzero.tracing import _jaxpr
from jzero.tracing._types import Eqn, Jaxpr


def late_sums(jaxpr: Jaxpr) -> Jaxpr:
    """One device's program whose loops sum nothing over the devices that they only add up."""
    eqns = list[Eqn]()
    for eqn in jaxpr.eqns:
        inner = _jaxpr.with_inner(eqn, late_sums)
        eqns += _loop(inner) if eqn.primitive.name == "scan" else [inner]
    return _waits.with_equations(jaxpr, eqns)


def _loop(eqn: Eqn) -> list[Eqn]:
    scan, changed = Scan.of(eqn), False
    for j, port in enumerate(scan.carries):
        chain = _collected(scan, port)
        if chain:
            scan, changed = _summed_behind(scan, j, chain), True
    return scan.equations() if changed else [eqn]


def _collected(scan: Scan, port: CarryPort) -> list[Eqn]:
    """The sum that a carry adds up, what is done to it, and the addition; nothing if it adds up no such."""
    makers = {out: eqn for eqn in scan.eqns for out in eqn.outvars}
    num = _waits.num_readers(scan)
    if _jaxpr.is_literal(port.after) or num.get(port.before) != 1 or num.get(port.after) != 1:
        return []
    add = makers.get(port.after)
    if add is None or add.primitive.name not in _rules.ADDS or port.before not in add.invars:
        return []
    (atom,) = (x for x in add.invars if x is not port.before)
    chain = [add]
    while not _jaxpr.is_literal(atom) and num[atom] == 1 and (eqn := makers.get(atom)) is not None:
        chain.append(eqn)
        if eqn.primitive.name == "psum":
            alone = len(eqn.invars) == 1 and eqn.params["axis_index_groups"] is None
            return chain[::-1] if alone and _waits.is_float(eqn.invars[0]) else []
        if len(eqn.invars) != 1 or not (_rules.costs(eqn, Cost.VIEW) or _rules.is_float_cast(eqn)):
            return []
        (atom,) = eqn.invars
    return []


def _summed_behind(scan: Scan, j: int, chain: list[Eqn]) -> Scan:
    """The loop that adds up what the first of these sums, and these, behind it."""
    port, (psum, *_, add) = scan.carries[j], chain
    term = _jaxpr.variable(psum.invars[0])
    writer = JaxprWriter(psum)
    zeros = writer.full(0, term.aval)
    before, after, out = (_jaxpr.new_var(psum.outvars[0]) for _ in range(3))
    gone = {*map(id, chain)}
    eqns = [eqn for eqn in scan.eqns if id(eqn) not in gone]
    eqns.append(add.replace(invars=[before, term], outvars=[after]))
    behind = JaxprWriter(psum, {term: out, port.before: port.init})
    behind.copy(chain[:-1])
    behind.again(add, outs=[port.out])
    new = CarryPort(zeros, before, after, out)
    return dataclasses.replace(
        scan, eqns=tuple(eqns), carries=(*scan.carries[:j], new, *scan.carries[j + 1 :]),
        before=(*scan.before, *writer.eqns),
        after=(*scan.after, *(_jaxpr.within_scope(e, outer=scan.eqn) for e in behind.eqns)),
    )  # fmt: skip
