"""Which parameters and gradients travel as codes of few bits, and why others do not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

import jax.numpy as jnp

from jzero.sharding.analysis._frames import Frame
from jzero.sharding.analysis._links import Links
from jzero.sharding.analysis._product_reads import read_by_products
from jzero.sharding.plan._leaves import LeafPlan
from jzero.sharding.plan._stages import PARAMETER

# Elements of a leaf: below it scales and the computation cost more than the bytes are worth.
LEAST = 2**14


def in_codes(leaves: Sequence[LeafPlan], frame: Frame, links: Links) -> tuple[LeafPlan, ...]:
    """The leaves, with what may travel as codes, or the reason why a parameter may not."""
    products = read_by_products(frame, links)

    def decided(leaf: LeafPlan) -> LeafPlan:
        if leaf.role != PARAMETER:
            return leaf
        why = _why_exact(leaf, products)
        return dataclasses.replace(leaf, coded=not why, why_exact=why)

    return tuple(map(decided, leaves))


def _why_exact(leaf: LeafPlan, products: Collection[str]) -> str:
    if not jnp.issubdtype(jnp.dtype(leaf.dtype), jnp.floating):
        return "it has no floating point numbers"
    if leaf.path not in products:
        return "no product reads it"
    if math.prod(leaf.shape) < LEAST:
        return f"it has fewer than {LEAST} elements"
    return "it has 8 bits" if leaf.itemsize == 1 else ""
