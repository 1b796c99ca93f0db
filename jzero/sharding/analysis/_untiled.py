# SPDX-License-Identifier: Apache-2.0
"""Lists values that a program gathers or reduces whole although they exceed a tile, and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from jzero.ir import _rules
from jzero.ir._regions import variables
from jzero.ir._rules import Cost, size_in_bytes
from jzero.sharding.analysis import _traffic
from jzero.tracing import _jaxpr, _lines
from jzero.tracing._types import Atom, Eqn, Var

TILES = "jzero.tiles"  # The scope of a loop over tiles.

# Operations through which the reader of a gathered matrix, or the maker of a reduced one, is sought.
_PASSED = _rules.named(Cost.COPY, Cost.VIEW, Cost.PART, Cost.REPEAT, Cost.CAST) | {
    "pad", "optimization_barrier",
}  # fmt: skip
_READ_BY = {
    "gather": "a look-up reads it whole",
    "conv_general_dilated": "a convolution reads it whole",
    "dot_general": (
        "a product reads it whole: the other operand is sharded too, or it is stored over other axes"
    ),
    "scan": "a loop reads it whole in every iteration",
    "while": "a loop reads it whole in every iteration",
    "cond": "a branch reads it whole",
}
_MADE_BY = {
    "scatter-add": "its gradient is that of a look-up",
    "conv_general_dilated": "its gradient is that of a convolution",
    "dot_general": "it is stored over other mesh axes, or its sum is one of several",
    "scan": "a loop adds it up before it is reduced",
    "while": "a loop adds it up before it is reduced",
}


class Untiled(NamedTuple):
    leaf: str
    what: str  # 'gathered' or 'reduced'
    nbytes: int  # Of the whole.
    why: str
    where: str  # The user's line, if known.

    def __str__(self) -> str:
        where = f" at {self.where}" if self.where else ""
        return f"{self.leaf}, {self.what}{where}: {self.why}"


def untiled(jaxpr: Any, tile_bytes: int | None, gathers: bool) -> tuple[Untiled, ...]:
    """Values larger than `tile_bytes` that a program gathers or reduces at once, the largest first.

    Without `gathers`, parameters are stored replicated, and gathered values do not count.
    """
    if tile_bytes is None:
        return ()
    found: dict[tuple[str, str, str], Untiled] = {}
    for each in _found_in(_jaxpr.open_jaxpr(jaxpr)[0]):
        key = (each.leaf, each.what, each.why)
        small = each.nbytes <= tile_bytes or (each.what == "gathered" and not gathers)
        if not small and (key not in found or found[key].nbytes < each.nbytes):
            found[key] = each
    return tuple(sorted(found.values(), key=lambda each: -each.nbytes))


def _found_in(jaxpr: _jaxpr.Jaxpr) -> Iterator[Untiled]:
    makers = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    readers: dict[Var, Eqn] = {}  # The first reader.
    for eqn in reversed(jaxpr.eqns):
        readers |= dict.fromkeys(variables(eqn.invars), eqn)
    for eqn in jaxpr.eqns:
        leaf, collective = _traffic.leaf_of(eqn), _collective(eqn)
        if not leaf or collective is None:
            for sub in _jaxpr.inner_jaxprs(eqn):
                yield from _found_in(_jaxpr.open_jaxpr(sub)[0])
            continue
        gathered = _traffic.op_of(collective) == "all-gather"
        atom = eqn.outvars[0] if gathered else eqn.invars[0]
        whole = collective.outvars[0] if gathered else collective.invars[0]
        other = _reader(atom, readers) if gathered else _maker(atom, makers)
        if gathered and other is None:
            continue  # It is a new parameter, which is stored replicated.
        why = (
            "its tiles cannot be smaller" if _jaxpr.in_scope(eqn, TILES) else _why(other, gathered)
        )
        where = _lines.summary(other) if other is not None and _lines.has_line(other) else ""
        what = "gathered" if gathered else "reduced"
        yield Untiled(leaf, what, size_in_bytes(whole.aval), why, where)


def _collective(eqn: Eqn) -> Eqn | None:
    """The equation, or the one inside a `shard_map` over Auto axes."""
    if _traffic.op_of(eqn) in ("all-gather", "reduce-scatter", "all-reduce"):
        return eqn
    if eqn.primitive.name != "shard_map":
        return None
    inner = [e for sub in _jaxpr.inner_jaxprs(eqn) for e in _jaxpr.open_jaxpr(sub)[0].eqns]
    return next((e for e in inner if _traffic.op_of(e)), None)


def _why(other: Eqn | None, gathered: bool) -> str:
    name = "" if other is None else other.primitive.name
    if gathered:
        return _READ_BY.get(name, f"`{name}` reads it whole")
    return _MADE_BY.get(name, f"`{name}` makes its gradient" if name else "it was made before")


def _reader(atom: Atom, readers: dict[Var, Eqn]) -> Eqn | None:
    """The first equation that reads `atom`, through views and casts."""
    while atom in readers:
        eqn = readers[atom]
        name = eqn.primitive.name
        if name not in _PASSED and _traffic.op_of(eqn) != "all-gather":
            return eqn
        atom = eqn.outvars[eqn.invars.index(atom) if name == "optimization_barrier" else 0]
    return None


def _maker(atom: Atom, makers: dict[Var, Eqn]) -> Eqn | None:
    """The equation that computes `atom`, through views, casts and scaling."""
    while not _jaxpr.is_literal(atom) and atom in makers:
        eqn = makers[atom]
        if eqn.primitive.name not in _PASSED | {"mul"}:  # by the scale of a sum
            return eqn
        at = eqn.outvars.index(atom) if eqn.primitive.name == "optimization_barrier" else 0
        atom = eqn.invars[at]
    return None
