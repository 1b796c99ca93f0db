# SPDX-License-Identifier: Apache-2.0
"""What `describe` says of replicated, padded and offloaded leaves: one line for all alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from jzero._errors import describe_leaf
from jzero._folded import folded, listed
from jzero._memory_kinds import DEVICE, NVME
from jzero._quantities import readable_bytes
from jzero.reports._lines import wrapped
from jzero.sharding.plan._leaves import LeafPlan
from jzero.sharding.plan._plan import StepPlan
from jzero.sharding.plan._stages import OPTIMIZER, PARAMETER

_NOUNS = {NVME: "files on NVMe"}
_SHOWN = 5  # lines of leaves for one reason
_OWNED_SHOWN = 8  # updates of whole matrices


def left_full(plan: StepPlan) -> list[str]:
    """Leaves that the stage would shard, and that stay replicated; and why."""
    leaves = plan.leaves
    full = [leaf for leaf in leaves if leaf.why_full]
    params = [leaf for leaf in leaves if leaf.role == PARAMETER]
    moments = [leaf for leaf in leaves if leaf.role == OPTIMIZER and leaf.shape]
    if plan.stage in (1, 2) and plan.num_devices > 1 and params and not moments:
        # As in a loop over minibatches, whose next iteration computes with what the moments made.
        return [
            *wrapped(f"Stage {plan.stage} shards optimizer state, and no leaf is only that: the step "
                     "computes rows of the batch from all of these, as from moments where a loop updates "
                     "more than once in a step. Stage 3 shards such leaves."),
            *_listed(params, lambda leaf: "", _at_rest),
        ]  # fmt: skip
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
        *wrapped(f"{len(found)} of {len(leaves)} leaves {verb} stored padded (jzero.LeafArray), "
                 f"which costs {_bytes_of(found, _padding)}."),
        *_listed(found, lambda leaf: f"padded to {list(leaf.padded_shape)}", _padding),
    ]  # fmt: skip


def uncut(leaves: Sequence[LeafPlan]) -> list[str]:
    """Leaves that lack dims which `auto_specs` would cut."""
    found = [leaf for leaf in leaves if leaf.uncut]
    if not found:
        return []
    return [
        *wrapped(f"{len(found)} of {len(leaves)} leaves cannot be stored as auto_specs says for "
                 f"their parameters: {_bytes_of(found, _at_rest)}."),
        *_listed(found, lambda leaf: leaf.uncut, _at_rest),
    ]  # fmt: skip


def owned(plan: StepPlan) -> list[str]:
    """Lines on matrices that an update needs whole: whose update is distributed, and whose is replicated."""
    lines = []
    for each in plan.owned[:_OWNED_SHOWN]:
        what, leaves = f"{each.num} x {each.matrix}", listed(each.leaves)
        if each.why:
            text = f"Every device gathers and updates {what} of {leaves}: {each.why}."
        else:
            text = f"The update of {what} of {leaves} is distributed: {each.each} on each device."
        lines += wrapped(text, "  ")
    more = len(plan.owned) - _OWNED_SHOWN
    return lines + [f"And {more} more updates of whole matrices."] * (more > 0)


def offloaded(plan: StepPlan, code_paths: str) -> list[str]:
    """Leaves that are stored on the host, how they are updated, and the optimizer state that is not."""
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
        lines += wrapped(
            f"{len(mine)} of {len(plan.leaves)} leaves are stored in {_NOUNS.get(tier, tier + ' memory')}, "
            f"{readable_bytes(moments + params)} for each device: {' and '.join(parts)}."
        )
    if plan.device_bytes and any(bucket.nbytes_at_once for bucket in plan.buckets):
        num_buckets = sum(bucket.parts for bucket in plan.buckets)
        lines += wrapped(
            f"A step copies them to the device and back in {num_buckets} bucket{'s' * (num_buckets > 1)}, at "
            f"most {readable_bytes(plan.device_bytes)} at a time."
        )
    if code_paths:
        lines.append("The host updates them in place:")
        lines += [line for each in code_paths.splitlines() for line in wrapped(each, "  ")]
    staying = [leaf for leaf in state if leaf.tier == DEVICE]
    if staying:
        lines += wrapped(
            f"{len(staying)} of {len(state)} leaves of optimizer state stay on the devices: "
            f"{_bytes_of(staying, _at_rest)}."
        )
        lines += _listed(staying, lambda leaf: "", _at_rest)
    return lines


def _at_rest(leaf: LeafPlan) -> int:
    return leaf.nbytes_per_device


def _padding(leaf: LeafPlan) -> int:
    return leaf.nbytes_per_device - leaf.nbytes // leaf.num_shards


def _bytes_of(leaves: Sequence[LeafPlan], nbytes: Callable[[LeafPlan], int]) -> str:
    return f"{readable_bytes(sum(map(nbytes, leaves)))} on each device"


def _listed(
    leaves: Sequence[LeafPlan], why: Callable[[LeafPlan], str], nbytes: Callable[[LeafPlan], int]
) -> list[str]:
    """Leaves by the reason that they have, and of each a line for all of one kind; most bytes first."""
    reasons: dict[str, list[LeafPlan]] = {}
    for leaf in sorted(leaves, key=lambda leaf: -nbytes(leaf)):
        reasons.setdefault(why(leaf), []).append(leaf)
    lines = []
    for reason, found in reasons.items():
        lines += wrapped(f"{reason}:", "  ", first="  ") if reason else []
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
