# SPDX-License-Identifier: Apache-2.0
"""Runs a list of operations: in order, asynchronously, with bounded memory on the devices.

The list is cut where a program runs: what is fetched for a program, the program, and what is sent behind it
are a *visit*. The next program's values are fetched while a program runs, as far as there is room
(`_stream.stream`). Nothing waits but for room, for a `while` that asks whether it goes on, and for the last
copies.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jzero._memory_kinds import NVME
from jzero.offload.execute import _stream
from jzero.offload.execute._stream import Visit, free
from jzero.offload.schedule._liveness import NOTHING, Dead, dead_after
from jzero.offload.schedule._ops import (
    Commit,
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


class New(NamedTuple):
    """What an update has made: in stores, and on its way to the devices."""

    there: Mapping[Any, Any]
    here: Mapping[Any, Any] = {}


class HostSide:
    """What the hosts do in one run of a list beside copies: they update, and write files. Here nothing."""

    def prepare(self, update: Update, takes: Sequence[Any]) -> None:
        """Does what can fail of an update that stands by itself, and overwrites nothing.

        What it takes is there; None of what has gone into files, or to an earlier update.
        """

    def update(self, update: Update, place: int | None, takes: Sequence[Any]) -> New:
        """Makes an update; one of a bucket it only starts, in the iteration of this place."""
        return New({})

    def write(self, gradients: Sequence[Wanted], arrays: Sequence[Any]) -> None:
        """Writes gradients, or slices of them, to files."""

    def commit(self, commit: Commit) -> Mapping[Any, Any]:
        """Has what was written count from now on; leaves in files."""
        return {}


NOBODY = HostSide()


class Section(NamedTuple):
    """Operations of a list that run together.

    Attributes:
      ops: them.
      device_bytes: the most bytes of what they fetch, on each device at a time.
      under_way: as of `stream`.
    """

    ops: tuple[Op, ...]
    device_bytes: int = 0
    under_way: int | None = None


class _Group(NamedTuple):
    """What is fetched, runs, and follows until something else is fetched or runs."""

    fetches: tuple[Fetch, ...]
    run: Run | None
    after: tuple[Send | Update | Commit, ...]


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
      keeps: what is read when it has run.
    """

    def __init__(self, ops: Sequence[Op], keeps: Keys):
        self.ops, self.keeps = tuple(ops), keeps
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

    def _moved(self, op: Fetch | Send | Update | Commit, names: _Names) -> _OpAt:
        dead = names.known(self.dead(op).there)
        match op:
            case Commit():
                return _OpAt(op, (), None, dead)
            case Update(takes=takes):
                return _OpAt(op, names.known(takes), names.place(), dead)
        keys = names.known(op.refs)
        place = keys[0].at if keys and isinstance(keys[0], Wanted) else None
        return _OpAt(op, keys, place, dead)


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
    fetches, run, after = list[Fetch](), None, list[Send | Update | Commit]()
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
            case Send() | Update() | Commit():
                after.append(op)
    if fetches or run or after:
        yield _Group(tuple(fetches), run, tuple(after))


class Execution:
    """One run of a list, section by section.

    Attributes:
      here: values on the devices.
      there: values in stores.
    """

    def __init__(
        self, program: Executable, here: dict[HeldAs, Any], there: dict[HeldAs, Any],
        host: HostSide = NOBODY,
    ):  # fmt: skip
        self._program, self.here, self.there, self._host = program, here, there, host
        self._files: Any = None

    def run(self, section: Section, beside: Iterable[Visit | None] = (), files: Any = None) -> None:
        """Runs a section of the list.

        Args:
          section: it.
          beside: visits of another run, which begin first.
          files: reads of files for what it fetches (`FileRun`), if it fetches any.
        """
        self._files = files
        visits = itertools.chain(beside, self.visits(section.ops))
        coming = files.ahead(visits) if files else visits
        _stream.stream(coming, section.device_bytes, section.under_way)
        self._files = None

    # -- visits ----------------------------------------------------------------------------------------

    def visits(
        self, ops: Sequence[Op], loop: Loop | None = None, number: int | None = None
    ) -> Iterator[Visit | None]:
        """What operations do, visit by visit, as `stream` makes them; of a loop, in one iteration."""
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
        yield from self.visits(loop.first, loop, -1)
        if loop.length is not None:
            for number in range(loop.length):
                yield from self.visits(loop.body, loop, number)
            yield from self.visits(loop.last, loop, loop.length)
            dead = self._program.dead(loop)
            # Updates of the last iterations have yet to begin with what is on the host.
            yield Visit(
                0, dict, functools.partial(_left, self.here, dead.here),
                functools.partial(_drop, self.there, dead.there), counts=False,
            )  # fmt: skip
            return
        for number in itertools.count():
            yield None
            if not self._goes_on(loop, number):
                _drop(self.here, self._program.dead(loop).here)
                _drop(self.there, self._program.dead(loop).there)
                return
            yield from self.visits(loop.body, loop, number)

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
        done: Sequence[Any] = self._run(visit) if visit.run else self._begun(visit)
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

    def _begun(self, visit: _VisitAt) -> Sequence[Any]:
        """Begins what stands by itself, and waits for no program; what is to be there before it is over."""
        commits = False
        for moved in visit.after:
            if isinstance(moved.op, Update) and moved.op.bucket is None:
                self._host.prepare(moved.op, self._of_host(moved))
            commits = commits or isinstance(moved.op, Commit)
        # The devices may have no room for it: then the old state is what there is.
        return [self.here[x] for x in self._program.keeps.here] if commits else ()

    def _of_host(self, moved: _OpAt) -> list[Any]:
        """What an update takes; see `HostSide.prepare`."""
        return [self.there.get(key) for key in moved.keys]

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
        """Has the host do what follows from what is there now."""
        for moved in visit.after:
            op = moved.op
            match op:
                case Update():
                    new = self._host.update(op, moved.place, self._of_host(moved))
                    self.there.update(new.there)
                    self.here.update(new.here)
                    _drop(self.there, moved.dead)
                case Commit():
                    self.there.update(self._host.commit(op))
                case Send(store=store) if store == NVME:
                    from_here = self.there if op.places else self.here
                    self._host.write(moved.wanted, [from_here.pop(key) for key in moved.keys])


def _left(values: dict[HeldAs, Any], keys: Sequence[Any], _: Any) -> list[Any]:
    _drop(values, keys)
    return []


def _drop(values: dict[HeldAs, Any], keys: Sequence[Any]) -> None:
    for key in keys:
        values.pop(key, None)
