"""describe(): what rests where, and what a step moves, as a table a person reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jzero._errors import describe_leaf
from jzero.sharding._layout import Full
from jzero.sharding._plan import OPTIMIZER, OTHER, PARAMETER, LeafPlan, Plan
from jzero.sharding._traffic import Collective

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def readable_bytes(num: float) -> str:
    """`12.3 MiB`."""
    for unit in _UNITS:
        if num < 1024 or unit == _UNITS[-1]:
            return f"{num:.0f} {unit}" if unit == "B" else f"{num:.1f} {unit}"
        num /= 1024
    raise AssertionError


@dataclasses.dataclass(frozen=True)
class Report:
    """What a step keeps on each device and moves between them; `print` it.

    Attributes:
      plan: layout and role of every leaf.
      traffic: the collectives of one step, loops multiplied out.
      keys: arguments taken for PRNG keys; each device folds its index into them.
      accumulator_bytes: on each device, what sums up the gradients and metrics of microbatches.
    """

    plan: Plan
    traffic: tuple[Collective, ...]
    keys: tuple[str, ...] = ()
    accumulator_bytes: int = 0

    def __str__(self) -> str:
        axes = ", ".join(f"'{name}' of size {size}" for name, size in self.plan.axes)
        lines = [
            f"jzero: stage {self.plan.stage} over {self.plan.num_devices} devices (data axes: {axes})",
            f"reductions: {_REDUCTIONS[self.plan.reductions]}",
            *self._microbatches(),
            "",
            *self._at_rest(),
            "",
            *self._left_full(),
            *self._padded(),
            *self._averaged(),
            "",
            *self._traffic(),
        ]
        if self.keys:
            lines += ["", f"PRNG keys, folded with the device's index: {', '.join(self.keys)}"]
        return "\n".join(lines)

    def elements(self, op: str, dtype: str | None = None) -> int:
        """Elements that a step moves by `op` ('all-gather', 'reduce-scatter', 'all-reduce')."""
        return sum(
            c.total_elements
            for c in self.traffic
            if c.op == op and (dtype is None or c.dtype == dtype)
        )

    def _microbatches(self) -> list[str]:
        plan = self.plan
        if plan.accumulate == 1:
            return []
        when = "once per step" if plan.reduce_once else "for each microbatch"
        return [
            f"microbatches: {plan.accumulate} on each device; gradients are reduced {when}, and summed "
            f"up in {readable_bytes(self.accumulator_bytes)} on each device"
        ]

    def _at_rest(self) -> list[str]:
        rows: list[tuple[str, ...]] = [("at rest", "leaves", "sharded", "whole", "on each device")]
        for role in (PARAMETER, OPTIMIZER, OTHER):
            leaves = [leaf for leaf in self.plan.leaves if leaf.role == role]
            if leaves:
                rows.append(self._row(role, leaves))
        return _table([*rows, self._row("total", self.plan.leaves)])

    def _row(self, title: str, leaves: Sequence[LeafPlan]) -> tuple[str, ...]:
        return (
            title,
            str(len(leaves)),
            str(sum(not isinstance(leaf.layout, Full) for leaf in leaves)),
            readable_bytes(sum(leaf.nbytes for leaf in leaves)),
            readable_bytes(sum(leaf.nbytes_per_device for leaf in leaves)),
        )

    def _left_full(self) -> list[str]:
        full = [leaf for leaf in self.plan.leaves if leaf.why_full]
        if not full:
            return ["No leaf that the stage shards was left full."]
        shown = "; ".join(
            f"{describe_leaf(leaf.path, leaf.shape, leaf.dtype)} ({leaf.why_full})"
            for leaf in full[:8]
        )
        more = f"; and {len(full) - 8} more" if len(full) > 8 else ""
        num_bytes = sum(leaf.nbytes for leaf in full)
        return [
            f"{len(full)} of {len(self.plan.leaves)} leaves stay full on every device: {shown}{more}. "
            f"They cost {num_bytes} bytes on each device."
        ]

    def _padded(self) -> list[str]:
        padded = [leaf for leaf in self.plan.leaves if leaf.padding]
        if not padded:
            return []
        shown = "; ".join(
            f"{describe_leaf(leaf.path, leaf.shape, leaf.dtype)} (to {list(leaf.padded_shape)})"
            for leaf in padded[:8]
        )
        more = f"; and {len(padded) - 8} more" if len(padded) > 8 else ""
        num_bytes = sum(leaf.nbytes_per_device - leaf.nbytes // leaf.num_shards for leaf in padded)
        return [
            f"{len(padded)} of {len(self.plan.leaves)} leaves are padded at rest (jzero.PaddedArray): "
            f"{shown}{more}. The padding costs {num_bytes} bytes on each device."
        ]

    def _averaged(self) -> list[str]:
        averaged = [leaf for leaf in self.plan.leaves if leaf.averaged]
        if not averaged:
            return []
        shown = "; ".join(describe_leaf(leaf.path, leaf.shape, leaf.dtype) for leaf in averaged[:8])
        more = f"; and {len(averaged) - 8} more" if len(averaged) > 8 else ""
        return [f"averaged over the devices in each step: {shown}{more}."]

    def _traffic(self) -> list[str]:
        groups: dict[tuple[str, str, str], list[Collective]] = {}
        for c in self.traffic:
            groups.setdefault((c.op, c.dtype, ",".join(c.axes)), []).append(c)
        if not groups:
            return ["A step moves nothing between devices."]
        rows: list[tuple[str, ...]] = [("per step", "dtype", "axes", "collectives", "elements")]
        for key, group in sorted(groups.items()):
            runs, elements = (
                sum(c.times for c in group), sum(c.total_elements for c in group)
            )  # fmt: skip
            rows.append((*key, str(runs), f"{elements:,}"))
        return _table(rows)


_REDUCTIONS = {
    "typed": "placed by JAX's AD (an untouched step); gradients are means over the devices",
    "written": "the step's own collectives, as written",
    "marked": "at jax.grad / jax.value_and_grad; gradients are means over the devices",
}


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i < 1 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
