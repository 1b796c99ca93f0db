"""Runs a step's jaxpr on one device's values: the loop over equations, and where it stands.

What an equation does is in `_ordinary.py` and `_control.py`, one handler per primitive. Collectives are
never bound there; `Devices` decides them value by value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import jax.numpy as jnp
from jax import lax

from jzero.sharding.analysis._frames import Frame
from jzero.sharding.analysis._links import Links
from jzero.sharding.analysis._needs import read_dtype
from jzero.sharding.run import _collectives
from jzero.sharding.run._queue import GatherQueue, token_of
from jzero.sharding.run._values import (
    Devices,
    FullValue,
    ShardValue,
    Unreduced,
    Value,
    in_order_made,
    waits,
)
from jzero.tracing import _jaxpr

WAITS_THROUGH_LOOPS = 2**26  # bytes of a gradient
CALLBACKS = frozenset({"debug_callback", "debug_print", "io_callback"})


@dataclasses.dataclass
class Env:
    """Values of a frame's variables; in `stacks`, [microbatches, ...], what differs between microbatches."""

    values: dict[_jaxpr.Var, Value]
    stacks: dict[_jaxpr.Var, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Interpreter:
    """One run of the step, while it is being traced inside `shard_map`.

    Attributes:
      links: which dims are sharded.
      devices: the data axes, and the current pass.
      axis_names: the mesh axes behind each axis name that the step uses.
      automatic: mesh axes over which XLA shards; sharding constraints may name them.
      handlers: what runs an equation, by the name of its primitive.
      otherwise: what runs all other equations.
      reduce_once: a step's own loop over microbatches sums gradients locally and reduces after it.
      microbatches: how many microbatches a device works through.
      microbatch: inside their loop, the index of the current one.
      hold: inside their loop, reductions are left to be done after it.
      silent: what runs has run before, so that its prints and callbacks are done.
      keep_gathered: what the forward pass gathered serves the backward pass too.
      reduce_dtype: in which gradients are reduced; None for the dtype in which the step has them.
      handed_out: values that another program reads, and what there does. They are reduced before anything is
        made of them: a gradient that waited through a cast, too, would be reduced twice.
    """

    links: Links
    devices: Devices
    axis_names: dict[str, tuple[str, ...]]
    automatic: tuple[str, ...]
    handlers: Mapping[str, Handler]
    otherwise: Handler
    reduce_once: bool = False
    microbatches: int = 1
    microbatch: Any = None
    hold: bool = False
    silent: bool = False
    keep_gathered: bool = False
    reduce_dtype: Any = None
    handed_out: Mapping[_jaxpr.Var, Any] = dataclasses.field(default_factory=dict)
    seen_pass: str | None = None

    def run(self, frame: Frame, args: Sequence[Value]) -> list[Value]:
        """Values of the frame's outputs, given those of its inputs."""
        env = self.start(frame, args)
        self.run_equations(frame, range(len(frame.jaxpr.eqns)), env)
        return [self.read(frame, env, atom) for atom in frame.jaxpr.outvars]

    def start(self, frame: Frame, args: Sequence[Value]) -> Env:
        """The frame's variables before its first equation."""
        consts = [FullValue(_jaxpr.constant(value)) for value in frame.consts]
        variables = [*frame.jaxpr.constvars, *frame.jaxpr.invars]
        return Env(dict(zip(variables, [*consts, *args], strict=True)))

    def run_equations(self, frame: Frame, indices: Iterable[int], env: Env) -> None:
        """Runs some of the frame's equations; their results are added to `env`."""
        for index in indices:
            eqn = frame.jaxpr.eqns[index]
            if self.silent and eqn.primitive.name in CALLBACKS:
                env.values |= {out: FullValue(_zeros(out.aval)) for out in eqn.outvars}
                continue
            with _jaxpr.source_of(eqn):
                self.enter_pass(frame, eqn)
                self.reduce_before_loop(frame, index, eqn, env)
                self.reduce_in_order(frame, index, eqn, env)
                handler = self.handlers.get(eqn.primitive.name, self.otherwise)
                ins = [self.read(frame, env, atom) for atom in eqn.invars]
                outs = handler(self, frame, index, eqn, ins)
            env.values |= zip(eqn.outvars, outs, strict=True)
            self.note_varying(frame, eqn, outs)

    def reduce_before_loop(self, frame: Frame, index: int, eqn: _jaxpr.Eqn, env: Env) -> None:
        """Reduces large gradients that would wait, whole, until a backward pass's loop is done.

        A tied table's: the logits' part is there before the layers, the look-up's after them. It is
        reduced twice then.
        """
        if self.hold or eqn.primitive.name != "scan" or frame.pass_of(eqn) != "backward":
            return
        tokens = []
        for var, value in env.values.items():
            large = waits(value) and value.x.size * value.x.dtype.itemsize > WAITS_THROUGH_LOOPS
            if large and frame.last_use(var) > index:
                tokens.append(token_of(self.settle(frame, var, value).x))
        # The loop waits for them: the compiler would else reduce after it, together with the rest.
        for atom in eqn.invars:
            if _jaxpr.is_literal(atom):
                continue
            found = env.values[atom]
            if isinstance(found, FullValue) and frame.varies(atom) and tokens:
                env.values[atom] = FullValue(_collectives.not_before(found.x, tokens), found.name)
                break

    def reduce_in_order(self, frame: Frame, index: int, eqn: _jaxpr.Eqn, env: Env) -> None:
        """Before what follows a backward pass reads the first of its gradients: reduces them all.

        In the order in which they were made, and not in that of the update, which is about the reverse:
        the first reduction would wait for the last gradient.
        """
        if self.microbatch is not None or self.devices.divergent or frame.pass_of(eqn) is not None:
            return
        read = [a for a in eqn.invars if not _jaxpr.is_literal(a) and a in frame.unreduced]
        first = any(_is_waiting_array(env.values[atom]) for atom in read)
        passed_on = frame.unreduced.issuperset(eqn.outvars)
        if not first or (passed_on and self.handed_out.keys().isdisjoint(read)):
            return
        due = [
            (var, value) for var, value in env.values.items()
            if _is_waiting_array(value) and frame.last_use(var) >= index
        ]  # fmt: skip
        if any(value.collecting for _, value in due):  # A step's own loop reduces after it.
            return
        self._reduce_all(frame, due)

    def reduce_handed_out(self, frame: Frame, env: Env) -> None:
        """Reduces what is handed out and no equation has read, in the order in which it was made."""
        values = [(var, env.values[var]) for var in self.handed_out if var in env.values]
        self._reduce_all(frame, [(var, value) for var, value in values if waits(value)])

    def _reduce_all(self, frame: Frame, due: Sequence[tuple[_jaxpr.Var, Unreduced]]) -> None:
        for i in in_order_made([value for _, value in due]):
            self.settle(frame, *due[i])

    def read(self, frame: Frame, env: Env, atom: _jaxpr.Atom) -> Value:
        """The value of an operand or output."""
        if _jaxpr.is_literal(atom):
            return FullValue(_jaxpr.literal(atom))
        value = env.values[atom]
        return self.settle(frame, atom, value) if atom in self.handed_out else value

    # -- layouts ---------------------------------------------------------------------------------

    def dim_of(self, frame: Frame, atom: _jaxpr.Atom) -> int | None:
        """The dim along which `atom` is sharded if it is sharded at all."""
        if self.devices.num == 1 or self.devices.divergent:
            return None
        return self.links.sharded_dim(frame, atom)

    def full(self, frame: Frame, atom: _jaxpr.Atom, value: Value) -> Any:
        """The whole array of an operand."""
        return self.devices.full(value, self.dim_of(frame, atom))

    def settle(self, frame: Frame, atom: _jaxpr.Atom, value: Value) -> FullValue | ShardValue:
        """The operand with its reduction done."""
        return self.devices.settle(value, self.dim_of(frame, atom))

    def hand_out(
        self, frame: Frame, atoms: Sequence[_jaxpr.Atom], values: Sequence[Value]
    ) -> list[Value]:
        """What a loop's body hands out: reduced, unless the loop over microbatches reduces after it.

        In the order in which they were made, for each reduction waits for the one before it.
        """
        outs = list(values)
        for i in in_order_made(outs):
            if self.hold and waits(outs[i]):
                continue
            if self.microbatch is not None:
                outs[i] = self.devices.scatter(outs[i], self.dim_of(frame, atoms[i]))
            else:
                outs[i] = self.settle(frame, atoms[i], outs[i])
        return outs

    def as_dim(self, frame: Frame, atom: _jaxpr.Atom, value: Value, dim: int | None) -> Any:
        """The operand's array in a given layout."""
        return self.full(frame, atom, value) if dim is None else self.devices.shard(value, dim)

    def carried_dim(self, frame: Frame, out: _jaxpr.Var, ins: Sequence[Value]) -> int | None:
        """The layout in which a loop carries, or a branch returns, `out`."""
        dim = self.dim_of(frame, out)
        if out in frame.needs_full and not any(isinstance(value, ShardValue) for value in ins):
            return None
        return dim

    def gathered(
        self, frame: Frame, var: _jaxpr.Var, value: FullValue | ShardValue,
        indices: Iterable[int] | None = None,
    ) -> FullValue:  # fmt: skip
        """`value` whole, for the equations of `frame` that read it as `var`.

        It is cast first, if that is what all of them do: bf16 compute gathers bf16.
        """
        dtype = read_dtype(frame, var, indices)
        narrower = dtype is not None and jnp.dtype(dtype).itemsize < var.aval.dtype.itemsize
        if isinstance(value, ShardValue) and narrower:
            key = (self.devices.scope, "cast", str(dtype))
            if key not in value.views:
                cast = value.x.astype(dtype)
                value.views[key] = ShardValue(cast, value.dim, value.size, value.axes, value.name)
            value = value.views[key]
        return FullValue(self.devices.full(value), value.name)

    # -- passes ----------------------------------------------------------------------------------

    def enter_pass(self, frame: Frame, eqn: _jaxpr.Eqn) -> None:
        """Starts a new scope for gathers when the equation belongs to another pass than the last."""
        current = None if self.keep_gathered else frame.pass_of(eqn)
        if frame.autodiff is not None or current is None or current == self.seen_pass:
            return
        queue = self.devices.queue
        if self.seen_pass is not None and queue.latest is not None:
            self.devices = dataclasses.replace(
                self.devices, scope=object(), queue=queue.next_pass()
            )
        self.seen_pass = current

    def note_varying(self, frame: Frame, eqn: _jaxpr.Eqn, outs: Sequence[Value]) -> None:
        """Remembers the latest value of the pass: later gathers and the next pass wait for it."""
        for var, value in zip(eqn.outvars, outs, strict=True):
            if isinstance(value, FullValue) and frame.varies(var):
                if jnp.issubdtype(var.aval.dtype, jnp.number):
                    self.devices.queue.note(value.x, eqn.primitive.name)

    def as_contribution(self, value: Value, scale: float) -> Any:
        """What this device adds to a sum, `scale` times which is `value`; it was reduced already."""
        x = jnp.asarray(self.devices.full(value))
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return x / jnp.asarray(scale * self.devices.num, x.dtype)
        assert scale == 1, scale
        first = lax.axis_index(self.devices.axes) == 0
        return jnp.where(first, x, jnp.zeros_like(x))

    def inside(self, divergent: bool = False) -> Interpreter:
        """The interpreter for a loop body or a branch: its gathers are its own."""
        devices = dataclasses.replace(
            self.devices,
            scope=object(),
            queue=GatherQueue(self.devices.queue.limit),
            divergent=divergent or self.devices.divergent,
        )
        return dataclasses.replace(self, devices=devices, seen_pass=None)


def _zeros(aval: Any) -> Any:
    return jnp.zeros(aval.shape, aval.dtype)


def _is_waiting_array(value: Value) -> TypeGuard[Unreduced]:
    """Whether a reduction of more than a scalar has not run."""
    return waits(value) and bool(value.x.ndim)


Handler = Callable[[Interpreter, Frame, int, _jaxpr.Eqn, list[Value]], list[Value]]
