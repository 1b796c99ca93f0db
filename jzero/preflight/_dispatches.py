# SPDX-License-Identifier: Apache-2.0
"""The programs and copies that a step of several programs starts, and the memory in use meanwhile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero._memory_kinds import DEVICE, PINNED
from jzero.ir._regions import variables
from jzero.ir._rules import size_in_bytes
from jzero.preflight._clocks import FROM_HOST, TO_HOST
from jzero.preflight._schedule import Copied
from jzero.segments._segment import shard_of
from jzero.tracing import _jaxpr
from jzero.tracing._types import Eqn, Jaxpr, Var

_Value = jax.ShapeDtypeStruct  # of the global shape, with its sharding and memory kind


@dataclasses.dataclass(frozen=True, eq=False)
class DispatchedProgram:
    """One of the different programs that a step starts."""

    name: str  # of its function: 'iteration', 'fetch', ...
    run: Callable[..., Any]  # takes flat arguments
    args: tuple[_Value, ...]
    donated: tuple[int, ...]  # indices of arguments
    places: tuple[NamedSharding | None, ...]  # of its results, where the program specifies them

    def lower(self, mesh: Mesh) -> jax.stages.Lowered:
        """Lowers the program for these devices; its places are on an abstract mesh.

        Shardings of devices that are not there would lose their memory kinds, since such devices list none;
        those of an abstract mesh keep them, and JAX takes the devices from the context.
        """

        def part(*args: Any) -> Any:
            return self.run(*args)

        part.__name__ = self.name
        jitted = jax.jit(part, donate_argnums=self.donated, out_shardings=[*self.places])
        with jax.set_mesh(mesh):
            return jitted.lower(*self.args)


class Dispatch(NamedTuple):
    """A program or copy that a step starts."""

    program: DispatchedProgram | None  # the program; None for a copy
    reads: tuple[Var, ...]
    makes: Mapping[Var, _Value]
    consumes: tuple[Var, ...]  # donated
    # of what it makes, copies between the devices and their hosts
    copies: tuple[Copied, ...] = ()


@dataclasses.dataclass(frozen=True)
class Dispatches:
    steps: tuple[Dispatch, ...]  # in order
    args: Mapping[Var, _Value]  # the step's arguments
    results: frozenset[Var]  # the step's results
    in_files: frozenset[Var] = frozenset()  # arguments that are in no memory

    @property
    def programs(self) -> dict[DispatchedProgram, int]:
        """The different programs, in the order in which they first run, and how often each does."""
        counts: dict[DispatchedProgram, int] = {}
        for step in self.steps:
            if step.program is not None:
                counts[step.program] = counts.get(step.program, 0) + 1
        return counts


def read_dispatches(
    closed: Any, args: Sequence[_Value], in_files: Collection[int] = ()
) -> Dispatches:
    """Reads the jaxpr of `StepProgram.dispatched`; the arguments `in_files` are in no memory."""
    jaxpr, _ = _jaxpr.open_jaxpr(closed)
    reader = _DispatchReader(args[0].sharding.mesh)
    reader.values |= zip(jaxpr.invars, args, strict=True)
    steps = tuple(map(reader.read, jaxpr.eqns))
    results = frozenset(variables(jaxpr.outvars))
    away = frozenset(jaxpr.invars[i] for i in in_files)
    return Dispatches(steps, dict(zip(jaxpr.invars, args, strict=True)), results, away)


class _DispatchReader:
    def __init__(self, mesh: Any):
        self._mesh = mesh
        self.values: dict[Var, _Value] = {}
        self._programs: dict[Any, DispatchedProgram] = {}

    def value(self, aval: Any, place: NamedSharding | None) -> _Value:
        """A value of this type, by default replicated on the devices."""
        kind = PINNED if _jaxpr.is_on_host(aval) else DEVICE
        spec = P() if place is None else place.spec
        kind = (place.memory_kind if place is not None else None) or kind
        place = NamedSharding(self._mesh, spec, memory_kind=kind)
        return jax.ShapeDtypeStruct(
            aval.shape, aval.dtype, sharding=place, weak_type=aval.weak_type
        )

    def read(self, eqn: Eqn) -> Dispatch:
        args = [
            self.value(atom.aval, None) if _jaxpr.is_literal(atom) else self._of(atom)
            for atom in eqn.invars
        ]
        specs = _specs_of(eqn, [x.sharding.spec for x in args])
        declared = eqn.params.get("out_shardings", eqn.params.get("devices", ()))
        declared = [place if isinstance(place, NamedSharding) else None for place in declared]
        declared += [None] * (len(specs) - len(declared))
        places = [
            NamedSharding(self._mesh, spec) if place is None else place
            for spec, place in zip(specs, declared, strict=True)
        ]
        makes = {
            var: self.value(var.aval, place) for var, place in zip(eqn.outvars, places, strict=True)
        }
        self.values |= makes
        reads = tuple(variables(eqn.invars))
        if "donated_invars" not in eqn.params:  # A copy: only programs have that.
            return Dispatch(None, reads, makes, (), tuple(self._copies(eqn, args)))
        gone = tuple(i for i, donated in enumerate(eqn.params["donated_invars"]) if donated)
        consumes = tuple(variables([eqn.invars[i] for i in gone]))
        return Dispatch(self._program(eqn, args, gone, declared), reads, makes, consumes)

    def _copies(self, eqn: Eqn, args: Sequence[_Value]) -> Iterator[Copied]:
        for atom, arg, var in zip(eqn.invars, args, eqn.outvars, strict=True):
            made = self.values[var]
            kind = made.sharding.memory_kind
            if kind != arg.sharding.memory_kind:
                source = None if _jaxpr.is_literal(atom) else atom
                stream = TO_HOST if kind == PINNED else FROM_HOST
                yield Copied(source, var, stream, held_bytes([made], kind))

    def _of(self, var: Var) -> _Value:
        """What is known of a variable; constants of the trace are on the devices."""
        if var not in self.values:
            self.values[var] = self.value(var.aval, None)
        return self.values[var]

    def _program(
        self, eqn: Eqn, args: Sequence[_Value], gone: tuple[int, ...], declared: Sequence[Any]
    ) -> DispatchedProgram:
        closed = eqn.params["jaxpr"]
        places = tuple(x.sharding for x in args)
        key = (id(closed), places, gone, tuple(declared))
        if key not in self._programs:
            jaxpr, consts = _jaxpr.open_jaxpr(closed)

            def run(*args: Any) -> Any:
                return _jaxpr.evaluate(jaxpr, consts, *args)

            name = eqn.params["name"].strip("_<>")
            self._programs[key] = DispatchedProgram(name, run, tuple(args), gone, tuple(declared))
        return self._programs[key]


def _specs_of(eqn: Eqn, args: Sequence[P]) -> list[P]:
    """Specs of results: those of a `shard_map`, of a copy's operand, or replicated."""
    if eqn.primitive.name == "shard_map":
        return list(eqn.params["out_specs"])
    if eqn.primitive.name == "device_put":
        return list(args)
    called = _jaxpr.call_parts(eqn)
    if called is None:
        return [P()] * len(eqn.outvars)
    return _specs_inside(called[0], args)


