"""Ordinary equations, reductions, and the step's own collectives: a handler for each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jzero.sharding.analysis import _frames, _rules
from jzero.sharding.analysis._frames import Frame
from jzero.sharding.run import _collectives
from jzero.sharding.run._interpret import Handler, Interpreter
from jzero.sharding.run._values import FullValue, ShardValue, Unreduced, Value, waits
from jzero.tracing import _jaxpr


def apply(
    interp: Interpreter, frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Value]
) -> list[Value]:
    """Runs an equation: pending if linear, on shards if its rule allows, else on whole values."""
    if _casts_to_itself(eqn, ins[0] if ins else None):
        return ins
    pending = _apply_linear(interp, eqn, ins)
    if pending is not None:
        return [pending]
    settled = [interp.settle(frame, a, v) for a, v in zip(eqn.invars, ins, strict=True)]
    rule = _rules.rule_for(eqn)
    if rule is not None and not any(frame.varies(out) for out in eqn.outvars):
        known = _known_view(interp, eqn, rule, settled)
        if known is not None and known[1] in known[0].views:
            return [known[0].views[known[1]]]
        outs = _apply_on_shards(interp, frame, eqn, rule, settled)
        if outs is not None:
            name = next((v.name for v in settled if isinstance(v, ShardValue)), "")
            outs = [dataclasses.replace(out, name=name) for out in outs]
            if known is not None and isinstance(outs[0], ShardValue):
                known[0].views[known[1]] = outs[0]
            return outs
    whole = [interp.devices.full(value) for value in settled]
    return [FullValue(out) for out in _jaxpr.bind(eqn, *whole)]


def _casts_to_itself(eqn: _jaxpr.Eqn, value: Value | None) -> bool:
    """Whether the equation casts what was cast already, before its gather."""
    if eqn.primitive.name != "convert_element_type" or not isinstance(value, FullValue):
        return False
    new, old = eqn.outvars[0].aval, jnp.asarray(value.x).aval
    return new.dtype == old.dtype and new.weak_type == old.weak_type


def _known_view(
    interp: Interpreter, eqn: _jaxpr.Eqn, rule: _rules.Rule, ins: list[FullValue | ShardValue]
) -> tuple[ShardValue, object] | None:
    """The shard of which the equation makes a view, and the key under which it is remembered."""
    if not (rule.linear and len(ins) == 1 and isinstance(ins[0], ShardValue)):
        return None
    return ins[0], (interp.devices.scope, eqn.primitive.name, str(eqn.params))


def _apply_linear(interp: Interpreter, eqn: _jaxpr.Eqn, ins: list[Value]) -> Unreduced | None:
    """The result before its reduction, if every operand still waits for one and may go on waiting."""
    name = eqn.primitive.name
    scalar_sum = name == "add" and eqn.outvars[0].aval.ndim == 0
    collects = name in ("add", "add_any") and any(
        isinstance(v, Unreduced) and v.collecting for v in ins
    )
    if collects:
        ins = _as_contributions(interp, ins)
    if not (scalar_sum or collects or _rules.is_linear(eqn)):
        return None
    # Python's sum() starts from a literal 0, which adds nothing to wait for.
    zeros = [scalar_sum and _jaxpr.is_literal(a) and a.val == 0 for a in eqn.invars]
    terms = [value for value, zero in zip(ins, zeros, strict=True) if not zero]
    waiting = [v for v in terms if waits(v)]
    if not waiting or len(waiting) < len(terms):
        return None
    first, *rest = waiting
    if first.dim is not None and name not in ("convert_element_type", "add", "add_any"):
        return None
    if scalar_sum and not rest:
        return first
    if name == "convert_element_type":
        return dataclasses.replace(first, dtype=eqn.params["new_dtype"])
    scales = {value.scale for value in waiting} - {None}
    if len(scales) > 1 or any((v.dtype, v.dim) != (first.dtype, first.dim) for v in rest):
        return None
    wire = jnp.result_type(*(value.x.dtype for value in waiting))
    xs = [value.x if not rest else value.x.astype(first.dtype) for value in waiting]
    (x,) = _jaxpr.bind(eqn, *xs)
    scale = scales.pop() if scales else None
    made = max(value.made for value in waiting)
    return dataclasses.replace(first, x=x.astype(wire), scale=scale, collecting=collects, made=made)


def _as_contributions(interp: Interpreter, ins: list[Value]) -> list[Value]:
    """Terms of a running sum: what was reduced already is shared out to the devices again."""
    scales = [v.scale for v in ins if isinstance(v, Unreduced) and v.scale is not None]
    scale = scales[0] if scales else 1.0

    def contribution(value: Value) -> Value:
        if waits(value) and value.dim is None:
            return value
        x = interp.as_contribution(value, scale)
        return Unreduced(x, scale, x.dtype)

    return [contribution(value) for value in ins]


def _apply_on_shards(
    interp: Interpreter, frame: Frame, eqn: _jaxpr.Eqn, rule: _rules.Rule,
    ins: list[FullValue | ShardValue],
) -> list[Value] | None:  # fmt: skip
    """The result computed from shards, or None if the operands must be gathered."""
    maps = rule.dims(eqn)
    axes = _output_axes(interp, frame, eqn, ins)
    reduced = _apply_reduction(interp, eqn, rule, maps, ins)
    if reduced is not None:
        return [reduced]
    dim = _output_dim(interp, frame, eqn, maps, ins)
    if dim is None:
        return None
    size, args = eqn.outvars[0].aval.shape[dim], []
    for atom, value, dims in zip(eqn.invars, ins, maps, strict=True):
        # Dims of size 1 that the operation broadcasts stay as they are.
        own = dims.index(dim) if dim in dims else None
        if own is not None and not interp.devices.line_up(atom.aval.shape[own], size):
            return None
        args.append((value, own))
    arrays = [
        interp.devices.full(value) if own is None else interp.devices.shard(value, own, axes)
        for value, own in args
    ]
    local = rule.local(eqn, dim, interp.devices.shard_size(size, axes))
    outs = _jaxpr.bind(eqn, *arrays, **local)
    return [ShardValue(out, dim, size, axes, view_of=_view(eqn, rule, ins)) for out in outs]


def _output_axes(
    interp: Interpreter, frame: Frame, eqn: _jaxpr.Eqn, ins: list[FullValue | ShardValue]
) -> tuple[str, ...]:
    """Those of parameters for what a pass will gather, of the gradients for all the rest."""
    found = {value.axes for value in ins if isinstance(value, ShardValue)}
    gathered = any(out in frame.needs_full for out in eqn.outvars)
    return found.pop() if len(found) == 1 and gathered else interp.devices.shard_axes


def _view(
    eqn: _jaxpr.Eqn, rule: _rules.Rule, ins: list[FullValue | ShardValue]
) -> tuple[ShardValue, Callable[[Any], Any]] | None:
    """The operand, if the equation only rearranges it: a table and its transpose share a gather."""
    first, (operand, *rest) = eqn.invars[0], ins
    same_dtype = first.aval.dtype == eqn.outvars[0].aval.dtype
    if rest or not (rule.linear and same_dtype and isinstance(operand, ShardValue)):
        return None
    return operand, lambda whole: _jaxpr.bind(eqn, whole)[0]


def _apply_reduction(
    interp: Interpreter, eqn: _jaxpr.Eqn, rule: _rules.Rule, maps: _rules.DimMaps,
    ins: list[FullValue | ShardValue],
) -> Value | None:  # fmt: skip
    """Sum, maximum or minimum over a sharded dim: local first, then over the devices."""
    if rule.reduces is None or not isinstance(ins[0], ShardValue):
        return None
    if maps[0][ins[0].dim] is not None:
        return None
    devices, axes = interp.devices, ins[0].axes
    (local,) = _jaxpr.bind(eqn, devices.without_padding(ins[0], rule.reduces))
    if rule.reduces == "sum" and jnp.issubdtype(local.dtype, jnp.inexact):
        # Devices beside these axes hold the same, and a reduction sums over all.
        return Unreduced(local, devices.count(axes) / devices.num, local.dtype)
    return FullValue(_collectives.all_reduce(local, axes, rule.reduces))


def _output_dim(
    interp: Interpreter, frame: Frame, eqn: _jaxpr.Eqn, maps: _rules.DimMaps,
    ins: list[FullValue | ShardValue],
) -> int | None:  # fmt: skip
    """The dim along which the output is computed in shards; None for whole."""
    out = eqn.outvars[0]
    needs_full = any(out in frame.needs_full for out in eqn.outvars)
    wanted = interp.dim_of(frame, out)
    shards = [(value, dims) for value, dims in zip(ins, maps, strict=True)
              if isinstance(value, ShardValue)]  # fmt: skip
    if not shards:
        comes_from = eqn.primitive.name == "broadcast_in_dim" or any(
            wanted in dims for dims in maps
        )
        return wanted if comes_from and not needs_full else None
    survivors = [dims[value.dim] for value, dims in shards if dims[value.dim] is not None]
    if not survivors:
        return None
    sharded_bytes = max(
        _rules.size_in_bytes(atom.aval)
        for atom, value in zip(eqn.invars, ins, strict=True)
        if isinstance(value, ShardValue)
    )
    # Gather before growing: a bias is gathered, not its broadcast over the batch; bf16, not its upcast.
    if needs_full and _rules.size_in_bytes(out.aval) > sharded_bytes:
        return None
    return wanted if wanted in survivors else survivors[0]


# Reductions and the step's own collectives.


def _identity(
    interp: Interpreter, frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Value]
) -> list[Value]:
    return ins


def _constrain(
    interp: Interpreter, frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Value]
) -> list[Value]:
    """A sharding constraint speaks to XLA of the automatic axes, of which a shard has the same dims."""
    if not interp.automatic:
        return ins
    (value,) = ins
    if isinstance(value, Unreduced) and value.reduced is not None:
        value = value.reduced
    x = lax.with_sharding_constraint(value.x, _jaxpr.constraint_spec(eqn, interp.automatic))
    if isinstance(value, ShardValue):
        return [ShardValue(x, value.dim, value.size, value.axes, value.name)]
    return [dataclasses.replace(value, x=x)]


def _psum(
    interp: Interpreter, frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Value]
) -> list[Value]:
    everywhere = set(_frames.axes_of(eqn)) == set(interp.axis_names)
    if not everywhere or eqn.params.get("axis_index_groups"):
        return _collective(interp, frame, index, eqn, ins)
    num = interp.devices.num * interp.microbatches
    outs: list[Value] = []
    operands = zip(eqn.invars, eqn.outvars, frame.reads(eqn), ins, strict=True)
    for atom, out, axes, value in operands:
        x = interp.full(frame, atom, value)
        if axes:
            gradient = frame.pass_of(eqn) == "backward" or atom in frame.local_gradients
            wire = _on_the_wire(interp, x) if gradient else x
            outs.append(Unreduced(wire, 1.0, x.dtype, interp.links.leaf_of(frame, out)))
        else:  # The sum of what all devices have in common.
            outs.append(FullValue(x * jnp.asarray(num, x.dtype)))
    return outs


def _on_the_wire(interp: Interpreter, x: Any) -> Any:
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    return x.astype(interp.reduce_dtype) if interp.reduce_dtype is not None and floating else x


def _collective(
    interp: Interpreter, frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Value]
) -> list[Value]:
    names: dict[str, Any] = {}
    for param in ("axes", "axis_name"):
        if param in eqn.params:
            axes = tuple(axis for name in _frames.axes_of(eqn) for axis in interp.axis_names[name])
            names[param] = axes
    if eqn.primitive.name == "axis_index":
        return [FullValue(_axis_index(interp, names["axis_name"]))]
    whole = [interp.full(frame, a, v) for a, v in zip(eqn.invars, ins, strict=True)]
    if eqn.primitive.name in _frames.REDUCTIONS:
        return [FullValue(lax.psum(x, names["axes"])) for x in whole]
    if eqn.primitive.name in ("pmax", "pmin") and not eqn.params.get("axis_index_groups"):
        kind = eqn.primitive.name[1:]
        return [FullValue(_collectives.all_reduce(x, names["axes"], kind)) for x in whole]
    return [FullValue(out) for out in _jaxpr.bind(eqn, *whole, **names)]


def _axis_index(interp: Interpreter, axes: tuple[str, ...]) -> jax.Array:
    index = lax.axis_index(axes)
    if interp.microbatch is None or axes[-1] != interp.devices.axes[-1]:
        return index
    # Microbatches lie along the last axis.
    return index * interp.microbatches + interp.microbatch.astype(index.dtype)


ORDINARY: dict[str, Handler] = {
    **dict.fromkeys(_frames.COLLECTIVES, _collective),
    **dict.fromkeys(_frames.REDUCTIONS, _psum),
    **dict.fromkeys(_rules.IDENTITIES, _identity),
    "sharding_constraint": _constrain,
}
