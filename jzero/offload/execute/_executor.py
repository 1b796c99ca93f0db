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
    is_tracer,
    value_of,
)

# A value, or the slice of it at one place along dim 0.
HeldAs = Value | tuple[Value, int]


class AtTurn(NamedTuple):
    """A turn of a loop; -1 is before the first."""

    of: Loop
    number: int


class Keys(NamedTuple):
    """What is read of the devices, and of the stores, when a list has run."""

    here: tuple[Value, ...] = ()
    there: tuple[Value, ...] = ()


@dataclasses.dataclass(frozen=True)
class Arrivals:
    """Who is told of what has arrived on the host.

    Attributes:
      begin: `(update, place of the turn, what it takes)`: starts an update; returns leaves on the hosts that
        from now on are other arrays.
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

    def dead(self, op: Op | None) -> Dead:
        """What nobody needs after an operation."""
        return self._dead.get(id(op), NOTHING)

    def groups(self, ops: Sequence[Op]) -> list[_Group | Loop]:
        """Operations of one list, cut where programs run."""
        if id(ops) not in self._groups:
            self._groups[id(ops)] = [*_grouped(ops)]
        return self._groups[id(ops)]


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
        """Runs nothing.

        Args:
          program: the list.
          here: what it takes of the devices.
          there: what it takes of pinned memory.
          files: where values come from that are in files (`FileRun`); None if none are.
          arrivals: who is told of what is on the host.
        """
        self._program, self.here, self.there = program, here, there
        self._files, self._arrivals = files, arrivals

    def run(self, device_bytes: int, under_way: int | None = None) -> None:
        """Runs it.

        Args:
          device_bytes: of what is fetched, on each device at a time.
          under_way: as of `stream`.
        """
        visits = self._visits(self._program.ops)
        coming = self._files.ahead(visits) if self._files else visits
        _stream.stream(coming, device_bytes, under_way)

    # -- visits ----------------------------------------------------------------------------------------

    def _visits(self, ops: Sequence[Op], turn: AtTurn | None = None) -> Iterator[Visit | None]:
        for group in self._program.groups(ops):
            if isinstance(group, Loop):
                yield from self._loop(group)
                continue
            yield Visit(
                sum(op.nbytes for op in group.fetches),
                functools.partial(self._fetch, group, turn),
                functools.partial(self._update, group, turn),
                functools.partial(self._over, group, turn),
                self._wanted(group, turn),
                bool(group.run and group.run.program),
            )

    def _loop(self, loop: Loop) -> Iterator[Visit | None]:
        yield from self._visits(loop.first, AtTurn(loop, -1))
        if loop.length is not None:
            for number in range(loop.length):
                yield from self._visits(loop.body, AtTurn(loop, number))
            yield Visit(0, dict, functools.partial(self._left, loop), counts=False)
            return
        for number in itertools.count():
            yield None
            if not self._goes_on(loop, number):
                self._left(loop, {})
                return
            yield from self._visits(loop.body, AtTurn(loop, number))

    def _left(self, loop: Loop, _: dict[HeldAs, Any]) -> list[Any]:
        dead = self._program.dead(loop)
        self._drop(self.here, dead.here, None)
        self._drop(self.there, dead.there, None)
        return []

    def _goes_on(self, loop: Loop, number: int) -> bool:
        run = loop.goes_on
        assert run is not None
        assert run.call is not None
        (asked,), _ = run.call([self.here[_whole(x)] for x in run.takes], None)
        # A trace of what is started has one turn.
        return not number if is_tracer(asked) else bool(jax.device_get(asked))

    def _wanted(self, group: _Group, turn: AtTurn | None) -> Sequence[Wanted]:
        """What is read of files for a visit, ahead of it."""
        fetches = [op for op in group.fetches if op.store == NVME and op.ahead]
        return [x for op in fetches for x in _wanted(op, turn)] if self._files else []

    # -- what a visit does -----------------------------------------------------------------------------

    def _fetch(self, group: _Group, turn: AtTurn | None) -> dict[HeldAs, Any]:
        """Starts copies to the devices; what is not there yet, or comes late, follows with the program."""
        found: dict[HeldAs, Any] = {}
        for op in group.fetches:
            if op.ahead:
                found |= self._fetched(op, turn, found)
        return found

    def _fetched(
        self, op: Fetch, turn: AtTurn | None, known: Mapping[HeldAs, Any]
    ) -> dict[HeldAs, Any]:
        keys = [key for ref in op.refs if (key := _key(ref, turn)) is not None and key not in known]
        if op.store == NVME and self._files:
            return dict(zip(keys, self._files.fetched(_wanted(op, turn)), strict=True))
        if op.by is not None:
            if not keys:
                return {}
            sources = [self.there[value_of(ref)] for ref in op.refs]
            copies = op.by(sources, _place(op.refs[0], turn))
            found = dict(zip(keys, copies, strict=True))
        else:
            pairs = zip(op.refs, op.places, strict=True)
            there = [(key, place) for ref, place in pairs if (key := _key(ref, turn)) in self.there]
            there = [(key, place) for key, place in there if key not in known]
            arrays = [self.there[key] for key, _ in there]
            copies = jax.device_put(arrays, [place for _, place in there]) if there else []
            found = {key: x for (key, _), x in zip(there, copies, strict=True)}
        for value in op.frees:  # Freed when it is copied: the host holds no second state.
            free(self.there.pop(value))
        return found

    def _update(self, group: _Group, turn: AtTurn | None, arrays: dict[HeldAs, Any]) -> list[Any]:
        """Starts the program, and then copies to the host; what is to be waited for."""
        for op in group.fetches:
            late = not op.ahead or any(_key(ref, turn) not in arrays for ref in op.refs)
            if late and not (op.by or (op.store == NVME and op.ahead)):
                arrays |= self._fetched(op, turn, arrays)
        self.here |= arrays
        done: Sequence[Any] = ()
        if (run := group.run) is not None:
            done = self._run(run, turn)
        copies = [x for op in group.after if isinstance(op, Send) for x in self._send(op, turn)]
        for each in (*group.fetches, run, *group.after):
            self._drop(self.here, self._program.dead(each).here, turn)
        for op in group.fetches:
            self._drop(self.there, self._program.dead(op).there, turn)
        return copies or [*done]

    def _run(self, run: Run, turn: AtTurn | None) -> Sequence[Any]:
        assert run.call is not None
        keys = [_key(ref, turn) for ref in run.takes]
        arrays = [self.here[key] for key in keys if key is not None]
        made, done = run.call(arrays, None if turn is None else turn.number)
        self.here.update(
            (key, x) for ref, x in zip(run.gives, made, strict=True)
            if (key := _key(ref, turn)) is not None and x is not None
        )  # fmt: skip
        return done

    def _send(self, op: Send, turn: AtTurn | None) -> Sequence[Any]:
        keys = [key for ref in op.refs if (key := _key(ref, turn)) is not None]
        arrays = [self.here[key] for key in keys]
        if op.by is not None:
            stacks = [value_of(ref) for ref in op.refs]
            olds = [self.there[x] for x in stacks] if stacks[0] in self.there else None
            new, done = op.by(olds, arrays, _place(op.refs[0], turn))
            self.there.update(zip(stacks, new, strict=True))
            return done
        if not op.places:  # They go into files piece by piece.
            return ()
        copies = jax.device_put(arrays, [*op.places])
        self.there.update(zip(keys, copies, strict=True))
        return list(copies)

    def _over(self, group: _Group, turn: AtTurn | None) -> None:
        """Tells of what is on the host now."""
        begin, write = self._arrivals.begin, self._arrivals.write
        for op in group.after:
            if isinstance(op, Send) and op.store == NVME and write is not None:
                from_here = self.there if op.places else self.here
                arrays = [from_here.pop(_known(_key(ref, turn))) for ref in op.refs]
                write([Wanted(value_of(ref), _place(ref, turn)) for ref in op.refs], arrays)
            elif isinstance(op, Update):
                takes = [self.there[_known(_key(ref, turn))] for ref in op.takes]
                if begin is not None:
                    self.there.update(begin(op, _place_of(turn), takes))
                self._drop(self.there, self._program.dead(op).there, turn)

    def _drop(self, values: dict[HeldAs, Any], refs: Sequence[Ref], turn: AtTurn | None) -> None:
        for ref in refs:
            if (key := _key(ref, turn)) is not None:
                values.pop(key, None)


def _whole(ref: Ref) -> Value:
    assert isinstance(ref, Value), "a slice is known in a turn only"
    return ref


def _key(ref: Ref, turn: AtTurn | None) -> HeldAs | None:
    """How a value is known in a turn; None for a slice of the turn after the last one."""
    if not isinstance(ref, Slice):
        return ref
    place = _place(ref, turn)
    return None if place is None else (ref.of, place)


def _known(key: HeldAs | None) -> HeldAs:
    assert key is not None, "only leaves are fetched for the turn after the last one"
    return key


def _place(ref: Ref, turn: AtTurn | None) -> Any:
    """The place of a slice along dim 0."""
    if not isinstance(ref, Slice):
        return None
    assert turn is not None, "a slice is known in a turn only"
    number = turn.number + ref.ahead
    return turn.of.order[number] if number < len(turn.of.order) else None


def _place_of(turn: AtTurn | None) -> int | None:
    return None if turn is None else turn.of.order[turn.number]


def _wanted(op: Fetch, turn: AtTurn | None) -> list[Wanted]:
    """What of values is read from files: them, or one slice of each."""
    refs = [ref for ref in op.refs if _key(ref, turn) is not None]
    return [Wanted(value_of(ref), _place(ref, turn)) for ref in refs]
