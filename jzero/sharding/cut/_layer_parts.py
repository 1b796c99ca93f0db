# SPDX-License-Identifier: Apache-2.0
"""The parts of a program with parameters stored off the device: stages, scanned layers, outer loops."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax import lax

from jzero.ir import _by_parts, _rules
from jzero.ir._regions import variables
from jzero.sharding.analysis import _residuals
from jzero.sharding.analysis._frames import split
from jzero.sharding.cut._open_loop import OpenLoop
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._rewrite import Excerpt
from jzero.tracing._types import Atom, Eqn, Jaxpr, Var

# How a loop's stack is stored: as a leaf on the host, as slices, or as one array on the devices, whose memory
# a stack that the loop makes may take (RENEWED). A stack that it makes may also be written on the host, or
# sent there slice by slice, an array each.
LEAF, SLICES, STACK, RENEWED = "leaf", "slices", "stack", "renewed"
ON_HOST, SENT, UNREAD = "on host", "sent", "unread"


@dataclasses.dataclass(frozen=True, eq=False)
class LayerBody:
    invars: tuple[Var, ...]  # Loop constants, the carry, and slices of stacks.
    consts: dict[Var, Any]  # Of the body's constvars.
    slices: tuple[Var, ...]  # Those of leaves.
    gathered: tuple[
        Var, ...
    ]  # Values that the previous iteration gathers from the slices; may be empty.
    gathers: Excerpt  # `slices -> gathered`
    compute: Excerpt  # From `gathered` and the other inputs to the body's results.

    @classmethod
    def of(
        cls, jaxpr: Jaxpr, consts: Sequence[Any], slices: Sequence[Var], gathered: Sequence[Var]
    ) -> LayerBody:
        gathers = _rewrite.excerpt(jaxpr, gathered, effects=False)
        compute = _rewrite.excerpt(jaxpr, jaxpr.outvars, gathered)
        known = dict(zip(jaxpr.constvars, consts, strict=True))
        return cls(tuple(jaxpr.invars), known, tuple(slices), tuple(gathered), gathers, compute)

    @property
    def used_sharded(self) -> list[int]:
        """Indices of the leaves that `compute` reads as they are fetched."""
        return [i for i, var in enumerate(self.slices) if var in self.compute.reads]

    @property
    def sharded_bytes(self) -> int:
        """Bytes on a device of leaves that are still in use when those of the next iteration arrive."""
        if not self.gathered:
            return 0
        return sum(_rules.size_in_bytes(self.slices[i].aval) for i in self.used_sharded)


def gathered_of(jaxpr: Jaxpr, slices: Sequence[Var]) -> list[Var]:
    """The values that a body gathers from `slices` only; of nested gathers, those that others read."""
    known, found = set(slices), list[Var]()
    for eqn in jaxpr.eqns:
        inner = _by_parts.inside(eqn)
        opens = _jaxpr.has_side_effects(inner) or _jaxpr.inner_jaxprs(inner)
        if opens or not known.issuperset(variables(eqn.invars)):
            continue
        known.update(eqn.outvars)
        if inner.primitive.name == "all_gather":
            found += eqn.outvars
    reads = _rewrite.excerpt(jaxpr, jaxpr.outvars, found).reads
    return [var for var in found if var in reads]


@dataclasses.dataclass(frozen=True, eq=False)
class StraightStage:
    """A straight-line stage: some equations as one program."""

    eqns: tuple[Eqn, ...]
    leaves: tuple[Var, ...]  # The leaves that it fetches.
    reads: tuple[Var, ...]  # Its other inputs.
    outputs: tuple[Var, ...]
    nbytes: int  # Of its leaves on a device, as they are fetched, and gathered.
    last_uses: frozenset[Var] = frozenset()  # Inputs that may be donated.


@dataclasses.dataclass(frozen=True, eq=False)
class ScannedLayers:
    """A `scan` over layers, each iteration of which is a program."""

    eqn: Eqn
    xs: tuple[str, ...]  # For each stack that it slices: LEAF, SLICES, STACK or RENEWED.
    ys: tuple[str, ...]  # For each stack that it makes: SLICES, STACK, ON_HOST, SENT or UNREAD.
    body: LayerBody  # It gathers for the next iteration if both iterations' leaves fit.
    nbytes: int  # Of an iteration's leaves on a device, as they are fetched, and gathered.
    last_uses: frozenset[Var] = frozenset()  # Initial carries and stacks that may be donated.
    renewed: tuple[
        Var | None, ...
    ] = ()  # For each `ys` of STACK, the RENEWED stack whose memory it takes.

    @property
    def eqns(self) -> tuple[Eqn, ...]:
        return (self.eqn,)

    @functools.cached_property
    def parts(self) -> _jaxpr.ScanParts:
        return _jaxpr.scan_parts(self.eqn)

    @functools.cached_property
    def operands(self) -> list[list[Atom]]:
        """Loop constants, initial carries, and stacks."""
        return split(self.eqn.invars, self.parts.num_consts, self.parts.num_carry)

    @functools.cached_property
    def init(self) -> list[Atom]:
        return self.operands[1]

    @functools.cached_property
    def results(self) -> list[list[Var]]:
        """Final carries, and stacks."""
        return split(self.eqn.outvars, self.parts.num_carry)

    @functools.cached_property
    def leaves(self) -> tuple[Var, ...]:
        return tuple(map(_jaxpr.variable, self.stacks_as(LEAF)))

    def stacks_as(self, kind: str) -> list[Atom]:
        return [x for x, k in zip(self.operands[2], self.xs, strict=True) if k == kind]

    def made(self, kind: str) -> list[Var]:
        return [y for y, k in zip(self.results[1], self.ys, strict=True) if k == kind]

    @functools.cached_property
    def leaving(self) -> list[Var]:
        """The stacks for the host: those written whole, then those sent slice by slice."""
        return [*self.made(ON_HOST), *self.made(SENT)]

    @functools.cached_property
    def reads(self) -> tuple[Var, ...]:
        return tuple(v for v in variables(self.eqn.invars) if v not in self.leaves)


@dataclasses.dataclass(frozen=True, eq=False)
class OuterLoop:
    """A `scan` or a `while`, each iteration of which runs in parts."""

    eqn: Eqn
    loop: OpenLoop
    parts: tuple[LayerPart, ...]
    leaves_around: frozenset[Var]  # All leaves of the program around the loop.
    last_uses: frozenset[Var] = frozenset()  # Initial carries that may be donated.

    @property
    def init(self) -> tuple[Atom, ...]:
        return self.loop.init

    @property
    def leaves(self) -> tuple[Var, ...]:
        return tuple(v for v in self.loop.reads if v in self.leaves_around)

    @property
    def reads(self) -> tuple[Var, ...]:
        return tuple(v for v in self.loop.reads if v not in self.leaves_around)

    @property
    def nbytes(self) -> int:
        return max(part.nbytes for part in self.parts)


LayerPart = StraightStage | ScannedLayers | OuterLoop


def fetched(parts: Iterable[LayerPart]) -> Iterator[StraightStage | ScannedLayers]:
    """All stages and scanned layers, also those inside outer loops."""
    for part in parts:
        if isinstance(part, OuterLoop):
            yield from fetched(part.parts)
        else:
            yield part


def outer_loops(parts: Iterable[LayerPart]) -> Iterator[OuterLoop]:
    for part in parts:
        if isinstance(part, OuterLoop):
            yield part
            yield from outer_loops(part.parts)


def read_later(reads: Sequence[Collection[Var]], outs: Iterable[Atom]) -> list[set[Var]]:
    """For each part, the values that later parts read, or that are returned, given all parts' `reads`."""
    found = [set(variables(outs))]
    for read in reversed(reads[1:]):
        found.append(found[-1].union(read))
    return found[::-1]


