# SPDX-License-Identifier: Apache-2.0
"""Residuals: values that a forward pass saves for its backward pass, and which of them are offloaded.

* A *stack* is returned by a forward loop slice by slice, and only sliced by backward loops: it is never on
the device
  as a whole.
* A *value* is computed outside loops (in an unrolled layer), and read by both passes: the forward pass reads
the
  device's copy, the backward pass fetches the host's.

If the parts of a step are several programs, a residual is transferred between them, and is *marked* for that.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jzero.ir import _rules
from jzero.ir._dataflow import forward
from jzero.ir._products import products
from jzero.ir._regions import Region, ValueIn, edges, region_of, trip_count
from jzero.tracing import _jaxpr, _lines
from jzero.tracing._types import Eqn, Var

# A copy of 1 MiB takes 20 us at 55 GB/s, about twice as long as starting it.
LEAST_BYTES = 2**20
# Bytes of values in transfer at once, not counting the last: some 2 ms at 55 GB/s, as long as several
# products.
ON_THEIR_WAY = 2**27
AnyRegion = TypeVar("AnyRegion", bound=Region)
_WAITS = "jzero.waits_on_host"


class Residual(NamedTuple):
    """A residual that is offloaded; shape and bytes are one device's."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    where: str  # The line that computes it.
    iterations: int  # Of the loop that computes it, each of which transfers a slice; 1 for a value.
    times: int  # In a step, or microbatch: the iterations of loops around both passes.

    def __str__(self) -> str:
        moves = f", in {self.iterations} iterations" if self.iterations > 1 else ""
        times = f", {self.times} times" if self.times > 1 else ""
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]{moves}{times}, at {self.where}"


Residuals = Mapping[ValueIn, Residual]


def residuals(
    program: AnyRegion, varies: Callable[[AnyRegion, Var], object], times: int = 1
) -> dict[ValueIn, Residual]:  # fmt: skip
    """The offloaded residuals: batch-sharded ones (`varies`) whose transfers have at least `LEAST_BYTES`."""
    found, last = dict[ValueIn, Residual](), _last_product(program)
    for index, eqn in enumerate(program.jaxpr.eqns):
        if program.pass_of(eqn) is None:  # An equation of one pass has no residuals inside.
            num = trip_count(eqn)
            for child in program.inner(eqn):
                found |= residuals(child, varies, times if num is None else times * num)
        if program.pass_of(eqn) != "forward":
            continue
        for out in eqn.outvars:
            parts = _parts(program, eqn, out)
            if parts and (parts > 1 or index < last) and _fits(out, parts) and varies(program, out):
                aval, where = out.aval, _lines.summary(eqn)
                nbytes = _rules.size_in_bytes(aval)
                shape, dtype = tuple(aval.shape), str(aval.dtype)
                found[program, out] = Residual(shape, dtype, nbytes, where, parts, times)
    return found


def marked(x: jax.Array) -> jax.Array:
    """`x`, marked as a residual for a later program; the schedule transfers it between the two."""
    return _jaxpr.named(x, _WAITS)


def marks(eqns: Iterable[Eqn]) -> set[Var]:
    """The marked values, and the stacks of loops that mark slices."""
    program = region_of(eqns)
    found = forward(
        program, {}, lambda _, eqn, ins: [_jaxpr.is_named(eqn, _WAITS)] * len(eqn.outvars), operator.or_,
        False, lambda _, edge, marked: marked and edge.shift == 1,
    )  # fmt: skip
    return {_jaxpr.variable(atom) for region, atom in found if region is program}


def _last_product(program: Region) -> int:
    """The index of the forward pass's last product: there is no time to transfer later residuals."""
    return max((
        index for index, eqn in enumerate(program.jaxpr.eqns)
        if program.pass_of(eqn) == "forward"
        and (eqn.primitive.name == "pallas_call" or products(program, eqn))
    ), default=-1)  # fmt: skip


def _parts(program: Region, eqn: Eqn, var: Var) -> int:
    """The number of transfers of a result; 0 if it is no residual, or stays on the device."""
    eqns, readers = program.jaxpr.eqns, program.readers.get(var, [])
    late = [i for i in readers if i < len(eqns) and program.pass_of(eqns[i]) == "backward"]
    if len(eqns) in readers or not late:
        return 0
    sliced = [_slices(program, eqns[i], var) for i in late]
    if not any(sliced):
        return 1
    if len(late) < len(readers) or not all(sliced):
        return 0
    return (trip_count(eqn) or 0) if _makes_stack(program, eqn, var) else 0


def _makes_stack(program: Region, eqn: Eqn, var: Var) -> bool:
    """Whether a loop's iterations compute the slices of a stack, instead of copying slices of another."""
    over = edges(program, eqn)
    slices = {edge.target[1] for edge in over if edge.shift == -1}
    made = [edge.source[1] for edge in over if edge.shift == 1 and edge.target[1] is var]
    return any(not _jaxpr.is_literal(atom) and atom not in slices for atom in made)


def _slices(program: Region, eqn: Eqn, var: Var) -> bool:
    """Whether the equation is a loop that reads `var` only slice by slice."""
    return {edge.shift for edge in edges(program, eqn) if edge.source[1] is var} == {-1}


def _fits(var: Var, parts: int) -> bool:
    """Whether it is a numeric array on the device, and large enough for `parts` transfers."""
    aval = var.aval
    is_array = jnp.issubdtype(aval.dtype, jnp.number) or aval.dtype == jnp.bool_
    large = _rules.size_in_bytes(aval) >= parts * LEAST_BYTES
    return is_array and large and not _jaxpr.is_on_host(aval)
