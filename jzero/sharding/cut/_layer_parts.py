# SPDX-License-Identifier: Apache-2.0
"""The parts of a jaxpr with parameters stored off the device: stages, scanned layers, outer loops."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jzero.ir._regions import variables
from jzero.sharding.analysis import _residuals
from jzero.sharding.analysis._frames import split
from jzero.sharding.cut._layer_body import LayerBody
from jzero.sharding.cut._open_loop import OpenLoop
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Var

# How a loop's stack is there: a leaf on the host, a slice for each iteration, or one array on the devices,
# which may become one that the loop makes; a stack that is made may also be left on the host, or go there
# slice by slice, an array each.
LEAF, SLICES, STACK, RENEWED = "leaf", "slices", "stack", "renewed"
HOSTED, SENT, UNREAD = "hosted", "sent", "unread"


@dataclasses.dataclass(frozen=True, eq=False)
class StraightStage:
    """A straight-line stage: some equations as one program.

    Attributes:
      eqns: in order, with what they recompute.
      leaves: the leaves that it fetches.
      reads: its other inputs.
      outputs: what later parts read, or the step returns.
      nbytes: of its leaves on a device while it runs: as they are fetched, and gathered.
      last_uses: inputs that nobody reads afterwards: an output may take their memory.
    """

    eqns: tuple[Eqn, ...]
    leaves: tuple[Var, ...]
    reads: tuple[Var, ...]
    outputs: tuple[Var, ...]
    nbytes: int
    last_uses: frozenset[Var] = frozenset()


@dataclasses.dataclass(frozen=True, eq=False)
class ScannedLayers:
    """A `scan` over layers, each iteration of which is a program.

    Attributes:
      eqn: the loop.
      xs: for each stack that it reads, how it is there: LEAF, SLICES, STACK or RENEWED.
      ys: for each stack that it makes, how it shall be: SLICES, STACK, HOSTED, SENT or UNREAD.
      body: what an iteration computes; it gathers for the next one where two iterations' leaves have room.
      nbytes: of an iteration's leaves on a device: as they are fetched, and gathered.
      last_uses: of what it begins with, and takes slices of, what nobody reads after that.
      renewed: for each stack that it makes as STACK, the one that it reads whose memory it takes, or None.
    """

    eqn: Eqn
    xs: tuple[str, ...]
    ys: tuple[str, ...]
    body: LayerBody
    nbytes: int
    last_uses: frozenset[Var] = frozenset()
    renewed: tuple[Var | None, ...] = ()

    @functools.cached_property
    def parts(self) -> _jaxpr.ScanParts:
        """The loop taken apart."""
        return _jaxpr.scan_parts(self.eqn)

    @functools.cached_property
    def operands(self) -> list[list[Atom]]:
        """What it closes over, begins with, and reads slice by slice."""
        return split(self.eqn.invars, self.parts.num_consts, self.parts.num_carry)

    @functools.cached_property
    def init(self) -> list[Atom]:
        """The first carry."""
        return self.operands[1]

    @functools.cached_property
    def results(self) -> list[list[Var]]:
        """The last carry, and the stacks that it makes."""
        return split(self.eqn.outvars, self.parts.num_carry)

    @functools.cached_property
    def leaves(self) -> tuple[Var, ...]:
        """The stacks of leaves that it fetches slice by slice."""
        return tuple(map(_jaxpr.variable, self.stacks_as(LEAF)))

    def stacks_as(self, kind: str) -> list[Atom]:
        """The stacks that it reads in one form."""
        return [x for x, k in zip(self.operands[2], self.xs, strict=True) if k == kind]

    def made(self, kind: str) -> list[Var]:
        """The stacks that it makes in one form."""
        return [y for y, k in zip(self.results[1], self.ys, strict=True) if k == kind]

    @functools.cached_property
    def leaving(self) -> list[Var]:
        """The stacks that it makes for the host: whole, then slice by slice."""
        return [*self.made(HOSTED), *self.made(SENT)]

    @functools.cached_property
    def reads(self) -> tuple[Var, ...]:
        """The other inputs."""
        return tuple(v for v in variables(self.eqn.invars) if v not in self.leaves)


@dataclasses.dataclass(frozen=True, eq=False)
class OuterLoop:
    """A `scan` or a `while`, each iteration of which runs in parts.

    Attributes:
      eqn: the loop.
      loop: its body, opened.
      parts: of its body.
      hosted: all leaves around the loop.
      last_uses: of what it begins with, what nobody reads after that.
    """

    eqn: Eqn
    loop: OpenLoop
    parts: tuple[LayerPart, ...]
    hosted: frozenset[Var]
    last_uses: frozenset[Var] = frozenset()

    @property
    def init(self) -> tuple[Atom, ...]:
        """The first carry."""
        return self.loop.init

    @property
    def leaves(self) -> tuple[Var, ...]:
        """Leaves that its parts fetch."""
        return tuple(v for v in self.loop.reads if v in self.hosted)

    @property
    def reads(self) -> tuple[Var, ...]:
        """The other inputs."""
        return tuple(v for v in self.loop.reads if v not in self.hosted)

    @property
    def nbytes(self) -> int:
        """Of the leaves of its largest part."""
        return max(part.nbytes for part in self.parts)


LayerPart = StraightStage | ScannedLayers | OuterLoop


class Fetched(NamedTuple):
    """A stage or scanned layers, and the outer loops around it, the outermost first."""

    part: StraightStage | ScannedLayers
    around: tuple[OuterLoop, ...] = ()


def fetched(parts: Iterable[LayerPart], around: tuple[OuterLoop, ...] = ()) -> Iterator[Fetched]:
    """All stages and scanned layers, those of outer loops included."""
    for part in parts:
        if isinstance(part, OuterLoop):
            yield from fetched(part.parts, (*around, part))
        else:
            yield Fetched(part, around)


def outer_loops(parts: Iterable[LayerPart]) -> Iterator[OuterLoop]:
    """All outer loops, those within others included."""
    for part in parts:
        if isinstance(part, OuterLoop):
            yield part
            yield from outer_loops(part.parts)


def offloaded(parts: Iterable[LayerPart]) -> frozenset[Var]:
    """Values (of stacks, slices) that are offloaded between the part that makes them and its readers."""
    found = set[Var]()
    for part in parts:
        if isinstance(part, StraightStage):
            found |= _residuals.marks(part.eqns).intersection(part.outputs)
        elif isinstance(part, ScannedLayers):
            found |= _residuals.marks([part.eqn])
        else:
            found |= offloaded(part.parts).difference(variables(part.loop.body.outvars))
    return frozenset(found)
