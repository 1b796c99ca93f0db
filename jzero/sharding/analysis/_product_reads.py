# SPDX-License-Identifier: Apache-2.0
"""Which parameters products read: those that may be gathered in few bits."""

from __future__ import annotations

from jzero.sharding.analysis._frames import Frame, variables
from jzero.sharding.analysis._links import Links

_PRODUCTS = frozenset({"dot_general", "ragged_dot_general", "conv_general_dilated"})


def read_by_products(root: Frame, links: Links) -> frozenset[str]:
    """Paths of leaves with which something of the batch is multiplied; casts and slices of them count."""
    return frozenset(
        links.leaf_of(frame, var)
        for frame, _, eqn in root.walk()
        if eqn.primitive.name in _PRODUCTS and any(frame.varies(out) for out in eqn.outvars)
        for var in variables(eqn.invars)
        if not frame.varies(var)
    )
