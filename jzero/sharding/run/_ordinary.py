# SPDX-License-Identifier: Apache-2.0
"""Ordinary equations, reductions, and the step's own collectives: a handler for each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jzero.ir import _rules
from jzero.ir._factors import DimMaps, Factor
from jzero.ir._rules import Cost
from jzero.sharding.analysis import _frames
from jzero.sharding.analysis._frames import Frame
from jzero.sharding.analysis._tables import added_dims
from jzero.sharding.plan._layout import Automatic
from jzero.sharding.run import _coded, _collectives, _tables
from jzero.sharding.run._interpret import EqnHandler, Interpreter
from jzero.sharding.run._tables import RowsAdded
from jzero.sharding.run._values import (
    CodedValue,
    FullValue,
    Settled,
    ShardValue,
    Unreduced,
    Value,
    comes_from_codes,
    rows_of,
    waits,
)
from jzero.tracing import _jaxpr


def apply(
    interp: Interpreter, frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Value]
) -> list[Value]:
    """Runs an equation: pending if linear, on shards if its rule allows, else on whole values."""
    if _casts_to_itself(eqn, ins):
        return ins
    pending = _before_reduction(interp, eqn, ins)
    if pending is not None:
        return [pending]
    settled = [interp.devices.settle(value) for value in ins]
    first = settled[0] if settled else None
    if isinstance(first, CodedValue) and not any(frame.varies(out) for out in eqn.outvars):
        indices = map(interp.devices.full, settled[1:])
        view = _coded.view(first, eqn, indices, interp.devices.scope)
        if view is not None:
            return [view]
    outs = _on_shards(interp, frame, eqn, settled)
    if outs is not None:
        return outs
    as_codes = any(frame.varies(out) for out in eqn.outvars)
    whole = [interp.devices.full(value, as_codes) for value in settled]
    return [FullValue(x) for x in _jaxpr.bind(eqn, *whole)]


def _casts_to_itself(eqn: _jaxpr.Eqn, ins: list[Value]) -> bool:
    """Whether the equation casts what was cast already, before its gather."""
    if eqn.primitive.name != "convert_element_type" or not isinstance(ins[0], FullValue):
        return False
    new, old = eqn.outvars[0].aval, jnp.asarray(ins[0].x).aval
    return bool(new.dtype == old.dtype and new.weak_type == old.weak_type)


# --------------------------------------------------------------------------------------------------
# Before a reduction: the sum of f(x) is f of the sum, for each f of `_LINEAR`. [Note: reductions wait]


def _before_reduction(interp: Interpreter, eqn: _jaxpr.Eqn, ins: list[Value]) -> Unreduced | None:
    """The result before its reduction, if every operand still waits for one and may go on waiting."""
    linear = _LINEAR.get(eqn.primitive.name)
    return None if linear is None else linear(interp, eqn, ins)


def _cast(interp: Interpreter, eqn: _jaxpr.Eqn, ins: list[Value]) -> Unreduced | None:
    """`x [n, d]` keeps its dtype; the sum is presented in another."""
    (value,) = ins
    if not waits(value) or not _rules.is_float_cast(eqn):
        return None
    return dataclasses.replace(value, dtype=eqn.params["new_dtype"])


def _rearrange(interp: Interpreter, eqn: _jaxpr.Eqn, ins: list[Value]) -> Unreduced | None:
    """`x [n, d] -> [d, n]`; of a shard the dim would have to move, too."""
    (value,) = ins
    if not waits(value) or value.scattered:
        return None
    return dataclasses.replace(value, x=_jaxpr.bind(eqn, value.x)[0], collecting=False)


def _add_gradients(interp: Interpreter, eqn: _jaxpr.Eqn, ins: list[Value]) -> Unreduced | None:
    """`x [n, d] + y [n, d]`: JAX's AD adds up what there is of a gradient by `add_any`."""
    collects = any(isinstance(value, Unreduced) and value.collecting for value in ins)
    terms = _as_contributions(interp, ins) if collects else ins
    waiting = [value for value in terms if waits(value)]
    if not waiting or len(waiting) < len(terms):
        return None
    return _sum(eqn, waiting, collects)


