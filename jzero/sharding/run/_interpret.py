# SPDX-License-Identifier: Apache-2.0
"""Runs a step's jaxpr on one device's values: the loop over equations, and where it stands.

What an equation does is in `_ordinary.py` and `_control.py`, one handler per primitive. Collectives are
never bound there; `Devices` decides them value by value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeGuard

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jzero.ir import _memory_spaces
from jzero.sharding.analysis import _residuals
from jzero.sharding.analysis._frames import Frame
from jzero.sharding.analysis._links import Links
from jzero.sharding.analysis._needs import read_dtype
from jzero.sharding.analysis._residuals import Residuals
from jzero.sharding.analysis._tables import Tables
from jzero.sharding.partition._matrix_owners import Owners
from jzero.sharding.passes._inputs_first import COTANGENT
from jzero.sharding.passes._waits import not_before, token_of
from jzero.sharding.run import _coded, _queue
from jzero.sharding.run._devices import Devices
from jzero.sharding.run._queue import GatherQueue
from jzero.sharding.run._values import (
    CodedValue,
    FullValue,
    Settled,
    ShardValue,
    Unreduced,
    Value,
    comes_from_codes,
    in_order_made,
    waits,
)
from jzero.tracing import _jaxpr

CALLBACKS = frozenset({"debug_callback", "debug_print", "io_callback"})


@dataclasses.dataclass
class Env:
    """Values of a frame's variables; in `stacks`, [microbatches, ...], what differs between microbatches.

    `on_host` has copies of those that a backward pass is yet to fetch. `large` are those of more than
    `WAITS_THROUGH_LOOPS` bytes that wait for a reduction, and may have been reduced since.
    """

    values: dict[_jaxpr.Var, Value]
    stacks: dict[_jaxpr.Var, jax.Array] = dataclasses.field(default_factory=dict)
    on_host: dict[_jaxpr.Var, jax.Array] = dataclasses.field(default_factory=dict)
    large: dict[_jaxpr.Var, Unreduced] = dataclasses.field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for var, value in self.values.items():
            self.note_large(var, value)

    def note_large(self, var: _jaxpr.Var, value: Value) -> None:
        """Remembers a value if it is large and waits."""
        if waits(value) and value.x.nbytes > _queue.WAITS_THROUGH_LOOPS:
            self.large[var] = value


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
      boundary: values that another program reads, and what there does. They are reduced before anything is
        made of them: a gradient that waited through a cast, too, would be reduced twice.
      loop_bytes: of an evaluation, the most that a loop gathers before it and keeps; None for a training.
      leaving: copies to the host that nothing has waited for.
      fetches: when copies from the host start, in a backward pass that reads some.
      tile_bytes: the most that a matrix may have to be gathered, and its gradient made, whole.
      owners: what owners run in the place of a call, by its first result.
      residuals: what waits on the host for a backward pass.
      tables: in which rows are looked up, and nothing else is done with them.
      in_parts: what runs here is cut into programs, which find out from marks what waits on the host.
    """

    links: Links
    devices: Devices
    axis_names: dict[str, tuple[str, ...]]
    automatic: tuple[str, ...]
    handlers: Mapping[str, EqnHandler]
    otherwise: EqnHandler
    reduce_once: bool = False
    microbatches: int = 1
    microbatch: jax.Array | None = None
    hold: bool = False
    silent: bool = False
    keep_gathered: bool = False
    reduce_dtype: DTypeLike | None = None
    boundary: Mapping[_jaxpr.Var, _jaxpr.Eqn | None] = dataclasses.field(default_factory=dict)
    loop_bytes: int | None = None
    tile_bytes: int | None = None
    owners: Owners = dataclasses.field(default_factory=dict)
    residuals: Residuals = dataclasses.field(default_factory=dict)
    tables: Tables = dataclasses.field(default_factory=dict)
    in_parts: bool = False
    seen_pass: str | None = None
    leaving: list[jax.Array] = dataclasses.field(default_factory=list)
    fetches: GatherQueue | None = None

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
                zeros = [FullValue(jnp.zeros(v.aval.shape, v.aval.dtype)) for v in eqn.outvars]
                env.values |= zip(eqn.outvars, zeros, strict=True)
                continue
            with _jaxpr.source_of(eqn):
                self.enter_pass(frame, eqn)
                self.reduce_before_loop(frame, index, eqn, env)
                self.reduce_in_order(frame, index, eqn, env)
                sends = not self.in_parts and self.sends(frame, eqn, env)
                self.fetch(frame, eqn, env)
                handler = self.handlers.get(eqn.primitive.name, self.otherwise)
                if self.in_parts and _jaxpr.changes_memory(eqn):
                    handler = _marked
                ins = [self.read(frame, env, atom) for atom in eqn.invars]
                outs = handler(self, frame, index, eqn, ins)
            self.bind(frame, env, eqn.outvars, outs)
            if sends:
                self.leave(env, eqn.outvars[0], outs[0].x)
            self.note_varying(frame, eqn, outs)

    def bind(
        self, frame: Frame, env: Env, variables: Sequence[_jaxpr.Var], values: Sequence[Value]
    ) -> None:
        """Gives variables their values; one that waits for its reduction learns how it is wanted."""
        for var, value in zip(variables, values, strict=True):
            if waits(value) and not value.scattered:
                value.dim = self.dim_of(frame, var)
            env.values[var] = value
            env.note_large(var, value)
            if (frame, var) in self.residuals and isinstance(value, FullValue):
                self.send(frame, env, var, value)

    def read(self, frame: Frame, env: Env, atom: _jaxpr.Atom) -> Value:
        """The value of an operand or output."""
        if _jaxpr.is_literal(atom):
            return FullValue(_jaxpr.literal(atom))
        value = env.values[atom]
        return self.devices.settle(value) if atom in self.boundary else value

    def send(self, frame: Frame, env: Env, var: _jaxpr.Var, value: FullValue) -> None:
        """Copies to the host, or marks, what a backward pass will read; a stack is there, or marked, already.

        What the forward pass makes of it waits for the copies before: the compiler would else start them
        when the backward pass asks for them, and keep all values on the device until then.
        """
        if self.in_parts:
            if self.residuals[frame, var].turns == 1:
                env.on_host[var] = _residuals.marked(value.x)
            return
        if _memory_spaces.on_host(value.x):
            return
        x = self.after_copies(value.x)
        env.values[var] = FullValue(x, value.name)
        self.leave(env, var, _memory_spaces.to_host(x))

    def sends(self, frame: Frame, eqn: _jaxpr.Eqn, env: Env) -> bool:
        """Whether a policy of the step's own has the equation do so; then what it copies waits alike."""
        if not _memory_spaces.is_sent(eqn) or frame.autodiff or frame.pass_of(eqn) != "forward":
            return False
        var = _jaxpr.variable(eqn.invars[0])
        value = env.values[var]
        if not isinstance(value, FullValue):
            return False
        env.values[var] = FullValue(self.after_copies(value.x), value.name)
        return True

    def after_copies(self, x: jax.Array) -> jax.Array:
        """`x`, when all but the last copies to the host are there."""
        arrived: list[jax.Array] = []
        while (
            self.leaving
            and sum(c.nbytes for c in self.leaving) + x.nbytes > _residuals.ON_THEIR_WAY
        ):
            arrived.append(self.leaving.pop(0))
        return not_before(x, arrived)

    def leave(self, env: Env, var: _jaxpr.Var, copy: jax.Array) -> None:
        """Remembers a copy to the host."""
        env.on_host[var] = copy
        self.leaving.append(copy)

    def fetch(self, frame: Frame, eqn: _jaxpr.Eqn, env: Env) -> None:
        """Brings back from the host what an equation of a backward pass is the first one to read.

        Each waits, as a gather does ([Note: tokens of a pass]), so that they come when they are due.
        """
        if not env.on_host or frame.pass_of(eqn) != "backward":
            return
        for atom in eqn.invars:
            if _jaxpr.is_literal(atom) or atom not in env.on_host:
                continue
            if self.in_parts and (frame, atom) in self.residuals:
                env.values[atom] = FullValue(env.on_host.pop(atom))
                continue
            if self.fetches is None:
                queue, limit = self.devices.queue, _residuals.ON_THEIR_WAY
                nothing_yet = queue.latest is None  # but what the step was called with
                self.fetches = GatherQueue(limit) if nothing_yet else queue.next_pass(limit)
            copy = env.on_host.pop(atom)
            x = not_before(copy, self.fetches.tokens(copy.nbytes))
            # Else an equation of the step's own policy fetches it.
            if (frame, atom) in self.residuals:
                x = _memory_spaces.to_device(x)
            env.values[atom] = FullValue(x, getattr(env.values[atom], "name", ""))

    # -- when reductions run -----------------------------------------------------------------------

    def reduce_before_loop(self, frame: Frame, index: int, eqn: _jaxpr.Eqn, env: Env) -> None:
        """Reduces large gradients that would wait, whole, until a backward pass's loop is done.

        A tied table's: the logits' part is there before the layers, the look-up's after them. It is
        reduced twice then. What a loop around this one collects waits anyway, from turn to turn.
        """
        if self.hold or eqn.primitive.name != "scan" or frame.pass_of(eqn) != "backward":
            return
        # And for those of what a loop before has summed up: nothing else waits for them.
        tokens = [*self.devices.queue.before_loop]
        tokens += [
            token_of(self.devices.settle(value).x) for var, value in env.large.items()
            if waits(value) and not value.collecting and frame.last_use(var) > index
        ]  # fmt: skip
        self.devices.queue.before_loop.clear()
        env.large = {var: value for var, value in env.large.items() if waits(value)}
        # The loop waits for them: the compiler would else reduce after it, together with the rest.
        for atom in eqn.invars:
            if _jaxpr.is_literal(atom):
                continue
            found = env.values[atom]
            is_here = isinstance(found, FullValue) and not _memory_spaces.on_host(found.x)
            if is_here and frame.varies(atom) and tokens:
                env.values[atom] = FullValue(not_before(found.x, tokens), found.name)
                break

    def reduce_in_order(self, frame: Frame, index: int, eqn: _jaxpr.Eqn, env: Env) -> None:
        """Before what follows a backward pass reads the first of its gradients: reduces them all.

        Not in the order in which the update reads them: [Note: reductions in order].
        """
        if self.microbatch is not None or self.devices.divergent or frame.pass_of(eqn) is not None:
            return
        read = [a for a in eqn.invars if not _jaxpr.is_literal(a) and a in frame.unreduced]
        first = any(_is_waiting_array(env.values[var]) for var in read)
        passed_on = frame.unreduced.issuperset(eqn.outvars)
        if not first or (passed_on and self.boundary.keys().isdisjoint(read)):
            return
        due = [
            value for var, value in env.values.items()
            if _is_waiting_array(value) and frame.last_use(var) >= index
        ]  # fmt: skip
        if not any(value.collecting for value in due):  # A step's own loop reduces after it.
            self._reduce_all(due)

    def reduce_boundary(self, env: Env) -> None:
        """Reduces what is handed out and no equation has read, in the order in which it was made."""
        values = [env.values[var] for var in self.boundary if var in env.values]
        self._reduce_all([value for value in values if waits(value)])

    def _reduce_all(self, due: Sequence[Unreduced]) -> None:
        self.devices.queue.expect(due, of_turn=False)
        for value in sorted(due, key=lambda value: value.made):
            self.devices.settle(value)

    def hand_out(self, values: Sequence[Value], held: Sequence[bool]) -> list[Value]:
        """What a loop's body hands out: reduced in order, unless a loop around it is to do that."""
        outs = list(values)
        due = [i for i in in_order_made(outs) if not (self.hold or held[i]) or not waits(outs[i])]
        self.devices.queue.expect([outs[i] for i in due])
        for i in due:
            reduce = self.devices.settle if self.microbatch is None else self.devices.scatter
            outs[i] = reduce(outs[i])
        return outs

    # -- layouts -----------------------------------------------------------------------------------

    def dim_of(self, frame: Frame, atom: _jaxpr.Atom) -> int | None:
        """The dim along which `atom` is sharded if it is sharded at all."""
        if self.devices.num == 1 or self.devices.divergent:
            return None
        return self.links.sharded_dim(frame, atom)

    def carried_dim(self, frame: Frame, out: _jaxpr.Var, ins: Sequence[Value]) -> int | None:
        """The layout in which a loop carries, or a branch returns, `out`."""
        dim = self.dim_of(frame, out)
        if out in frame.needs_full and not any(isinstance(value, ShardValue) for value in ins):
            return None
        return dim

    def gathered(
        self, frame: Frame, var: _jaxpr.Var, value: Settled, indices: Collection[int] | None = None
    ) -> FullValue:
        """`value`, `[n/k, d]` or whole, as the whole `[n, d]` for the equations that read it as `var`.

        It is cast first, if that is what all of them do: bf16 compute gathers bf16.
        """
        dtype = read_dtype(frame, var, indices)
        narrower = dtype is not None and jnp.dtype(dtype).itemsize < var.aval.dtype.itemsize
        if isinstance(value, CodedValue) and narrower:
            value = _coded.cast(value, str(jnp.dtype(dtype)), self.devices.scope)
        elif isinstance(value, ShardValue) and narrower and not comes_from_codes(value):
            key = (self.devices.scope, "cast", str(dtype))
            if key not in value.views:
                cast = dataclasses.replace(value, x=value.x.astype(dtype), view_of=None)
                value.views[key] = dataclasses.replace(cast, gathered={}, views={})
            value = value.views[key]
        eqns = frame.jaxpr.eqns
        readers = [i for i in frame.readers.get(var, ()) if indices is None or i in indices]
        as_codes = any(
            frame.varies(out) for i in readers if i < len(eqns) for out in eqns[i].outvars
        )
        return FullValue(self.devices.full(value, as_codes), value.name)

    # -- passes ----------------------------------------------------------------------------------

    def of_one_pass(self, frame: Frame, eqn: _jaxpr.Eqn) -> bool:
        """Whether the equation, a loop, is part of one pass and holds none; in an evaluation all are."""
        return self.loop_bytes is not None or frame.pass_of(eqn) is not None

    def enter_pass(self, frame: Frame, eqn: _jaxpr.Eqn) -> None:
        """Starts a new scope for gathers when the equation belongs to another pass than the last.

        They wait for what the last one computed: [Note: tokens of a pass].
        """
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
                    if self.fetches is not None:
                        self.fetches.note(value.x, eqn.primitive.name)
                if _jaxpr.is_named(eqn, COTANGENT):
                    self.devices.queue.start = token_of(value.x)

    def as_contribution(self, value: Value, scale: float) -> jax.Array:
        """What this device adds to a sum, `scale` times which is `value [n, d]`; it was reduced already."""
        x = jnp.asarray(self.devices.full(value))
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return x / jnp.asarray(scale * self.devices.num, x.dtype)
        assert scale == 1, scale
        first = lax.axis_index(self.devices.axes) == 0
        return jnp.where(first, x, jnp.zeros_like(x))

    def inside(
        self, divergent: bool = False, after: jax.Array | None = None, one_pass: bool = False
    ) -> Interpreter:
        """The interpreter for a loop body or a branch, of one pass or not: its gathers wait for `after`.

        What a loop that holds both passes keeps on the host leaves and comes back inside of its program.
        """
        queue = self.devices.queue
        devices = dataclasses.replace(
            self.devices,
            scope=object(),
            queue=GatherQueue(
                queue.limit, queue.together, start=None if after is None else token_of(after)
            ),
            divergent=divergent or self.devices.divergent,
        )
        return dataclasses.replace(
            self,
            devices=devices,
            in_parts=self.in_parts and one_pass,
            seen_pass=None,
            leaving=[],
            fetches=None,
        )


def _marked(
    interp: Interpreter, frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Value]
) -> list[Value]:
    """What a policy of the step's own sends to the host or fetches, where programs' results are moved."""
    (value,) = ins
    sends = _memory_spaces.is_sent(eqn) and isinstance(value, FullValue)
    return [FullValue(_residuals.marked(value.x), value.name)] if sends else ins


def _is_waiting_array(value: Value) -> TypeGuard[Unreduced]:
    """Whether a reduction of more than a scalar has not run."""
    return waits(value) and bool(value.x.ndim)


EqnHandler = Callable[[Interpreter, Frame, int, _jaxpr.Eqn, list[Value]], list[Value]]
