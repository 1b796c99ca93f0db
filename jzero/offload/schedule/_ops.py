# SPDX-License-Identifier: Apache-2.0
"""A step that moves values between memories, as a list of operations: data that is printed and folded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any


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


@dataclasses.dataclass(frozen=True, eq=False)
class Fetch:
    """A value is copied from a store to the devices.

    Attributes:
      value: all of it.
      store: 'pinned_host' or 'nvme'.
      sliced: each turn of the loop around has its own slice.
    """

    value: Value
    store: str
    sliced: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """A program of the devices.

    Attributes:
      program: what it computes.
      takes: what others have made for it; leaves and arguments are left out.
      gives: what it makes for others.
    """

    program: str
    takes: tuple[Value, ...] = ()
    gives: tuple[Value, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Send:
    """A value is copied from the devices to a store.

    Attributes:
      value: all of it.
      store: 'pinned_host' or 'nvme'.
      sliced: each turn of the loop around has its own slice.
      copies: how many of it are there at a time: 2 where an update is delayed, 0 if its place is that of a
        leaf at rest.
    """

    value: Value
    store: str
    sliced: bool = False
    copies: int = 1


@dataclasses.dataclass(frozen=True, eq=False)
class Wait:
    """A value waits on the host from the forward to the backward pass: it is sent, and fetched.

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
    """The hosts' processors renew leaves where these rest.

    Attributes:
      store: 'host' or 'nvme'.
      leaves: what rests there and is renewed; what is in files is read, and written.
      takes: what it reads besides.
      gives: what it makes for the devices, in pinned memory.
      copies: how many of these are there at a time.
      sliced: each turn of the loop around has its own slice.
      delayed: it reads what the step before has sent.
    """

    store: str
    leaves: tuple[Value, ...]
    takes: tuple[Value, ...]
    gives: tuple[Value, ...] = ()
    copies: int = 1
    sliced: bool = False
    delayed: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Commit:
    """What was written to files counts from now on."""

    store: str


@dataclasses.dataclass(frozen=True, eq=False)
class Loop:
    """Operations that run again.

    Attributes:
      body: of each turn.
      length: how many turns it has; None for a `while`, of which nobody knows.
      where: its line; '' if it is jzero's own, over microbatches or slices.
      takes: what others have made for it.
      gives: what it leaves behind for others.
    """

    body: tuple[Op, ...]
    length: int | None
    where: str
    takes: tuple[Value, ...] = ()
    gives: tuple[Value, ...] = ()


Op = Fetch | Run | Send | Wait | Update | Commit | Loop


def flat(
    ops: tuple[Op, ...], around: tuple[Loop, ...] = ()
) -> Iterator[tuple[Op, tuple[Loop, ...]]]:
    """Every operation but loops, with the loops around it, the outermost first."""
    for op in ops:
        if isinstance(op, Loop):
            yield from flat(op.body, (*around, op))
        else:
            yield op, around
