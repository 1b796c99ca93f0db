# SPDX-License-Identifier: Apache-2.0
"""Interprets a jaxpr on `DeviceValue`s: each equation becomes those of one device.

Regions say which equations have inner jaxprs, not names of primitives: calls, custom derivatives, checkpoints
and operations that JAX expands are all inlined.
"""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jzero._errors import StepError, message
from jzero.ir import _rules
from jzero.ir._errors import cannot
from jzero.ir._opaque import NAMES as OPAQUE
from jzero.ir._regions import Region
from jzero.ir._writer import JaxprWriter
from jzero.sharding.partition import (
    _along,
    _control,
    _distributed_updates,
    _effects,
    _equations,
    _lazy,
    _look_ups,
    _opaque,
    _requests,
    _reshapes,
    _written,
)
from jzero.sharding.partition._frame import DeviceFrame
from jzero.sharding.partition._own_rows import in_own_rows
from jzero.sharding.partition._values import DeviceValue
from jzero.tracing import _jaxpr, _lines
from jzero.tracing._types import Eqn, Var


def run(frame: DeviceFrame, region: Region, ins: Sequence[DeviceValue]) -> list[DeviceValue]:
    outer, frame.region = frame.region, region
    env: dict[Var, DeviceValue] = dict(zip(region.jaxpr.invars, ins, strict=True))
    for var, const in zip(region.jaxpr.constvars, region.consts, strict=True):
        env[var] = frame.constant(var, const)
    around, frame.values = frame.values, env
    for var, value in zip(region.jaxpr.invars, ins, strict=True):
        value.own = frame.own(region, var)
    eqns = region.jaxpr.eqns
    if frame.shared.written is None:
        eqns = [*itertools.chain.from_iterable(in_own_rows(region, e) for e in eqns)]
    for eqn in eqns:
        frame.source, frame.reason, frame.leaf = eqn, "", ""
        frame.enter_pass(region.pass_of(eqn))
        values = [frame.literal(x) if _jaxpr.is_literal(x) else env[x] for x in eqn.invars]
        outs = _equation(frame, region, eqn, values)
        env |= zip(eqn.outvars, outs, strict=True)
        for var, value in zip(eqn.outvars, outs, strict=True):
            value.own = frame.own(region, var)
            value.hint = value.hint or frame.hint_of(var)
            value.leaf = value.leaf or frame.leaf_of(var)
            is_wanted = value.hint is not None and value.hint.is_direct
            if value.layout.partial and is_wanted and not _waits(frame, region, var, value):
                frame.reduce_at_exit(value)
        frame.note(outs)
    frame.region, frame.values = outer, around
    return [frame.literal(x) if _jaxpr.is_literal(x) else env[x] for x in region.jaxpr.outvars]


def _waits(frame: DeviceFrame, region: Region, var: Var, value: DeviceValue) -> bool:
    """Whether a partial sum stays partial: a reader takes it so, or the region returns it."""
    eqns = region.jaxpr.eqns
    ends = len(eqns) in (readers := region.readers.get(var, []))
    in_time = bool(value.partial_axes & frame.over_time)
    each = [eqns[i] for i in readers if i < len(eqns)]
    found = [
        e for e in each
        if _equations.passes_partial(e) or in_time and _equations.widens_in_time(frame, e)
        or _equations.widens_for_loop(frame, e)
    ]  # fmt: skip
    # A view alone does not count if other readers need the sum: it would be reduced twice.
    alone = len(found) == len(each)
    return ends or any(alone or not _rules.costs(e, _rules.Cost.VIEW) for e in found)


