# SPDX-License-Identifier: Apache-2.0
"""A segment: some of a step's equations as one program, with typed inputs and outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jzero.sharding.plan._interface import ValuePlan
from jzero.tracing import _jaxpr, _rewrite

Arrays = list[jax.Array]
Var = _jaxpr.Var
Values = dict[Var, jax.Array]
# `(consumed, read) -> (given, outputs)`, on whole arrays.
SegmentFn = Callable[[Arrays, Arrays], tuple[Arrays, Arrays]]
Taken = TypeVar("Taken")


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """A program of some of a step's equations, with variables of the step as its arguments and results."""

    consumes: tuple[Var, ...]  # Arguments that are donated.
    reads: tuple[Var, ...]  # The other arguments.
    gives: tuple[Var, ...]  # Results for later segments.
    outs: tuple[int, ...]  # The step's outputs among the results, by index.
    types: Mapping[Var, ValuePlan]  # Of consumes, reads and gives.
    mesh: Mesh
    run: SegmentFn
    jitted: SegmentFn  # `jax.jit` of `run`.
    out_specs: tuple[list[P], list[P]]

    @property
    def takes(self) -> tuple[Var, ...]:
        return (*self.consumes, *self.reads)

    def __call__(self, values: Values, run: SegmentFn) -> dict[int, jax.Array]:
        """Calls `run` on `values`, to which it adds the results `gives`; returns outputs by index."""
        given, outs = run(*self.taken(values))
        values.update(zip(self.gives, given, strict=True))
        return dict(zip(self.outs, outs, strict=True))

    def taken(self, values: Mapping[Var, Taken]) -> tuple[list[Taken], list[Taken]]:
        return [values[var] for var in self.consumes], [values[var] for var in self.reads]

    def avals(self) -> tuple[list[jax.ShapeDtypeStruct], list[jax.ShapeDtypeStruct]]:
        return self.taken({var: self.types[var].aval(self.mesh) for var in self.takes})


def shard_of(aval: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.sharding.shard_shape(aval.shape), aval.dtype)


class Compiled:
    """The compiled programs of segments, shared by equal ones, such as those of equal layers."""

    def __init__(self, share: bool):
        self._share = share
        self._shared: dict[Hashable, SegmentFn] = {}
        self._of: dict[tuple[tuple[int, ...], tuple[Var, ...]], SegmentFn] = {}

    def of(self, segment: Segment, values: Values) -> SegmentFn:
        if (key := (segment.outs, segment.gives)) not in self._of:
            program = _rewrite.program_key(jax.make_jaxpr(segment.run)(*segment.taken(values)))
            # That does not tell how arguments and results are grouped.
            nums = tuple(map(len, (segment.consumes, segment.reads, segment.gives, segment.outs)))
            equal, own = (program, nums), segment.jitted
            is_shared = self._share and program is not None
            self._of[key] = self._shared.setdefault(equal, own) if is_shared else own
        return self._of[key]

    @property
    def num(self) -> int:
        return len(set(self._of.values()))
