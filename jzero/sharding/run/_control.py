# SPDX-License-Identifier: Apache-2.0
"""Calls and branches: bodies are traced by JAX's own functions, with values going in and out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jzero.sharding.analysis import _frames
from jzero.sharding.analysis._frames import Frame
from jzero.sharding.run import _owners
from jzero.sharding.run._interpret import EqnHandler, Interpreter
from jzero.sharding.run._loops import run_scan, run_while
from jzero.sharding.run._values import FullValue, Settled, Unreduced, Value
from jzero.tracing import _jaxpr


def _call(
    interp: Interpreter, frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Value]
) -> list[Value]:
    owners = interp.owners.get(eqn.outvars[0]) if eqn.outvars else None
    if owners is not None and _owners.can_run(interp):
        values = dict(zip(map(_jaxpr.variable, eqn.invars), ins, strict=True))
        found = _owners.run(interp, frame, owners, values)
        return [found[out] for out in eqn.outvars]
    (child,) = frame.children[index]
    return interp.run(child, ins)


def _remat(
    interp: Interpreter, frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Value]
) -> list[Value]:
    """A checkpoint's body; in a backward pass one gather serves recomputation and derivatives."""
    if not _jaxpr.is_rematted(eqn):
        return _call(interp, frame, index, eqn, ins)
    if _jaxpr.prevents_cse(eqn):
        ins = _held_back(ins, [bool(frame.varies(atom)) for atom in eqn.invars])
    devices = interp.devices
    if not interp.keep_gathered:
        interp.devices = dataclasses.replace(devices, scope=object())
    with jax.named_scope("checkpoint"):
        outs = _call(interp, frame, index, eqn, ins)
    interp.devices = devices
    return outs


def _held_back(ins: list[Value], are_held: Sequence[bool]) -> list[Value]:
    """Activations wait for each other, and so for the backward pass, as JAX has it.

    Shards do not, so that gathers can start early: they have [Note: tokens of a pass] instead.
    """
    held = {
        i: value for i, (value, is_held) in enumerate(zip(ins, are_held, strict=True))
        if isinstance(value, FullValue) and is_held
    }  # fmt: skip
    if not held:
        return ins
    arrays = lax.optimization_barrier([value.x for value in held.values()])
    names = [value.name for value in held.values()]
    waiting = dict(zip(held, map(FullValue, arrays, names), strict=True))
    return [waiting.get(i, value) for i, value in enumerate(ins)]


def _barrier(
    interp: Interpreter, frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Value]
) -> list[Value]:
    """A barrier of the step's own, of `jax.checkpoint` with `jax_remat3`, or of `_sent.fenced`.

    What is alone in one waits for nothing, and is a value of its own behind it: also rows that are alike on
    all devices. With others parameters do not wait, as for a checkpoint.
    """
    return _held_back(ins, [len(ins) == 1 or bool(frame.varies(x)) for x in eqn.invars])


def _cond(
    interp: Interpreter, frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Value]
) -> list[Value]:
    """Branches return `[n, d]` or `[n/k, d]` alike, each in the layout that is wanted of it.

    Where devices choose for themselves, no collective may run inside: operands are gathered before, and
    what a branch would reduce is reduced after, with what the other devices have of it.
    """
    devices, divergent = interp.devices, bool(frame.reads(eqn)[0])
    choice, *operands = ins
    if divergent:
        operands = [FullValue(devices.full(value), value.name) for value in operands]
    settled = [devices.settle(value) for value in operands]
    dims = [None if divergent else interp.carried_dim(frame, out, settled) for out in eqn.outvars]
    pending = [divergent and _frames.is_unreduced(frame, out) for out in eqn.outvars]

    def branch(child: Frame) -> Callable[[list[Settled]], list[jax.Array]]:
        def body(values: list[Settled]) -> list[jax.Array]:
            inner = interp.inside(divergent, one_pass=interp.of_one_pass(frame, eqn))
            outs = inner.run(child, values)
            return [
                value.x.astype(out.aval.dtype)
                if wait and isinstance(value, Unreduced)
                else inner.devices.as_dim(value, dim)
                for value, dim, wait, out in zip(outs, dims, pending, eqn.outvars, strict=True)
            ]

        return body

    branches = [branch(child) for child in frame.children[index]]
    arrays = lax.switch(devices.full(choice).astype(jnp.int32), branches, settled)
    return [
        Unreduced(x, 1.0, x.dtype) if wait else devices.value(x, dim, out.aval.shape)
        for x, dim, wait, out in zip(arrays, dims, pending, eqn.outvars, strict=True)
    ]


CONTROL: dict[str, EqnHandler] = {
    **dict.fromkeys([*_jaxpr.CALLS, "call_hi_primitive"], _call),
    "remat2": _remat,
    "checkpoint": _remat,
    "optimization_barrier": _barrier,
    "cond": _cond,
    "scan": run_scan,
    "while": run_while,
}