def _add(interp: Interpreter, eqn: _jaxpr.Eqn, ins: list[Value]) -> Unreduced | None:
    """Sums of losses, which are scalars, and running sums: `add` of others may wait no more."""
    if eqn.outvars[0].aval.ndim == 0:
        # Python's sum() starts from a literal 0, which adds nothing to wait for.
        zeros = [_jaxpr.is_literal(atom) and atom.val == 0 for atom in eqn.invars]
        ins = [value for value, zero in zip(ins, zeros, strict=True) if not zero]
    elif not any(isinstance(value, Unreduced) and value.collecting for value in ins):
        return None
    return _add_gradients(interp, eqn, ins)


def _sum(eqn: _jaxpr.Eqn, waiting: Sequence[Unreduced], collects: bool) -> Unreduced | None:
    """One reduction for all, if they are due alike."""
    first, *rest = waiting
    if not rest:
        return first
    scales = {value.scale for value in waiting} - {None}
    forms = {(v.dtype, v.scattered, v.dim if v.scattered else None) for v in waiting}
    coded = all(
        v.coded for v in waiting if v.scale is not None
    )  # A running sum is what is added to it.
    if len(scales) > 1 or len(forms) > 1:
        return None
    wire = jnp.result_type(*(value.x.dtype for value in waiting))
    (x,) = _jaxpr.bind(eqn, *(value.x.astype(first.dtype) for value in waiting))
    scale, made = next(iter(scales), None), max(value.made for value in waiting)
    x, known = x.astype(wire), all(rows_of(value) for value in waiting)
    added = [each._replace(table=x) for value in waiting for each in value.added if known]
    return dataclasses.replace(
        first, x=x, scale=scale, collecting=collects, coded=coded, made=made, added=(*added,)
    )


def _as_contributions(interp: Interpreter, ins: list[Value]) -> list[Value]:
    """Terms of a running sum, `[n, d]`: what was reduced already is shared out to the devices again."""
    scales = [v.scale for v in ins if isinstance(v, Unreduced) and v.scale is not None]
    scale = scales[0] if scales else 1.0

    def contribution(value: Value) -> Value:
        if waits(value) and not value.scattered:
            return value
        x = interp.as_contribution(value, scale)
        return Unreduced(x, scale, x.dtype)

    return [contribution(value) for value in ins]


_LINEAR: dict[str, Callable[[Interpreter, _jaxpr.Eqn, list[Value]], Unreduced | None]] = {
    "convert_element_type": _cast,
    "transpose": _rearrange,
    "reshape": _rearrange,
    "squeeze": _rearrange,
    "add_any": _add_gradients,
    "add": _add,
}


# --------------------------------------------------------------------------------------------------
# On shards.


def _on_shards(
    interp: Interpreter, frame: Frame, eqn: _jaxpr.Eqn, ins: list[Settled]
) -> list[Value] | None:
    """The results computed from shards, or None if the operands must be gathered."""
    if not _rules.keeps_dims(eqn) or any(frame.varies(out) for out in eqn.outvars):
        return None
    ins = [interp.devices.own_part(x) if isinstance(x, CodedValue) else x for x in ins]
    if not (_rules.costs(eqn, *_WHOLE_VIEWS) and isinstance(ins[0], ShardValue)):
        return _by_rule(interp, frame, eqn, ins)
    # A view that was made before is the same one, and its gather, too.
    views, key = ins[0].views, (interp.devices.scope, eqn.primitive.name, str(eqn.params))
    if key in views:
        return [views[key]]
    outs = _by_rule(interp, frame, eqn, ins)
    if outs is not None and isinstance(outs[0], ShardValue):
        views[key] = outs[0]
    return outs