def _specs_inside(jaxpr: Jaxpr, args: Sequence[P]) -> list[P]:
    specs = dict(zip(jaxpr.invars, args, strict=True))

    def of(atom: Any) -> P:
        return P() if _jaxpr.is_literal(atom) else specs.get(atom, P())

    for eqn in jaxpr.eqns:
        found = _specs_of(eqn, [of(atom) for atom in eqn.invars])
        places = eqn.params["devices"] if eqn.primitive.name == "device_put" else ()
        for i, place in enumerate(places):
            found[i] = place.spec if isinstance(place, NamedSharding) else found[i]
        specs |= zip(eqn.outvars, found, strict=True)
    return [of(atom) for atom in jaxpr.outvars]


# -- memory --------------------------------------------------------------------------------------------


class ProgramMemory(NamedTuple):
    """Bytes of a program on a device, or on its host."""

    arguments: int
    made: int  # results that do not alias donated arguments
    temporaries: int

    @classmethod
    def of(cls, compiled: jax.stages.Compiled) -> tuple[ProgramMemory, ProgramMemory]:
        """Reads both from XLA: those on a device, and those on its host."""
        found: Any = compiled.memory_analysis()

        def read(where: str) -> ProgramMemory:
            arguments, results, inside, temporaries = (
                getattr(found, f"{where}{what}_size_in_bytes")
                for what in ("argument", "output", "alias", "temp")
            )
            return cls(arguments, results - inside, temporaries)

        return read(""), read("host_")


class Moment(NamedTuple):
    """The memory in use once something has been started and its results are allocated."""

    program: DispatchedProgram | None  # the program; None for a copy
    nbytes: int  # that a device holds
    host_nbytes: int  # that its host holds for it, in pinned memory


def moments(
    found: Dispatches, memory: Mapping[DispatchedProgram, tuple[ProgramMemory, ProgramMemory]]
) -> list[Moment]:
    """The memory in use at each dispatch, if every value is freed after its last reader has started."""
    last = {var: i for i, step in enumerate(found.steps) for var in step.reads}
    alive = {var: x for var, x in found.args.items() if var not in found.in_files}
    known: list[Moment] = []
    for i, step in enumerate(found.steps):
        before = [held_bytes(alive.values(), kind) for kind in (DEVICE, PINNED)]
        if step.program is None:
            new = [held_bytes(step.makes.values(), kind) for kind in (DEVICE, PINNED)]
        else:
            new = [each.made + each.temporaries for each in memory[step.program]]
        known.append(Moment(step.program, before[0] + new[0], before[1] + new[1]))
        alive |= step.makes
        for var in [*step.consumes, *step.reads, *step.makes]:
            if var in step.consumes or (
                last.get(var, i) <= i and var not in found.results and not _stays(var, found)
            ):
                alive.pop(var, None)
    return known


def _stays(var: Var, found: Dispatches) -> bool:
    """Whether only a program that consumes it frees it: an argument on the devices."""
    return var in found.args and found.args[var].sharding.memory_kind == DEVICE


def held_bytes(values: Iterable[_Value], kind: str) -> int:
    """Bytes on each device of the values in one kind of memory."""
    return sum(size_in_bytes(shard_of(x)) for x in values if x.sharding.memory_kind == kind)
