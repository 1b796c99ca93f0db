# SPDX-License-Identifier: Apache-2.0
"""The prose of `describe`: similar leaves share a line, and long lists show the largest entries."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jzero._errors import describe_leaf
from jzero._folded import folded, listed
from jzero._memory_kinds import DEVICE, NVME
from jzero._quantities import readable_bytes
from jzero.offload.memory._leaf_array import CodingError
from jzero.offload.schedule._folds import Iterations, Transfer
from jzero.reports._lines import wrapped
from jzero.sharding.analysis._residuals import LEAST_BYTES
from jzero.sharding.analysis._traffic import Collective
from jzero.sharding.analysis._untiled import Untiled
from jzero.sharding.plan._leaves import LeafPlan
from jzero.sharding.plan._plan import StepPlan
from jzero.sharding.plan._stages import OPTIMIZER, PARAMETER

_NOUNS = {NVME: "files on NVMe"}
_SHOWN = 5  # lines of leaves for one reason
_MOST = 8  # distributed updates; quantized leaves


def first_lines(lines: Sequence[str], most: int) -> list[str]:
    return [*lines[:most], *[f"  and {len(lines) - most} more"] * (len(lines) > most)]


def largest(values: Iterable[Any], most: int, text: Callable[[Any], str] = str) -> list[str]:
    found = sorted(values, key=lambda x: -x.nbytes)
    return first_lines([f"  {readable_bytes(x.nbytes)}  {text(x)}" for x in found], most)


def by_reason(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """A line for each reason, with its paths."""
    return [
        f"  {listed([path for path, reason in pairs if reason == why], 8)}: {why}"
        for why in dict.fromkeys(why for _, why in pairs)
    ]


def microbatches(plan: StepPlan, accumulator_bytes: int, handed_bytes: int) -> list[str]:
    if plan.accumulate == 1:
        return []
    when = "once per step" if plan.reduce_once else "for each microbatch"
    lines = [
        f"microbatches: {plan.accumulate} on each device; gradients are reduced {when}, and "
        f"accumulated in {readable_bytes(accumulator_bytes)} on each device"
    ]
    if plan.reductions == "written":
        lines.append("  to the step's own collectives each microbatch is a device")
    if plan.microbatches.by_layer:
        lines.append(
            "layer by layer: all microbatches pass a layer, whose parameters are fetched once per pass, "
            "before the next layer; values passed between layers take up to "
            f"{readable_bytes(handed_bytes)} on each device"
        )
    loops = plan.microbatches.loops
    if loops is not None and loops.num > 1:
        lines.append(
            f"loops over microbatches: {loops.num}; matrix products run {loops.repeats:.1f} times as "
            f"often as in one loop; {readable_bytes(sum(x.nbytes for x in loops.saved))} on each device "
            "are saved for later loops"
        )
        lines += largest(loops.saved, 8, lambda x: f"{x.what} of {x.where}")
    if loops is not None and loops.at_once:
        nbytes = sum(each.nbytes for each in loops.at_once)
        lines.append(
            "computed from all microbatches at once, which saves no memory: "
            f"{readable_bytes(nbytes)} on each device"
        )
        lines += largest(loops.at_once, 8, lambda x: f"{x.what} of {x.where}")
    return lines


def from_host(plan: StepPlan, transfers: Sequence[Transfer]) -> list[str]:
    """For an evaluation of parameters on the host: the budget, and bytes per iteration."""
    if not plan.evaluates or not transfers:
        return []
    iterations: dict[Iterations, int] = {}
    for x in transfers:
        if x.loop is not None and x.direction == "to device":
            iterations[x.loop] = iterations.get(x.loop, 0) + x.nbytes // (x.loop.num or 1)
    in_files = any(x.direction == "from disk" for x in transfers)
    source = "files on NVMe" if in_files else "the hosts' pinned memory"
    lines = [
        f"Parameters come from {source}, part by part: at most "
        f"{readable_bytes(plan.device_bytes)} of them on a device at a time, gathered ones "
        "included."
    ]
    for (where, num), nbytes in iterations.items():
        each = "each iteration" if num is None else f"each of the {num:,} iterations"
        lines.append(
            f"  {nbytes:,} bytes to each device in {each} of the loop at {where}: its iterations per "
            f"second are at most the {'disk' if in_files else 'link'}'s bytes per second over that."
        )
    return lines


def activations(plan: StepPlan) -> list[str]:
    """Empty without `Memory(activations=)`."""
    found = plan.activations
    if found is None:
        return []
    if not found:
        return [
            "No activation is saved on the host: the forward pass saves no batch-sharded value of "
            f"{readable_bytes(LEAST_BYTES)} or more for the backward pass."
        ]
    num, every = plan.accumulate, plan.microbatches.by_layer
    microbatch = f", of {'all' if every else 'one'} microbatch{'es' * every}" * (num > 1)
    total = sum(r.nbytes for r in found) * (num if every else 1)
    verb = "is" if len(found) == 1 else "are"
    stacks = sum(r.iterations > 1 for r in found)
    whats = [f"{stacks} stack{'s' * (stacks > 1)} of loops"] * bool(stacks)
    values = len(found) - stacks
    whats += [f"{values} value{'s' * (values > 1)}"] * bool(values)
    return [
        f"{' and '.join(whats)} {verb} saved on the host for the backward pass, "
        f"{readable_bytes(total)} of each device{microbatch}:",
        *largest(found, 8),
    ]


def tiles(plan: StepPlan, found: Sequence[Untiled]) -> list[str]:
    """Lines on tiles, and on what is larger than one and not tiled."""
    nbytes = plan.exchange.tile_bytes
    if nbytes is None:
        return []
    return [
        f"tiles: matrices above {readable_bytes(nbytes)} are gathered, and their gradients reduced, in "
        f"tiles of that size{', except these:' if found else ''}",
        *largest(found, 20),
    ]


def left_full(plan: StepPlan) -> list[str]:
    """Leaves that the stage would shard and that stay replicated, and why."""
    leaves = plan.leaves
    full = [leaf for leaf in leaves if leaf.why_full]
    params = [leaf for leaf in leaves if leaf.role == PARAMETER]
    moments = [leaf for leaf in leaves if leaf.role == OPTIMIZER and leaf.shape]
    if plan.stage in (1, 2) and plan.num_devices > 1 and params and not moments:
        # As in a loop over minibatches: each iteration computes with parameters updated by the moments.
        return [
            f"Stage {plan.stage} shards optimizer state, and no leaf is only that: the step computes rows of "
            "the batch from all of these, as from moments where a loop updates more than once in a step. "
            "Stage 3 shards such leaves.",
            *_listed(params, lambda leaf: "", _at_rest),
        ]
    if not full:
        return ["No leaf that the stage shards is left replicated."]
    verb = "stays" if len(full) == 1 else "stay"
    return [
        f"{len(full)} of {len(leaves)} leaves {verb} replicated: {_bytes_of(full, _at_rest)}.",
        *_listed(full, lambda leaf: leaf.why_full, _at_rest),
    ]


def padded(leaves: Sequence[LeafPlan]) -> list[str]:
    """Leaves that are stored padded."""
    found = [leaf for leaf in leaves if leaf.padding]
    if not found:
        return []
    verb = "is" if len(found) == 1 else "are"
    return [
        f"{len(found)} of {len(leaves)} leaves {verb} stored padded (jzero.LeafArray), which costs "
        f"{_bytes_of(found, _padding)}.",
        *_listed(found, lambda leaf: f"padded to {list(leaf.padded_shape)}", _padding),
    ]


def uncut(leaves: Sequence[LeafPlan]) -> list[str]:
    """Leaves that lack dims which `auto_specs` would cut."""
    found = [leaf for leaf in leaves if leaf.uncut]
    if not found:
        return []
    return [
        f"{len(found)} of {len(leaves)} leaves cannot be stored as auto_specs says for their parameters: "
        f"{_bytes_of(found, _at_rest)}.",
        *_listed(found, lambda leaf: leaf.uncut, _at_rest),
    ]


def owned(plan: StepPlan) -> list[str]:
    """Matrices that an update needs whole: which updates are distributed, and which are replicated."""
    lines = []
    for each in plan.owned[:_MOST]:
        what, leaves = f"{each.num} x {each.matrix}", listed(each.leaves)
        if each.why:
            lines.append(f"Every device gathers and updates {what} of {leaves}: {each.why}.")
        else:
            lines.append(
                f"The update of {what} of {leaves} is distributed: {each.each} on each device."
            )
    more = len(plan.owned) - _MOST
    return lines + [f"And {more} more updates of whole matrices."] * (more > 0)


def offloaded(plan: StepPlan, code_paths: str) -> list[str]:
    """Leaves stored on the host, how they are updated, and optimizer state that stays on the devices."""
    leaves = [leaf for leaf in plan.leaves if leaf.tier != DEVICE]
    if not leaves:
        return []
    state = [leaf for leaf in plan.leaves if leaf.role == OPTIMIZER]
    lines, all_state = [], sum(map(_at_rest, state))
    for tier in dict.fromkeys(leaf.tier for leaf in leaves):
        mine = [leaf for leaf in leaves if leaf.tier == tier]
        moments, params = (
            sum(_at_rest(leaf) for leaf in mine if leaf.is_streamed == streamed)
            for streamed in (False, True)
        )
        parts = [f"{moments / all_state:.1%} of the optimizer state"] if moments else []
        parts += [f"{readable_bytes(params)} of parameters"] if params else []
        lines.append(
            f"{len(mine)} of {len(plan.leaves)} leaves are stored in {_NOUNS.get(tier, tier + ' memory')}, "
            f"{readable_bytes(moments + params)} for each device: {' and '.join(parts)}."
        )
    if plan.device_bytes and any(bucket.nbytes_at_once for bucket in plan.buckets):
        num_buckets = sum(bucket.parts for bucket in plan.buckets)
        lines.append(
            f"A step copies them to the device and back in {num_buckets} bucket{'s' * (num_buckets > 1)}, at "
            f"most {readable_bytes(plan.device_bytes)} at a time."
        )
    if code_paths:
        lines += ["The host updates them in place:", *code_paths.splitlines()]
    staying = [leaf for leaf in state if leaf.tier == DEVICE]
    if staying:
        lines.append(
            f"{len(staying)} of {len(state)} leaves of optimizer state stay on the devices: "
            f"{_bytes_of(staying, _at_rest)}."
        )
        lines += _listed(staying, lambda leaf: "", _at_rest)
    return lines


def quantized(
    leaves: Sequence[LeafPlan], traffic: Sequence[Collective], errors: Mapping[str, CodingError]
) -> list[str]:
    """What is quantized, what is not and why, and the leaves with the largest rounding errors."""
    found = quantized_leaves(leaves, traffic, errors)
    if not found:
        return []
    exact = [(leaf.path, leaf.why_exact) for leaf in leaves if leaf.why_exact]
    formats = listed(list(dict.fromkeys(each["format"] for each in found)), 4)
    now, before = (
        sum(each[key] for each in found) for key in ("nbytes_per_device", "decoded_bytes")
    )
    rows = list[str]()
    for each in sorted(found, key=lambda x: -(x["rms_error"] or 0)):
        nbytes = (readable_bytes(each[key]) for key in ("nbytes_per_device", "gathered_bytes"))
        columns = [f"{x:>10}" for x in nbytes]
        if each["rms_error"] is not None:
            columns += [f"{each[key]:7.2%}" for key in ("rms_error", "largest_error")]
        shape = ",".join(map(str, each["shape"]))
        rows.append(f"{'  '.join(columns)}  {each['path']} {each['dtype']}[{shape}]")
    return [
        f"weights: {len(found)} of {len(leaves)} leaves are stored as {formats}, {readable_bytes(now)} for "
        f"each device instead of {readable_bytes(before)}{'; these stay exact:' if exact else ''}",
        *by_reason(exact),
        "columns: bytes stored on each device; bytes gathered in a call; rounding error (root mean square; "
        "maximum, relative to the largest element)",
        *first_lines(rows, _MOST),
    ]


def quantized_leaves(
    leaves: Sequence[LeafPlan], traffic: Sequence[Collective], errors: Mapping[str, CodingError]
) -> list[dict[str, Any]]:
    gathered = collections.Counter[str]()
    for each in traffic:
        if each.op == "all-gather":
            gathered[each.leaf] += each.nbytes
    return [
        {"path": leaf.path, "dtype": leaf.codes.dtype, "shape": list(leaf.codes.shape),
         "format": str(leaf.codes.blocks), "nbytes_per_device": leaf.nbytes_per_device,
         "decoded_bytes": leaf.decoded.nbytes_per_device, "gathered_bytes": gathered[leaf.path],
         "rms_error": errors[leaf.path].rms if leaf.path in errors else None,
         "largest_error": errors[leaf.path].largest if leaf.path in errors else None}
        for leaf in leaves if leaf.codes is not None
    ]  # fmt: skip


def _at_rest(leaf: LeafPlan) -> int:
    return leaf.nbytes_per_device


def _padding(leaf: LeafPlan) -> int:
    return leaf.nbytes_per_device - leaf.nbytes // leaf.num_shards


def _bytes_of(leaves: Sequence[LeafPlan], nbytes: Callable[[LeafPlan], int]) -> str:
    return f"{readable_bytes(sum(map(nbytes, leaves)))} on each device"


def _listed(
    leaves: Sequence[LeafPlan], why: Callable[[LeafPlan], str], nbytes: Callable[[LeafPlan], int]
) -> list[str]:
    """Leaves grouped by reason, then by role, dtype and shape; most bytes first."""
    reasons: dict[str, list[LeafPlan]] = {}
    for leaf in sorted(leaves, key=lambda leaf: -nbytes(leaf)):
        reasons.setdefault(why(leaf), []).append(leaf)
    lines = []
    for reason, found in reasons.items():
        lines += [f"  {reason}:"] if reason else []
        lines += _of_kinds(found, nbytes)
    return lines


def _of_kinds(leaves: Sequence[LeafPlan], nbytes: Callable[[LeafPlan], int]) -> Iterator[str]:
    kinds: dict[tuple[object, ...], list[LeafPlan]] = {}
    for leaf in leaves:
        kinds.setdefault((leaf.role, leaf.dtype, leaf.shape), []).append(leaf)
    entries = [
        (each.num * nbytes(kind[0]), each, describe_leaf(each.text, kind[0].shape, kind[0].dtype))
        for kind in kinds.values()
        for each in folded(leaf.path for leaf in kind)
    ]
    entries.sort(key=lambda entry: -entry[0])
    for total, each, text in entries[:_SHOWN]:
        times = f"{each.num} x " if each.num > 1 else ""
        yield from wrapped(times + text, " " * 13, first=f"{readable_bytes(total):>11}  ")
    if rest := entries[_SHOWN:]:
        total, count = sum(entry[0] for entry in rest), sum(entry[1].num for entry in rest)
        yield f"{readable_bytes(total):>11}  {count} more"
