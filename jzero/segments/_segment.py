# SPDX-License-Identifier: Apache-2.0
"""A segment: some of a step's equations as one program, with typed inputs and outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
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
    """A program that runs some of a step's equations; its values are known by their variables.

    Attributes:
      consumes: what it takes and renews, and nobody reads after it; donated.
      reads: what else it takes.
      gives: what it makes for later segments.
      outs: which outputs of the step it makes, by index.
      types: the layout of each value that it takes or gives.
      mesh: on which it runs.
      run: the program, as a function.
      jitted: the same, compiled.
      out_specs: the layouts of what it gives and of its outputs, as JAX spells them.
    """

    consumes: tuple[Var, ...]
    reads: tuple[Var, ...]
    gives: tuple[Var, ...]
    outs: tuple[int, ...]
    types: Mapping[Var, ValuePlan]
    mesh: Mesh
    run: SegmentFn
    jitted: SegmentFn
    out_specs: tuple[list[P], list[P]]

    @property
    def takes(self) -> tuple[Var, ...]:
        return (*self.consumes, *self.reads)

    def __call__(self, values: Values, run: SegmentFn) -> dict[int, jax.Array]:
        """Calls `run` on `values` and adds what it gives to them; returns outputs by index."""
        given, outs = run(*self.taken(values))
        values.update(zip(self.gives, given, strict=True))
        return dict(zip(self.outs, outs, strict=True))

    def taken(self, values: Mapping[Var, Taken]) -> tuple[list[Taken], list[Taken]]:
        """What it takes of these values: to consume, and to read."""
        return [values[var] for var in self.consumes], [values[var] for var in self.reads]

    def avals(self) -> tuple[list[jax.ShapeDtypeStruct], list[jax.ShapeDtypeStruct]]:
        """Of what it takes, whole and padded."""
        return self.taken({var: self.types[var].aval(self.mesh) for var in self.takes})


def shard_of(aval: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.sharding.shard_shape(aval.shape), aval.dtype)


class Compiled:
    """The compiled programs of segments; one serves all that are equal, as those of equal layers are."""

    def __init__(self, share: bool):
        self._share = share
        self._shared: dict[tuple[str | None, tuple[int, ...]], SegmentFn] = {}
        self._of: dict[tuple[tuple[int, ...], tuple[Var, ...]], SegmentFn] = {}

    def of(self, segment: Segment, values: Values) -> SegmentFn:
        """The program of a segment that will take these values."""
        if (key := (segment.outs, segment.gives)) not in self._of:
            text = _rewrite.whole_text(jax.make_jaxpr(segment.run)(*segment.taken(values)))
            shared = self._share and text is not None
            # The text does not say how arguments and results are grouped.
            nums = tuple(map(len, (segment.consumes, segment.reads, segment.gives, segment.outs)))
            equal, own = (text, nums), segment.jitted
            self._of[key] = self._shared.setdefault(equal, own) if shared else own
        return self._of[key]

    @property
    def num(self) -> int:
        """How many different ones there are."""
        return len(set(self._of.values()))
