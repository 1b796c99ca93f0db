# SPDX-License-Identifier: Apache-2.0
"""Which leaves are quantized, stored or sent, and why others are exact."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

import jax.numpy as jnp

from jzero._blocks import Blocks
from jzero._errors import OptionError, message
from jzero.ir._regions import variables
from jzero.sharding.analysis._frames import Frame
from jzero.sharding.analysis._linked_dims import Links
from jzero.sharding.analysis._product_reads import read_by_products, read_through_views
from jzero.sharding.plan._leaves import LeafPlan, StoredLeaf
from jzero.sharding.plan._stages import PARAMETER, StageAxes
from jzero.tracing import _call
from jzero.tracing._types import Var

WHO = _call.WHO
# Elements of a leaf: below it scales and the computation cost more than the bytes are worth.
LEAST = 2**14


def quantize_sent(
    leaves: Sequence[LeafPlan], frame: Frame, links: Links, stage_axes: StageAxes,
    gather_codes: Blocks | None,
) -> tuple[LeafPlan, ...]:  # fmt: skip
    """The leaves, with what may be sent quantized, or the reason why a parameter may not.

    A stored copy would keep what is rounded off. So new parameters are sent as the difference to it, and only
    if they have a master: then the next difference has what was rounded off.
    """
    products = read_by_products(frame, links)
    copies = gather_codes is not None and stage_axes.param_axes != stage_axes.shard_axes
    out = []
    for i, leaf in enumerate(leaves):
        if leaf.role == PARAMETER:
            why = why_exact(leaf, products)
            renewed = not why and copies and _has_master(frame, i)
            leaf = dataclasses.replace(leaf, coded=not why, renewed_in_codes=renewed, why_exact=why)
        out.append(leaf)
    if gather_codes is not None and not stage_axes.param_axes:
        _check_masters(out, gather_codes)
    return tuple(out)


def _check_masters(leaves: Sequence[LeafPlan], codes: Blocks) -> None:
    bad = [leaf.path for leaf in leaves if leaf.coded]
    if bad and not any(leaf.renewed_in_codes for leaf in leaves):
        raise OptionError(message(
            WHO, [f"{path} is updated from its own old value" for path in bad],
            f"Below stage 3 Comm(gather_dtype={codes}) quantizes the difference of new parameters to old "
            "ones; what is rounded off is lost unless a master has it.",
            "Use jzero.master_weights(tx), stage=3, or drop gather_dtype.", shown=4))  # fmt: skip


def why_exact(leaf: LeafPlan, products: Collection[str]) -> str:
    """Why a leaf must not be quantized, or ''; `products` are the paths of leaves that products read."""
    if not jnp.issubdtype(jnp.dtype(leaf.dtype), jnp.floating):
        return "it has no floating point numbers"
    if leaf.path not in products:
        return "no matrix product reads it as it is"
    if math.prod(leaf.shape) < LEAST:
        return f"it has fewer than {LEAST} elements"
    return "it has 8 bits" if leaf.itemsize == 1 else ""


def _has_master(frame: Frame, index: int) -> bool:
    """Whether a new parameter depends on its old value through its gradient only."""
    old, new = frame.jaxpr.invars[index], frame.jaxpr.outvars[index]
    due, seen = variables([new]), set[Var]()
    while due:
        var = due.pop()
        if var is old:
            return False
        if var in seen or var not in frame.makers:
            continue
        seen.add(var)
        eqn = frame.jaxpr.eqns[frame.makers[var]]
        # What depends on the batch is a gradient, or computed from one.
        if not any(frame.reads(eqn)):
            due += variables(eqn.invars)
    return True


# -- evaluations: stored quantized -------------------------------------------------------------------------
def quantize_stored(
    leaves: Sequence[LeafPlan], stored: Sequence[StoredLeaf | None], frame: Frame, blocks: Blocks | None,
    tile_bytes: int | None,
) -> tuple[LeafPlan, ...]:  # fmt: skip
    """The leaves as they are stored: quantized, if they are already, and with `blocks` those that may be."""
    found = [None if form is None or form.codes is None else form.codes.blocks for form in stored]
    _check_format(leaves, found, blocks)
    products = frozenset[str]()
    if blocks is not None:
        named = zip(frame.jaxpr.invars, leaves, strict=False)
        products = read_through_views(frame, {var: leaf.path for var, leaf in named})
    out = []
    for leaf, codes in zip(leaves, found, strict=True):
        if codes is None and blocks is not None and leaf.role == PARAMETER:
            by_xla = any(leaf.automatic)
            why = "XLA shards it over further axes" if by_xla else why_exact(leaf, products)
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
