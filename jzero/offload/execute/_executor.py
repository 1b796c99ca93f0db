# SPDX-License-Identifier: Apache-2.0
"""Runs a list of operations: in order, asynchronously, with bounded memory on the devices.

The list is cut where a program runs: what is fetched for a program, the program, and what is sent behind it
are a *visit*. The next program's values are fetched while a program runs, as far as there is room
(`_stream.stream`). Nothing waits but for room, for a `while` that asks whether it goes on, and for the last
copies.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jzero._memory_kinds import NVME
from jzero.offload.execute import _stream
from jzero.offload.execute._stream import Visit, free
from jzero.offload.schedule._liveness import NOTHING, Dead, dead_after
from jzero.offload.schedule._ops import (
    Fetch,
    Loop,
    Op,
    Ref,
    Run,
    Send,
    Slice,
    Update,
    Value,
    Wanted,
    value_of,
    with_riders,
)
from jzero.sharding.analysis._frames import split

# A value, or the slice of it at one place along dim 0.
HeldAs = Value | Wanted


class Keys(NamedTuple):
    """What is read of the devices, and of the stores, when a list has run."""

    here: tuple[Value, ...] = ()
    there: tuple[Value, ...] = ()


@dataclasses.dataclass(frozen=True)
class Arrivals:
    """Who is told of what has arrived on the host.

    Attributes:
      begin: `(update, place of the iteration, what it takes)`: starts an update; returns leaves on the hosts
        that from now on are other arrays.
      write: `(gradients, arrays)`: writes gradients, or slices of them, to files.
    """

    begin: Callable[[Update, int | None, Sequence[Any]], Mapping[Any, Any]] | None = None
    write: Callable[[Sequence[Wanted], Sequence[Any]], None] | None = None


NOBODY = Arrivals()


class _Group(NamedTuple):
    """What is fetched, runs, and follows until something else is fetched or runs."""

    fetches: tuple[Fetch, ...]
    run: Run | None
    after: tuple[Send | Update, ...]


class _OpAt(NamedTuple):
    """What an operation moves, or takes of what is on the host, in one iteration."""

    op: Any
    keys: tuple[HeldAs, ...]  # One of the iteration after the last is left out.
    place: int | None  # of slices, along dim 0
    dead: tuple[HeldAs, ...]  # what nobody needs on the host after it

    @property
    def wanted(self) -> list[Wanted]:
        """What it moves, as files know it."""
        return [key if isinstance(key, Wanted) else Wanted(key, None) for key in self.keys]

    @property
    def stacks(self) -> list[Value]:
        """Of what it moves slices of."""
        return [*map(value_of, self.keys)]


class _VisitAt(NamedTuple):
    """A group in one iteration."""

    fetches: tuple[_OpAt, ...]
    run: Run | None
    rides: tuple[_OpAt, ...]  # what its program fetches and sends itself
    takes: tuple[HeldAs, ...]
    gives: tuple[HeldAs | None, ...]
    place: int | None  # of the iteration's slices, if there are any
    after: tuple[_OpAt, ...]
    dead: tuple[HeldAs, ...]  # what nobody needs on the devices after it

    @property
    def nbytes(self) -> int:
        """On each device, of what it fetches.

        With what its program fetches for a later iteration: as visits ask for room before the program of the
        visit before begins, there is room for that one's copies when it makes them.
        """
        moved = (*self.fetches, *self.rides)
        return sum(x.op.nbytes for x in moved if isinstance(x.op, Fetch))

    @property
    def wanted(self) -> list[Wanted]:
        """What is read of files for it, ahead of it."""
        ahead = (x for x in self.fetches if x.op.store == NVME and x.op.ahead)
        return [each for x in ahead for each in x.wanted]


class Executable:
    """A list of operations that can run, any number of times.

    Attributes:
      ops: the list.
    """

    def __init__(self, ops: Sequence[Op], keeps: Keys):
        self.ops = tuple(ops)
        self._dead = dead_after(ops, keeps.here, keeps.there)
        self._groups: dict[int, list[_Group | Loop]] = {}
        # By the group, and the iteration: names are looked up once, and not in each step.
        self._visits: dict[tuple[int, int | None], _VisitAt] = {}

    def dead(self, op: Op | None) -> Dead:
        """What nobody needs after an operation."""
        return self._dead.get(id(op), NOTHING)

    def groups(self, ops: Sequence[Op]) -> list[_Group | Loop]:
        """Operations of one list, cut where programs run."""
        if id(ops) not in self._groups:
            self._groups[id(ops)] = [*_grouped(ops)]
        return self._groups[id(ops)]

    def visit(self, group: _Group, loop: Loop | None, number: int | None) -> _VisitAt:
        """A group in an iteration of the loop around it."""
        sliced = loop is not None and loop.length is not None
        key = id(group), number if sliced else None
        if key not in self._visits:
            self._visits[key] = self._visit(group, _Names(loop if sliced else None, number))
        return self._visits[key]

    def _visit(self, group: _Group, names: _Names) -> _VisitAt:
        run = group.run
        ops = [*with_riders([*group.fetches, *([run] if run else []), *group.after])]
        rides = run.rides if run else ()
        return _VisitAt(
            tuple(self._moved(op, names) for op in group.fetches),
            run,
            tuple(self._moved(op, names) for op in rides),
            names.known(run.takes if run else ()),
            tuple([names.key(ref) for ref in run.gives] if run else []),
            names.place(),
            tuple(self._moved(op, names) for op in group.after),
            names.known([ref for op in ops for ref in self.dead(op).here]),
        )

    def _moved(self, op: Fetch | Send | Update, names: _Names) -> _OpAt:
        keys = names.known(op.takes if isinstance(op, Update) else op.refs)
        place = keys[0].at if keys and isinstance(keys[0], Wanted) else None
        if isinstance(op, Update):
            place = names.place()
        return _OpAt(op, keys, place, names.known(self.dead(op).there))


class _Names(NamedTuple):
    """How values are known in an iteration of a loop, or outside of any."""

    loop: Loop | None
    number: int | None

    def place(self, ahead: int = 0) -> int | None:
        """Of slices of the iteration so many after this one; None if there is no such iteration."""
        if self.loop is None or self.number is None:
            return None
        number, order = self.number + ahead, self.loop.order
        return order[number] if 0 <= number < len(order) else None

    def key(self, ref: Ref) -> HeldAs | None:
        """None for a slice of an iteration that is not there."""
        if not isinstance(ref, Slice):
            return ref
        assert self.loop is not None, "a slice is known in an iteration only"
        place = self.place(ref.ahead)
        return None if place is None else Wanted(ref.of, place)

    def known(self, refs: Sequence[Ref]) -> tuple[HeldAs, ...]:
        """All that there are."""
        return tuple([key for ref in refs if (key := self.key(ref)) is not None])


def _grouped(ops: Sequence[Op]) -> Iterator[_Group | Loop]:
    fetches, run, after = list[Fetch](), None, list[Send | Update]()
    for op in ops:
        begins = isinstance(op, Loop) or (isinstance(op, Fetch | Run) and (run or after))
        if begins and (fetches or run or after):
            yield _Group(tuple(fetches), run, tuple(after))
            fetches, run, after = [], None, []
        match op:
            case Loop():
                yield op
            case Fetch():
                fetches.append(op)
            case Run():
                run = op
            case Send() | Update():
                after.append(op)
    if fetches or run or after:
        yield _Group(tuple(fetches), run, tuple(after))


class Execution:
    """One run of a list.

    Attributes:
      here: values on the devices.
      there: values in pinned memory.
    """

    def __init__(
        self, program: Executable, here: dict[HeldAs, Any], there: dict[HeldAs, Any], files: Any = None,
        arrivals: Arrivals = NOBODY,
    ):  # fmt: skip
        self._program, self.here, self.there = program, here, there
        self._files, self._arrivals = files, arrivals

    def run(self, device_bytes: int, under_way: int | None = None) -> None:
        """Runs it, with `device_bytes` and `under_way` as of `stream`."""
        visits = self._visits(self._program.ops)
        coming = self._files.ahead(visits) if self._files else visits
        _stream.stream(coming, device_bytes, under_way)

    # -- visits ----------------------------------------------------------------------------------------

    def _visits(
        self, ops: Sequence[Op], loop: Loop | None = None, number: int | None = None
    ) -> Iterator[Visit | None]:
        for group in self._program.groups(ops):
            if isinstance(group, Loop):
                yield from self._loop(group)
                continue
            visit = self._program.visit(group, loop, number)
            yield Visit(
                visit.nbytes,
                functools.partial(self._fetch, visit),
                functools.partial(self._update, visit),
                functools.partial(self._over, visit),
                visit.wanted if self._files else (),
                bool(visit.run and visit.run.program),
            )

    def _loop(self, loop: Loop) -> Iterator[Visit | None]:
        yield from self._visits(loop.first, loop, -1)
        if loop.length is not None:
            for number in range(loop.length):
                yield from self._visits(loop.body, loop, number)
            yield from self._visits(loop.last, loop, loop.length)
            yield Visit(0, dict, functools.partial(self._left, loop), counts=False)
            return
        for number in itertools.count():
            yield None
            if not self._goes_on(loop, number):
                self._left(loop, {})
                return
            yield from self._visits(loop.body, loop, number)

    def _left(self, loop: Loop, _: dict[HeldAs, Any]) -> list[Any]:
        dead = self._program.dead(loop)
        _drop(self.here, dead.here)
        _drop(self.there, dead.there)
        return []

    def _goes_on(self, loop: Loop, number: int) -> bool:
        run = loop.goes_on
        assert run is not None
        assert run.call is not None
        (asked,), _ = run.call([self.here[value_of(x)] for x in run.takes], None)
        # A trace of what is started has one iteration.
        return not number if isinstance(asked, jax.core.Tracer) else bool(jax.device_get(asked))

    # -- what a visit does -----------------------------------------------------------------------------

    def _fetch(self, visit: _VisitAt) -> dict[HeldAs, Any]:
        """Starts copies to the devices; what is not there yet, or comes late, follows with the program."""
        found: dict[HeldAs, Any] = {}
        for moved in visit.fetches:
            if moved.op.ahead:
                found.update(self._fetched(moved, found))
        return found

    def _fetched(self, moved: _OpAt, known: Mapping[HeldAs, Any]) -> dict[HeldAs, Any]:
        op: Fetch = moved.op
        if op.store == NVME and self._files:
            return dict(zip(moved.keys, self._files.fetched(moved.wanted), strict=True))
        if op.by is not None:
            return self._by_program(op.by, moved)
        found: dict[HeldAs, Any] = {}
        there = [
            (key, place) for key, place in zip(moved.keys, op.places, strict=True)
            if key in self.there and key not in known
        ]  # fmt: skip
        if there:
            arrays = [self.there[key] for key, _ in there]
            copies = jax.device_put(arrays, [place for _, place in there])
            found = {key: x for (key, _), x in zip(there, copies, strict=True)}
        for value in op.frees:  # Freed when it is copied: the host holds no second state.
            free(self.there.pop(value))
        return found

    def _by_program(self, by: Any, moved: _OpAt) -> dict[HeldAs, Any]:
        if not moved.keys:
            return {}
        stacks = [self.there[x] for x in moved.stacks]
        return dict(zip(moved.keys, by(stacks, moved.place), strict=True))

    def _update(self, visit: _VisitAt, arrays: dict[HeldAs, Any]) -> list[Any]:
        """Starts the program, and then copies to the host; what is to be waited for."""
        for moved in visit.fetches:
            op = moved.op
            if not op.ahead or (op.by is None and any(key not in arrays for key in moved.keys)):
                arrays.update(self._fetched(moved, arrays))
        self.here.update(arrays)
        done: Sequence[Any] = self._run(visit) if visit.run else ()
        copies = [x for m in visit.after if isinstance(m.op, Send) for x in self._send(m)]
        _drop(self.here, visit.dead)
        for moved in (*visit.fetches, *visit.rides):
            _drop(self.there, moved.dead)
        return copies or [*done]

    def _run(self, visit: _VisitAt) -> Sequence[Any]:
        assert visit.run is not None
        assert visit.run.call is not None
        here = self.here
        arrays: list[Any] = [here[key] for key in visit.takes]
        for moved in visit.rides:
            arrays += self._taken(moved)
        made, done = visit.run.call(arrays, visit.place)
        sizes = [len(moved.keys) for moved in visit.rides]
        found, *riding = split([*made], len(visit.gives), *sizes[:-1])
        for key, x in zip(visit.gives, found, strict=True):
            if key is not None and x is not None:
                here[key] = x
        for moved, new in zip(visit.rides, riding if sizes else (), strict=True):
            if isinstance(moved.op, Fetch):
                here.update(zip(moved.keys, new, strict=True))
            else:
                self.there.update(zip(moved.stacks, new, strict=True))
        return done

    def _taken(self, moved: _OpAt) -> list[Any]:
        """What a program takes for what rides in it."""
        stacks = [self.there[x] for x in moved.stacks if x in self.there]
        if isinstance(moved.op, Fetch):
            return [stacks]
        return [[self.here[key] for key in moved.keys], stacks]

    def _send(self, moved: _OpAt) -> Sequence[Any]:
        op: Send = moved.op
        arrays = [self.here[key] for key in moved.keys]
        if op.by is not None:
            stacks = moved.stacks
            olds = [self.there[x] for x in stacks] if stacks[0] in self.there else None
            new, done = op.by(olds, arrays, moved.place)  # type: ignore[arg-type]
            self.there.update(zip(stacks, new, strict=True))
            return done
        if not op.places:  # They go into files piece by piece.
            return ()
        copies = jax.device_put(arrays, [*op.places])
        self.there.update(zip(moved.keys, copies, strict=True))
        return list(copies)

    def _over(self, visit: _VisitAt) -> None:
        """Tells of what is on the host now."""
        begin, write = self._arrivals.begin, self._arrivals.write
        for moved in visit.after:
            op = moved.op
            if isinstance(op, Update):
                takes = [self.there[key] for key in moved.keys]
                if begin is not None:
                    self.there.update(begin(op, moved.place, takes))
                _drop(self.there, moved.dead)
            elif op.store == NVME and write is not None:
                from_here = self.there if op.places else self.here
                write(moved.wanted, [from_here.pop(key) for key in moved.keys])


def _drop(values: dict[HeldAs, Any], keys: Sequence[Any]) -> None:
    for key in keys:
        values.pop(key, None)
