# SPDX-License-Identifier: Apache-2.0
"""Chains of equations: gathers of a program's arguments, sums of terms, and the same on stacks or tiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jzero.ir import _rules
from jzero.ir._factors import Factor, with_size
from jzero.ir._regions import Region, variables
from jzero.ir._writer import JaxprWriter
from jzero.sharding.passes import _waits
from jzero.sharding.passes._origins import VIEWS
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Jaxpr, Var


class GatherChain(NamedTuple):
    """A gather, without the barriers before it."""

    root: Var  # the argument of the program that it gathers
    eqns: tuple[Eqn, ...]  # views, casts and gathers of the argument; the last one is this

    @property
    def out(self) -> Var:
        return self.eqns[-1].outvars[0]


def chains(jaxpr: Jaxpr) -> list[GatherChain]:
    """The gathers of a program's own arguments, in order; without those of inner jaxprs."""
    makers = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    found = [_chain(eqn, makers) for eqn in jaxpr.eqns if _waits.is_gather(eqn)]
    arguments = {*jaxpr.invars}
    return [chain for chain in found if chain is not None and chain.root in arguments]


def _chain(eqn: Eqn, makers: _waits.Makers) -> GatherChain | None:
    eqns, atom = [eqn], eqn.invars[0]
    while not _jaxpr.is_literal(atom) and (made := makers.get(atom)) is not None:
        if made.primitive.name == "optimization_barrier":
            atom = made.invars[_waits.place_of(made, atom)]
        elif may_stand_in(made):
            eqns.append(made)
            atom = made.invars[0]
        else:
            return None
    return None if _jaxpr.is_literal(atom) else GatherChain(atom, tuple(eqns[::-1]))


def may_stand_in(eqn: Eqn) -> bool:
    """Whether it only views, casts or gathers one value."""
    known = all(map(_jaxpr.is_literal, eqn.invars[1:])) and len(eqn.outvars) == 1
    return known and (_waits.is_gather(eqn) or _rules.costs(eqn, *VIEWS))


def terms_of(region: Region, total: Var) -> tuple[list[Var], list[Eqn]]:
    """The terms of a sum, in order, and its additions, whose results nothing else reads."""
    due, terms, adds = [total], list[Var](), list[Eqn]()
    while due:
        index = region.makers.get(x := due.pop())
        eqn = None if index is None else region.jaxpr.eqns[index]
        if eqn is not None and only_reader(region, x) is not None and _adds_alike(eqn):
            adds.append(eqn)
            due += map(_jaxpr.variable, eqn.invars[::-1])
        else:
            terms.append(x)
    return terms, adds


def _adds_alike(eqn: Eqn) -> bool:
    """Whether it adds two values of one type."""
    if eqn.primitive.name not in _rules.ADDS or len(variables(eqn.invars)) < 2:
        return False
    atoms = (*eqn.invars, *eqn.outvars)
    return len({(x.aval.shape, x.aval.dtype, x.aval.weak_type) for x in atoms}) == 1


def only_reader(region: Region, var: Var) -> Eqn | None:
    """The equation that alone reads a value; None for one that is read twice, or returned."""
    readers, eqns = region.readers.get(var, []), region.jaxpr.eqns
    return eqns[readers[0]] if len(readers) == 1 and readers[0] < len(eqns) else None


def may_be_on_stack(eqn: Eqn) -> bool:
    """Whether it can be applied to a stack as to its slices."""
    if eqn.params.get("dimensions") is not None and eqn.primitive.name == "reshape":
        return False
    return _waits.is_gather(eqn) or eqn.primitive.name in _ON_STACK


def on_stack(writer: JaxprWriter, eqns: Sequence[Eqn], stack: Atom, last: Var | None = None) -> Var:
    """Writes a chain of equations on slices as one on the whole stack; its result is `last`, if given."""
    length = stack.aval.shape[0]
    for eqn in eqns:
        (out,), params = eqn.outvars, dict(eqn.params)
        if _waits.is_gather(eqn):
            params["all_gather_dimension"] += 1
        else:
            params |= _ON_STACK[eqn.primitive.name](length, params)
        new = last if last is not None and eqn is eqns[-1] else None
        new = _jaxpr.var_like(out.aval, (length, *out.aval.shape)) if new is None else new
        source = _jaxpr.within_scope(eqn, outer=writer.source)
        (stack,) = writer.clone(source, [stack], [new], params=params)
    return _jaxpr.variable(stack)


def with_size_of(
    writer: JaxprWriter, eqn: Eqn, factor: Factor, size: int, ins: Sequence[Atom], source: Eqn
) -> list[Var]:
    """Writes an equation whose factor has another size, as of a tile or of a gathered operand."""
    shapes = [
        out.aval.shape if d is None else with_size(out.aval.shape, d, size)
        for out, d in zip(eqn.outvars, factor.outs, strict=True)
    ]
    outs = [_jaxpr.var_like(x.aval, shape) for x, shape in zip(eqn.outvars, shapes, strict=True)]
    return writer.clone(eqn, ins, outs, source, {**eqn.params, **factor.local(size, 1)})


def _behind_first(dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(d + 1 for d in dims)


_Params = Mapping[str, Any]
# By primitive, the parameters that differ in an equation on a stack of `length` slices.
_ON_STACK: dict[str, Callable[[int, _Params], _Params]] = {
    "convert_element_type": lambda length, params: {},
    "psum": lambda length, params: {},
    "reduce_scatter": lambda length, params: {"scatter_dimension": params["scatter_dimension"] + 1},
    "transpose": lambda length, params: {"permutation": (0, *_behind_first(params["permutation"]))},
    "squeeze": lambda length, params: {"dimensions": _behind_first(params["dimensions"])},
    "slice": lambda length, params: {
        "start_indices": (0, *params["start_indices"]),
        "limit_indices": (length, *params["limit_indices"]),
        "strides": params["strides"] and (1, *params["strides"]),
    },
    "reshape": lambda length, params: {"new_sizes": (length, *params["new_sizes"])},
}
