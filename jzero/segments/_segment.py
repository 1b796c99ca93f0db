"""A segment: some of a step's equations as one program, with typed inputs and outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from jzero.sharding.analysis import _traffic
from jzero.sharding.analysis._traffic import Collective
from jzero.sharding.plan._boundary import ValuePlan
from jzero.tracing import _jaxpr, _rewrite

Var = _jaxpr.Var
Values = dict[Var, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """A program that runs some of a step's equations; its values are known by their variables.

    Attributes:
      consumes: what it takes and renews, and nobody reads after it; donated.
      reads: what else it takes.
      gives: what it makes for later segments.
      outs: which outputs of the step it makes, by index.
      types: how each value that it takes or gives lies on the devices.
      mesh: on which it runs.
      run: `(consumed, read) -> (given, outputs)`, on whole arrays.
      jitted: the same, compiled.
    """

    consumes: tuple[Var, ...]
    reads: tuple[Var, ...]
    gives: tuple[Var, ...]
    outs: tuple[int, ...]
    types: Mapping[Var, ValuePlan]
    mesh: Mesh
    run: Callable[..., Any]
    jitted: Callable[..., Any]

    @property
    def takes(self) -> tuple[Var, ...]:
        """Everything that it takes."""
        return (*self.consumes, *self.reads)

    def __call__(self, values: Values, run: Callable[..., Any]) -> dict[int, Any]:
        """Calls `run` on `values` and adds what it gives to them; returns outputs by index."""
        given, outs = run(*self.taken(values))
        values.update(zip(self.gives, given, strict=True))
        return dict(zip(self.outs, outs, strict=True))

    def taken(self, values: Mapping[Var, Any]) -> list[list[Any]]:
        """What it takes of these values: to consume, and to read."""
        return [[values[var] for var in group] for group in (self.consumes, self.reads)]

    def avals(self) -> list[list[jax.ShapeDtypeStruct]]:
        """Of what it takes, whole and padded."""
        return self.taken({var: self.types[var].aval(self.mesh) for var in self.takes})

    def collectives(self) -> tuple[Collective, ...]:
        """What it moves between the devices: nothing, if it could run where there are no others."""
        return tuple(_traffic.collectives(jax.make_jaxpr(self.run)(*self.avals())))


class Compiled:
    """The compiled programs of segments; one serves all that are equal, as those of equal layers are."""

    def __init__(self, share: bool):
        self._share = share
        self._shared: dict[Any, Callable[..., Any]] = {}
        self._of: dict[Any, Callable[..., Any]] = {}

    def of(self, segment: Segment, values: Mapping[Var, Any]) -> Callable[..., Any]:
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
