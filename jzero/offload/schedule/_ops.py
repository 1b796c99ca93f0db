# SPDX-License-Identifier: Apache-2.0
"""A step that moves values between memories, as a list of operations: data that is run, printed and folded.

A value is known by its `Value`, which is a name; two values of one type are two. `Slice(value)` is the slice
of a stack that belongs to an iteration of the loop around. A value may be on the devices and, by the same
name, in a store: `Fetch` and `Send` copy it between them, and programs take and make what is on the devices.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.sharding import NamedSharding

HANDED_ON = "value"  # what parts of a step hand to each other, on the devices
# `(arrays, place) -> (results, what to wait for)`; the place of an iteration in stacks, None outside of
# loops.
DeviceCall = Callable[[Sequence[Any], int | None], tuple[Sequence[Any], Sequence[Any]]]


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """One device's part of a leaf, a gradient, or whatever programs hand to each other.

    Attributes:
      what: 'parameter', 'optimizer state', 'gradient', 'scalar', 'activation', 'output', ...
      dtype: of its elements.
      elements: padding included.
      nbytes: of these.
    """

    what: str
    dtype: str
    elements: int
    nbytes: int

    @classmethod
    def of(cls, what: str, shard: Any) -> Value:
        """A value of one device's shape and dtype."""
        num = math.prod(shard.shape)
        return cls(what, str(shard.dtype), num, num * shard.dtype.itemsize)

    @classmethod
    def of_gradient(cls, shard: Any) -> Value:
        """What is computed of the batch for an update: a gradient, or a number, as the scale of a clip."""
        return cls.of("gradient" if shard.shape else "scalar", shard)

    @classmethod
    def of_leaf(cls, leaf: Any) -> Value:
        """A leaf of the state, as planned (`LeafPlan`)."""
        nbytes = leaf.nbytes_per_device
        return cls(leaf.role, leaf.dtype, nbytes // leaf.itemsize, nbytes)


class Slice(NamedTuple):
    """A slice of a stack.

    Attributes:
      of: the stack.
      ahead: whose: of this iteration (0), of one after it (1, 2), or of the one before it (-1).
    """

    of: Value
    ahead: int = 0


Ref = Value | Slice


class Wanted(NamedTuple):
    """What is read of a value in a store: one slice along dim 0, or all of it (None)."""

    value: Value
    at: int | None


def value_of(ref: Ref | Wanted) -> Value:
    """The value of which it is all, or a slice."""
    match ref:
        case Slice(of):
            return of
        case Wanted(value):
            return value
    return ref


@dataclasses.dataclass(frozen=True, eq=False)
class Fetch:
    """Values are copied from a store to the devices.

    Attributes:
      refs: them.
      store: 'pinned_host' or 'nvme'.
      places: where each goes.
      by: `(the values in the store, iteration) -> copies`, if a program makes these, as of slices of stacks;
        else they are copied as they are.
      nbytes: what is on each device for them until the program behind is over: as they come, and gathered.
      frees: those that nobody fetches after it, and that are given back to the host.
      ahead: whether it begins while the program before still runs.
    """

    refs: tuple[Ref, ...]
    store: str
    places: tuple[NamedSharding, ...] = ()
    by: Callable[[Sequence[Any], int], Sequence[Any]] | None = None
    nbytes: int = 0
    frees: frozenset[Value] = frozenset()
    ahead: bool = True


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """A program of the devices.

    Attributes:
      program: what it computes; '' if it gives values other names, and computes little or nothing.
      takes: what it takes.
      gives: what it makes.
      call: the program.
      index: of the part of the step that it is, or in which it is; None if it is in none.
      rides: slices that the program itself copies from pinned memory, and to it, beside what it computes.
        Behind what it takes it is given for each of these a list of stacks there, and for a `Send` a list of
        slices before that; empty for an iteration that is not there, and for stacks that are not there yet.
        Behind what it makes it makes the slices, or the stacks, of iterations that are there.
    """

    program: str
    takes: tuple[Ref, ...] = ()
    gives: tuple[Ref, ...] = ()
    call: DeviceCall | None = None
    index: int | None = None
    rides: tuple[Fetch | Send, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Send:
    """Values are copied from the devices to a store.

    Attributes:
      refs: them.
      store: 'pinned_host' or 'nvme'.
      places: where each goes.
      by: `(the stacks in the store or None, slices, iteration) -> (stacks, what to wait for)`, if a program
        writes slices into stacks; else they are copied as they are, slices one by one.
      copies: how many of them are there at a time: 2 where an update is delayed, 0 if their place is that of
        stored leaves.
      waits: they wait there until the devices fetch them again.
    """

    refs: tuple[Ref, ...]
    store: str
    places: tuple[NamedSharding, ...] = ()
    by: Callable[[Any, Sequence[Any], int], tuple[Sequence[Any], Sequence[Any]]] | None = None
    copies: int = 1
    waits: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Wait:
    """A value waits on the host from the forward to the backward pass, within a program or beside it.

    Attributes:
      value: on each device.
      times: how often in a step.
      copies: how many of it are on the host at a time.
    """

    value: Value
    times: int
    copies: int = 1


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """The hosts' processors renew leaves where these are stored.

    Attributes:
      store: 'host' or 'nvme'.
      leaves: what is stored there and is renewed; what is in files is read, and written.
      takes: what it reads besides.
      gives: what it makes for the devices, in pinned memory.
      copies: how many of these are there at a time.
      delayed: it reads what the step before has sent.
      bucket: what it updates, of one that begins while layers compute, and returns before it is over.
      rides: what it copies to the devices itself, of what it makes, as soon as it is there.
    """

    store: str
    leaves: tuple[Ref, ...]
    takes: tuple[Ref, ...]
    gives: tuple[Value, ...] = ()
    copies: int = 1
    delayed: bool = False
    bucket: Any = None
    rides: tuple[Fetch, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Commit:
    """What was written to files counts from now on."""

    store: str


@dataclasses.dataclass(frozen=True, eq=False)
class Loop:
    """Operations that run again.

    Attributes:
      body: of each iteration.
      length: how many iterations it has; None for a `while`, of which nobody knows.
      where: its line; '' if it is jzero's own, over microbatches or slices.
      takes: what others have made for it.
      gives: what it leaves behind for others.
      first: operations before the first iteration, for which that is the iteration ahead.
      last: operations after the last iteration, for which that is the iteration before.
      reverse: whether the last slices are those of the first iteration.
      goes_on: of a `while`, a program that says whether it has another iteration.
    """

    body: tuple[Op, ...]
    length: int | None
    where: str
    takes: tuple[Value, ...] = ()
    gives: tuple[Value, ...] = ()
    first: tuple[Op, ...] = ()
    last: tuple[Op, ...] = ()
    reverse: bool = False
    goes_on: Run | None = None

    @functools.cached_property
    def order(self) -> range:
        """The slice of each iteration."""
        assert self.length is not None, "a while loop has no slices"
        return range(self.length)[:: -1 if self.reverse else 1]


Op = Fetch | Run | Send | Wait | Update | Commit | Loop


def with_riders(ops: Sequence[Op]) -> Iterator[Op]:
    """The operations, and behind each those that ride in it: their copies are there then."""
    for op in ops:
        yield op
        if isinstance(op, Run | Update):
            yield from op.rides


def flat(ops: Sequence[Op], around: tuple[Loop, ...] = ()) -> Iterator[tuple[Op, tuple[Loop, ...]]]:
    """Every operation of an iteration but loops, with the loops around it, the outermost first."""
    for op in with_riders(ops):
        if isinstance(op, Loop):
            yield from flat(op.body, (*around, op))
        else:
            yield op, around


def of_list(program: Callable[[list[Any]], Sequence[Any]]) -> DeviceCall:
    """A program of a list, the same in every iteration, for which nobody waits."""
    return lambda arrays, _: (program([*arrays]), ())
