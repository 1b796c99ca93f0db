# SPDX-License-Identifier: Apache-2.0
"""A step that moves values between memories, as a list of operations: data that is run, printed and folded.

Each `Value` is one value: the list names values by identity. `Slice(value)` is the slice of a stacked value
that belongs to the current iteration of the loop around. One value may be on the devices and in a store:
`Fetch` and `Send` copy between the two, and programs read and write the devices' copy.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.sharding import NamedSharding

HANDED_ON = "value"  # what one program leaves on the devices for another
# `(arrays, place) -> (results, what to wait for)`; `place` is an iteration's index in stacks, None outside
# loops.
DeviceCall = Callable[[Sequence[Any], int | None], tuple[Sequence[Any], Sequence[Any]]]


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """One device's part of a leaf, of a gradient, or of what one program leaves for another."""

    what: str  # 'parameter', 'optimizer state', 'gradient', 'scalar', 'activation', 'output', ...
    dtype: str
    elements: int  # padding included
    nbytes: int

    @classmethod
    def of(cls, what: str, shard: Any) -> Value:
        num = math.prod(shard.shape)
        return cls(what, str(shard.dtype), num, num * shard.dtype.itemsize)

    @classmethod
    def of_gradient(cls, shard: Any) -> Value:
        """An input of the update from the forward-backward program: a gradient, or a clip's scale."""
        return cls.of("gradient" if shard.shape else "scalar", shard)

    @classmethod
    def of_leaf(cls, leaf: Any) -> Value:
        nbytes = leaf.nbytes_per_device
        return cls(leaf.role, leaf.dtype, nbytes // leaf.itemsize, nbytes)


class Slice(NamedTuple):
    of: Value  # the stack
    ahead: int = 0  # of how many iterations later it is; -1 for the iteration before


Ref = Value | Slice


class Wanted(NamedTuple):
    value: Value
    at: int | None  # a slice along dim 0; None for the whole value


def value_of(ref: Ref | Wanted) -> Value:
    match ref:
        case Slice(of):
            return of
        case Wanted(value):
            return value
    return ref


@dataclasses.dataclass(frozen=True, eq=False)
class Fetch:
    refs: tuple[Ref, ...]
    store: str  # 'pinned_host' or 'nvme'
    places: tuple[NamedSharding, ...] = ()
    # `(stacks in the store, iteration) -> copies`, if a program makes them; else they are copied as they
    # are.
    by: Callable[[Sequence[Any], int], Sequence[Any]] | None = None
    nbytes: int = 0  # on each device until the next program ends, as fetched and as gathered
    frees: frozenset[Value] = frozenset()  # freed on the host once copied
    ahead: bool = True  # whether it may start while the program before runs


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """A program of the devices.

    `transfers` are copies that the program itself issues, for other iterations, beside what it computes. Its
    arguments are then `takes` and, for each of these, (of a `Send`) the list of slices to write and the list
    of stacks in pinned memory; lists are empty for an iteration that does not exist, or stacks that do not
    exist yet. Its results are `gives` and then, for each, the fetched slices or the written stacks.
    """

    program: str  # '' for one that renames values or computes next to nothing
    takes: tuple[Ref, ...] = ()
    gives: tuple[Ref, ...] = ()
    call: DeviceCall | None = None
    transfers: tuple[Fetch | Send, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Send:
    refs: tuple[Ref, ...]
    store: str  # 'pinned_host' or 'nvme'
    places: tuple[NamedSharding, ...] = ()
    # `(stacks in the store or None, slices, iteration) -> (stacks, what to wait for)`, if a program writes
    # slices into stacks; else they are copied as they are, slices one by one.
    by: Callable[[Any, Sequence[Any], int], tuple[Sequence[Any], Sequence[Any]]] | None = None
    copies: int = 1  # at a time: 2 if the update is delayed, 0 if they replace stored leaves
    waits: bool = False  # whether the devices fetch them again in this step


@dataclasses.dataclass(frozen=True, eq=False)
class Wait:
    """An activation that stays on the host from the forward to the backward pass."""

    value: Value
    times: int  # in a step
    copies: int = 1  # at a time


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """The hosts' processors update leaves where these are stored."""

    store: str  # 'host' or 'nvme'
    leaves: tuple[Ref, ...]  # stored there, and updated in place
    takes: tuple[Ref, ...]  # read besides
    gives: tuple[Value, ...] = ()  # made for the devices, in pinned memory
    copies: int = 1  # of `gives` at a time
    delayed: bool = False  # whether it reads the last step's gradients
    # An `EarlyBucket` if it starts while layers compute, and returns before it is done.
    bucket: Any = None
    transfers: tuple[Fetch, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Commit:
    """Makes what was written to files the current version."""

    store: str


@dataclasses.dataclass(frozen=True, eq=False)
class Loop:
    body: tuple[Op, ...]
    length: int | None  # None for a `while`
    where: str  # the user's line; '' for jzero's own loops over microbatches or slices
    takes: tuple[Value, ...] = ()  # made before it
    gives: tuple[Value, ...] = ()  # read after it
    first: tuple[Op, ...] = ()  # before the first iteration, as if of iteration -1
    last: tuple[Op, ...] = ()  # after the last iteration, as if of one more
    reverse: bool = False  # whether the first iteration has the last slices
    goes_on: Run | None = None  # of a `while`: whether there is another iteration

    @functools.cached_property
    def order(self) -> range:
        assert self.length is not None, "a while loop has no slices"
        return range(self.length)[:: -1 if self.reverse else 1]


Op = Fetch | Run | Send | Wait | Update | Commit | Loop


def with_transfers(ops: Sequence[Op]) -> Iterator[Op]:
    """The operations, each followed by the transfers inside it, whose results exist from there on."""
    for op in ops:
        yield op
        if isinstance(op, Run | Update):
            yield from op.transfers


def flat(ops: Sequence[Op], around: tuple[Loop, ...] = ()) -> Iterator[tuple[Op, tuple[Loop, ...]]]:
    """Every operation of one iteration, loops opened, and the loops around it, the outermost first."""
    for op in with_transfers(ops):
        if isinstance(op, Loop):
            yield from flat(op.body, (*around, op))
        else:
            yield op, around


def of_list(program: Callable[[list[Any]], Sequence[Any]]) -> DeviceCall:
    """A program of a list of arrays, the same in every iteration; nothing waits for it."""
    return lambda arrays, _: (program([*arrays]), ())
