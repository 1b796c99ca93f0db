# SPDX-License-Identifier: Apache-2.0
"""The list of operations of a segment that runs part by part."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import NamedSharding

from jzero._memory_kinds import PINNED
from jzero.ir._loops import MICROBATCHES
from jzero.ir._regions import variables
from jzero.ir._rules import size_in_bytes
from jzero.offload._layer_programs import LayerPrograms, Locals
from jzero.offload.schedule._ops import (
    HANDED_ON,
    DeviceCall,
    Fetch,
    Loop,
    Op,
    Ref,
    Run,
    Send,
    Slice,
    Update,
    Value,
    of_list,
)
from jzero.sharding.analysis._frames import split
from jzero.sharding.cut._layer_parts import (
    ON_HOST,
    SENT,
    SLICES,
    STACK,
    UNREAD,
    LayerPart,
    OuterLoop,
    ScannedLayers,
    StraightStage,
)  # fmt: skip
from jzero.sharding.plan._leaves import LeafPlan
from jzero.tracing import _jaxpr, _lines
from jzero.tracing._types import Eqn, Var

STRETCH, ITERATION = "a stretch of layers", "an iteration of the loop over layers"


@dataclasses.dataclass
class CutSegment:
    inner: Locals  # what one device computes
    parts: tuple[LayerPart, ...]
    programs: LayerPrograms
    leaf_of: dict[Var, LeafPlan]  # inputs that are stored on the hosts
    leaves: dict[Var, Value]  # the same, as the list names them
    gradients: dict[Var, Value]  # what is sent to the host, as the list names it
    # Outputs of parts that are sent to the host: the first of `gradients` that each is.
    on_host: dict[Var, Var]
    out_shardings: dict[int, NamedSharding]  # of outputs that go to pinned memory, by index
    waiting: frozenset[Var]  # activations that wait on the host
    gives: Sequence[Var]  # the segment's, which are its first outputs
    device_bytes: int  # of what it fetches, on each device
    # Written to files as they are made; then None is returned.
    passed_on: frozenset[Var] = frozenset()
    store: Callable[[Var], str] = lambda var: PINNED  # where each gradient is sent
    copies: int = 1  # of each gradient at a time
    # That begin after a part, by its index, and whether each iteration begins one.
    updates: Mapping[int, Sequence[tuple[Update, bool]]] = dataclasses.field(default_factory=dict)


class Output(NamedTuple):
    """Where an output is when the list has run."""

    value: Value
    pinned: bool  # else it is on the devices


class LayerSchedule:
    """Makes the list; `outputs` are those of the segment, None for one that layers write to files."""

    def __init__(self, cut: CutSegment):
        self._cut, self._programs = cut, cut.programs
        sent = {v: cut.gradients[x] for v, x in cut.on_host.items()}
        # A loop's last carry is one array per device; `finish` makes the wanted array of it.
        self._sent = {v: x for v, x in sent.items() if cut.programs.form(v).stacked}
        self._values = {**cut.leaves, **{v: x for v, x in sent.items() if v not in self._sent}}
        self._waiting_now: set[Var] = set()  # activations that are on the host
        self.outputs: list[Output | None] = []

    def all(self) -> Iterator[Op]:
        """The operations of all parts, and those that make the remaining outputs."""
        for index, part in enumerate(self._cut.parts):
            begins = self._cut.updates.get(index, ())
            yield from self._of(part, [op for op, sliced in begins if sliced])
            yield from (op for op, sliced in begins if not sliced)
        yield from self._finish()

    def value(self, var: Var) -> Value:
        if var not in self._values:
            self._values[var] = _value(var, "activation" if var in self._cut.waiting else HANDED_ON)
        return self._values[var]

    def _all(self, found: Sequence[Any]) -> tuple[Value, ...]:
        return tuple([self.value(var) for var in found])

    # -- parts -----------------------------------------------------------------------------------------

    def _of(self, part: LayerPart, updates: Sequence[Update] = ()) -> Iterator[Op]:
        if isinstance(part, StraightStage):
            yield from self._stage(part)
        elif isinstance(part, ScannedLayers):
            yield from self._scanned_layers(part, updates)
        else:
            yield from self._outer_loop(part)

    def _stage(self, part: StraightStage) -> Iterator[Op]:
        programs, takes = self._programs, [*part.leaves, *part.reads]
        num = len(part.leaves)

        def call(arrays: Sequence[Any], _: int | None) -> Any:
            made, done = programs.stage(part)([*arrays[:num]], _known(takes, arrays))
            return made, [done]

        yield from self._back(part.reads)
        yield from self._leaves(part.leaves, part.nbytes)
        yield Run(STRETCH, self._all(takes), self._all(part.outputs), call)
        yield from self._sends(part.outputs)
        yield from self._waits(part.outputs)

    def _outer_loop(self, part: OuterLoop) -> Iterator[Op]:
        loop, programs = part.loop, self._programs
        takes = self._all([v for v in part.reads if v not in self._cut.leaf_of])
        gives = self._kept(part.eqn.outvars)
        carry, last = self._all(loop.carry), variables(loop.body.outvars)
        yield from self._back(part.reads)
        yield from self._held(variables(part.init))
        yield from self._enter(part, carry)
        body = [op for inner in part.parts for op in self._of(inner)]
        renew = programs.renew(part)
        body.append(Run("", self._all(last), carry, _named(last, renew)))
        goes_on = None
        if loop.goes_on is not None:
            asked = loop.goes_on.invars
            goes_on = Run("", self._all(asked), (), _named(asked, programs.goes_on(part)))
        yield Loop(tuple(body), loop.length, _line_of(part.eqn), takes, gives, goes_on=goes_on)
        results = [(v, x) for v, x in zip(loop.results, carry, strict=True) if v is not None]
        yield Run("", tuple(x for _, x in results), self._all([v for v, _ in results]), _same)
        yield from self._sends(part.eqn.outvars)

    def _enter(self, part: ScannedLayers | OuterLoop, carry: tuple[Value, ...]) -> Iterator[Op]:
        reads = variables(part.init)
        yield Run("", self._all(reads), carry, _named(reads, self._programs.enter(part)))

    def _scanned_layers(self, loop: ScannedLayers, updates: Sequence[Update]) -> Iterator[Op]:
        programs = self._programs
        takes = self._all([v for v in loop.reads if v not in self._cut.leaf_of])
        kept = [y for y, kind in zip(loop.results[1], loop.ys, strict=True)
                if kind not in (ON_HOST, SENT, UNREAD)]  # fmt: skip
        gives = self._kept([*loop.results[0], *kept])
        carry = tuple([_value(v, "carry") for v in loop.results[0]])
        gathered = tuple([_value(v, "gathered") for v in loop.body.gathered])
        leaves = self._all(loop.leaves)

        yield from self._back(loop.reads)
        yield from self._held(loop.reads)
        yield from self._enter(loop, carry)
        yield from self._stacks(loop)
        slices = variables(loop.stacks_as(SLICES))
        body: list[Op] = []
        back = tuple(Slice(self.value(v)) for v in slices if v in self._cut.waiting)
        if back:
            places = [programs.sharding(v) for v in slices if v in self._cut.waiting]
            body.append(Fetch(back, PINNED, tuple(places)))
        ahead, first, last = int(bool(gathered)), list[Op](), list[Op]()
        transfers = list[Fetch | Send]()
        if gathered:
            first += self._fetch_slices(loop, leaves, 1), self._gather(loop, leaves, gathered)
        if self._fetches_within_programs(loop):
            first.append(self._fetch_slices(loop, leaves, ahead + 1))
            transfers.append(self._fetch_slices(loop, leaves, ahead + 1))
            transfers += self._stores(loop, -1)
            last += self._stores(loop, -1)
        else:
            body.append(self._fetch_slices(loop, leaves, ahead))
        body.append(self._iteration(loop, carry, gathered, leaves, tuple(transfers)))
        body += self._leaving(loop)
        body += () if transfers else self._stores(loop)
        body += updates
        parts = loop.parts
        yield Loop(
            tuple(body), parts.length, _line_of(loop.eqn), takes, gives, tuple(first), tuple(last),
            parts.reverse,
        )  # fmt: skip
        yield Run("", carry, self._all(loop.results[0]), _same)
        yield from self._sends([*loop.results[0], *loop.made(STACK)])
        yield from self._waits(loop.made(STACK))

    def _stacks(self, loop: ScannedLayers) -> Iterator[Op]:
        programs, ys = self._programs, loop.made(STACK)
        pairs = [*zip(ys, loop.renewed, strict=True)]
        new = [y for y, old in pairs if old is None]
        if new:
            yield Run("", (), self._all(new), lambda *_: (programs.empty(loop)(), ()))
        if olds := [(y, old) for y, old in pairs if old is not None]:
            took, gave = self._all([old for _, old in olds]), self._all([y for y, _ in olds])
            yield Run("", took, gave, _same)

    def _fetches_within_programs(self, loop: ScannedLayers) -> bool:
        """Whether each iteration fetches within its program, which hides copies but cannot read files."""
        pinned = all(self._cut.leaf_of[v].tier == PINNED for v in loop.leaves)
        return pinned and 2 * loop.nbytes <= self._cut.device_bytes

    def _fetch_slices(self, loop: ScannedLayers, leaves: tuple[Value, ...], ahead: int) -> Fetch:
        programs = self._programs

        def by(stacks: Sequence[Any], place: int) -> Sequence[Any]:
            i = programs.positions(loop.parts.length)[place]
            found: Sequence[Any] = programs.fetch(loop)([*stacks], i)
            return found

        tier = self._cut.leaf_of[loop.leaves[0]].tier
        return Fetch(tuple(Slice(v, ahead) for v in leaves), tier, (), by, loop.nbytes)

    def _gather(
        self, loop: ScannedLayers, leaves: tuple[Value, ...], gathered: tuple[Value, ...]
    ) -> Run:
        programs = self._programs

        def call(arrays: Sequence[Any], _: int | None) -> Any:
            found, done = programs.gather(loop)([*arrays], programs.positions(loop.parts.length)[0])
            return found, [done]

        return Run("a gather", tuple(Slice(v, 1) for v in leaves), gathered, call)

    def _iteration(
        self, loop: ScannedLayers, carry: tuple[Value, ...], gathered: tuple[Value, ...],
        leaves: tuple[Value, ...], transfers: tuple[Fetch | Send, ...],
    ) -> Run:  # fmt: skip
        programs = self._programs
        consts = self._all(variables(loop.operands[0]))
        kept = [Slice(leaves[j]) for j in loop.body.used_sharded]
        slices = [Slice(self.value(_jaxpr.variable(a))) for a in loop.stacks_as(SLICES)]
        stacks = self._all(variables(loop.stacks_as(STACK)))
        made = self._all(loop.made(STACK))
        following = [Slice(v, 1) for v in leaves] if gathered else []
        onward = -1 if loop.parts.reverse else 1
        groups: list[Sequence[Ref]] = [consts, carry, gathered, kept, slices, stacks, made]
        sizes = [*map(len, groups)]

        def call(arrays: Sequence[Any], place: int | None) -> Any:
            assert place is not None
            *parts, rest = split(arrays, *sizes)
            positions = programs.positions(loop.parts.length)
            num = len(rest) - sum(1 + isinstance(op, Send) for op in transfers)
            coming = rest[:num]  # The last iteration gathers for none.
            stacks, slices, renewed = [*rest[num:], [], [], []][:3]
            # Of an iteration that is not there any place: nothing is copied.
            after, before = (
                positions[(place + onward * far) % len(positions)]
                for far in (1 + bool(gathered), -1)
            )
            made, args = list[Any](), (*parts, positions[place], coming)
            if slices and not renewed:
                made, _ = programs.store(loop, True)(None, slices, before)
                slices = []
            if stacks or renewed:
                iteration = programs.iteration_beside_copies(loop, bool(coming))
                found, copied = iteration(stacks, slices, renewed, after, before, *args)
                made = [*copied, *made]
            else:
                found = programs.iteration(loop, bool(coming))(*args)
            new_carry, new, leaving, stacked, done, gave = found
            gave = gave or [None] * len(gathered)
            return [*new_carry, *new, *leaving, *stacked, *gave, *made], [done]

        gives: list[Ref] = [
            *carry, *(Slice(self.value(y)) for y in loop.made(SLICES)),
            *(Slice(self.value(y)) for y in loop.leaving), *made, *gathered,
        ]  # fmt: skip
        takes: list[Ref] = [x for group in (*groups, following) for x in group]
        return Run(ITERATION, tuple(takes), tuple(gives), call, transfers)

    def _leaving(self, loop: ScannedLayers) -> Iterator[Send]:
        programs, mine = self._programs, loop.made(SLICES)
        if waits := [y for y in mine if y in self._cut.waiting]:
            places = tuple([programs.sharding(y, PINNED) for y in waits])
            refs = tuple(Slice(self.value(y)) for y in waits)
            yield Send(refs, PINNED, places, waits=True)
        for store, sent in self._by_store(loop.made(SENT)):
            places = tuple([programs.slice_sharding(y) for y in sent])
            refs = tuple(Slice(self._given(y)) for y in sent)
            yield Send(refs, store, places, copies=self._cut.copies)

    def _stores(self, loop: ScannedLayers, ahead: int = 0) -> Iterator[Send]:
        """Writes slices of an iteration, or of the one `ahead` of it, into stacks on the host."""
        programs = self._programs
        if stacks_there := loop.made(ON_HOST):

            def by(stacks: Any, new: Sequence[Any], place: int) -> Any:
                i = programs.positions(loop.parts.length)[place]
                stacks, done = programs.store(loop, stacks is None)(stacks, [*new], i)
                return stacks, [done]

            refs = tuple(Slice(self._given(y), ahead) for y in stacks_there)
            yield Send(refs, PINNED, (), by, self._cut.copies)

    # -- between memories ------------------------------------------------------------------------------

    def _leaves(self, leaves: Sequence[Var], nbytes: int, ahead: bool = True) -> Iterator[Fetch]:
        """Whole leaves, one fetch for each store."""
        tiers = dict.fromkeys(self._cut.leaf_of[v].tier for v in leaves)
        for i, tier in enumerate(tiers):
            mine = [v for v in leaves if self._cut.leaf_of[v].tier == tier]
            places = tuple([self._programs.sharding(v) for v in mine])
            room = nbytes if not i else 0
            yield Fetch(self._all(mine), tier, places, nbytes=room, ahead=ahead)

    def _held(self, reads: Sequence[Var]) -> Iterator[Fetch]:
        """Leaves that a loop reads whole: they stay until it is over."""
        yield from self._leaves([v for v in reads if v in self._cut.leaf_of], 0, ahead=False)

    def _back(self, reads: Sequence[Var]) -> Iterator[Fetch]:
        mine = [v for v in dict.fromkeys(reads) if v in self._waiting_now]
        if mine:
            self._waiting_now.difference_update(mine)
            places = tuple([self._programs.sharding(v) for v in mine])
            yield Fetch(self._all(mine), PINNED, places)

    def _waits(self, made: Sequence[Var]) -> Iterator[Send]:
        mine = [v for v in made if v in self._cut.waiting]
        if mine:
            self._waiting_now.update(mine)
            places = tuple([self._programs.sharding(v, PINNED) for v in mine])
            yield Send(self._all(mine), PINNED, places, waits=True)

    def _sends(self, made: Sequence[Var]) -> Iterator[Op]:
        mine = [v for v in made if v in self._cut.on_host]
        for var in mine:
            if var in self._sent:
                run = self._programs.finish((self._output_of(var),), (var,))
                yield Run("", (self.value(var),), (self._sent[var],), of_list(run))
        there = [v for v in mine if self._sharding(v).memory_kind == PINNED]
        for store, sent in self._by_store(there):
            places = tuple(map(self._sharding, sent))
            yield Send(tuple(map(self._given, sent)), store, places, copies=self._cut.copies)

    def _output_of(self, var: Var) -> int:
        return self._cut.inner.jaxpr.outvars.index(var)

    def _sharding(self, var: Var) -> NamedSharding:
        return self._cut.out_shardings[self._output_of(var)]

    def _by_store(self, sent: Sequence[Var]) -> Iterator[tuple[str, list[Var]]]:
        found: dict[str, list[Var]] = {}
        for var in sent:
            found.setdefault(self._cut.store(self._cut.on_host[var]), []).append(var)
        yield from found.items()

    def _given(self, var: Var) -> Value:
        return self._sent.get(var, self.value(var))

    # -- outputs ---------------------------------------------------------------------------------------

    def _finish(self) -> Iterator[Op]:
        """Finds the outputs, and makes those that no part makes in the wanted form."""
        cut, atoms = self._cut, self._cut.inner.jaxpr.outvars
        found: dict[int, Output | None] = {}
        for i, atom in enumerate(atoms):
            if (output := self._output(i)) is not None:
                found[i] = output
            elif not cut.passed_on.isdisjoint(variables([atom])):
                found[i] = None
        missing = tuple(i for i in range(len(atoms)) if i not in found)
        if missing:
            reads = variables([atoms[i] for i in missing])
            yield from self._back(reads)
            yield from self._held(reads)
            made = tuple(
                cut.gradients[cut.gives[i]]
                if i in cut.out_shardings
                else _value(atoms[i], "output")
                for i in missing
            )
            run = self._programs.finish(missing, tuple(reads))
            yield Run("", self._all(reads), made, of_list(run))
            for i, value in zip(missing, made, strict=True):
                place = cut.out_shardings.get(i)
                found[i] = Output(value, place is not None)
                if place is not None and place.memory_kind == PINNED:
                    yield Send((value,), cut.store(cut.gives[i]), (place,), copies=cut.copies)
        for i, sharding in cut.out_shardings.items():
            if sharding.memory_kind != PINNED and (output := found[i]) is not None:
                # No part sends it: it goes into files from the devices.
                yield Send((output.value,), cut.store(cut.gives[i]))
                found[i] = None
        self.outputs = [found[i] for i in range(len(atoms))]

    def _output(self, index: int) -> Output | None:
        """An output that a part makes in the wanted form, else None."""
        cut, jaxpr = self._cut, self._cut.inner.jaxpr
        atom, wanted = jaxpr.outvars[index], cut.out_shardings
        if _jaxpr.is_literal(atom) or atom in cut.passed_on:
            return None
        first = jaxpr.outvars.index(atom)
        if atom in cut.on_host and wanted.get(index) == wanted[first]:
            return Output(self._given(atom), wanted[first].memory_kind == PINNED)
        if first != index:
            return None
        as_wanted = atom not in jaxpr.invars and not self._programs.form(atom).stacked
        return Output(self.value(atom), False) if as_wanted and index not in wanted else None

    def _kept(self, made: Sequence[Var]) -> tuple[Value, ...]:
        gone = self._cut.on_host.keys() | self._cut.waiting
        return self._all([v for v in made if v not in gone])


def _value(atom: Any, what: str) -> Value:
    aval = atom.aval
    return Value(what, str(aval.dtype), aval.size, size_in_bytes(aval))


def _known(takes: Sequence[Var], arrays: Sequence[Any]) -> dict[Var, Any]:
    return dict(zip(takes, arrays, strict=True))


def _named(takes: Sequence[Var], program: Callable[[Mapping[Var, Any]], Any]) -> DeviceCall:
    """A program of values by their variables."""
    return lambda arrays, _: (program(_known(takes, arrays)), ())


def _same(arrays: Sequence[Any], _: int | None) -> Any:
    return arrays, ()


def _line_of(loop: Eqn) -> str:
    """The user's line; '' for jzero's own loop over microbatches."""
    return "" if _jaxpr.in_scope(loop, MICROBATCHES) else _lines.summary(loop)
