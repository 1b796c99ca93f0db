# SPDX-License-Identifier: Apache-2.0
"""Splits the reduction of a large gradient: terms that are made before a loop are reduced before it.

The gradient of an embedding table with tied weights has a term from the logits, made before the backward
loop, and one from the look-up, made after it. Otherwise the first would wait, unreduced, through the loop.
The price is one more reduction of as many bytes.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence

from jax import lax

from jzero.ir._regions import Region
from jzero.sharding.passes import _waits
from jzero.sharding.passes._chains import terms_of
from jzero.sharding.passes._order import WAITS_THROUGH_LOOPS
from jzero.tracing import _jaxpr
from jzero.tracing._types import Eqn, Jaxpr, Var


def before_loops(jaxpr: Jaxpr, reduction: str = "reduce_scatter") -> Jaxpr:
    """In the new program, no large gradient waits through a loop for another term of it."""
    inner = functools.partial(before_loops, reduction=reduction)
    jaxpr = _waits.with_equations(jaxpr, [_jaxpr.with_inner(e, inner) for e in jaxpr.eqns])
    iterates = [i for i, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name in ("scan", "while")]
    loops = [
        i for i in iterates
        if any(e.primitive.name in _waits.PRODUCTS for e in _jaxpr.inside(jaxpr.eqns[i]))
    ]  # fmt: skip
    large = [
        i for i, eqn in enumerate(jaxpr.eqns)
        if eqn.primitive.name == reduction and _waits.nbytes(eqn.invars) > WAITS_THROUGH_LOOPS
    ]  # fmt: skip
    if not loops or not large:
        return jaxpr
    program, written, gone = Region(jaxpr, []), dict[int, list[Eqn]](), set[int]()
    for i in large:
        terms, adds = terms_of(program, _jaxpr.variable(jaxpr.eqns[i].invars[0]))
        parts = dict[int, list[Var]]()  # by how many loops there are before them
        for term in terms:
            parts.setdefault(bisect.bisect(loops, program.makers.get(term, -1)), []).append(term)
        if len(parts) > 1:
            gone |= {*map(id, [jaxpr.eqns[i], *adds])}
            for at, eqns in _in_parts(jaxpr.eqns[i], [*parts.values()], i, program):
                written.setdefault(at, []).extend(eqns)
    eqns = [*written.get(-1, ())]
    for i, eqn in enumerate(jaxpr.eqns):
        eqns += [eqn] * (id(eqn) not in gone) + written.get(i, [])
    return _waits.with_equations(jaxpr, eqns)


def _in_parts(
    reduction: Eqn, parts: Sequence[Sequence[Var]], end: int, program: Region
) -> list[tuple[int, list[Eqn]]]:
    """The reduction of each part, behind what makes it, and their sum in place of the reduction."""
    found, shards = list[tuple[int, list[Eqn]]](), list[Var]()
    for terms in parts:
        whole, eqns = _added(reduction, terms)
        shards.append(_jaxpr.new_var(reduction.outvars[0]))
        eqns.append(reduction.replace(invars=[whole], outvars=[shards[-1]]))
        found.append((max(program.makers.get(term, -1) for term in terms), eqns))
    _, eqns = _added(reduction, shards)
    eqns[-1] = eqns[-1].replace(outvars=reduction.outvars)
    return [*found, (end, eqns)]


def _added(source: Eqn, terms: Sequence[Var]) -> tuple[Var, list[Eqn]]:
    (total, *others), eqns = terms, list[Eqn]()
    for term in others:
        out = _jaxpr.new_var(total)
        eqns.append(_jaxpr.equation(lax.add_p, [total, term], [out], source))
        total = out
    return total, eqns
