# SPDX-License-Identifier: Apache-2.0
"""Update subgraphs: the connected parts of an optimizer update that need whole matrices.

A matrix product or an `eigh` needs replicated operands. An operation between two of them runs on whole
matrices, too: on shards, its result would have to be gathered. Everything before and after runs on shards.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike

from jzero._components import grouped
from jzero.ir import _rules
from jzero.ir._regions import variables
from jzero.ir._rules import Cost
from jzero.sharding.analysis import _frames, _new_leaves
from jzero.sharding.analysis._frames import Frame
from jzero.sharding.analysis._linked_dims import Links
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Var

# Their semantics are unknown, and so are the matrices that they update.
_OPAQUE = frozenset({"pure_callback", "io_callback", "ffi_call", "pallas_call"})


@dataclasses.dataclass(frozen=True)
class UpdateSubgraph:
    eqns: tuple[int, ...]
    reads: tuple[Var, ...]
    gives: tuple[Var, ...]  # Values that other equations read, or the frame returns.
    sharded: tuple[int | None, ...]  # For each of `reads`, the dim along which it is sharded.
    wanted: tuple[
        int | None, ...
    ]  # For each of `gives`, the dim along which its readers want it sharded.
    leaves: tuple[
        tuple[str, ...], ...
    ]  # For each of `gives`, the leaves that it may become, for the report.
    level: int = 0  # The number of subgraphs on the longest path to this one.

    @property
    def name(self) -> str:
        """A leaf that it updates, or ''."""
        return next((names[0] for names in self.leaves if names), "")


class Names(NamedTuple):
    """Paths of the state's leaves, and the indices of parameters."""

    paths: tuple[str, ...]
    params: frozenset[int]


def find_update_subgraphs(frame: Frame, links: Links, names: Names) -> list[UpdateSubgraph]:
    """The update subgraphs of a frame that read or compute sharded values, in order."""
    eqns = frame.jaxpr.eqns
    plain = [_is_plain(frame, eqn) for eqn in eqns]
    hard = [plain[i] and _needs_whole(frame, eqn) for i, eqn in enumerate(eqns)]
    if not any(hard):
        return []
    constant = _constants(frame, plain)
    inside = _between(eqns, plain, hard)
    made = {out for i in inside for out in eqns[i].outvars}

    def keys(index: int) -> Iterable[Hashable]:
        read = variables(eqns[index].invars)
        together = (v for v in read if v in made or (v.aval.ndim > 1 and v not in constant))
        return [*eqns[index].outvars, *together]

    found = []
    for part in grouped(inside, keys):
        eqns_of = _with_makers(frame, part, plain, constant)
        subgraph = _subgraph(frame, links, eqns_of)
        if any(dim is not None for dim in subgraph.sharded) or _matrices(subgraph):
            found.append(subgraph)
    return _with_leaves(frame, links, _with_levels(frame, found), names)


def why_not_alone(frame: Frame, subgraph: UpdateSubgraph) -> str:
    """Why every device must run a subgraph; '' if one device may run it alone."""
    if all(dim is None for dim in subgraph.sharded):
        if _frames.is_unreduced(frame, largest_read(subgraph)):
            return "its gradient is reduced whole, since only products and their like read it"
        return "what it reads is whole on every device"
    for eqn in _all_equations(frame, subgraph):
        name = eqn.primitive.name
        if _rules.costs(eqn, Cost.DRAW):
            return "it draws random numbers"
        if name in _OPAQUE:
            return f"nobody knows what its {name} does"
        if name in _frames.COLLECTIVES:
            return f"the step's own {name} is part of it"
    return ""


def signature(frame: Frame, subgraph: UpdateSubgraph) -> Hashable:
    """A key that is equal for subgraphs of one level with equal equations and types."""
    eqns = [frame.jaxpr.eqns[index] for index in subgraph.eqns]
    return subgraph.level, subgraph.sharded, _computes(subgraph.reads, eqns, subgraph.gives)


# -- which equations ---------------------------------------------------------------------------------


def _is_plain(frame: Frame, eqn: Eqn) -> bool:
    """Whether it may be in an update: replicated, in no pass of `jax.grad`, and without side effects."""
    if frame.pass_of(eqn) is not None or _jaxpr.has_side_effects(eqn):
        return False
    return not any(frame.varies(atom) for atom in [*eqn.invars, *eqn.outvars])


def _needs_whole(frame: Frame, eqn: Eqn) -> bool:
    if not (children := frame.inner(eqn)):
        return _is_hard(eqn)
    inner = (each for child in children for each in child.walk())
    return any(not f.inner(e) and _is_hard(e) for f, e in inner)


