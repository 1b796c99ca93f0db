# SPDX-License-Identifier: Apache-2.0
"""The cut of a step for offload: forward and backward on the devices, and the optimizer program in subgraphs.

The optimizer program is the forward closure of the offloaded leaves: every equation that depends on one of
them. What depends only on gradients (a global norm, the clipping scale) belongs to the forward-backward
program. No offloaded leaf feeds the batch (dataflow would make it a parameter), so the optimizer program
never feeds the forward-backward program. Cheap equations between the two are recomputed where they are read
(`_transfers.py`).

The optimizer program consists of independent update subgraphs: equations that share a
non-scalar value that depends on an offloaded leaf, as a parameter's moments and its update do. Where
subgraphs meet only through scalars (the norm of all updates), the equations after it form subgraphs of a
later *level*, which run when all of the level before have run.
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

_SCALARS = -1  # the component of equations on scalars of several others


@dataclasses.dataclass(frozen=True)
class Subgraph:
    """An independent update subgraph: it runs by itself.

    Attributes:
      level: subgraphs of lower levels run before it.
      eqns: its equations of the root frame, by index; cheap ones may be another's or the forward-backward
        program's, too.
      reads: its inputs: leaves, values of the forward-backward program, and of subgraphs of lower levels.
      gives: its outputs that other subgraphs read.
      outs: which outputs of the step are its own, by index.
      leaves: the offloaded leaves that it reads or renews, by index.
    """

    level: int
    eqns: tuple[int, ...]
    reads: tuple[Var, ...]
    gives: tuple[Var, ...]
    outs: tuple[int, ...]
    leaves: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class OptimizerProgram:
    """What of a step follows from offloaded leaves.

    Attributes:
      subgraphs: in an order in which they can run.
      transferred: values of the forward-backward program that subgraphs read.
      apart: equations that depend on offloaded leaves, and those of subgraphs that the forward-backward
        program has no use for.
    """

    subgraphs: tuple[Subgraph, ...]
    transferred: tuple[Var, ...]
    apart: frozenset[int] = frozenset()

    @functools.cached_property
    def outs(self) -> frozenset[int]:
        """Outputs of the step that subgraphs make."""
        return frozenset(index for subgraph in self.subgraphs for index in subgraph.outs)


def feeds_forward_backward(frame: Frame) -> set[Var]:
    """What equations depend on that read the batch: an estimate of the Hessian reads moments, too."""
    feeds: set[Var] = set()
    for eqn in reversed(frame.jaxpr.eqns):
        if any(frame.reads(eqn)) or any(out in feeds for out in eqn.outvars):
            feeds.update(variables(eqn.invars))
    return feeds


def cut_update(
    frame: Frame, offloaded: Collection[int], parameters: Collection[int] = ()
) -> OptimizerProgram:
    """Cuts a step in two, for the leaves that are not stored on the devices.

    Args:
      frame: the root frame, without calls (`_rewrite.flatten_calls`).
      offloaded: positions of leaves of the state that only the update reads.
      parameters: positions of others, which the forward-backward program reads; the optimizer program makes
        all of them.
    """
    cutter = _UpdateCutter(frame, offloaded, parameters)
    transferred = cutter.transferred()
    update = OptimizerProgram(cutter.subgraphs(), transferred, cutter.apart(transferred))
    _check(frame, offloaded, update)
    return update


def pack(subgraphs: Sequence[Subgraph], sizes: Sequence[int], most: int) -> list[list[Subgraph]]:
    """Subgraphs that run together, because what they read of offloaded leaves fits in `most` bytes.

    Args:
      subgraphs: in an order in which they can run.
      sizes: bytes of every leaf of the state, on each device.
      most: a pack of one subgraph may have more.
    """
    packs: list[list[Subgraph]] = []
    leaves, nbytes = set[int](), 0  # of the last pack
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
    """The offloaded leaves that some subgraphs read or renew."""
    return sorted({leaf for subgraph in subgraphs for leaf in subgraph.leaves})


def nbytes_of(subgraphs: Sequence[Subgraph], sizes: Sequence[int]) -> int:
    """Bytes of these leaves."""
    return sum(sizes[leaf] for leaf in leaves_of(subgraphs))


class _UpdateCutter:
    """Finds the optimizer program, and the level and component of each of its nodes.

    A node is an equation that depends on an offloaded leaf, by index, or an output of the step that the
    optimizer program returns: its position behind the equations.
    """

    def __init__(self, frame: Frame, offloaded: Collection[int], parameters: Collection[int]):
        self._frame = frame
        self._eqns = frame.jaxpr.eqns
        invars = frame.jaxpr.invars
        self._leaf_of = {invars[i]: i for i in (*offloaded, *parameters)}
        self._leaves = {*offloaded, *parameters}
        # Offloaded leaves, and what depends on them.
        self._update_vars = {invars[i] for i in offloaded}
        self._consts = set(frame.jaxpr.constvars)
        self._dependent: set[int] = set()
        for index, eqn in enumerate(self._eqns):
            if any(atom in self._update_vars for atom in variables(eqn.invars)):
                self._dependent.add(index)
                self._update_vars.update(eqn.outvars)
        nodes = self._read_by_outputs(sorted(self._dependent))
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

    def _read_by_outputs(self, indices: Sequence[int]) -> list[int]:
        """Those of some equations that an output of the step needs, or that do more than compute."""
        eqns, outs = [self._eqns[i] for i in indices], self._frame.jaxpr.outvars
        read = set(map(id, _rewrite.behind(eqns, outs)[0]))
        return [i for i in indices if id(self._eqns[i]) in read]

    def _reads_of(self, atoms: Sequence[Atom]) -> list[Var]:
        return [var for var in variables(atoms) if var not in self._consts]

    def _copied(self, nodes: Iterable[int]) -> dict[int, list[Var]]:
        """The equations that are recomputed for these nodes, in order, and what each reads."""
        found: dict[int, list[Var]] = {}
        todo = [var for node in nodes for var in self.reads[node]]
        while todo:
            index = self.copies.get(todo.pop())
            if index is not None and index not in found:
                found[index] = self._reads_of(self._eqns[index].invars)
                todo += found[index]
        return dict(sorted(found.items()))

    def transferred(self) -> tuple[Var, ...]:
        """What is read of the forward-backward program."""
        elsewhere = {*self._frame.jaxpr.invars, *self._update_vars, *self.copies}
        read = [*self._copied(self.reads).values(), *self.reads.values()]
        return tuple(dict.fromkeys(x for atoms in read for x in atoms if x not in elsewhere))

    def apart(self, transferred: Collection[Var]) -> frozenset[int]:
        """Equations that forward and backward omit: they need offloaded leaves, or are unread there."""
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
        """What ties a node to others: values that it reads or makes, but for scalars and gradients."""
        made = self._eqns[node].outvars if node < len(self._eqns) else []
        return [
            v for v in [*self.reads[node], *made] if v in self._update_vars and not is_scalar(v)
        ]

    def _levels(self) -> dict[int, tuple[int, int]]:
        """Level and component of every node."""
        found: dict[int, tuple[int, int]] = {}
        numbers: dict[int | Var, int] = {}
        makers = self._frame.makers
        for node in self.reads:
            made_by = (makers.get(a, -1) for a in self.reads[node])
            before = {found[i] for i in made_by if i in self.reads}
            others = {component for _, component in before}
            as_it_is = node >= len(self._eqns) and not before  # a gradient
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
    """The type of the cut.

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
