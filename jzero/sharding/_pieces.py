"""The cut of a step for offload: the grad part on the devices, and the update part in pieces.

The update part is the forward closure of the offloaded leaves: every equation that depends on one of them.
What depends on gradients alone (a global norm, the clipping scale) is grad part. No offloaded leaf feeds the
batch (it would be a parameter, by dataflow), so the update part never feeds the grad part.

The update part falls into pieces. Equations that share a value which is no scalar belong together: a
parameter's moments and its update. Where they meet through scalars only (the norm of all updates), what
follows runs on a later *level*, when all of the level before has run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

from jzero import _jaxpr
from jzero.sharding import _rules
from jzero.sharding._frames import COLLECTIVES, MARK, Frame

_SCALARS = -1  # where equations on scalars of several pieces belong
Place = tuple[int, int]  # level, and which of the connected parts


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of the update part that runs by itself.

    Attributes:
      level: pieces of lower levels run before it.
      eqns: its equations of the root frame, by index.
      reads: what it reads: leaves, values of the grad part, and of pieces of lower levels.
      gives: what it makes that other pieces read.
      outs: which outputs of the step are its own, by index.
      leaves: the offloaded leaves that it reads or renews, by index.
    """

    level: int
    eqns: tuple[int, ...]
    reads: tuple[_jaxpr.Var, ...]
    gives: tuple[_jaxpr.Var, ...]
    outs: tuple[int, ...]
    leaves: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class UpdatePart:
    """What of a step follows from offloaded leaves.

    Attributes:
      pieces: in an order in which they can run.
      boundary: values of the grad part that pieces read, and an equation that does (None: it is returned).
    """

    pieces: tuple[Piece, ...]
    boundary: dict[_jaxpr.Var, _jaxpr.Eqn | None]

    @property
    def eqns(self) -> frozenset[int]:
        """Equations of all pieces."""
        return frozenset(index for piece in self.pieces for index in piece.eqns)

    @property
    def outs(self) -> frozenset[int]:
        """Outputs of the step that pieces make."""
        return frozenset(index for piece in self.pieces for index in piece.outs)


def feeds_grad_part(frame: Frame) -> set[_jaxpr.Var]:
    """What equations depend on that read the batch: an estimate of the Hessian reads moments, too."""
    feeds: set[_jaxpr.Var] = set()
    for eqn in reversed(frame.jaxpr.eqns):
        if any(frame.reads(eqn)) or any(out in feeds for out in eqn.outvars):
            feeds.update(_variables(eqn.invars))
    return feeds


def cut_update(frame: Frame, offloaded: Collection[int]) -> UpdatePart:
    """Cuts a step in two, for the leaves that do not rest on the devices.

    Args:
      frame: the root frame, without calls (`_jaxpr.flatten_calls`).
      offloaded: positions of leaves of the state.
    """
    cutter = _UpdateCutter(frame, offloaded)
    pieces = cutter.pieces()
    made = {var for i in cutter.update for var in frame.jaxpr.eqns[i].outvars}
    invars = set(frame.jaxpr.invars)
    boundary: dict[_jaxpr.Var, _jaxpr.Eqn | None] = {}
    for node, atoms in cutter.reads.items():
        eqn = frame.jaxpr.eqns[node] if node < len(frame.jaxpr.eqns) else None
        boundary |= {a: eqn for a in atoms if a not in made and a not in invars}
    _check(frame, offloaded, pieces, set(boundary))
    return UpdatePart(pieces, boundary)


def pack(pieces: Sequence[Piece], sizes: Sequence[int], most: int) -> list[list[Piece]]:
    """Pieces that run together, because what they read of offloaded leaves fits in `most` bytes.

    Args:
      pieces: in an order in which they can run.
      sizes: bytes of every leaf of the state, on each device.
      most: a pack of one piece may have more.
    """
    packs: list[list[Piece]] = []
    for piece in pieces:
        fits = (
            packs
            and packs[-1][0].level == piece.level
            and nbytes_of([*packs[-1], piece], sizes) <= most
        )
        if fits:
            packs[-1].append(piece)
        else:
            packs.append([piece])
    return packs


def leaves_of(pieces: Sequence[Piece]) -> list[int]:
    """The offloaded leaves that some pieces read or renew."""
    return sorted({leaf for piece in pieces for leaf in piece.leaves})


def nbytes_of(pieces: Sequence[Piece], sizes: Sequence[int]) -> int:
    """Bytes of these leaves."""
    return sum(sizes[leaf] for leaf in leaves_of(pieces))


