# SPDX-License-Identifier: Apache-2.0
"""Cuts a step for offload: a forward-backward program, and an optimizer program in independent subgraphs.

The optimizer program consists of all equations that depend on an offloaded leaf. Equations that depend only
on gradients (a global norm, the clipping scale) belong to the forward-backward program. No offloaded leaf
feeds the batch (dataflow would make it a parameter), so the optimizer program never feeds the
forward-backward program. Cheap equations between the two are recomputed where they are read
(`_transfers.py`).

An independent update subgraph consists of equations that share a non-scalar value that depends on an
offloaded leaf, such as those of a parameter's moments and update. Where subgraphs meet only through scalars
(the norm of all updates), the equations after it form subgraphs of a later *level*, which run after all of
the level before.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Sequence

from jzero._components import Components
from jzero.ir._regions import variables
from jzero.sharding.analysis._frames import Frame
from jzero.sharding.cut._transfers import copies, is_scalar
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._types import Atom, Var

_SCALARS = -1  # The component of equations on scalars of several components.


@dataclasses.dataclass(frozen=True)
class Subgraph:
    level: int  # Subgraphs of lower levels run before it.
    eqns: tuple[int, ...]  # Indices in the root frame; cheap ones may also be in others.
    reads: tuple[Var, ...]  # Leaves, values of the forward-backward program, and of lower levels.
    gives: tuple[Var, ...]  # Outputs for other subgraphs.
    outs: tuple[int, ...]  # Outputs of the step, by index.
    leaves: tuple[int, ...]  # Offloaded leaves that it reads or updates, by index.


@dataclasses.dataclass(frozen=True)
class OptimizerProgram:
    subgraphs: tuple[Subgraph, ...]  # In topological order.
    transferred: tuple[Var, ...]  # Values of the forward-backward program that subgraphs read.
    apart: frozenset[int] = frozenset()  # Equations that the forward-backward program leaves out.

    @functools.cached_property
    def outs(self) -> frozenset[int]:
        return frozenset(index for subgraph in self.subgraphs for index in subgraph.outs)


def feeds_forward_backward(frame: Frame) -> set[Var]:
    """Values on which equations that read the batch depend; an estimate of the Hessian reads moments, too."""
    feeds: set[Var] = set()
    for eqn in reversed(frame.jaxpr.eqns):
        if any(frame.reads(eqn)) or any(out in feeds for out in eqn.outvars):
            feeds.update(variables(eqn.invars))
    return feeds


def cut_update(
    frame: Frame, offloaded: Collection[int], parameters: Collection[int] = ()
) -> OptimizerProgram:
    """Cuts a step in two. `frame` is the root frame, without calls.

    `offloaded` are indices of leaves that only the update reads, `parameters` those of offloaded leaves that
    the forward-backward program reads; the optimizer program makes all of them.
    """
    cutter = _UpdateCutter(frame, offloaded, parameters)
    transferred = cutter.transferred()
    update = OptimizerProgram(cutter.subgraphs(), transferred, cutter.apart(transferred))
    _check(frame, offloaded, update)
    return update


def pack(subgraphs: Sequence[Subgraph], sizes: Sequence[int], most: int) -> list[list[Subgraph]]:
    """Groups subgraphs whose offloaded leaves fit in `most` bytes together; a single one may have more.

    `sizes` are bytes of all leaves of the state, on each device.
    """
    packs: list[list[Subgraph]] = []
    leaves, nbytes = set[int](), 0  # Of the last pack.
    for subgraph in subgraphs:
        more = sum(sizes[leaf] for leaf in subgraph.leaves if leaf not in leaves)
        if packs and packs[-1][0].level == subgraph.level and nbytes + more <= most:
            packs[-1].append(subgraph)
        else:
            packs.append([subgraph])
            leaves, nbytes, more = set(), 0, nbytes_of([subgraph], sizes)
        leaves.update(subgraph.leaves)
        nbytes += more
    return packs


def leaves_of(subgraphs: Sequence[Subgraph]) -> list[int]:
    return sorted({leaf for subgraph in subgraphs for leaf in subgraph.leaves})


def nbytes_of(subgraphs: Sequence[Subgraph], sizes: Sequence[int]) -> int:
    return sum(sizes[leaf] for leaf in leaves_of(subgraphs))


class _UpdateCutter:
    """Finds the optimizer program, and the level and component of each of its nodes.

    A node is the index of an equation that depends on an offloaded leaf, or `len(eqns)` plus the index of an
    output that the optimizer program returns.
    """

    def __init__(self, frame: Frame, offloaded: Collection[int], parameters: Collection[int]):
        self._frame = frame
        self._eqns = frame.jaxpr.eqns
        invars = frame.jaxpr.invars
        self._leaf_of = {invars[i]: i for i in (*offloaded, *parameters)}
        self._leaves = {*offloaded, *parameters}
        # Offloaded leaves, and all values that depend on them.
        self._update_vars = {invars[i] for i in offloaded}
        self._consts = set(frame.jaxpr.constvars)
        self._dependent: set[int] = set()
        for index, eqn in enumerate(self._eqns):
            if any(atom in self._update_vars for atom in variables(eqn.invars)):
                self._dependent.add(index)
                self._update_vars.update(eqn.outvars)
        dependent = [self._eqns[i] for i in sorted(self._dependent)]
        read = set(map(id, _rewrite.behind(dependent, frame.jaxpr.outvars)[0]))
        nodes = [i for i in sorted(self._dependent) if id(self._eqns[i]) in read]
        self.reads = {i: self._reads_of(self._eqns[i].invars) for i in nodes}
        for out, atom in enumerate(frame.jaxpr.outvars):
            is_leaf = out in offloaded or out in parameters
            untouched = is_leaf and atom is invars[out]
            depends = not _jaxpr.is_literal(atom) and atom in self._update_vars
            if not untouched and (is_leaf or depends):
                self.reads[len(self._eqns) + out] = self._reads_of([atom])
        wanted = [var for atoms in self.reads.values() for var in atoms]
        free = {invars[i] for i in parameters}
        self.copies = copies(frame, wanted, self._update_vars, free)
        self._readers: dict[Var, list[int]] = {}
        for node, atoms in self.reads.items():
            for var in atoms:
                self._readers.setdefault(var, []).append(node)
        self._tied: Components[int | Var] = Components()
        for node in self.reads:
            for var in self._large(node):
                self._tied.join(node, var)

    def _reads_of(self, atoms: Sequence[Atom]) -> list[Var]:
        return [var for var in variables(atoms) if var not in self._consts]

    def _copied(self, nodes: Iterable[int]) -> dict[int, list[Var]]:
        """The equations that are recomputed for these nodes, in order, with their operands."""
        found: dict[int, list[Var]] = {}
        todo = [var for node in nodes for var in self.reads[node]]
        while todo:
            index = self.copies.get(todo.pop())
            if index is not None and index not in found:
                found[index] = self._reads_of(self._eqns[index].invars)
                todo += found[index]
        return dict(sorted(found.items()))

    def transferred(self) -> tuple[Var, ...]:
        elsewhere = {*self._frame.jaxpr.invars, *self._update_vars, *self.copies}
        read = [*self._copied(self.reads).values(), *self.reads.values()]
        return tuple(dict.fromkeys(x for atoms in read for x in atoms if x not in elsewhere))

    def apart(self, transferred: Collection[Var]) -> frozenset[int]:
        """Equations that the forward-backward program leaves out: dependent ones, and unread ones."""
        outvars, num = self._frame.jaxpr.outvars, len(self._eqns)
        needed = set(variables([a for i, a in enumerate(outvars) if num + i not in self.reads]))
        needed.update(transferred)
        copied, apart = set(self.copies.values()), set[int]()
        for index, eqn in reversed(list(enumerate(self._eqns))):
            unread = index in copied and needed.isdisjoint(eqn.outvars)
            if index in self._dependent or unread:
                apart.add(index)
            else:
                needed.update(variables(eqn.invars))
        return frozenset(apart)

    # -- subgraphs ----------------------------------------------------------------------------------

    def _large(self, node: int) -> list[Var]:
        """Values that tie a node to others: those that it reads or makes, except scalars and gradients."""
        made = self._eqns[node].outvars if node < len(self._eqns) else []
        return [
            v for v in [*self.reads[node], *made] if v in self._update_vars and not is_scalar(v)
        ]

    def _levels(self) -> dict[int, tuple[int, int]]:
        found: dict[int, tuple[int, int]] = {}
        numbers: dict[int | Var, int] = {}
        makers = self._frame.makers
        for node in self.reads:
            made_by = (makers.get(a, -1) for a in self.reads[node])
            before = {found[i] for i in made_by if i in self.reads}
            others = {component for _, component in before}
            as_it_is = node >= len(self._eqns) and not before  # A gradient.
            if self._large(node) or as_it_is:
                own = numbers.setdefault(self._tied.of(node), len(numbers))
            else:
                own = others.pop() if len(others) == 1 else _SCALARS
            level = max((level + (other != own) for level, other in before), default=0)
            found[node] = (level, own)
        return found

    def subgraphs(self) -> tuple[Subgraph, ...]:
        members: dict[tuple[int, int], list[int]] = {}
        for node, level_and_component in self._levels().items():
            members.setdefault(level_and_component, []).append(node)
        order = sorted((level, nodes) for (level, _), nodes in members.items())
        return tuple(self._subgraph(level, nodes) for level, nodes in order)

    def _subgraph(self, level: int, nodes: Sequence[int]) -> Subgraph:
        own = [node for node in nodes if node < len(self._eqns)]
        outs = tuple(node - len(self._eqns) for node in nodes if node >= len(self._eqns))
        copied = self._copied(nodes)
        eqns = sorted([*own, *copied])
        made = {var: None for i in eqns for var in self._eqns[i].outvars}
        atoms = [a for i in nodes for a in self.reads[i]] + [a for x in copied.values() for a in x]
        reads = {a: None for a in atoms if a not in made}
        mine = set(nodes)
        given = [a for i in own for a in self._eqns[i].outvars]
        gives = tuple(a for a in given if not mine.issuperset(self._readers.get(a, ())))
        leaves = {self._leaf_of[a] for a in reads if a in self._leaf_of}
        leaves |= {out for out in outs if out in self._leaves}
        return Subgraph(level, tuple(eqns), tuple(reads), gives, outs, tuple(sorted(leaves)))


def _check(frame: Frame, offloaded: Collection[int], update: OptimizerProgram) -> None:
    """Checks the types of the cut.

    forward-backward program: (leaves on devices, batch) -> (transferred, outputs)
    subgraph:     (leaves, transferred, values of lower levels) -> (values, outputs)
    """
    eqns, outvars = frame.jaxpr.eqns, frame.jaxpr.outvars
    leaves = {frame.jaxpr.invars[i] for i in offloaded}
    made = {out for i in update.apart for out in eqns[i].outvars}
    rest = [eqn for i, eqn in enumerate(eqns) if i not in update.apart]
    read = {atom for eqn in rest for atom in variables(eqn.invars)}
    returned = variables([a for i, a in enumerate(outvars) if i not in update.outs])
    assert not read & (made | leaves), "forward and backward read what the optimizer program makes"
    assert not {*returned, *update.transferred} & made, (
        "forward and backward return what they have not made"
    )
    indices = {i for subgraph in update.subgraphs for i in subgraph.eqns}
    assert not any(axes for i in indices for axes in frame.reads(eqns[i])), "an update varies"
    known = {*update.transferred, *frame.jaxpr.invars}
    for level in sorted({subgraph.level for subgraph in update.subgraphs}):
        here = [subgraph for subgraph in update.subgraphs if subgraph.level == level]
        assert all(set(subgraph.reads) <= known for subgraph in here), (
            "a value is read before it is made"
        )
        assert not any(known & set(subgraph.gives) for subgraph in here), "a value is made twice"
        known |= {var for subgraph in here for var in subgraph.gives}