def _by_rule(
    interp: Interpreter, frame: Frame, eqn: _jaxpr.Eqn, ins: list[Settled]
) -> list[Value] | None:
    """`[n/k, d], [d] -> [n/k, d]`: what the rule makes of shards that line up; of others, None."""
    factors, devices = _rules.factors_of(eqn), interp.devices
    maps = _rules.dim_maps(eqn, factors)
    name = next((value.name for value in ins if isinstance(value, ShardValue)), "")
    reduced = _reduction(interp, eqn, factors, ins)
    if reduced is not None:
        return [dataclasses.replace(reduced, name=name)]
    dim = _output_dim(interp, frame, eqn, maps, ins)
    if dim is None:
        return None
    # Dims of size 1 that the operation broadcasts stay as they are.
    factor = next(each for each in factors if each.outs[0] == dim)
    own = factor.ins
    size = eqn.outvars[0].aval.shape[dim]
    sizes = [a.aval.shape[d] for a, d in zip(eqn.invars, own, strict=True) if d is not None]
    if not all(devices.line_up(other, size) for other in sizes):
        return None
    axes = _output_axes(interp, frame, eqn, ins)
    arrays = [
        devices.full(value) if d is None else devices.shard(value, d, axes)
        for value, d in zip(ins, own, strict=True)
    ]
    local = factor.local(devices.shard_size(size, axes), devices.count(axes))
    outs = _jaxpr.bind(eqn, *arrays, **local)
    first, views = ins[0], _rules.costs(eqn, *_WHOLE_VIEWS, Cost.PART)
    coded = views and isinstance(first, ShardValue) and first.coded
    automatic = _automatic(interp, eqn, maps, ins, dim)
    return [
        ShardValue(x, dim, size, axes, name, coded, automatic, view_of=_view(eqn, ins, i))
        for i, x in enumerate(outs)
    ]


def _automatic(
    interp: Interpreter, eqn: _jaxpr.Eqn, maps: DimMaps, ins: list[Settled], dim: int
) -> Automatic:
    """How XLA shards a result along other dims than `dim`: as the first operand of which it is known.

    A dim of another size has the same parts if they divide both: as many elements stand before it.
    """
    shape = eqn.outvars[0].aval.shape
    for value, dims in zip(ins, maps, strict=True):
        found = interp.devices.automatic(value) if isinstance(value, ShardValue) else ()
        to = {dims[d]: axes for d, axes in enumerate(found) if axes and dims[d] not in (None, dim)}
        sizes = interp.devices.others
        kept = {
            d: axes
            for d, axes in to.items()
            if d is not None and shape[d] % math.prod(sizes[axis] for axis in axes) == 0
        }
        if kept:
            return tuple(kept.get(d, ()) for d in range(max(kept) + 1))
    return ()


def _output_axes(
    interp: Interpreter, frame: Frame, eqn: _jaxpr.Eqn, ins: list[Settled]
) -> tuple[str, ...]:
    """Those of parameters for what a pass will gather, of the gradients for all the rest."""
    found = {value.axes for value in ins if isinstance(value, ShardValue)}
    gathered = any(out in frame.needs_full for out in eqn.outvars)
    return found.pop() if len(found) == 1 and gathered else interp.devices.shard_axes


def _view(
    eqn: _jaxpr.Eqn, ins: list[Settled], index: int
) -> tuple[ShardValue | CodedValue, Callable[[jax.Array], jax.Array]] | None:
    """The operand, if the equation only rearranges it: a table and its transpose share a gather.

    Of what rests in codes casts and slices share it, too: only its codes are gathered then.
    """
    first, (operand, *rest) = eqn.invars[0], ins
    same = _rules.costs(eqn, *_WHOLE_VIEWS) and first.aval.dtype == eqn.outvars[0].aval.dtype
    same |= _rules.costs(eqn, Cost.PART, Cost.CAST) and comes_from_codes(operand)
    if rest or not (same and isinstance(operand, ShardValue)):
        return None
    return operand, lambda whole: _jaxpr.bind(eqn, whole)[index]


_WHOLE_VIEWS = (Cost.VIEW, Cost.CAST)


