"""describe(): what rests where, and what a step moves, as a table a person reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jzero._errors import describe_leaf
from jzero._memory_kinds import DEVICE
from jzero._quantities import readable_bytes
from jzero.reports import _tables
from jzero.reports._tables import Memory, crossing_table, memory_table, traffic_table
from jzero.sharding.analysis._traffic import Collective, Crossing
from jzero.sharding.batch._body import Movement
from jzero.sharding.cut._kept import Loops
from jzero.sharding.plan._layout import Full
from jzero.sharding.plan._leaves import LeafPlan
from jzero.sharding.plan._plan import StepPlan
from jzero.sharding.plan._stages import OPTIMIZER, OTHER, PARAMETER


@dataclasses.dataclass(frozen=True)
class Report:
    """What a step keeps on each device and moves between them; `print` it.

    Attributes:
      plan: layout and role of every leaf.
      traffic: the collectives of one step, loops multiplied out.
      keys: arguments taken for PRNG keys; each device folds its index into them.
      accumulator_bytes: on each device, what sums up the gradients and metrics of microbatches.
      crossings: what each device and its host copy to each other in a step.
      roads: how the host updates what rests there, if it does.
      movements: operations that move rows of the batch, because nothing cheaper is exact.
      whole_arguments: arguments that come whole to every device, as the devices do not divide their rows.
    """

    plan: StepPlan
    traffic: tuple[Collective, ...]
    keys: tuple[str, ...] = ()
    accumulator_bytes: int = 0
    crossings: tuple[Crossing, ...] = ()
    roads: str = ""
    movements: tuple[Movement, ...] = ()
    whole_arguments: tuple[str, ...] = ()

    def __str__(self) -> str:
        axes = ", ".join(f"'{name}' of size {size}" for name, size in self.plan.axes)
        lines = [
            f"jzero: stage {self.plan.stage} over {self.plan.num_devices} devices (data axes: {axes})",
            f"reductions: {_REDUCTIONS[self.plan.reductions]}",
            *self._microbatches(),
            "",
            *memory_table(self.memory).text(),
            "",
            *self._left_full(),
            *self._padded(),
            *self._offloaded(),
            "",
            *self._traffic(),
            *self._crossings(),
            *self.gathered_rows(),
        ]
        if self.keys:
            lines += ["", f"PRNG keys, folded with the device's index: {', '.join(self.keys)}"]
        return "\n".join(lines)

    @property
    def memory(self) -> tuple[Memory, ...]:
        """Bytes at rest of each role; what lives within a step is known to the compiler only."""
        roles = {role: self._leaves_of(role) for role in (PARAMETER, OPTIMIZER, OTHER)}
        return tuple(_memory(role, leaves) for role, leaves in roles.items() if leaves)

    @property
    def loops(self) -> Loops | None:
        """The loops over microbatches, and what is kept between them; None without microbatches."""
        return self.plan.microbatches.loops

    def elements(self, op: str, dtype: str | None = None) -> int:
        """Elements that a step moves by `op` ('all-gather', 'reduce-scatter', 'all-reduce')."""
        return _tables.elements(self.traffic, op, dtype)

    def _leaves_of(self, role: str) -> list[LeafPlan]:
        return [leaf for leaf in self.plan.leaves if leaf.role == role]

    def _microbatches(self) -> list[str]:
        plan = self.plan
        if plan.accumulate == 1:
            return []
        when = "once per step" if plan.reduce_once else "for each microbatch"
        lines = [
            f"microbatches: {plan.accumulate} on each device; gradients are reduced {when}, and summed "
            f"up in {readable_bytes(self.accumulator_bytes)} on each device"
        ]
        if plan.reductions == "written":
            lines.append("  to the step's own collectives each microbatch is a device")
        loops = self.loops
        if loops is not None and loops.num > 1:
            kept = loops.kept
            lines.append(
                f"loops over them: {loops.num}; products run {loops.repeats:.1f} times as often as "
                f"in one; {readable_bytes(sum(k.nbytes for k in kept))} on each device kept for later loops"
            )
            lines += [f"  {readable_bytes(k.nbytes)}  {k.what} of {k.where}" for k in kept[:8]]
            lines += [f"  and {len(kept) - 8} more"] if len(kept) > 8 else []
        return lines

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

    def _offloaded(self) -> list[str]:
        plan = self.plan
        leaves = [leaf for leaf in plan.leaves if leaf.tier != DEVICE]
        if not leaves:
            return []
        num_bytes = sum(leaf.nbytes_per_device for leaf in leaves)
        of_all = sum(leaf.nbytes_per_device for leaf in self._leaves_of(OPTIMIZER))
        lines = [
            f"{len(leaves)} of {len(plan.leaves)} leaves rest in {leaves[0].tier} memory, {num_bytes} bytes "
            f"for each device: {num_bytes / of_all:.1%} of the optimizer state."
        ]
        if plan.device_bytes:
            num_turns = sum(turn.parts for turn in plan.turns)
            lines.append(
                f"A step copies them to the device and back in {num_turns} turns, at most "
                f"{plan.device_bytes} bytes at a time."
            )
        if self.roads:
            lines += ["The host updates them in their place:", *self.roads.splitlines()]
        staying = [
            describe_leaf(leaf.path, leaf.shape, leaf.dtype)
            for leaf in self._leaves_of(OPTIMIZER)
            if leaf.tier == DEVICE
        ]
        if staying:
            end = ", ..." if len(staying) > 8 else "."
            lines.append(
                f"Optimizer state that stays on the devices: {', '.join(staying[:8])}{end}"
            )
        return lines

    def _crossings(self) -> list[str]:
        table = crossing_table(self.crossings)
        return ["", *table.text()] if table else []

    def gathered_rows(self) -> list[str]:
        """Lines on what moves rows of the batch; none if nothing does."""
        lines = []
        if self.whole_arguments:
            lines += ["", "Whole on every device, which do not divide their rows: "
                      f"{_listed(self.whole_arguments)}."]  # fmt: skip
        if self.movements:
            total = sum(m.nbytes * m.times for m in self.movements)
            found = sorted(self.movements, key=lambda m: -m.nbytes * m.times)
            size = readable_bytes(total)
            lines += ["", f"{len(found)} operations move rows of the batch, {size} to each device:"]
            lines += [f"  {readable_bytes(m.nbytes)}  {m}" for m in found[:20]]
            lines += [f"  and {len(found) - 20} more"] if len(found) > 20 else []
        return lines

    def _traffic(self) -> list[str]:
        table = traffic_table(self.traffic)
        return table.text() if table else ["A step moves nothing between devices."]


_REDUCTIONS = {
    "whole batch": "where the step sums over the batch; it trains what jax.jit trains on one device",
    "written": "the step's own collectives, as written",
}


def _listed(names: Sequence[str]) -> str:
    more = f"; and {len(names) - 8} more" if len(names) > 8 else ""
    return "; ".join(names[:8]) + more


def _memory(role: str, leaves: Sequence[LeafPlan]) -> Memory:
    sharded = sum(not isinstance(leaf.layout, Full) for leaf in leaves)
    whole = sum(leaf.nbytes for leaf in leaves)
    per_device = sum(leaf.nbytes_per_device for leaf in leaves if leaf.tier == DEVICE)
    on_host = sum(leaf.nbytes_per_device for leaf in leaves if leaf.tier != DEVICE)
    note = f"{sharded} of {len(leaves)} leaves sharded"
    return Memory(role, whole, per_device, True, note, on_host)
