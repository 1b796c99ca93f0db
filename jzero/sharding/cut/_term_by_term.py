# SPDX-License-Identifier: Apache-2.0
"""Reassociates sums over microbatches, so that each term is added where it is computed.

A tied weight's gradient is a sum over its uses. If it were summed for each microbatch first, the terms of all
microbatches would be stored until the last use::

    total = total + (a + b)   ->   total = (total + a) + b

A step of the whole batch sums in that order, too: each use over all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jax import lax

from jzero.ir import _rules
from jzero.ir._regions import region_of
from jzero.ir._writer import JaxprWriter
from jzero.sharding.analysis._frames import num_reads
from jzero.sharding.cut._transfers import is_scalar
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Jaxpr, Var


class _Term(NamedTuple):
    """One term of a sum, and the casts from it to the sum, in order."""

    atom: Atom
    casts: tuple[Eqn, ...]


def term_by_term(body: Jaxpr, carries: Sequence[Var]) -> tuple[Jaxpr, dict[Var, list[Var]]]:
    """A loop's body whose first outputs are the next `carries`, with sums term by term, except scalar ones.

    Also returns, for each carry with several terms, its value after each of them.
    """
    place = region_of(body.eqns).makers
    makers = {out: body.eqns[i] for out, i in place.items()}
    uses = num_reads(body)
    steps: dict[Var, list[Var]] = {}
    gone, added = set[int](), list[Eqn]()
    for before, after in zip(carries, body.outvars, strict=False):
        eqn = None if _jaxpr.is_literal(after) else makers.get(after)
        if eqn is None or is_scalar(after) or not _adds(eqn):
            continue
        if uses.get(before) != 1 or uses[eqn.outvars[0]] != 1 or before not in eqn.invars:
            continue
        (whole,) = (atom for atom in eqn.invars if atom is not before)
        terms = _terms(whole, makers, uses)
        if len(terms) == 1:
            continue
        terms.sort(
            key=lambda term: -1 if _jaxpr.is_literal(term.atom) else place.get(term.atom, -1)
        )
        steps[before] = [*(_jaxpr.new_var(after) for _ in terms[1:]), eqn.outvars[0]]
        total, writer = before, JaxprWriter(eqn)
        for term, then in zip(terms, steps[before], strict=True):
            atom = term.atom
            for cast in term.casts:
                (atom,) = writer.clone(cast, [atom])
            (total,) = writer.add(lax.add_p, [total, atom], [then])
        added += writer.eqns
        gone.add(id(eqn))
    eqns = [*(eqn for eqn in body.eqns if id(eqn) not in gone), *added]
    return _jaxpr.replaced(body, eqns=eqns), steps


def _terms(whole: Atom, makers: Mapping[Var, Eqn], uses: Mapping[Var, int]) -> list[_Term]:
    found, waiting = list[_Term](), [_Term(whole, ())]
    while waiting:
        term = waiting.pop()
        atom, casts = term
        eqn = None if _jaxpr.is_literal(atom) or uses[atom] != 1 else makers.get(atom)
        if eqn is not None and _adds(eqn):
            waiting += [_Term(each, casts) for each in eqn.invars]
        elif eqn is not None and _rules.is_float_cast(eqn) and _is_sum(eqn.invars[0], makers, uses):
            waiting.append(_Term(eqn.invars[0], (eqn, *casts)))
        else:
            found.append(term)
    return found


def _adds(eqn: Eqn) -> bool:
    same = all(atom.aval.shape == eqn.outvars[0].aval.shape for atom in eqn.invars)
    return eqn.primitive.name in _rules.ADDS and same and eqn.invars[0] is not eqn.invars[1]


def _is_sum(atom: Atom, makers: Mapping[Var, Eqn], uses: Mapping[Var, int]) -> bool:
    return (
        not _jaxpr.is_literal(atom) and uses[atom] == 1 and atom in makers and _adds(makers[atom])
    )