class _UpdateCutter:
    """Finds the update part, and gives each of its nodes a place.

    A node is an equation, by index, or an output of the step that the update part hands out: its position
    behind the equations.
    """

    def __init__(self, frame: Frame, offloaded: Collection[int]):
        self._frame = frame
        self._eqns = frame.jaxpr.eqns
        invars = frame.jaxpr.invars
        self._leaf_of = {invars[i]: i for i in offloaded}
        self._hosted = set(self._leaf_of)
        self.update: set[int] = set()
        for index, eqn in enumerate(self._eqns):
            if any(atom in self._hosted for atom in _variables(eqn.invars)):
                self.update.add(index)
                self._hosted.update(eqn.outvars)
        self._sink()
        consts = set(frame.jaxpr.constvars)
        self.reads = {
            i: [a for a in _variables(self._eqns[i].invars) if a not in consts]
            for i in sorted(self.update)
        }
        for out, atom in enumerate(frame.jaxpr.outvars):
            untouched = out in offloaded and atom is invars[out]
            handed_out = not _jaxpr.is_literal(atom) and atom in self._hosted
            if not untouched and (out in offloaded or handed_out):
                self.reads[len(self._eqns) + out] = [atom]
        self._parents: dict[object, object] = {}
        for node in self.reads:
            for var in self._large(node):
                self._join(node, var)

    def _sink(self) -> None:
        """Adds what only the update part reads, if handing out its operands takes no more memory.

        Moments need multiples and squares of a gradient: the gradient is handed out, and once.
        """
        readers: dict[_jaxpr.Var, set[int]] = {}
        for index, eqn in enumerate(self._eqns):
            for atom in _variables(eqn.invars):
                readers.setdefault(atom, set()).add(index)
        kept = set(_variables(self._frame.jaxpr.outvars))
        for index, eqn in reversed(list(enumerate(self._eqns))):
            if index in self.update or not _can_sink(self._frame, eqn):
                continue
            (out,) = eqn.outvars
            if out not in kept and readers.get(out, set()) and readers[out] <= self.update:
                self.update.add(index)
                self._hosted.add(out)

    # -- pieces ----------------------------------------------------------------------------------

    def _large(self, node: int) -> list[_jaxpr.Var]:
        """The values of the update part, scalars left out, that a node reads or makes."""
        made = self._eqns[node].outvars if node < len(self._eqns) else []
        return [v for v in [*self.reads[node], *made] if v in self._hosted and not is_scalar(v)]

    def _find(self, key: object) -> object:
        while (parent := self._parents.get(key, key)) != key:
            self._parents[key] = self._parents.get(parent, parent)
            key = parent
        return key

    def _join(self, a: object, b: object) -> None:
        self._parents[self._find(a)] = self._find(b)

    def _places(self) -> dict[int, Place]:
        """Level and part of every node."""
        places: dict[int, Place] = {}
        maker = {out: i for i in self.update for out in self._eqns[i].outvars}
        numbers: dict[object, int] = {}
        for node in self.reads:
            before = {places[maker[a]] for a in self.reads[node] if a in maker}
            if self._large(node):
                part = numbers.setdefault(self._find(node), len(numbers))
            elif len({part for _, part in before}) == 1:
                (part,) = {part for _, part in before}
            else:
                part = _SCALARS
            level = max((level + (other != part) for level, other in before), default=0)
            places[node] = (level, part)
        return places

    def pieces(self) -> tuple[Piece, ...]:
        members: dict[Place, list[int]] = {}
        for node, place in self._places().items():
            members.setdefault(place, []).append(node)
        order = sorted(members, key=lambda place: (place[0], members[place][0]))
        return tuple(self._piece(place[0], members[place]) for place in order)

    def _piece(self, level: int, nodes: Sequence[int]) -> Piece:
        eqns = tuple(node for node in nodes if node < len(self._eqns))
        outs = tuple(node - len(self._eqns) for node in nodes if node >= len(self._eqns))
        made = {var: None for i in eqns for var in self._eqns[i].outvars}
        reads = {a: None for node in nodes for a in self.reads[node] if a not in made}
        mine = set(nodes)
        elsewhere = {a for node in self.reads if node not in mine for a in self.reads[node]}
        leaves = {self._leaf_of[a] for a in reads if a in self._leaf_of}
        leaves |= {out for out in outs if out in self._leaf_of.values()}
        gives = tuple(var for var in made if var in elsewhere)
        return Piece(level, eqns, tuple(reads), gives, outs, tuple(sorted(leaves)))


def _variables(atoms: Sequence[_jaxpr.Atom]) -> list[_jaxpr.Var]:
    return list({atom: None for atom in atoms if not _jaxpr.is_literal(atom)})


def is_scalar(var: _jaxpr.Atom) -> bool:
    """Whether a value has one element, so that whoever needs it may have it."""
    return math.prod(var.aval.shape) <= 1


def _can_sink(frame: Frame, eqn: _jaxpr.Eqn) -> bool:
    """Whether an equation is cheap, the same on all devices, and reads no more bytes than it makes."""
    rule = _rules.rule_for(eqn)
    cheap = rule is not None and rule.reduces is None and len(eqn.outvars) == 1
    if not cheap or is_scalar(eqn.outvars[0]) or eqn.primitive.name in {*COLLECTIVES, MARK}:
        return False
    if any(frame.reads(eqn)) or any(map(frame.varies, eqn.outvars)):
        return False
    leaves = set(frame.jaxpr.invars)
    large = [a for a in _variables(eqn.invars) if a not in leaves and not is_scalar(a)]
    most = _rules.size_in_bytes(eqn.outvars[0].aval)
    return sum(_rules.size_in_bytes(a.aval) for a in large) <= most


def _check(
    frame: Frame, offloaded: Collection[int], pieces: Sequence[Piece], boundary: set[_jaxpr.Var]
) -> None:
    """The type of the cut.

    grad part: (leaves on devices, batch) -> (boundary, outputs)
    piece:     (leaves, boundary, values of lower levels) -> (values, outputs)
    """
    eqns, invars = frame.jaxpr.eqns, frame.jaxpr.invars
    update = [index for piece in pieces for index in piece.eqns]
    assert len(update) == len(set(update)), "an equation is in two pieces"
    made = {out for index in update for out in eqns[index].outvars} | {invars[i] for i in offloaded}
    rest = [i for i in range(len(eqns)) if i not in set(update)]
    fed = {atom for i in rest for atom in _variables(eqns[i].invars)}
    assert not fed & made, "the grad part reads what the update part makes"
    assert not any(axes for i in update for axes in frame.reads(eqns[i])), "an update varies"
    known = boundary | set(invars)
    for level in sorted({piece.level for piece in pieces}):
        here = [piece for piece in pieces if piece.level == level]
        assert all(set(piece.reads) <= known for piece in here), "a value is read before it is made"
        known |= {var for piece in here for var in piece.gives}