def offloaded(parts: Iterable[LayerPart]) -> frozenset[Var]:
    """Values, and stacks of slices, that are offloaded between the part that makes them and its readers."""
    found = set[Var]()
    for part in parts:
        if isinstance(part, StraightStage):
            found |= _residuals.marks(part.eqns).intersection(part.outputs)
        elif isinstance(part, ScannedLayers):
            found |= _residuals.marks([part.eqn])
        else:
            found |= offloaded(part.parts).difference(variables(part.loop.body.outvars))
    return frozenset(found)


def evaluate_parts(parts: Sequence[LayerPart], values: Mapping[Var, Any]) -> dict[Var, Any]:
    """Traces the parts on one device as one program, in which outer loops are loops again.

    `values` has all inputs, leaves and constants included.
    """
    env = dict(values)
    for part in parts:
        if isinstance(part, OuterLoop):
            last = _run_loop(part, env)
            env |= {v: x for v, x in zip(part.loop.results, last, strict=True) if v is not None}
        else:
            for eqn in part.eqns:
                outs = _jaxpr.evaluate_one(eqn, read(eqn.invars, env))
                env |= zip(eqn.outvars, outs, strict=True)
    return env


def read(atoms: Sequence[Atom], env: Mapping[Var, Any]) -> list[Any]:
    return [_jaxpr.literal(a) if _jaxpr.is_literal(a) else env[_jaxpr.variable(a)] for a in atoms]


def _run_loop(part: OuterLoop, env: Mapping[Var, Any]) -> list[Any]:
    """The final carry of an outer loop."""
    loop = part.loop

    def iteration(carry: list[Any]) -> list[Any]:
        made = evaluate_parts(part.parts, {**env, **dict(zip(loop.carry, carry, strict=True))})
        return read(loop.body.outvars, made)

    def goes_on(carry: list[Any]) -> Any:
        assert loop.goes_on is not None
        known = {**env, **dict(zip(loop.carry, carry, strict=True))}
        (asked,) = _jaxpr.evaluate(loop.goes_on, (), *read(loop.goes_on.invars, known))
        return asked

    init = read(loop.init, env)
    with _jaxpr.source_of(part.eqn):
        if loop.length is None:
            last: list[Any] = lax.while_loop(goes_on, iteration, init)
            return last
        return list(
            lax.scan(lambda carry, _: (iteration(carry), None), init, length=loop.length)[0]
        )
