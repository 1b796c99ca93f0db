# SPDX-License-Identifier: Apache-2.0
"""Runs a list of operations: in order, asynchronously, with bounded memory on the devices.

The list is cut where a program runs: what a program fetches, the program, and what is sent after it are one
*streaming slot*. While a program runs, the next one's values are fetched as far as the budget allows
(`_stream.stream`). Nothing waits but for memory, for the condition of a `while`, and for the last copies.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jzero._memory_kinds import NVME
from jzero.offload.execute import _stream
from jzero.offload.execute._stream import StreamSlot, free
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
    with_transfers,
)
from jzero.sharding.analysis._frames import split

# A value, or the slice of it at one place along dim 0.
HeldAs = Value | Wanted


class New(NamedTuple):
    there: Mapping[Any, Any]  # in stores
    here: Mapping[Any, Any] = {}  # on its way to the devices


class HostSide:
    """The host's own work in a run of a list: updates, and writes to files. This one does none."""

    def prepare(self, takes: Sequence[Any]) -> None:
        """Does what can fail of the late update, and overwrites nothing; what is no longer there is None."""

    def update(self, update: Update, place: int | None, takes: Sequence[Any]) -> New:
        """Makes an update; an early one (of a bucket, in the iteration of this place) it only starts."""
        return New({})

    def write(self, gradients: Sequence[Wanted], arrays: Sequence[Any]) -> None:
        pass

    def commit(self) -> Mapping[Any, Any]:
        """Makes what was written the current version; returns the new leaves in files."""
        return {}


NOBODY = HostSide()


class Section(NamedTuple):
    """Operations of a list that run together; see `stream` for the limits."""

    ops: tuple[Op, ...]
    device_bytes: int = 0  # of what they fetch, on each device
    under_way: int | None = None


class _Group(NamedTuple):
    """Fetches, a program, and what follows until the next fetch or program."""

    fetches: tuple[Fetch, ...]
    run: Run | None
    after: tuple[Send | Update | Commit, ...]


class _OpAt(NamedTuple):
    op: Any
    keys: tuple[HeldAs, ...]  # One of the iteration after the last is left out.
    place: int | None  # of slices, along dim 0
    dead: tuple[HeldAs, ...]  # what nobody needs on the host after it

    @property
    def wanted(self) -> list[Wanted]:
        return [key if isinstance(key, Wanted) else Wanted(key, None) for key in self.keys]

    @property
    def stacks(self) -> list[Value]:
        return [*map(value_of, self.keys)]


class _SlotAt(NamedTuple):
    fetches: tuple[_OpAt, ...]
    run: Run | None
    transfers: tuple[_OpAt, ...]  # what its program fetches and sends itself
    takes: tuple[HeldAs, ...]
    gives: tuple[HeldAs | None, ...]
    place: int | None  # of the iteration's slices, if there are any
    after: tuple[_OpAt, ...]
    dead: tuple[HeldAs, ...]  # what nobody needs on the devices after it

    @property
    def nbytes(self) -> int:
        # Also for a later iteration: a slot asks for memory before the program of the slot before begins, so
        # what that program fetches has its memory then.
        moved = (*self.fetches, *self.transfers)
        return sum(x.op.nbytes for x in moved if isinstance(x.op, Fetch))

    @property
    def wanted(self) -> list[Wanted]:
        ahead = (x for x in self.fetches if x.op.store == NVME and x.op.ahead)
        return [each for x in ahead for each in x.wanted]