def _is_hard(eqn: Eqn) -> bool:
    # Sources and draws from keys have no matrix operand.
    if _rules.keeps_dims(eqn) or _rules.costs(eqn, Cost.IDENTITY, Cost.SOURCE, Cost.DRAW):
        return False
    return any(getattr(atom.aval, "ndim", 0) > 1 for atom in eqn.invars)


def _constants(frame: Frame, plain: list[bool]) -> set[Var]:
    found = set(frame.jaxpr.constvars)
    for is_plain, eqn in zip(plain, frame.jaxpr.eqns, strict=True):
        if is_plain and found.issuperset(variables(eqn.invars)):
            found.update(eqn.outvars)
    return found


def _between(eqns: list[Eqn], plain: list[bool], hard: list[bool]) -> list[int]:
    """The hard equations, and the plain ones on a path from one hard equation to another."""
    after: set[Var] = set()
    follows = []
    for i, eqn in enumerate(eqns):
        follows.append(plain[i] and not after.isdisjoint(variables(eqn.invars)))
        if hard[i] or follows[i]:
            after.update(eqn.outvars)
    before: set[Var] = set()
    inside = []
    for i, eqn in reversed(list(enumerate(eqns))):
        leads = plain[i] and not before.isdisjoint(eqn.outvars)
        if hard[i] or leads:
            before.update(variables(eqn.invars))
        if hard[i] or (leads and follows[i]):
            inside.append(i)
    return inside[::-1]


def _with_makers(frame: Frame, part: list[int], plain: list[bool], constant: set[Var]) -> list[int]:
    """Adds equations whose results only `part` reads, and whose operands are constants or read by it anyway.

    So each device makes its own identity matrix, and receives a gradient without its transpose.
    """
    eqns, makers, inside = frame.jaxpr.eqns, frame.makers, set(part)
    read = {v for i in part for v in variables(eqns[i].invars)}
    due = [
        -makers[v] for v in read if v in makers
    ]  # The latest first, because its readers are known then.
    heapq.heapify(due)
    while due:
        i = -heapq.heappop(due)
        eqn = eqns[i]
        if i in inside or not plain[i]:
            continue
        operands = variables(eqn.invars)
        matrices = {v for v in operands if v.aval.ndim > 1}
        known = all(v in read or v in constant for v in matrices)
        known &= bool(matrices) or constant.issuperset(eqn.outvars)
        if known and all(inside.issuperset(frame.readers.get(out, ())) for out in eqn.outvars):
            inside.add(i)
            read |= set(operands)
            for var in operands:
                if var in makers:
                    heapq.heappush(due, -makers[var])
    return sorted(inside)


def _with_levels(frame: Frame, subgraphs: list[UpdateSubgraph]) -> list[UpdateSubgraph]:
    inside = {i: number for number, subgraph in enumerate(subgraphs) for i in subgraph.eqns}
    level: dict[Var, int] = {}
    made: dict[Var, int] = {}  # By the number of the subgraph.
    found = [0] * len(subgraphs)
    for i, eqn in enumerate(frame.jaxpr.eqns):
        mine = inside.get(i)
        steps = (
            level.get(var, 0) + (mine is not None and made.get(var) != mine)
            for var in variables(eqn.invars)
        )
        here = max(steps, default=0)
        level |= dict.fromkeys(eqn.outvars, here)
        if mine is not None:
            made |= dict.fromkeys(eqn.outvars, mine)
            found[mine] = max(found[mine], here)
    pairs = zip(subgraphs, found, strict=True)
    return [dataclasses.replace(subgraph, level=number) for subgraph, number in pairs]


def _subgraph(frame: Frame, links: Links, indices: list[int]) -> UpdateSubgraph:
    eqns = [frame.jaxpr.eqns[i] for i in indices]
    made = {out for eqn in eqns for out in eqn.outvars}
    reads = [v for v in variables(a for eqn in eqns for a in eqn.invars) if v not in made]
    inside = set(indices)
    outs = [out for eqn in eqns for out in eqn.outvars]
    gives = [out for out in outs if not inside.issuperset(frame.readers.get(out, ()))]
    sharded, wanted = (
        tuple(links.sharded_dim(frame, var) for var in each) for each in (reads, gives)
    )
    return UpdateSubgraph(tuple(indices), tuple(reads), tuple(gives), sharded, wanted, ())


