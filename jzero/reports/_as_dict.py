# SPDX-License-Identifier: Apache-2.0
"""What reports say, as plain types of JSON: bytes and elements are ints, tuples are lists."""

from __future__ import annotations

import dataclasses
from typing import Any

from jzero.offload.schedule._schedule import Schedule
from jzero.offload.schedule._text import rows
from jzero.sharding.plan._layout import Shard
from jzero.sharding.plan._leaves import LeafPlan
from jzero.sharding.plan._plan import StepPlan


def plain(record: Any) -> dict[str, Any]:
    """A named tuple or a dataclass."""
    fields = record._asdict() if hasattr(record, "_asdict") else dataclasses.asdict(record)
    return {name: list(x) if isinstance(x, tuple) else x for name, x in fields.items()}


def schedule(found: Schedule) -> list[dict[str, Any]]:
    return [
        {"operation": row.op, "what": row.what, "nbytes": row.nbytes, "link": row.link,
         "depth": row.depth}
        for row in rows(found.ops)
    ]  # fmt: skip


def leaf(plan: LeafPlan) -> dict[str, Any]:
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
    loops = plan.microbatches.loops
    return {
        "num": plan.accumulate,
        "reduce": "once" if plan.reduce_once else "each",
        "accumulator_bytes": accumulator_bytes,
        "order": "layer" if plan.microbatches.by_layer else "microbatch",
        "handed_bytes": handed_bytes,
        "loops": 1 if loops is None else loops.num,
        "repeats": 1.0 if loops is None else float(loops.repeats),
        "saved": [*map(plain, () if loops is None else loops.saved)],
        "at_once": [*map(plain, () if loops is None else loops.at_once)],
    }