class Executable:
    """A list of operations that can run any number of times."""

    def __init__(self, ops: Sequence[Op], here: Sequence[Value], there: Sequence[Value]):
        """What is read when it has run is `here` on the devices, and `there` in stores."""
        self.ops, self.keeps = tuple(ops), here
        self._dead = dead_after(ops, here, there)
        self._groups: dict[int, list[_Group | Loop]] = {}
        # By group and iteration: names are looked up once, not in each step.
        self._slots: dict[tuple[int, int | None], _SlotAt] = {}

    def dead(self, op: Op) -> Dead:
        return self._dead.get(id(op), NOTHING)

    def groups(self, ops: Sequence[Op]) -> list[_Group | Loop]:
        if id(ops) not in self._groups:
            self._groups[id(ops)] = [*_grouped(ops)]
        return self._groups[id(ops)]

    def slot(self, group: _Group, loop: Loop | None, number: int | None) -> _SlotAt:
        sliced = loop is not None and loop.length is not None
        key = id(group), number if sliced else None
        if key not in self._slots:
            self._slots[key] = self._slot_at(group, _Names(loop if sliced else None, number))
        return self._slots[key]

    def _slot_at(self, group: _Group, names: _Names) -> _SlotAt:
        run = group.run
        ops = [*with_transfers([*group.fetches, *([run] if run else []), *group.after])]
        transfers = run.transfers if run else ()
        return _SlotAt(
            tuple(self._moved(op, names) for op in group.fetches),
            run,
            tuple(self._moved(op, names) for op in transfers),
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
    """How values are named in an iteration of a loop, or outside of any."""

    loop: Loop | None
    number: int | None

    def place(self, ahead: int = 0) -> int | None:
        """The index in stacks of the iteration `ahead` of this one; None if there is no such iteration."""
        if self.loop is None or self.number is None:
            return None
        number, order = self.number + ahead, self.loop.order
        return order[number] if 0 <= number < len(order) else None

    def key(self, ref: Ref) -> HeldAs | None:
        """None for a slice of an iteration that does not exist."""
        if not isinstance(ref, Slice):
            return ref
        assert self.loop is not None, "a slice is known in an iteration only"
        place = self.place(ref.ahead)
        return None if place is None else Wanted(ref.of, place)

    def known(self, refs: Sequence[Ref]) -> tuple[HeldAs, ...]:
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
    """One run of a list, section by section."""

    def __init__(
        self, program: Executable, here: dict[HeldAs, Any], there: dict[HeldAs, Any],
        host: HostSide = NOBODY,
    ):  # fmt: skip
        self._program, self.here, self.there, self._host = program, here, there, host
        self._files: Any = None

    def run(
        self, section: Section, beside: Iterable[StreamSlot | None] = (), files: Any = None
    ) -> None:
        """Runs a section, after the slots of another run (`beside`); a `FileReader` reads its files."""
        self._files = files
        slots = itertools.chain(beside, self.slots(section.ops))
        coming = files.ahead(slots) if files else slots
        _stream.stream(coming, section.device_bytes, section.under_way)
        self._files = None

    def slots(
        self, ops: Sequence[Op], loop: Loop | None = None, number: int | None = None
    ) -> Iterator[StreamSlot | None]:
        for group in self._program.groups(ops):
            if isinstance(group, Loop):
                yield from self._loop(group)
                continue
            slot = self._program.slot(group, loop, number)
            yield StreamSlot(
                slot.nbytes,
                functools.partial(self._fetch, slot),
                functools.partial(self._update, slot),
                functools.partial(self._over, slot),
                slot.wanted if self._files else (),
                bool(slot.run and slot.run.program),
            )

    def _loop(self, loop: Loop) -> Iterator[StreamSlot | None]:
        yield from self.slots(loop.first, loop, -1)
        if loop.length is not None:
            for number in range(loop.length):
                yield from self.slots(loop.body, loop, number)
            yield from self.slots(loop.last, loop, loop.length)
            dead = self._program.dead(loop)

            def left(_: Any) -> list[Any]:
                _drop(self.here, dead.here)
                return []

            # Not now: updates of the last iterations still begin with what is on the host.
            yield StreamSlot(
                0, dict, left, functools.partial(_drop, self.there, dead.there), counts=False
            )
            return
        for number in itertools.count():
            yield None
            if not self._goes_on(loop, number):
                _drop(self.here, self._program.dead(loop).here)
                _drop(self.there, self._program.dead(loop).there)
                return
            yield from self.slots(loop.body, loop, number)

    def _goes_on(self, loop: Loop, number: int) -> bool:
        run = loop.goes_on
        assert run is not None
        assert run.call is not None
        (asked,), _ = run.call([self.here[value_of(x)] for x in run.takes], None)
        # A trace of what is started has one iteration.
        return not number if isinstance(asked, jax.core.Tracer) else bool(jax.device_get(asked))

    def _fetch(self, slot: _SlotAt) -> dict[HeldAs, Any]:
        """Starts copies to the devices; what is not on the host yet follows with the program."""
        found: dict[HeldAs, Any] = {}
        for moved in slot.fetches:
            if moved.op.ahead:
                found.update(self._fetched(moved, found))
        return found

    def _fetched(self, moved: _OpAt, known: Mapping[HeldAs, Any]) -> dict[HeldAs, Any]:
        op: Fetch = moved.op
        if op.store == NVME and self._files:
            return dict(zip(moved.keys, self._files.fetched(moved.wanted), strict=True))
        if op.by is not None:
            if moved.place is None:  # There is no such iteration.
                return {}
            stacks = [self.there[x] for x in moved.stacks]
            return dict(zip(moved.keys, op.by(stacks, moved.place), strict=True))
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

    def _update(self, slot: _SlotAt, arrays: dict[HeldAs, Any]) -> list[Any]:
        """Starts the program, and then copies to the host; returns what to wait for."""
        for moved in slot.fetches:
            op = moved.op
            if not op.ahead or (op.by is None and any(key not in arrays for key in moved.keys)):
                arrays.update(self._fetched(moved, arrays))
        self.here.update(arrays)
        done: Sequence[Any] = self._run(slot) if slot.run else self._begun(slot)
        copies = [x for m in slot.after if isinstance(m.op, Send) for x in self._send(m)]
        _drop(self.here, slot.dead)
        for moved in (*slot.fetches, *slot.transfers):
            _drop(self.there, moved.dead)
        return copies or [*done]

    def _run(self, slot: _SlotAt) -> Sequence[Any]:
        assert slot.run is not None
        assert slot.run.call is not None
        here = self.here
        arrays: list[Any] = [here[key] for key in slot.takes]
        for moved in slot.transfers:
            if isinstance(moved.op, Send):
                arrays.append([here[key] for key in moved.keys])
            arrays.append([self.there[x] for x in moved.stacks if x in self.there])
        made, done = slot.run.call(arrays, slot.place)
        sizes = [len(moved.keys) for moved in slot.transfers]
        found, *copied = split([*made], len(slot.gives), *sizes[:-1])
        for key, x in zip(slot.gives, found, strict=True):
            if key is not None and x is not None:
                here[key] = x
        for moved, new in zip(slot.transfers, copied if sizes else (), strict=True):
            if isinstance(moved.op, Fetch):
                here.update(zip(moved.keys, new, strict=True))
            else:
                self.there.update(zip(moved.stacks, new, strict=True))
        return done

    def _begun(self, slot: _SlotAt) -> Sequence[Any]:
        """Prepares updates that wait for no program; returns what must exist before a commit."""
        commits = False
        for moved in slot.after:
            if isinstance(moved.op, Update) and moved.op.bucket is None:
                self._host.prepare([self.there.get(key) for key in moved.keys])
            commits = commits or isinstance(moved.op, Commit)
        # The devices may have no room for it: then the old state is what there is.
        return [self.here[x] for x in self._program.keeps] if commits else ()

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

    def _over(self, slot: _SlotAt) -> None:
        """Has the host do what follows from what is on the host now."""
        for moved in slot.after:
            op = moved.op
            match op:
                case Update():
                    takes = [self.there.get(key) for key in moved.keys]
                    new = self._host.update(op, moved.place, takes)
                    self.there.update(new.there)
                    self.here.update(new.here)
                    _drop(self.there, moved.dead)
                case Commit():
                    self.there.update(self._host.commit())
                case Send(store=store) if store == NVME:
                    from_here = self.there if op.places else self.here
                    self._host.write(moved.wanted, [from_here.pop(key) for key in moved.keys])


def _drop(values: dict[HeldAs, Any], keys: Sequence[Any]) -> None:
    for key in keys:
        values.pop(key, None)
