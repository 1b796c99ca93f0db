"""Calls, branches and loops: bodies are traced by JAX's own functions, with shards going in and out."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jzero.sharding.analysis import _frames
from jzero.sharding.analysis._frames import Frame, split
from jzero.sharding.run import _prefetch
from jzero.sharding.run._interpret import Handler, Interpreter
from jzero.sharding.run._values import FullValue, ShardValue, Unreduced, Value, waits
from jzero.tracing import _jaxpr


def _call(
    interp: Interpreter, frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Value]
) -> list[Value]:
    (child,) = frame.children[index]
    return interp.run(child, ins)


def _remat(
    interp: Interpreter, frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Value]
) -> list[Value]:
    if not _jaxpr.is_rematted(eqn):
        return _call(interp, frame, index, eqn, ins)
    # One gather serves recomputation and backward pass. Activations are held back until the backward
    # pass arrives, as JAX does; shards are not, so that gathers can start early (they wait for the
    # pass's token instead).
    if _jaxpr.prevents_cse(eqn):
        held = [
            i for i, (atom, value) in enumerate(zip(eqn.invars, ins, strict=True))
            if isinstance(value, FullValue) and frame.varies(atom)
        ]  # fmt: skip
        if held:
            arrays = lax.optimization_barrier([ins[i].x for i in held])
            for i, x in zip(held, arrays, strict=True):
                ins[i] = FullValue(x, ins[i].name)
    devices = interp.devices
    if not interp.keep_gathered:
        interp.devices = dataclasses.replace(devices, scope=object())
    with jax.named_scope("checkpoint"):
        outs = _call(interp, frame, index, eqn, ins)
    interp.devices = devices
    return outs


def _cond(
    interp: Interpreter, frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Value]
) -> list[Value]:
    choice, *operands = ins
    divergent = bool(frame.reads(eqn)[0])
    if divergent:
        operands = [
            FullValue(interp.full(frame, atom, value), value.name)
            for atom, value in zip(eqn.invars[1:], operands, strict=True)
        ]
    settled = [
        interp.settle(frame, atom, v) for atom, v in zip(eqn.invars[1:], operands, strict=True)
    ]
    dims = [None if divergent else interp.carried_dim(frame, out, settled) for out in eqn.outvars]
    pending = [divergent and _frames.is_unreduced(frame, out) for out in eqn.outvars]

    def branch(child: Frame) -> Callable[[list[Any]], list[Any]]:
        def body(arrays: list[Any]) -> list[Any]:
            inner = interp.inside(divergent)
            values = [_like(v)(x) for v, x in zip(settled, arrays, strict=True)]
            outs = inner.run(child, values)
            return [
                value.x.astype(out.aval.dtype)
                if wait and isinstance(value, Unreduced)
                else inner.as_dim(child, atom, value, dim)
                for atom, value, dim, wait, out in zip(
                    child.jaxpr.outvars, outs, dims, pending, eqn.outvars, strict=True
                )
            ]

        return body

    arrays = lax.switch(
        interp.full(frame, eqn.invars[0], choice).astype(jnp.int32),
        [branch(child) for child in frame.children[index]],
        [value.x for value in settled],
    )
    return [
        Unreduced(x, 1.0, x.dtype) if wait else interp.devices.value(x, dim, out.aval.shape)
        for x, dim, wait, out in zip(arrays, dims, pending, eqn.outvars, strict=True)
    ]


def _scan(
    interp: Interpreter, frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Value]
) -> list[Value]:
    scan, (child,) = _jaxpr.scan_parts(eqn), frame.children[index]
    differentiated = frame.pass_of(eqn) is not None
    consts, init, xs = split(ins, scan.num_consts, scan.num_carry)
    const_atoms, init_atoms, xs_atoms = split(eqn.invars, scan.num_consts, scan.num_carry)
    consts = _loop_consts(interp, frame, child, const_atoms, consts, differentiated)
    carry_out, ys_out = split(eqn.outvars, scan.num_carry)
    sums = (
        _frames.running_sums(child, scan.num_consts, scan.num_carry)
        if (differentiated or interp.reduce_once) and interp.devices.num > 1
        else frozenset()
    )
    init = [interp.settle(frame, a, v) for a, v in zip(init_atoms, init, strict=True)]
    dims = [interp.carried_dim(frame, out, [v]) for out, v in zip(carry_out, init, strict=True)]
    starts = [
        jnp.zeros(atom.aval.shape, atom.aval.dtype) if i in sums
        else interp.as_dim(frame, atom, value, dim)
        for i, (atom, value, dim) in enumerate(zip(init_atoms, init, dims, strict=True))
    ]  # fmt: skip
    _, _, body_xs = split(child.jaxpr.invars, scan.num_consts, scan.num_carry)
    keep = interp.keep_gathered and differentiated
    slices = [
        _scanned(interp, child, var, interp.settle(frame, atom, value), keep)
        for var, atom, value in zip(body_xs, xs_atoms, xs, strict=True)
    ]
    y_forms: list[Callable[[Any], Value]] = []
    forwarded: dict[int, int] = {}
    scales: dict[int, float] = {}

    def body(carry: list[Any], arrays: list[Any]) -> tuple[list[Any], list[Any]]:
        inner = interp.inside()
        carried = [
            Unreduced(x, None, x.dtype, collecting=True)
            if i in sums
            else interp.devices.value(x, dims[i], carry_out[i].aval.shape, init[i].name)
            for i, x in enumerate(carry)
        ]
        sliced = [_like(v, -1)(x) for v, x in zip(slices, arrays, strict=True)]
        outs = inner.run(child, [*consts, *carried, *sliced])
        carry_outs, y_outs = split(outs, scan.num_carry)
        carry_atoms, y_atoms = split(child.jaxpr.outvars, scan.num_carry)
        scales.update((i, carry_outs[i].scale) for i in sums)
        new_carry = [
            value.x.astype(carry[i].dtype)
            if i in sums
            else inner.as_dim(child, atom, value, dims[i])
            for i, (atom, value) in enumerate(zip(carry_atoms, carry_outs, strict=True))
        ]
        ys = inner.hand_out(child, y_atoms, y_outs)
        # A residual that is a slice again is no new stack.
        forwarded.update({j: i for j, y in enumerate(ys) for i, x in enumerate(sliced) if y is x})
        made = [y for j, y in enumerate(ys) if j not in forwarded]
        y_forms[:] = [_like(v, 1) for v in made]
        return new_carry, [value.x for value in made]

    arrays = [value.x for value in slices]
    loop = functools.partial(lax.scan, unroll=scan.unroll)
    # A loop that is part of one pass: one that holds whole passes would keep what it gathered for the
    # next turn's forward pass alive through all of this turn.
    one_pass = differentiated and not interp.keep_gathered and not interp.devices.divergent
    gathers = any(isinstance(value, ShardValue) for value in slices)
    if one_pass and gathers and scan.length > 1 and scan.unroll == 1:
        loop = functools.partial(_prefetch.scan, queue=interp.devices.queue)
    carry, ys = loop(body, starts, arrays, length=scan.length, reverse=scan.reverse)
    outs: list[Value] = []
    for i, x in enumerate(carry):
        if i in sums:
            leaf = interp.links.leaf_of(frame, carry_out[i])
            if interp.hold:
                before = interp.as_contribution(init[i], scales[i])
                outs.append(Unreduced(x + before, scales[i], x.dtype, leaf))
                continue
            waiting = Unreduced(x, scales[i], x.dtype, leaf)
            in_microbatch = interp.microbatch is not None
            reduce = interp.devices.scatter if in_microbatch else interp.devices.settle
            total = reduce(waiting, dims[i])
            before = interp.as_dim(frame, init_atoms[i], init[i], dims[i])
            if waits(total):  # over replicas, which all have `before`
                before = before / jnp.asarray(interp.devices.num_replicas, before.dtype)
            outs.append(dataclasses.replace(total, x=total.x + before))
        else:
            outs.append(interp.devices.value(x, dims[i], carry_out[i].aval.shape, init[i].name))
    made = iter([form(y) for form, y in zip(y_forms, ys, strict=True)])
    return outs + [
        slices[forwarded[j]] if j in forwarded else next(made) for j in range(len(ys_out))
    ]


def _while(
    interp: Interpreter, frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Value]
) -> list[Value]:
    loop, (cond, body) = _jaxpr.while_parts(eqn), frame.children[index]
    divergent = any(cond.out_varying)
    differentiated = divergent or frame.pass_of(eqn) is not None
    cond_atoms, body_atoms, init_atoms = split(
        eqn.invars, loop.num_cond_consts, loop.num_body_consts
    )
    cond_ins, body_ins, init = split(ins, loop.num_cond_consts, loop.num_body_consts)
    cond_ins = _loop_consts(interp, frame, cond, cond_atoms, cond_ins, True)
    body_ins = _loop_consts(interp, frame, body, body_atoms, body_ins, differentiated)
    init = [interp.settle(frame, a, v) for a, v in zip(init_atoms, init, strict=True)]
    again_atom = cond.jaxpr.outvars[0]
    several = bool(again_atom.aval.ndim)  # A vmapped loop: each element stops by itself.
    dims = [
        None if divergent or several else interp.carried_dim(frame, out, [value])
        for out, value in zip(eqn.outvars, init, strict=True)
    ]

    def wrap(arrays: list[Any]) -> list[Value]:
        return [
            interp.devices.value(x, dim, out.aval.shape)
            for x, dim, out in zip(arrays, dims, eqn.outvars, strict=True)
        ]

    def run(child: Frame, consts: list[Value], carry: list[Any]) -> tuple[Interpreter, list[Value]]:
        inner = interp.inside(divergent)
        return inner, inner.run(child, [*consts, *wrap(carry)])

    def again(carry: list[Any]) -> Any:
        inner, (value,) = run(cond, cond_ins, carry)
        return inner.full(cond, again_atom, value)

    def keep_going(carry: list[Any]) -> Any:
        return again(carry).any() if several else again(carry)

    def step(carry: list[Any]) -> list[Any]:
        inner, outs = run(body, body_ins, carry)
        new = [
            inner.as_dim(body, atom, value, dim)
            for atom, value, dim in zip(body.jaxpr.outvars, outs, dims, strict=True)
        ]
        if not several:
            return new
        goes_on = again(carry)
        return [
            jnp.where(lax.expand_dims(goes_on, range(goes_on.ndim, x.ndim)), x, old)
            for x, old in zip(new, carry, strict=True)
        ]

    starts = [interp.as_dim(frame, *args) for args in zip(init_atoms, init, dims, strict=True)]
    return wrap(lax.while_loop(keep_going, step, starts))


def _loop_consts(
    interp: Interpreter, frame: Frame, child: Frame, atoms: list[_jaxpr.Atom],
    consts: list[Value], differentiated: bool,
) -> list[Value]:  # fmt: skip
    """What a loop closes over: gathered before it if every iteration is part of one pass.

    A time loop would else gather its weights at every time step. A loop *of* train steps or microbatches
    holds whole passes, and gathers inside them, so that no more than a pass needs is alive.
    """
    settled = [interp.settle(frame, a, v) for a, v in zip(atoms, consts, strict=True)]
    return [
        interp.gathered(child, var, value) if differentiated and var in child.needs_full else value
        for var, value in zip(child.jaxpr.invars, settled, strict=False)
    ]


def _scanned(
    interp: Interpreter, child: Frame, var: _jaxpr.Var, value: FullValue | ShardValue, keep: bool
) -> FullValue | ShardValue:
    """A value a scan takes slices of: gathered whole if it is sharded along the looped dim, or kept."""
    if isinstance(value, ShardValue) and (value.dim == 0 or (keep and var in child.needs_full)):
        return interp.gathered(child, var, value)
    return value


def _like(value: Value, offset: int = 0) -> Callable[[Any], Value]:
    """Wraps an array in the layout and name of `value`, `dim` moved by `offset`."""
    if isinstance(value, Unreduced):
        form = dataclasses.replace(value, x=None)
        if form.dim is not None:
            form.dim += offset
        return lambda x: dataclasses.replace(form, x=x)
    name = value.name  # Not the value itself: its tracer must not outlive the loop's trace.
    if isinstance(value, FullValue):
        return lambda x: FullValue(x, name)
    dim, size, axes = value.dim + offset, value.size, value.axes
    return lambda x: ShardValue(x, dim, size, axes, name)


CONTROL: dict[str, Handler] = {
    **dict.fromkeys(_jaxpr.CALLS, _call),
    "remat2": _remat,
    "checkpoint": _remat,
    "cond": _cond,
    "scan": _scan,
    "while": _while,
}
