# SPDX-License-Identifier: Apache-2.0
"""Which parameters of an evaluation rest in codes of few bits, and why others do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jzero._blocks import Blocks
from jzero._errors import OptionError, message
from jzero.sharding.analysis._frames import Frame
from jzero.sharding.analysis._product_reads import read_through_views
from jzero.sharding.plan._leaves import LeafPlan, StoredLeaf
from jzero.sharding.plan._stages import PARAMETER
from jzero.sharding.plan._wire import why_exact
from jzero.tracing import _call

WHO = _call.WHO


def at_rest(
    leaves: Sequence[LeafPlan], stored: Sequence[StoredLeaf | None], frame: Frame, blocks: Blocks | None,
    tile_bytes: int | None,
) -> tuple[LeafPlan, ...]:  # fmt: skip
    """The leaves, as they rest in codes: those that do already, and with `blocks` those that shall.

    Raises:
      OptionError: a leaf is in codes of another format; or there are some, and `tile_bytes`.
    """
    found = [None if form is None or form.codes is None else form.codes.blocks for form in stored]
    _check_format(leaves, found, blocks)
    products = frozenset[str]()
    if blocks is not None:
        named = zip(frame.jaxpr.invars, leaves, strict=False)
        products = read_through_views(frame, {var: leaf.path for var, leaf in named})
    out = []
    for leaf, codes in zip(leaves, found, strict=True):
        if codes is None and blocks is not None and leaf.role == PARAMETER:
            why = (
                "XLA shards it over further axes"
                if any(leaf.automatic)
                else why_exact(leaf, products)
            )
            leaf, codes = dataclasses.replace(leaf, why_exact=why), None if why else blocks
        out.append(leaf if codes is None else leaf.in_codes(codes))
    coded = [leaf.path for leaf in out if leaf.codes]
    if coded and tile_bytes is not None:
        raise OptionError(message(
            WHO, f"Comm(tile_bytes={tile_bytes}), and {coded[0]} is quantized",
            "A quantized matrix is gathered as a whole: its blocks are not those of tiles.",
            "Drop tile_bytes, or weight_dtype."))  # fmt: skip
    return tuple(out)


def _check_format(
    leaves: Sequence[LeafPlan], found: Sequence[Blocks | None], blocks: Blocks | None
) -> None:
    bad = [
        f"{leaf.path} is stored as {codes}"
        for leaf, codes in zip(leaves, found, strict=True)
        if blocks is not None and codes not in (None, blocks)
    ]
    if bad:
        raise OptionError(message(
            WHO, bad, f"weight_dtype={blocks} is what an evaluation reads; another format has rounded off "
            "what this one would represent.",
            "Drop weight_dtype to read the leaves as they are, or shard the original weights.",
            shown=4))  # fmt: skip
