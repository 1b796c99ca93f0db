# SPDX-License-Identifier: Apache-2.0
"""Sums over devices that are only added up: accumulated on each device, and reduced once.

A value stays partial through everything but a cast to another dtype, so the partitioner leaves two cases.
The gradient of what all layers read (a bias by position) is reduced and cast in each iteration, and then
added to a carry. The gradients of a table that is read twice are reduced, cast and added. Here both are added
in the wider dtype and reduced in the narrower one; large ones are still reduced apart.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from jzero.ir import _rules
from jzero.ir._loops import CarryPort, Scan
from jzero.ir._rules import Cost
from jzero.ir._sent import cast
from jzero.ir._writer import JaxprWriter
from jzero.sharding.passes import _waits
from jzero.sharding.passes._order import WAITS_THROUGH_LOOPS
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Jaxpr, Var


def late_sums(jaxpr: Jaxpr) -> Jaxpr:
    """One device's program, in which sums that are only added to others are reduced together."""
    eqns = list[Eqn]()
    for eqn in jaxpr.eqns:
        inner = _jaxpr.with_inner(eqn, late_sums)
        eqns += _loop(inner) if eqn.primitive.name == "scan" else [inner]
    return _waits.with_equations(jaxpr, _together(eqns, jaxpr.outvars))


def _together(eqns: list[Eqn], outs: Sequence[Atom]) -> list[Eqn]:
    makers = {out: eqn for eqn in eqns for out in eqn.outvars}
    reads = [atom for eqn in eqns for atom in eqn.invars]
    num = Counter[Atom](atom for atom in [*reads, *outs] if not _jaxpr.is_literal(atom))
    written, gone = dict[int, list[Eqn]](), set[int]()
    for add in eqns:
        if add.primitive.name not in _rules.ADDS:
            continue
        terms = [_cast_sum(makers, num, atom) for atom in add.invars]
        if not all(terms) or len({_kind(each) for each in terms}) > 1:
            continue
        if _waits.nbytes(terms[0][0].invars) > WAITS_THROUGH_LOOPS:
            continue  # Whole, it would be kept from one end of the model to the other.
        new = _added(add, terms)
        makers |= {out: eqn for eqn in new for out in eqn.outvars}
        written[id(add)] = new
        gone |= {id(eqn) for term in terms for eqn in term}
    kept = [e for eqn in eqns for e in written.get(id(eqn), [eqn])]
    return [eqn for eqn in kept if id(eqn) not in gone]


def _cast_sum(makers: _waits.Makers, num: Counter[Atom], atom: Atom) -> list[Eqn]:
    """The reductions that a value is a cast of, and the cast; nothing if they have other readers."""
    cast = None if _jaxpr.is_literal(atom) else makers.get(atom)
    if cast is None or not _rules.is_float_cast(cast) or num[atom] != 1:
        return []
    chain, (x,) = [cast], cast.invars
    while not _jaxpr.is_literal(x) and num[x] == 1 and (eqn := makers.get(x)) is not None:
        if not _sums(eqn):
            break
        chain.append(eqn)
        (x,) = eqn.invars
    return chain[::-1] if len(chain) > 1 else []


def _sums(eqn: Eqn) -> bool:
    exact = eqn.primitive.name in ("psum", "reduce_scatter") and len(eqn.invars) == 1
    return exact and eqn.params["axis_index_groups"] is None


def _kind(chain: Sequence[Eqn]) -> tuple[str, ...]:
    (x,) = chain[0].invars
    sums = (f"{eqn.primitive.name} {eqn.params}" for eqn in chain[:-1])
    return str(x.aval.dtype), str(x.aval.shape), *sums


def _added(add: Eqn, terms: Sequence[Sequence[Eqn]]) -> list[Eqn]:
    """Accumulates the operands as their sums would be, and reduces once."""
    *sums, cast = terms[-1]
    writer, (x,) = JaxprWriter(sums[0]), sums[0].invars
    wide = _jaxpr.var_like(cast.outvars[0].aval, x.aval.shape)
    ins = [writer.clone(each[-1], each[0].invars, [_jaxpr.new_var(wide)])[0] for each in terms]
    (total,) = writer.clone(add, ins, [_jaxpr.new_var(wide)])
    params = {**cast.params, "new_dtype": x.aval.dtype}
    (narrow,) = writer.clone(cast, [total], [_jaxpr.new_var(x)], params=params)
    writer.clone(sums[0], [narrow], sums[0].outvars)
    writer.keep(sums[1:])
    writer.clone(cast, outs=add.outvars)
    return writer.eqns


def _loop(eqn: Eqn) -> list[Eqn]:
    scan = Scan.of(eqn)
    makers = {out: eqn for eqn in scan.eqns for out in eqn.outvars}
    num = _waits.num_readers(scan)
    found = {j: _accumulated_sum(port, makers, num) for j, port in enumerate(scan.carries)}
    chains = {j: chain for j, chain in found.items() if chain}
    return _summed_behind(scan, chains).equations() if chains else [eqn]


def _accumulated_sum(port: CarryPort, makers: _waits.Makers, num: Mapping[Var, int]) -> list[Eqn]:
    """The reduction that a carry accumulates, operations on it, and the addition; or nothing."""
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


def _summed_behind(scan: Scan, chains: Mapping[int, Sequence[Eqn]]) -> Scan:
    """The loop, whose carries add up what the chains' first sums would sum, and then the chains.

    A running sum in the narrower dtype would lose a small term of an iteration as soon as it is large.
    """
    gone = {id(eqn) for chain in chains.values() for eqn in chain}
    eqns = [eqn for eqn in scan.eqns if id(eqn) not in gone]
    carries, before, after = [*scan.carries], [*scan.before], [*scan.after]
    for j, chain in chains.items():
        port, (psum, *_, add) = carries[j], chain
        term, writer, body = _jaxpr.variable(psum.invars[0]), JaxprWriter(psum), JaxprWriter(add)
        dtype = jnp.promote_types(term.aval.dtype, add.outvars[0].aval.dtype)
        old, new, out = (_jaxpr.var_like(term.aval, dtype=dtype) for _ in range(3))
        carries[j] = CarryPort(writer.full(0, old.aval), old, new, out)
        body.clone(add, [old, *body.trace(cast, term, static=(dtype,))], [new])
        behind = JaxprWriter(psum, {port.before: port.init})
        (behind.names[term],) = behind.trace(cast, out, static=(term.aval.dtype,))
        behind.copy(chain[:-1])
        behind.clone(add, outs=[port.out])
        eqns += body.eqns
        before += writer.eqns
        after += (_jaxpr.within_scope(e, outer=scan.eqn) for e in behind.eqns)
    return dataclasses.replace(
        scan, eqns=tuple(eqns), carries=tuple(carries), before=tuple(before), after=tuple(after)
    )
