# SPDX-License-Identifier: Apache-2.0
"""Loops: a carry keeps its layout, stacks are sliced and made in shards, running sums wait for the end.

Values are pytrees (`_values.py`), so that a loop of JAX's carries them, slices them and stacks them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jzero.ir import _memory_spaces, _rules
from jzero.sharding.analysis import _frames, _residuals
from jzero.sharding.analysis._frames import Frame, split
from jzero.sharding.run import _coded, _prefetch
from jzero.sharding.run._devices import Devices
from jzero.sharding.run._interpret import Interpreter
from jzero.sharding.run._values import (
    CodedValue,
    FullValue,
    Settled,
    ShardValue,
    Unreduced,
    Value,
    moved,
    waits,
)
from jzero.tracing import _jaxpr


def run_scan(
    interp: Interpreter, frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Value]
) -> list[Value]:
    """A `scan`: carries `[n, d]` keep their layouts, of stacks `[turns, n, d]` a turn has `[n, d]`."""
    scan, (child,) = _jaxpr.scan_parts(eqn), frame.children[index]
    one_pass = interp.of_one_pass(frame, eqn)
    settled = [interp.devices.settle(value) for value in ins]
    consts, init, stacks = split(settled, scan.num_consts, scan.num_carry)
    consts = _loop_consts(interp, child, consts, one_pass)
    carries = _carries(interp, frame, child, eqn, init)
    keep = interp.keep_gathered and one_pass
    sliced = child.jaxpr.invars[scan.num_consts + scan.num_carry :]
    stacks = [_sliceable(interp, child, *x, keep) for x in zip(sliced, stacks, strict=True)]

    again = _gathers_again(interp, child, consts)
    held = [out in frame.held for out in eqn.outvars[scan.num_carry :]]
    come_back = [
        (frame, x) in interp.residuals for x in eqn.invars[scan.num_consts + scan.num_carry :]
    ]
    # One that is read whole goes as a value, when the loop is over.
    leave = [interp.residuals.get((frame, x)) for x in eqn.outvars[scan.num_carry :]]
    go_away = [each is not None and each.turns > 1 for each in leave]

    def turn(carry: list[_Carried], slices: list[Settled]) -> tuple[list[_Carried], _Made]:
        after = _changing([*carry, *slices]) if again else None
        inner = interp.inside(after=after, one_pass=one_pass)
        slices = [moved(value, -1) for value in slices]
        here = [_fetched(x) if back else x for x, back in zip(slices, come_back, strict=True)]
        entering = [each.enter(x) for each, x in zip(carries, carry, strict=True)]
        outs = inner.run(child, [*consts, *entering, *here])
        leaving, made = split(outs, scan.num_carry)
        made = [_as_reduced(value) for value in made]
        places = {id(each): i for i, each in reversed(list(enumerate(slices)))}
        ys = [_unless_sliced(value, places) for value in inner.hand_out(made, held)]
        send = _residuals.marked if interp.in_parts else _memory_spaces.to_host
        ys = [_sent(y, send) if away else y for y, away in zip(ys, go_away, strict=True)]
        kinds = [_Found(_kind(v)) for v in leaving]
        new = [each.leave(inner.devices, v) for each, v in zip(carries, leaving, strict=True)]
        return new, (ys, kinds)

    loop = functools.partial(lax.scan, unroll=scan.unroll)
    # A loop that is part of one pass: one that holds whole passes would keep what it gathered for the
    # next turn's forward pass alive through all of this turn.
    alone = one_pass and not interp.keep_gathered and not interp.devices.divergent
    gathers = alone and any(isinstance(value, ShardValue | CodedValue) for value in stacks)
    fetches = any(_on_host(value) for value in stacks)
    if (gathers or fetches) and scan.length > 1 and scan.unroll == 1:
        queue = interp.devices.queue if gathers else None
        loop = functools.partial(_prefetch.scan, queue=queue, balance=interp.devices.balance)
    starts = [each.start(interp.devices) for each in carries]
    ends, (ys, kinds) = loop(turn, starts, stacks, length=scan.length, reverse=scan.reverse)
    finished = zip(carries, ends, kinds, strict=True)
    made = zip(eqn.outvars[scan.num_carry :], ys, strict=True)
    return [
        *(each.finish(interp, x, kind.value) for each, x, kind in finished),
        *(stacks[y.value] if isinstance(y, _Found) else _as_written(y, var) for var, y in made),
    ]


def run_while(
    interp: Interpreter, frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Value]
) -> list[Value]:
    """A `while`: carries `[n, d]` keep their layouts; whole ones if devices leave it at different times."""
    loop, (cond, body) = _jaxpr.while_parts(eqn), frame.children[index]
    divergent = any(cond.out_varying)
    several = cond.jaxpr.outvars[0].aval.ndim > 0  # A vmapped loop: each element stops by itself.
    settled = [interp.devices.settle(value) for value in ins]
    cond_ins, body_ins, init = split(settled, loop.num_cond_consts, loop.num_body_consts)
    cond_ins = _loop_consts(interp, cond, cond_ins, True)
    body_ins = _loop_consts(interp, body, body_ins, divergent or interp.of_one_pass(frame, eqn))
    again, whole = _gathers_again(interp, body, body_ins), divergent or several
    dims = [
        None if whole else interp.carried_dim(frame, out, [value])
        for out, value in zip(eqn.outvars, init, strict=True)
    ]

    def laid_out(devices: Devices, values: Sequence[Value]) -> list[Settled]:
        return [
            devices.value(devices.as_dim(value, dim), dim, out.aval.shape, before)
            for value, dim, out, before in zip(values, dims, eqn.outvars, init, strict=True)
        ]

    def goes_on(carry: list[Settled]) -> jax.Array:
        inner = interp.inside(divergent)
        (value,) = inner.run(cond, [*cond_ins, *carry])
        return inner.devices.full(value)

    def turn(carry: list[Settled]) -> list[Settled]:
        inner = interp.inside(divergent, _changing(carry) if again else None)
        new = laid_out(inner.devices, inner.run(body, [*body_ins, *carry]))
        return _where(goes_on(carry), new, carry) if several else new

    def any_goes_on(carry: list[Settled]) -> jax.Array:
        return goes_on(carry).any() if several else goes_on(carry)

    return [*lax.while_loop(any_goes_on, turn, laid_out(interp.devices, init))]


def _where(goes_on: jax.Array, new: list[Settled], old: list[Settled]) -> list[Settled]:
    """Whole `[b, n, d]`: the new ones of the elements of `b` that go on, the old ones of all others."""

    def chosen(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(lax.expand_dims(goes_on, range(goes_on.ndim, x.ndim)), x, y)

    return [*jax.tree.map(chosen, new, old)]


def _loop_consts(
    interp: Interpreter, child: Frame, consts: list[Settled], one_pass: bool
) -> list[Settled]:
    """What a loop closes over: gathered before it if every iteration is part of one pass.

    A time loop would else gather its weights at every time step. A loop *of* train steps or microbatches
    holds whole passes, and gathers inside them, so that no more than a pass needs is alive. So does a loop
    of an evaluation that reads more than there is room for.
    """
    pairs = list(zip(child.jaxpr.invars, consts, strict=False))
    wanted = [(var, value) for var, value in pairs if _is_gathered(child, var, value)]
    whole = sum(_rules.size_in_bytes(var.aval) for var, _ in wanted)
    fits = interp.loop_bytes is None or whole <= interp.loop_bytes
    if not one_pass:
        return [value for _, value in pairs]
    if fits:
        return [
            interp.gathered(child, var, value) if var in child.needs_full else value
            for var, value in pairs
        ]
    # Decoded they have no room; their codes may, which each turn decodes.
    sizes = interp.devices.sizes
    nbytes = sum(
        _coded.nbytes_of_rows(value, sizes)
        if isinstance(value, CodedValue)
        else _rules.size_in_bytes(var.aval)
        for var, value in wanted
    )
    assert interp.loop_bytes is not None
    if nbytes > interp.loop_bytes:
        return [value for _, value in pairs]
    return [
        interp.devices.with_all_rows(value) if isinstance(value, CodedValue)
        else interp.gathered(child, var, value) if _is_gathered(child, var, value)
        else value
        for var, value in pairs
    ]  # fmt: skip


def _is_gathered(child: Frame, var: _jaxpr.Var, value: Settled) -> bool:
    """Whether a loop has to gather what it closes over, or to decode it."""
    return isinstance(value, ShardValue | CodedValue) and var in child.needs_full


def _gathers_again(interp: Interpreter, child: Frame, consts: Sequence[Settled]) -> bool:
    """Whether each turn of an evaluation's loop gathers what the loop closes over.

    The compiler would do it once, before the loop, unless the gathers wait for something of the turn
    (test_eval_step.py::test_what_does_not_fit_is_gathered_in_each_turn).
    """
    pairs = zip(child.jaxpr.invars, consts, strict=False)
    return interp.loop_bytes is not None and any(
        _is_gathered(child, var, value) for var, value in pairs
    )


def _changing(turn: Sequence[_Carried]) -> jax.Array | None:
    """An array that no two turns have in common, for all that the compiler knows."""
    found: list[jax.Array] = jax.tree.leaves(turn)
    return found[0] if found else None


def _sliceable(
    interp: Interpreter, child: Frame, var: _jaxpr.Var, stack: Settled, keep: bool
) -> Settled:
    """`[turns/k, n, d] -> [turns, n, d]`: gathered if it is sharded along the looped dim, or kept.

    One that rests in codes stays in codes, which each turn decodes; but for one whose row is all of it.
    """
    if isinstance(stack, CodedValue) and stack.num_stacked:
        gathers = stack.dim == 0 or (keep and var in child.needs_full)
        return interp.devices.with_all_rows(stack) if gathers else stack
    stack = interp.devices.own_part(stack) if isinstance(stack, CodedValue) else stack
    if isinstance(stack, ShardValue) and (stack.dim == 0 or (keep and var in child.needs_full)):
        return interp.gathered(child, var, stack)
    return stack


T = TypeVar("T")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Found(Generic[T]):
    """What tracing a turn found out: of which stack a result is a slice, what kind of sum it is."""

    value: T


_Carried = Settled | jax.Array
_SumKind = tuple[float | None, bool]  # of a sum: its scale, and whether it is coded
_Made = tuple[list[Value | _Found[int]], list[_Found[_SumKind]]]


def _kind(value: Value) -> _SumKind:
    return (value.scale, value.coded) if isinstance(value, Unreduced) else (None, False)


def _unless_sliced(value: Value, places: Mapping[int, int]) -> Value | _Found[int]:
    """A turn's `[n, d]` for a new stack, unless it is a slice again (a residual): that stack is there.

    `places` has the places of the slices, by their ids.
    """
    return _Found(places[id(value)]) if id(value) in places else moved(value, 1)


def _as_reduced(value: Value) -> Value:
    """A sum that is due, in the dtype in which it is reduced if the step widens it: the loop stacks it so."""
    if waits(value) and value.x.dtype.itemsize < jnp.dtype(value.dtype).itemsize:
        return dataclasses.replace(value, dtype=value.x.dtype)
    return value


def _as_written(value: Value, var: _jaxpr.Var) -> Value:
    """A stack in the dtype that the step gives it."""
    if waits(value):
        return dataclasses.replace(value, dtype=var.aval.dtype)
    if isinstance(value, CodedValue) or value.x.dtype == var.aval.dtype:
        return value
    return dataclasses.replace(value, x=value.x.astype(var.aval.dtype))


def _sent(made: Value | _Found[int], send: Callable[[jax.Array], jax.Array]) -> Value | _Found[int]:
    """What a turn made, in the host's memory, so that its stack is made there; or marked."""
    if isinstance(made, FullValue):
        return dataclasses.replace(made, x=send(made.x))
    return made