def _reduction(
    interp: Interpreter,
    eqn: _jaxpr.Eqn,
    factors: Sequence[Factor],
    ins: list[Settled],
) -> FullValue | Unreduced | None:
    """Sum, maximum or minimum over a sharded dim, `[n/k, d] -> [d]`: local first, then over the devices."""
    if not isinstance(value := ins[0], ShardValue):
        return None
    reduces = next((f.reduces for f in factors if f.ins[0] == value.dim), None)
    if reduces not in _rules.BY_DEVICES:
        return None
    devices, axes = interp.devices, value.axes
    (local,) = _jaxpr.bind(eqn, devices.without_padding(value, reduces))
    if reduces == "sum" and jnp.issubdtype(local.dtype, jnp.inexact):
        # Devices beside these axes hold the same, and a reduction sums over all.
        return Unreduced(local, devices.count(axes) / devices.num, local.dtype)
    return FullValue(devices.all_reduce(local, axes, reduces))


def _output_dim(
    interp: Interpreter, frame: Frame, eqn: _jaxpr.Eqn, maps: DimMaps, ins: list[Settled]
) -> int | None:
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
    value = interp.devices.own_part(value) if isinstance(value, CodedValue) else value
    spec = _jaxpr.constraint_spec(eqn, interp.automatic)
    x = lax.with_sharding_constraint(value.x, spec)
    if isinstance(value, ShardValue):
        return [dataclasses.replace(value, x=x, view_of=None, gathered={}, views={})]
    return [dataclasses.replace(value, x=x)]


def psum(
    interp: Interpreter, frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Value]
) -> list[Value]:
    """A sum over the devices, which waits; [Note: reductions wait]."""
    if not is_over_all(interp, eqn):
        return _collective(interp, frame, index, eqn, ins)
    num = interp.devices.num * interp.microbatches
    outs: list[Value] = []
    operands = zip(eqn.invars, eqn.outvars, frame.reads(eqn), ins, strict=True)
    for atom, out, axes, value in operands:
        x = interp.devices.full(value)
        if axes:
            wire = x.astype(wire_dtype(interp, frame, eqn, atom))
            leaf, coded = interp.links.leaf_of(frame, out), is_coded(interp, frame, eqn, atom, out)
            rows, dim = rows_of(value), interp.dim_of(frame, out)
            added = tuple(
                each._replace(table=wire) for each in rows
                if dim is not None and interp.devices.adds_rows(each, dim, leaf, coded)
            )  # fmt: skip
            outs.append(Unreduced(wire, 1.0, x.dtype, leaf, coded=coded, added=added))
        else:  # The sum of what all devices have in common.
            outs.append(FullValue(x * jnp.asarray(num, x.dtype)))
    return outs


def _look_up(
    interp: Interpreter, frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Value]
) -> list[Value]:
    """Rows `[b, d]` of a table; one in shards of columns that nothing else reads is not gathered."""
    table, places = ins
    kept = interp.tables.get((frame, eqn.invars[0]), ()) if frame.varies(eqn.outvars[0]) else ()
    if (
        not isinstance(table, ShardValue)
        or table.dim not in kept
        or not interp.devices.looks_up(table)
    ):
        return apply(interp, frame, index, eqn, ins)
    found = _tables.look_up(
        eqn, table.x, interp.devices.full(places), table.dim, table.axes, table.name
    )
    return [FullValue(found)]


def _add_rows(
    interp: Interpreter, frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Value]
) -> list[Value]:
    """A table of rows `[b, d]` that are added up: of zeros and such rows, it is remembered of which."""
    (out,) = apply(interp, frame, index, eqn, ins)
    _, places, rows = ins
    here = isinstance(places, FullValue) and isinstance(rows, FullValue)
    if here and isinstance(out, FullValue) and added_dims(eqn) and _is_zero(frame, eqn.invars[0]):
        out = FullValue(out.x, out.name, (RowsAdded(out.x, eqn, places.x, rows.x),))
    return [out]


