# SPDX-License-Identifier: Apache-2.0
"""What `describe` says of quantized leaves: their bytes, and what was rounded off."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from jzero._folded import folded, listed
from jzero._quantities import readable_bytes
from jzero.offload.memory._leaf_array import CodingError
from jzero.reports._lines import wrapped
from jzero.sharding.analysis._traffic import Collective
from jzero.sharding.plan._leaves import LeafPlan

_SHOWN = 8  # leaves


def lines(
    leaves: Sequence[LeafPlan], traffic: Sequence[Collective], errors: Mapping[str, CodingError]
) -> list[str]:
    """What is quantized, what is not and why, and the leaves of which most was rounded off."""
    found = entries(leaves, traffic, errors)
    if not found:
        return []
    exact = [leaf for leaf in leaves if leaf.why_exact]
    formats = listed(list(dict.fromkeys(each["format"] for each in found)), 4)
    now, before = (
        sum(each[key] for each in found) for key in ("nbytes_per_device", "decoded_bytes")
    )
    text = wrapped(
        f"weights: {len(found)} of {len(leaves)} leaves are stored as {formats}, {readable_bytes(now)} for "
        f"each device instead of {readable_bytes(before)}{'; these stay exact:' if exact else ''}", "  "
    )  # fmt: skip
    for why in dict.fromkeys(leaf.why_exact for leaf in exact):
        paths = [name.text for name in folded(leaf.path for leaf in exact if leaf.why_exact == why)]
        text += wrapped(f"{listed(paths, 8)}: {why}", "    ", first="  ")
    text += wrapped(
        "columns: bytes stored on each device; bytes gathered in a call; rounding error (root mean square; "
        "maximum, relative to the largest element)", "  ")  # fmt: skip
    for each in sorted(found, key=lambda x: -(x["rms_error"] or 0))[:_SHOWN]:
        nbytes = (readable_bytes(each[key]) for key in ("nbytes_per_device", "gathered_bytes"))
        parts = [f"{x:>10}" for x in nbytes]
        if each["rms_error"] is not None:
            parts += [f"{each[key]:7.2%}" for key in ("rms_error", "largest_error")]
        shape = ",".join(map(str, each["shape"]))
        first = "  ".join(parts)
        text += wrapped(f"{each['path']} {each['dtype']}[{shape}]", " " * 8, first=f"{first}  ")
    return text + [f"  and {len(found) - _SHOWN} more"] * (len(found) > _SHOWN)


def entries(
    leaves: Sequence[LeafPlan], traffic: Sequence[Collective], errors: Mapping[str, CodingError]
) -> list[dict[str, Any]]:
    """Each quantized leaf, as plain types."""
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
