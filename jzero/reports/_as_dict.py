# SPDX-License-Identifier: Apache-2.0
"""What reports say, as plain types of JSON: bytes and elements are ints, tuples are lists."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jzero.offload.schedule._folds import Transfer
from jzero.offload.schedule._schedule import Schedule
from jzero.offload.schedule._text import rows
from jzero.reports._tables import Memory
from jzero.sharding.analysis._residuals import Residual
from jzero.sharding.analysis._traffic import Collective
from jzero.sharding.partition._movement import Movement
from jzero.sharding.plan._distributed_updates import DistributedUpdate
from jzero.sharding.plan._extra_work import Extra
from jzero.sharding.plan._layout import Shard
from jzero.sharding.plan._leaves import LeafPlan
from jzero.sharding.plan._plan import StepPlan


def memory(rows: Sequence[Memory]) -> list[dict[str, Any]]:
    """A dict for each role."""
    return [row._asdict() for row in rows]


def traffic(collectives: Sequence[Collective]) -> list[dict[str, Any]]:
    """Collectives of one op, dtype and axes together, in the order of the first of each."""
    groups: dict[tuple[str, str, tuple[str, ...], bool], list[Collective]] = {}
    for c in collectives:
        groups.setdefault((c.op, c.dtype, c.axes, c.each_iteration), []).append(c)
    return [
        {"op": op, "dtype": dtype, "axes": list(axes), "each_iteration": each_iteration,
         "elements": sum(c.total_elements for c in group), "bytes": sum(c.nbytes for c in group),
         "times": sum(c.times for c in group)}
        for (op, dtype, axes, each_iteration), group in groups.items()
    ]  # fmt: skip


def transfers(found: Sequence[Transfer]) -> list[dict[str, Any]]:
    """What crosses between each device and its host, by direction, role and dtype."""
    groups: dict[tuple[str, str, str, bool], list[Transfer]] = {}
    for x in found:
        groups.setdefault((x.direction, x.what, x.dtype, x.each_iteration), []).append(x)
    return [
        {"direction": direction, "what": what, "dtype": dtype,
         "elements": sum(x.elements for x in group), "nbytes": sum(x.nbytes for x in group),
         "each_iteration": each_iteration}
        for (direction, what, dtype, each_iteration), group in groups.items()
    ]  # fmt: skip


def schedule(found: Schedule) -> list[dict[str, Any]]:
    """What a step does, in order."""
    return [
        {"operation": row.op, "what": row.what, "nbytes": row.nbytes, "link": row.link,
         "depth": row.depth}
        for row in rows(found.ops)
    ]  # fmt: skip


def activations(found: Sequence[Residual] | None) -> list[dict[str, Any]] | None:
    """What waits on the host for the backward pass; None if nothing shall."""
    return None if found is None else [r._asdict() | {"shape": list(r.shape)} for r in found]


def owned(found: DistributedUpdate) -> dict[str, Any]:
    """What one group or stack of matrices is, and who updates it."""
    return dataclasses.asdict(found) | {"leaves": list(found.leaves)}


def leaf(plan: LeafPlan) -> dict[str, Any]:
    """Where one leaf of the state rests."""
    sharded = plan.layout if isinstance(plan.layout, Shard) else None
    return {
        "path": plan.path,
        "role": plan.role,
        "dtype": plan.dtype,
        "shape": list(plan.shape),
        "dim": None if sharded is None else sharded.dim,
        "axes": [] if sharded is None else list(sharded.axes),
        "num_shards": plan.num_shards,
        "nbytes": plan.nbytes,
        "nbytes_per_device": plan.nbytes_per_device,
        "padded_shape": list(plan.padded_shape),
        "memory": plan.tier,
        "why_full": plan.why_full,
    }


def microbatches(plan: StepPlan, accumulator_bytes: int, handed_bytes: int) -> dict[str, Any]:
    """How a device works through them."""
    loops = plan.microbatches.loops
    kept = () if loops is None else loops.saved
    return {
        "num": plan.accumulate,
        "reduce": "once" if plan.reduce_once else "each",
        "accumulator_bytes": accumulator_bytes,
        "order": "layer" if plan.microbatches.by_layer else "microbatch",
        "handed_bytes": handed_bytes,
        "loops": 1 if loops is None else loops.num,
        "repeats": 1.0 if loops is None else float(loops.repeats),
        "saved": [*map(dataclasses.asdict, kept)],
        "at_once": [*map(dataclasses.asdict, () if loops is None else loops.at_once)],
    }


def extra_work(found: Extra) -> dict[str, Any]:
    """What the devices do more than once."""
    return {
        "what": found.what, "why": found.why, "fix": found.fix, "share": found.share,
        "flops": found.flops,
    }  # fmt: skip


def movement(found: Movement) -> dict[str, Any]:
    """What moves rows of the batch."""
    return {
        "operation": found.operation, "where": found.where, "reason": found.reason,
        "value": found.value, "nbytes": found.nbytes, "times": found.times,
    }  # fmt: skip