def _is_zero(frame: Frame, atom: _jaxpr.Atom) -> bool:
    if _jaxpr.is_literal(atom):
        return bool(np.all(np.asarray(atom.val) == 0))
    made = frame.makers.get(atom)
    eqn = None if made is None else frame.jaxpr.eqns[made]
    return (
        eqn is not None
        and eqn.primitive.name == "broadcast_in_dim"
        and _is_zero(frame, eqn.invars[0])
    )


def is_over_all(interp: Interpreter, eqn: _jaxpr.Eqn) -> bool:
    """Whether it sums over all devices."""
    everywhere = set(_jaxpr.axes_of(eqn)) == set(interp.axis_names)
    return everywhere and not eqn.params.get("axis_index_groups")


def wire_dtype(
    interp: Interpreter, frame: Frame, eqn: _jaxpr.Eqn, atom: _jaxpr.Atom
) -> jnp.dtype[Any]:
    """In which an operand of a sum over the devices travels: a gradient as `reduce_dtype` says."""
    dtype, chosen = (
        atom.aval.dtype,
        interp.reduce_dtype is not None and is_gradient(frame, eqn, atom),
    )
    chosen = chosen and jnp.issubdtype(dtype, jnp.floating)
    return jnp.dtype(interp.reduce_dtype if chosen else dtype)


def is_coded(
    interp: Interpreter, frame: Frame, eqn: _jaxpr.Eqn, atom: _jaxpr.Atom, out: _jaxpr.Var
) -> bool:
    """Whether an operand of a sum over the devices may travel as codes: a gradient of a leaf that may."""
    leaf = interp.links.leaf_of(frame, out)
    is_own = out in frame.own_gradients and leaf in interp.devices.coded
    return is_own and is_gradient(frame, eqn, atom) and jnp.issubdtype(out.aval.dtype, jnp.floating)


def is_gradient(frame: Frame, eqn: _jaxpr.Eqn, atom: _jaxpr.Atom) -> bool:
    """Whether the operand of a sum over the devices is a gradient."""
    is_local = not _jaxpr.is_literal(atom) and atom in frame.local_gradients
    return frame.pass_of(eqn) == "backward" or is_local


def _collective(
    interp: Interpreter, frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Value]
) -> list[Value]:
    names: dict[str, tuple[str, ...]] = {}
    for param in ("axes", "axis_name"):
        if param in eqn.params:
            axes = tuple(axis for name in _jaxpr.axes_of(eqn) for axis in interp.axis_names[name])
            names[param] = axes
    if eqn.primitive.name == "axis_index":
        return [FullValue(_axis_index(interp, names["axis_name"]))]
    whole = [interp.devices.full(value) for value in ins]
    if eqn.primitive.name in _frames.REDUCTIONS:
        return [FullValue(interp.devices.all_reduce(x, names["axes"])) for x in whole]
    if eqn.primitive.name in ("pmax", "pmin") and not eqn.params.get("axis_index_groups"):
        kind = eqn.primitive.name[1:]
        return [FullValue(interp.devices.all_reduce(x, names["axes"], kind)) for x in whole]
    if _collectives.is_reduction(eqn):

        def scattered(x: jax.Array) -> jax.Array:
            part: jax.Array
            (part,) = _jaxpr.bind(eqn, x, **names)
            return part

        return [FullValue(interp.devices.alone_if_narrow(scattered, x)) for x in whole]
    return [FullValue(out) for out in _jaxpr.bind(eqn, *whole, **names)]


def _axis_index(interp: Interpreter, axes: tuple[str, ...]) -> jax.Array:
    index = lax.axis_index(axes)
    if interp.microbatch is None or axes[-1] != interp.devices.axes[-1]:
        return index
    # Microbatches lie along the last axis.
    return index * interp.microbatches + interp.microbatch.astype(index.dtype)


ORDINARY: dict[str, EqnHandler] = {
    **dict.fromkeys(_frames.COLLECTIVES, _collective),
    **dict.fromkeys(_frames.REDUCTIONS, psum),
    **dict.fromkeys(_rules.IDENTITIES, _identity),
    "sharding_constraint": _constrain,
    "gather": _look_up,
    "scatter-add": _add_rows,
}
