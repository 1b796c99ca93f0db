# SPDX-License-Identifier: Apache-2.0
"""Opaque calls (callbacks, FFI, kernels) and marks of `jzero.per_example`: batch-sharded, or gathered."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jzero._errors import StepError, describe_leaf, message
from jzero.ir import _opaque
from jzero.ir._factors import Factor
from jzero.ir._layout import Partial
from jzero.ir._regions import Region
from jzero.sharding.partition._equations import ordinary
from jzero.sharding.partition._frame import DeviceFrame
from jzero.sharding.partition._values import DeviceValue
from jzero.tracing import _lines
from jzero.tracing._types import Eqn


def call(
    frame: DeviceFrame, region: Region, eqn: Eqn, ins: Sequence[DeviceValue]
) -> list[DeviceValue]:
    """Writes an opaque call; results without a batch dim are partial sums."""
    for value in ins:
        frame.reduce(value)
    scopes, dims = _opaque.scopes_of(region, eqn), [*map(_row_dims, ins)]
    # A promise is about one batch dim.
    rows = [min(found, default=None) for found in dims]
    apart = all(len(found) < 2 for found in dims)
    factors = _opaque.factors(eqn, rows, scopes) if apart else []
    num = ins[0].layout.num(frame.mesh) if ins else 1
    frame.reason = _opaque.why_gathered(eqn, factors, scopes, num)
    found = ordinary(frame, eqn, ins, factors)
    return [_summed(frame, v, found[0]) if _is_sum(factors, j) else v for j, v in enumerate(found)]


def _is_sum(factors: Sequence[Factor], j: int) -> bool:
    return any(factor.outs[j] is None for factor in factors)


def _summed(frame: DeviceFrame, value: DeviceValue, of_rows: DeviceValue) -> DeviceValue:
    (x,) = value.atoms.values()
    layout = frame.replicated(value.aval.shape).with_partial(
        *map(Partial, sorted(of_rows.layout.axes))
    )
    return DeviceValue(value.aval, layout, {layout: x})


def mark(frame: DeviceFrame, eqn: Eqn, value: DeviceValue) -> DeviceValue:
    """A mark where a value enters or leaves `jzero.per_example`.

    A value that enters is sharded along the promised batch dim, or replicated if it has none. A value without
    a batch dim that leaves is the gradient of a shared operand.
    """
    if value.layout.partial:
        return value
    dim, replicated, rows = eqn.params["dim"], frame.replicated(value.aval.shape), _row_dims(value)
    elsewhere = bool(rows - {dim, *eqn.params["vmapped"]})
    if not eqn.params["enters"]:
        if elsewhere and dim is None and replicated not in value.atoms:
            raise _refusal(eqn, value)
        return value
    if elsewhere:
        where = "no dim" if dim is None else f"dim {dim}"
        frame.reason = f"jzero.per_example has its rows along {where}"
        value, rows = frame.as_replicated(value), set()
    if dim is None or rows:
        return value
    # So that its readers are batch-sharded, too.
    layout = replicated.shard(dim, frame.mesh)
    atoms = {**value.atoms, layout: frame.at(value, layout)}
    return dataclasses.replace(
        value, layout=layout, atoms=atoms, rows=layout.axes, make=None, origin=None, outer=None,
        view=None, casts={}, scopes={},
    )  # fmt: skip


def _refusal(eqn: Eqn, value: DeviceValue) -> StepError:
    leaf = describe_leaf("a gradient", value.aval.shape, value.aval.dtype)
    return StepError(message(
        "jzero.per_example", f"{leaf} of what has no rows is as long as the batch{_lines.at_line(eqn)}",
        "A call of a backward pass may have made it; then nobody can tell it from one with rows.",
        "If it has rows, make it an argument, and name their dim in in_axes; else use another number of "
        "rows, or keep such calls out of fn."))  # fmt: skip


def _row_dims(value: DeviceValue) -> set[int]:
    dims = enumerate(value.layout.dims)
    return {d for d, dim in dims if any(cut.axis in value.rows for cut in dim.cuts)}
