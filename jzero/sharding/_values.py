"""What a value can be while the step runs on one device: full, a shard, or not yet reduced.

And how one becomes another: every gather, reduction and slice of the step is asked for here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp

from jzero._errors import StepError, message
from jzero.sharding import _collectives


@dataclasses.dataclass(eq=False)
class FullValue:
    """The whole value; whether it differs between devices is the frame's knowledge."""

    x: Any
    name: str = ""


@dataclasses.dataclass(eq=False)
class ShardValue:
    """This device's slice along `dim` of a value that is the same on all devices.

    `gathered` keeps the whole value for the pass (see `Devices.scope`) that asked for it. `view_of` is
    the value this one only rearranges, and how: the two share a gather. `views` are the casts and
    rearrangements already made of it, so that a step that casts twice gathers once.
    """

    x: Any
    dim: int
    name: str = ""
    view_of: tuple[ShardValue, Callable[[Any], Any]] | None = None
    gathered: dict[object, Any] = dataclasses.field(default_factory=dict)
    views: dict[object, ShardValue] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class Unreduced:
    """`scale` times the sum over the devices of `x`, presented as `dtype`; summed when first needed.

    A running sum of reductions (`collecting`) has no `scale` before the first: it takes that of what is
    added to it.
    `x` keeps the dtype in which the step wrote the reduction, so a cast after it changes no traffic.
    """

    x: Any
    scale: float | None
    dtype: Any
    name: str = ""
    collecting: bool = False
    reduced: FullValue | ShardValue | None = None


Value = FullValue | ShardValue | Unreduced


def waits(value: Value) -> TypeGuard[Unreduced]:
    """Whether the value is a reduction that has not run."""
    return isinstance(value, Unreduced) and value.reduced is None


@dataclasses.dataclass(eq=False)
class Devices:
    """The data axes, and where in the program we are.

    Attributes:
      axes: mesh axes that the step is sharded over.
      num: how many devices that is.
      scope: gathers of one shard are shared within a scope (a pass, a loop body, a remat body).
      token: a value the current pass starts from; gathers wait for it, so that the compiler cannot let
        the previous pass's gather serve this one and keep every parameter alive in between.
      divergent: inside a branch or loop that not all devices take together.
    """

    axes: tuple[str, ...]
    num: int
    scope: object = None
    token: Any = None
    divergent: bool = False

    def full(self, value: Value, dim: int | None = None) -> Any:
        """The whole array; `dim` is how an unreduced value is sharded on the way, if at all."""
        value = self.settle(value, dim)
        if isinstance(value, FullValue):
            return value.x
        if self.scope not in value.gathered and value.view_of is not None:
            origin, rearrange = value.view_of
            value.gathered[self.scope] = rearrange(self.full(origin))
        if self.scope not in value.gathered:
            shard = value.x
            if self.token is not None:
                shard = _collectives.keep_apart(shard, self.token)
            self._check_together("a parameter is gathered")
            value.gathered[self.scope] = _collectives.gather(
                shard, value.dim, self.axes, value.name
            )
        return value.gathered[self.scope]

    def shard(self, value: Value, dim: int) -> Any:
        """This device's slice along `dim`; a full value must be the same on all devices."""
        value = self.settle(value, dim)
        if isinstance(value, ShardValue) and value.dim == dim:
            return value.x
        return _collectives.take_shard(self.full(value), dim, self.axes, self.num)

    def settle(self, value: Value, dim: int | None) -> FullValue | ShardValue:
        """Runs the reduction if it is still due: scattered along `dim`, or whole for None."""
        if not isinstance(value, Unreduced):
            return value
        if value.reduced is None:
            value.reduced = self._reduce(value, dim)
        return value.reduced

    def _reduce(self, value: Unreduced, dim: int | None) -> FullValue | ShardValue:
        if self.num > 1:
            self._check_together("a gradient is reduced")
        if self.num == 1:
            total, dim = value.x, None
        elif dim is None:
            total = _collectives.all_reduce(value.x, self.axes)
        else:
            total = _collectives.reduce_scatter(value.x, dim, self.axes, value.name)
        if value.scale != 1:
            total = total * jnp.asarray(value.scale, total.dtype)
        total = total.astype(value.dtype)
        return FullValue(total) if dim is None else ShardValue(total, dim, value.name)

    def _check_together(self, what: str) -> None:
        if self.divergent:
            raise DivergentError(
                message(
                    "shard_train_step",
                    f"{what} inside a branch (lax.cond, lax.while_loop) that not all devices take",
                    "All devices must take part in a collective, or the step hangs.",
                    "Choose with jnp.where instead, or make the predicate the same on all devices.",
                )
            )


class DivergentError(StepError):
    """A collective would run where not all devices are."""


def token_of(x: jax.Array) -> jax.Array:
    """One element of `x`: depends on it without keeping it alive."""
    return x[(0,) * x.ndim] if math.prod(x.shape) else jnp.zeros((), x.dtype)