def _with_leaves(
    frame: Frame, links: Links, subgraphs: list[UpdateSubgraph], names: Names
) -> list[UpdateSubgraph]:
    """Sets `leaves` to the parameters that subgraphs update, or else to the optimizer state."""
    stops = {i for subgraph in subgraphs for i in subgraph.eqns}
    made = _new_leaves.new_leaves(frame, len(names.paths), stops)
    params = sum(1 << i for i in names.params)
    sets = [[made.get(var, 0) for var in subgraph.gives] for subgraph in subgraphs]
    sets = [
        [(each & params) if any(s & params for s in row) else each for each in row] for row in sets
    ]
    # A subgraph updates a single matrix if all its results become the same leaves.
    single = [n for n, row in enumerate(sets) if len({each for each in row if each}) == 1]
    apart = _new_leaves.told_apart([max(sets[n]) for n in single])
    for n, leaves in zip(single, apart, strict=True):
        sets[n] = [leaves if each else 0 for each in sets[n]]
    found, jaxpr_outs = [], frame.jaxpr.outvars
    for subgraph, row in zip(subgraphs, sets, strict=True):
        if not row:  # Its results are unused (test_loops.py::test_what_nobody_reads_is_no_update).
            continue
        paths = tuple(tuple(names.paths[i] for i in _new_leaves.bits(each)) for each in row)
        sharded = _sharded_reads(subgraph)
        stored = (jaxpr_outs[i] for each in row for i in _new_leaves.bits(each))
        if not sharded and all(links.sharded_dim(frame, out) is None for out in stored):
            continue
        if not any(row):  # It updates no leaf, and is named after one that it reads.
            read = max(sharded, key=lambda var: _rules.size_in_bytes(var.aval))
            paths = ((links.leaf_of(frame, read),), *paths[1:])
        found.append(dataclasses.replace(subgraph, leaves=paths))
    return found


def largest_read(subgraph: UpdateSubgraph) -> Var:
    """The matrix, or batch of matrices, that it updates: its largest sharded input, or largest input."""
    found = _sharded_reads(subgraph) or _matrices(subgraph)
    return max(found, key=lambda var: _rules.size_in_bytes(var.aval))


def _matrices(subgraph: UpdateSubgraph) -> list[Var]:
    return [var for var in subgraph.reads if var.aval.ndim > 1]


def _sharded_reads(subgraph: UpdateSubgraph) -> list[Var]:
    return [v for v, dim in zip(subgraph.reads, subgraph.sharded, strict=True) if dim is not None]


# -- whether two subgraphs compute the same ----------------------------------------------------------


def _all_equations(frame: Frame, subgraph: UpdateSubgraph) -> Iterator[Eqn]:
    """Equations of a subgraph, and those inside them."""
    for eqn in (frame.jaxpr.eqns[index] for index in subgraph.eqns):
        yield eqn
        for child in frame.inner(eqn):
            yield from (each for _, each in child.walk())


def _type(atom: Atom) -> Hashable:
    aval = atom.aval
    return getattr(aval, "shape", ()), str(aval.dtype), getattr(aval, "weak_type", False)


def _computes(reads: Sequence[Var], eqns: Iterable[Eqn], gives: Sequence[Atom]) -> Hashable:
    """A key of equations that does not depend on the names of variables."""
    places: dict[Var, tuple[int, ...]] = {var: (k,) for k, var in enumerate(reads)}

    def place(atom: Atom) -> Hashable:
        return _array(_jaxpr.literal(atom)) if _jaxpr.is_literal(atom) else places[atom]

    rows: list[Hashable] = []
    for number, eqn in enumerate(eqns):
        ins = tuple(map(place, eqn.invars))
        places |= {out: (number, k) for k, out in enumerate(eqn.outvars)}
        params = tuple((name, _param(value)) for name, value in sorted(eqn.params.items()))
        rows.append((eqn.primitive.name, params, ins, tuple(map(_type, eqn.outvars))))
    return tuple(map(_type, reads)), tuple(rows), tuple(map(place, gives))


def _param(value: object) -> Hashable:
    if hasattr(value, "jaxpr") or hasattr(value, "eqns"):
        jaxpr, consts = _jaxpr.open_jaxpr(value)
        reads = [*jaxpr.constvars, *jaxpr.invars]
        return tuple(map(_array, consts)), _computes(reads, jaxpr.eqns, jaxpr.outvars)
    if isinstance(value, dict):
        return tuple((str(name), _param(each)) for name, each in sorted(value.items()))
    if isinstance(value, (tuple, list)):
        return tuple(map(_param, value))
    # The text of a function has its address, so it equals itself only.
    return _array(value) if isinstance(value, (np.ndarray, jax.Array)) else str(value)


def _array(value: ArrayLike) -> Hashable:
    array = np.asarray(value)
    return array.shape, str(array.dtype), array.tobytes()