def _fetched(value: Settled) -> Settled:
    """A turn's slice of a stack, on the device."""
    if isinstance(value, CodedValue) or not _on_host(value):
        return value
    return dataclasses.replace(value, x=_memory_spaces.to_device(value.x))


def _on_host(value: Settled) -> bool:
    """Whether a residual waits in the host's memory; a leaf that rests in codes is none."""
    return not isinstance(value, CodedValue) and _memory_spaces.on_host(value.x)


def _carries(
    interp: Interpreter, frame: Frame, child: Frame, eqn: _jaxpr.Eqn, init: list[Settled]
) -> list[_Carry]:
    scan = _jaxpr.scan_parts(eqn)
    waits_for_end = frame.pass_of(eqn) is not None or interp.reduce_once
    sums = _frames.running_sums(child, scan.num_consts, scan.num_carry)
    found = []
    for i, (out, value) in enumerate(zip(eqn.outvars, init, strict=False)):
        dim = interp.carried_dim(frame, out, [value])
        is_sum = i in sums and waits_for_end and interp.devices.num > 1
        leaf = interp.links.leaf_of(frame, out)
        found.append((_RunningSum if is_sum else _Carry)(out, value, dim, leaf))
    return found


@dataclasses.dataclass(frozen=True)
class _Carry:
    """A carry `[n, d]`, between all turns in one layout: a shard `[n/k, d]` along `dim`, or whole."""

    out: _jaxpr.Var
    init: Settled
    dim: int | None
    leaf: str

    def start(self, devices: Devices) -> _Carried:
        return self.leave(devices, self.init)

    def enter(self, carried: _Carried) -> Value:
        assert not isinstance(carried, jax.Array)
        return carried

    def leave(self, devices: Devices, value: Value) -> _Carried:
        x = devices.as_dim(value, self.dim)
        return devices.value(x, self.dim, self.out.aval.shape, self.init)

    def finish(self, interp: Interpreter, carried: _Carried, kind: _SumKind) -> Value:
        return self.enter(carried)


