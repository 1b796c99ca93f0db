# SPDX-License-Identifier: Apache-2.0
"""Residuals: what a forward pass keeps for its backward pass, and which of it may wait on the host.

Two kinds, told apart by who reads them:

* a *stack* is what a forward loop hands out turn by turn and only backward loops slice: it is never on
  the device as a whole;
* a *value* is made outside of loops (of an unrolled layer) and read by both passes: the forward pass
  reads the device's copy, the backward pass fetches the host's.

Where parts of a step are programs of their own, a residual goes and comes between them: it is *marked*.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jzero.sharding.analysis import _rules
from jzero.sharding.analysis._frames import Frame, split, variables
from jzero.sharding.analysis._products import products
from jzero.sharding.analysis._traffic import Crossing
from jzero.tracing import _jaxpr
from jzero.tracing._types import Eqn, Jaxpr, Var

# A copy of 1 MiB takes 20 us at 55 GB/s, about twice what it takes to start one.
LEAST_BYTES = 2**20
# Bytes of values between device and host, besides one: some 2 ms at 55 GB/s, several products' time.
ON_THEIR_WAY = 2**27
_WAITS = "jzero.waits_on_host"


class Residual(NamedTuple):
    """A residual that waits on the host.

    Attributes:
      shape: of it, on one device.
      dtype: of its elements.
      nbytes: of it, on the host of each device.
      where: the line that made it.
      turns: of the loop that made it, each of which moves its slice; 1 for a value.
      times: how often one is made in a step (or microbatch): the turns of loops around both passes.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    where: str
    turns: int
    times: int

    def __str__(self) -> str:
        moves = f", in {self.turns} turns" if self.turns > 1 else ""
        times = f", {self.times} times" if self.times > 1 else ""
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]{moves}{times}, at {self.where}"


Readers = list[Eqn | None]  # of a variable; None stands for what calls the jaxpr


def note_residuals(frame: Frame, kept: Collection[Var] = (), times: int = 1) -> Iterator[Residual]:
    """Notes in each frame's `on_host` what waits on the host, and in how many parts, and tells it.

    Not what loops over microbatches have `kept` for later ones, and nothing whose slices (values) have less
    than `LEAST_BYTES`.
    """
    readers, last = _readers(frame.jaxpr), _last_product(frame)
    for index, eqn in enumerate(frame.jaxpr.eqns):
        if frame.pass_of(eqn) is None:  # What is part of one pass keeps nothing for another inside.
            turns = _jaxpr.scan_parts(eqn).length if eqn.primitive.name == "scan" else 1
            for child in frame.children.get(index, ()):
                yield from note_residuals(child, (), times * turns)
        if frame.pass_of(eqn) != "forward":
            continue
        for place, out in enumerate(eqn.outvars):
            turns = _turns(frame, index, place, readers.get(out, []))
            if (
                turns
                and (turns > 1 or index < last)
                and out not in kept
                and _fits(frame, out, turns)
            ):
                frame.on_host[out] = turns
                aval, where = out.aval, _jaxpr.summary(eqn)
                nbytes = _rules.size_in_bytes(aval)
                yield Residual(tuple(aval.shape), str(aval.dtype), nbytes, where, turns, times)


def crossings(residuals: Sequence[Residual], microbatches: int) -> Iterator[Crossing]:
    """What each device and its host copy to each other for them in a step."""
    for direction in ("to host", "to device"):
        for r in residuals:
            times = r.times * microbatches
            num, nbytes = times * math.prod(r.shape), times * r.nbytes
            yield Crossing(direction, "activation", r.dtype, num, nbytes)


def marked(x: jax.Array) -> jax.Array:
    """`x`, as what a later program is to read: whoever runs the two moves it."""
    return _jaxpr.named(x, _WAITS)


def is_mark(eqn: Eqn) -> bool:
    """Whether `marked` made the equation."""
    return _jaxpr.is_named(eqn, _WAITS)


def marks(eqns: Iterable[Eqn]) -> set[Var]:
    """What is marked in equations: values, and the stacks of loops that mark slices."""
    found = set[Var]()
    for eqn in eqns:
        if is_mark(eqn):
            found.update(eqn.outvars)
        elif eqn.primitive.name == "scan":
            scan = _jaxpr.scan_parts(eqn)
            inner = marks(scan.body.eqns)
            pairs = [*zip(scan.body.outvars, eqn.outvars, strict=True)][scan.num_carry :]
            found |= {out for atom, out in pairs if not _jaxpr.is_literal(atom) and atom in inner}
    return found


def _readers(jaxpr: Jaxpr) -> dict[Var, Readers]:
    found: dict[Var, Readers] = {}
    for eqn in jaxpr.eqns:
        for var in variables(eqn.invars):
            found.setdefault(var, []).append(eqn)
    for var in variables(jaxpr.outvars):
        found.setdefault(var, []).append(None)
    return found


def _last_product(frame: Frame) -> int:
    """Where the forward pass multiplies last: what follows has no time to leave and come back."""
    return max((
        index for index, eqn in enumerate(frame.jaxpr.eqns)
        if frame.pass_of(eqn) == "forward"
        and (eqn.primitive.name == "pallas_call" or products(frame, index, eqn))
    ), default=-1)  # fmt: skip


def _turns(frame: Frame, index: int, place: int, readers: Readers) -> int:
    """In how many parts result `place` of an equation leaves and comes back; 0 if it stays."""
    eqn = frame.jaxpr.eqns[index]
    var = eqn.outvars[place]
    late = [r for r in readers if r is not None and frame.pass_of(r) == "backward"]
    if None in readers or not late:
        return 0
    if not any(_slices(reader, var) for reader in late):
        return 1
    if len(late) < len(readers) or not all(_slices(reader, var) for reader in late):
        return 0
    return _jaxpr.scan_parts(eqn).length if _makes_stack(eqn, place) else 0


def _makes_stack(eqn: Eqn, place: int) -> bool:
    """Whether result `place` is what the turns of a loop make, and not slices of stacks that are there."""
    if eqn.primitive.name != "scan":
        return False
    parts = _jaxpr.scan_parts(eqn)
    made = parts.body.outvars[place]
    _, _, slices = split(parts.body.invars, parts.num_consts, parts.num_carry)
    return place >= parts.num_carry and not _jaxpr.is_literal(made) and made not in slices


def _slices(eqn: Eqn, var: Var) -> bool:
    """Whether the equation is a loop that reads `var` slice by slice, and in no other way."""
    if eqn.primitive.name != "scan":
        return False
    parts = _jaxpr.scan_parts(eqn)
    sliced = parts.num_consts + parts.num_carry
    return all(place >= sliced for place, atom in enumerate(eqn.invars) if atom is var)


def _fits(frame: Frame, var: Var, turns: int) -> bool:
    """Whether it is an array of the batch's rows, on the device, and what moves at once is large."""
    aval = var.aval
    is_array = jnp.issubdtype(aval.dtype, jnp.number) or aval.dtype == jnp.bool_
    large = _rules.size_in_bytes(aval) >= turns * LEAST_BYTES
    return bool(frame.varies(var)) and is_array and large and not _jaxpr.is_on_host(aval)
