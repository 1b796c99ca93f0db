# SPDX-License-Identifier: Apache-2.0
"""Gathers each leaf once for forward and backward pass; stacks before the loops that slice them.

FSDP2 calls it `reshard_after_forward=False`: gathered parameters stay until their last use.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from jzero.ir._loops import Scan, ScanBuilder, SlicePort, StackPort
from jzero.ir._regions import variables
from jzero.ir._writer import JaxprWriter
from jzero.sharding.passes import _waits
from jzero.sharding.passes._chains import (
    GatherChain,
    chains,
    may_be_on_stack,
    may_stand_in,
    on_stack,
)
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._types import Atom, Eqn, Jaxpr, Var


def keep_gathered(jaxpr: Jaxpr, in_all_loops: bool = False) -> Jaxpr:
    """One device's program in which each leaf is gathered once.

    `in_all_loops`: whether stacks are gathered before any loop; else only before those of one pass of
      `jax.grad`. A loop of train steps gathers what each of them has updated.
    """
    return _kept(jaxpr, in_all_loops, None)


def gathered_once(jaxpr: Jaxpr) -> Jaxpr:
    """One device's program, in which equal gathers of leaves are one, also of updated leaves."""
    eqns = [_jaxpr.with_inner(eqn, gathered_once) for eqn in jaxpr.eqns]
    return _each_once(_waits.with_equations(jaxpr, eqns))


def _kept(jaxpr: Jaxpr, in_all_loops: bool, autodiff: str | None) -> Jaxpr:
    eqns = list[Eqn]()
    for eqn in jaxpr.eqns:
        inside = autodiff or _jaxpr.autodiff_pass(eqn)

        def within(body: Jaxpr, inside: str | None = inside) -> Jaxpr:
            return _kept(body, in_all_loops, inside)

        new = _jaxpr.with_inner(eqn, within)
        of_one_pass = in_all_loops or inside is not None
        eqns += _of_stacks(new) if of_one_pass and eqn.primitive.name == "scan" else [new]
    return _each_once(_waits.with_equations(jaxpr, eqns))


# -- stacks ------------------------------------------------------------------------------------------------
def _of_stacks(eqn: Eqn) -> list[Eqn]:
    """A loop whose iterations get slices of gathered stacks."""
    scan = Scan.of(eqn)
    stacks = {port.row: port.stack for port in scan.xs}
    found = [c for c in chains(scan.body) if c.root in stacks and all(map(may_be_on_stack, c.eqns))]
    made = {port.stack: c for port in scan.ys if (c := _saved(scan, port, stacks)) is not None}
    if not found and not made:
        return [eqn]
    moved = {id(chain.eqns[-1]) for chain in found}
    builder = ScanBuilder(scan)
    builder.ys = [port for port in scan.ys if port.stack not in made]
    for stack, chain in made.items():
        on_stack(builder.before, chain.eqns, stacks[chain.root], stack)
    outs = [*(p.after for p in scan.carries), *(p.row for p in builder.ys)]
    left = [each for each in scan.eqns if id(each) not in moved]
    left = _rewrite.without_unread(left, outs, lambda _: True)
    read = {*variables([*(x for each in left for x in each.invars), *outs])}
    builder.eqns = tuple(left)
    builder.xs = [port for port in scan.xs if port.row in read]
    builder.xs += [
        SlicePort(on_stack(builder.before, chain.eqns, stacks[chain.root]), chain.out)
        for chain in found
        if chain.out in read
    ]
    return builder.build().equations()


def _saved(scan: Scan, port: StackPort, stacks: Mapping[Var, Atom]) -> GatherChain | None:
    """The chain that makes a saved stack of sliced ones; None if the loop computes it."""
    makers, eqns, atom = {e.outvars[0]: e for e in scan.eqns if e.outvars}, list[Eqn](), port.row
    while not _jaxpr.is_literal(atom) and (eqn := makers.get(atom)) is not None:
        if not may_stand_in(eqn) or _waits.is_gather(eqn) or not may_be_on_stack(eqn):
            return None
        eqns.append(eqn)
        atom = eqn.invars[0]
    known = eqns and not _jaxpr.is_literal(atom) and atom in stacks
    return GatherChain(_jaxpr.variable(atom), tuple(eqns[::-1])) if known else None


# -- equal gathers -----------------------------------------------------------------------------------------
def _each_once(jaxpr: Jaxpr) -> Jaxpr:
    if not jaxpr.eqns:
        return jaxpr
    ours = {id(chain.eqns[-1]) for chain in chains(jaxpr)}
    for eqn in filter(_waits.is_gather, jaxpr.eqns):
        if any(scope.startswith("jzero.gather[") for scope in _jaxpr.scopes(eqn)):
            ours.add(id(eqn))  # It gathers a leaf, or a value derived from one.
    writer, numbers, values = JaxprWriter(jaxpr.eqns[0]), dict[Hashable, int](), dict[Var, int]()
    gathered = dict[int, Var]()

    def number(atom: Atom) -> int:
        if _jaxpr.is_literal(atom):
            return numbers.setdefault((str(atom.val), str(atom.aval)), len(numbers))
        return values.setdefault(atom, numbers.setdefault(id(atom), len(numbers)))

    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "optimization_barrier":
            values |= zip(eqn.outvars, map(number, eqn.invars), strict=True)
        elif may_stand_in(eqn):
            key = (eqn.primitive.name, str(eqn.params), *map(number, eqn.invars))
            values[eqn.outvars[0]] = numbers.setdefault(key, len(numbers))
        if id(eqn) in ours:
            (out,) = eqn.outvars
            first = gathered.setdefault(values[out], out)
            if first is not out:
                writer.names[out] = first
                continue
        writer.eqns.append(writer.renamed(eqn))
    return _waits.with_equations(jaxpr, writer.eqns, [*map(writer.read, jaxpr.outvars)])
