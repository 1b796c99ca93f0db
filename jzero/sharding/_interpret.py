"""Runs a step's jaxpr on one device's values: the loop over equations, and where it stands.

What an equation does is in `_ordinary.py` and `_control.py`, one handler per primitive. Collectives are
never bound there; `Devices` decides them value by value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jzero import _jaxpr
from jzero.sharding._frames import Frame
from jzero.sharding._links import Links
from jzero.sharding._values import Devices, FullValue, ShardValue, Unreduced, Value, token_of


@dataclasses.dataclass
class Interpreter:
    """One run of the step, while it is being traced inside `shard_map`.

    Attributes:
      links: which dims are sharded.
      devices: the data axes, and the current pass.
      mean: reductions that JAX's AD placed are means (the loss is the mean over devices).
      axis_names: the mesh axes behind each axis name that the step uses.
      handlers: what runs an equation, by the name of its primitive.
      otherwise: what runs all other equations.
      reduce_once: a step's own loop over microbatches sums gradients locally and reduces after it.
    """

    links: Links
    devices: Devices
    mean: bool
    axis_names: dict[str, tuple[str, ...]]
    handlers: Mapping[str, Handler]
    otherwise: Handler
    reduce_once: bool = False
    seen_pass: str | None = None
    last_varying: Any = None

    def run(self, frame: Frame, args: Sequence[Value]) -> list[Value]:
        """Values of the frame's outputs, given those of its inputs."""
        env: dict[_jaxpr.Var, Value] = dict(zip(frame.jaxpr.invars, args, strict=True))
        consts = [FullValue(_jaxpr.constant(value)) for value in frame.consts]
        env |= zip(frame.jaxpr.constvars, consts, strict=True)

        means: dict[_jaxpr.Var, Value] = {}

        def read(eqn: _jaxpr.Eqn | None, atom: _jaxpr.Atom) -> Value:
            if _jaxpr.is_literal(atom):
                return FullValue(_jaxpr.literal(atom))
            if frame.averages(eqn, atom):
                return means.setdefault(atom, self.mean_of(env[atom].x))
            return env[atom]

        for index, eqn in enumerate(frame.jaxpr.eqns):
            with _jaxpr.source_of(eqn):
                self.enter_pass(frame, eqn)
                handler = self.handlers.get(eqn.primitive.name, self.otherwise)
                outs = handler(self, frame, index, eqn, [read(eqn, atom) for atom in eqn.invars])
            env |= zip(eqn.outvars, outs, strict=True)
            self.note_varying(frame, eqn, outs)
        return [read(None, atom) for atom in frame.jaxpr.outvars]

    # -- layouts ---------------------------------------------------------------------------------

    def dim_of(self, frame: Frame, atom: _jaxpr.Atom) -> int | None:
        """The dim along which `atom` is sharded if it is sharded at all."""
        if self.devices.num == 1 or self.devices.divergent:
            return None
        return self.links.sharded_dim(frame, atom, self.devices.num)

    def full(self, frame: Frame, atom: _jaxpr.Atom, value: Value) -> Any:
        """The whole array of an operand."""
        return self.devices.full(value, self.dim_of(frame, atom))

    def settle(self, frame: Frame, atom: _jaxpr.Atom, value: Value) -> FullValue | ShardValue:
        """The operand with its reduction done."""
        return self.devices.settle(value, self.dim_of(frame, atom))

    def as_dim(self, frame: Frame, atom: _jaxpr.Atom, value: Value, dim: int | None) -> Any:
        """The operand's array in a given layout."""
        return self.full(frame, atom, value) if dim is None else self.devices.shard(value, dim)

    def carried_dim(self, frame: Frame, out: _jaxpr.Var, ins: Sequence[Value]) -> int | None:
        """The layout in which a loop carries, or a branch returns, `out`."""
        dim = self.dim_of(frame, out)
        if out in frame.needs_full and not any(isinstance(value, ShardValue) for value in ins):
            return None
        return dim

    # -- passes ----------------------------------------------------------------------------------

    def enter_pass(self, frame: Frame, eqn: _jaxpr.Eqn) -> None:
        """Starts a new scope for gathers when the equation belongs to another pass than the last."""
        current = frame.pass_of(eqn)
        if frame.outer.autodiff is not None or current is None or current == self.seen_pass:
            return
        if self.seen_pass is not None and self.last_varying is not None:
            self.devices = dataclasses.replace(
                self.devices, scope=object(), token=token_of(self.last_varying)
            )
        self.seen_pass = current

    def note_varying(self, frame: Frame, eqn: _jaxpr.Eqn, outs: Sequence[Value]) -> None:
        """Remembers the latest value of the current pass: the next pass's token comes from it."""
        for var, value in zip(eqn.outvars, outs, strict=True):
            if isinstance(value, FullValue) and frame.varies(var):
                if jnp.issubdtype(var.aval.dtype, jnp.number):
                    self.last_varying = value.x

    def mean_of(self, x: Any) -> Unreduced:
        """The mean over the devices of a local value, taken when first needed."""
        return Unreduced(x, 1 / self.devices.num, x.dtype)

    def inside(self, divergent: bool = False) -> Interpreter:
        """The interpreter for a loop body or a branch: its gathers are its own."""
        devices = dataclasses.replace(
            self.devices,
            scope=object(),
            token=None,
            divergent=divergent or self.devices.divergent,
        )
        return dataclasses.replace(self, devices=devices, seen_pass=None, last_varying=None)


Handler = Callable[[Interpreter, Frame, int, _jaxpr.Eqn, list[Value]], list[Value]]