def _equation(
    frame: DeviceFrame, region: Region, eqn: Eqn, ins: list[DeviceValue]
) -> list[DeviceValue]:
    name = eqn.primitive.name
    if name == "sharding_constraint":
        return [_requests.constrained(frame, eqn, ins[0])]
    if name in _rules.IDENTITIES or _jaxpr.puts_nowhere(eqn):
        return ins
    if name == "optimization_barrier":
        return _control.barrier(frame, ins)
    if (distributed := frame.shared.distributed.of(region, eqn)) is not None:
        return _distributed_updates.run_distributed(frame, region, eqn, distributed, ins, run)
    if region.inner(eqn):
        return _control.run_inner(frame, region, eqn, ins, run)
    if (outs := _written.equation(frame, region, _jaxpr.without_sharding(eqn), ins)) is not None:
        return outs
    if _jaxpr.has_side_effects(eqn):
        return _effects.once(frame, eqn, ins)
    eqn = _jaxpr.without_sharding(eqn)
    if name == "marked_rows":
        return [_opaque.mark(frame, eqn, ins[0])]
    if name in OPAQUE:
        return _opaque.call(frame, region, eqn, ins)
    _check(eqn, region)
    if name == "reshape" and len(ins) == 1:
        if eqn.params["dimensions"] is not None:
            dims, sizes = eqn.params["dimensions"], eqn.params["new_sizes"]
            return _in_place_of(frame, region, eqn, ins, _transposed_first, (dims, sizes))
        if _lazy.may_wait(eqn, ins):
            return [_lazy.lazy(frame, eqn, ins, ())]
        return [_reshapes.reshaped(frame, eqn, ins[0])]
    if name in _VMAPPED:
        return _in_place_of(frame, region, eqn, ins, _over_dims, (name, eqn.params["axes"]))
    if name == "split" and ins[0].is_state:  # Passes know slices of leaves.
        return _in_place_of(
            frame, region, eqn, ins, _slices, (eqn.params["axis"], eqn.params["sizes"])
        )
    if (few := _look_ups.slices(frame, eqn, ins)) is not None:
        return _in_place_of(frame, region, eqn, ins, *few)
    factors = _rules.factors_of(eqn) if name != "reshape" else []
    if name in _along.NAMES and not _equations.partial_through(frame, eqn, ins):
        _equations.reduce_operands(frame, eqn, ins, factors)
        if (found := _along.along(frame, eqn, ins)) is not None:
            return found
    factors += _look_ups.factors(frame, eqn, ins)
    if _lazy.may_wait(eqn, ins):
        return [_lazy.lazy(frame, eqn, ins, factors)]
    frame.reason = "" if factors else "it needs the rows of all devices"
    if name == "convert_element_type" and ins[0].is_state:
        key = eqn.params["new_dtype"], eqn.params["weak_type"]
        if key not in ins[0].casts:
            (ins[0].casts[key],) = _equations.ordinary(frame, eqn, ins, factors)
        return [ins[0].casts[key]]
    return _equations.ordinary(frame, eqn, ins, factors)


def _in_place_of(
    frame: DeviceFrame, region: Region, eqn: Eqn, ins: Sequence[DeviceValue],
    fn: Callable[..., object], static: tuple[Hashable, ...],
) -> list[DeviceValue]:  # fmt: skip
    """Writes the equations of `fn(*static, *ins)` instead of an equation that computes the same."""
    given = [_jaxpr.var_like(value.aval) for value in ins]
    writer = JaxprWriter(eqn)
    outs = writer.trace(fn, *given, static=static)  # type: ignore[arg-type]
    env: dict[Var, DeviceValue] = dict(zip(given, ins, strict=True))
    for each in writer.eqns:
        frame.source = each
        values = [frame.literal(x) if _jaxpr.is_literal(x) else env[x] for x in each.invars]
        env |= zip(each.outvars, _equation(frame, region, each, values), strict=True)
    frame.source = eqn
    return [frame.literal(x) if _jaxpr.is_literal(x) else env[x] for x in outs]


def _transposed_first(dims: tuple[int, ...], sizes: tuple[int, ...], x: jax.Array) -> jax.Array:
    return lax.reshape(lax.transpose(x, dims), sizes)


def _slices(dim: int, sizes: tuple[int, ...], x: jax.Array) -> list[jax.Array]:
    ends = [*itertools.accumulate(sizes)]
    return [
        lax.slice_in_dim(x, end - size, end, axis=dim)
        for end, size in zip(ends, sizes, strict=True)
    ]


# Collectives over an axis of `jax.vmap` reduce a dim.
_VMAPPED: dict[str, Callable[..., jax.Array]] = {
    "psum": lambda x, dims: jnp.sum(x, dims, dtype=x.dtype),
    "pmax": jnp.max,
    "pmin": jnp.min,
}


def _over_dims(name: str, dims: tuple[int, ...], *xs: jax.Array) -> list[jax.Array]:
    return [_VMAPPED[name](x, dims) for x in xs]


def _check(eqn: Eqn, region: Region) -> None:
    """Refuses collectives of the step and `shard_map`."""
    if eqn.primitive.name == "shard_map":
        raise shard_map_error(f" ({_lines.summary(eqn)})")
    is_collective = _rules.costs(eqn, _rules.Cost.COLLECTIVE)
    if is_collective and not all(isinstance(x, numbers.Integral) for x in _jaxpr.axes_of(eqn)):
        raise cannot("it is a collective of the step's own", eqn, region)


def shard_map_error(where: str = "") -> StepError:
    return StepError(message(
        "shard_train_step", f"the step calls jax.shard_map itself{where}",
        "jzero runs the step inside a shard_map of its own, over the same devices.",
        "Write that part for the whole batch, without shard_map; or write the whole step for one device, "
        "with collectives, and pass axes=jzero.Axes(axis_name=...)."))  # fmt: skip