class _RunningSum(_Carry):
    """A carry that only collects: a device's own sum `[n, d]`, reduced after it; [Note: reductions wait]."""

    def start(self, devices: Devices) -> _Carried:
        return jnp.zeros(self.out.aval.shape, self.out.aval.dtype)

    def enter(self, carried: _Carried) -> Value:
        assert isinstance(carried, jax.Array)
        return Unreduced(carried, None, carried.dtype, collecting=True)

    def leave(self, devices: Devices, value: Value) -> _Carried:
        return value.x.astype(self.out.aval.dtype)

    def finish(self, interp: Interpreter, carried: _Carried, kind: _SumKind) -> Value:
        """The sum of what the turns added, `[n/k, d]` or `[n, d]`, and of what the loop began with."""
        assert isinstance(carried, jax.Array)
        scale, coded = kind
        assert scale is not None
        devices = interp.devices
        waiting = Unreduced(carried, scale, carried.dtype, self.leaf, dim=self.dim, coded=coded)
        if interp.hold:
            before = interp.as_contribution(self.init, scale)
            return dataclasses.replace(waiting, x=carried + before)
        in_microbatch = interp.microbatch is not None
        total = devices.scatter(waiting) if in_microbatch else devices.settle(waiting)
        assert not isinstance(total, CodedValue)
        before = devices.as_dim(self.init, self.dim)
        if waits(total):  # over replicas, which all have `before`
            before = before / jnp.asarray(devices.num_replicas, before.dtype)
        return dataclasses.replace(total, x=total.x + before)
