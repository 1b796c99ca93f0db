# SPDX-License-Identifier: Apache-2.0
"""A value split into its shards over Auto axes: dims of their own, before all others.

What is made of each part alone, as rows of codes are, is then moved part by part: `[n, d]` in two parts
along d is `[2, n, d/2]`, codes of it are `[2, bytes]`, and no place needs what the others have.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jzero.tracing import _jaxpr
from jzero.tracing._types import Eqn

_SCOPE = re.compile(r"jzero\.parts\[(.*)\]")


class AutoParts(NamedTuple):
    """The parts of a value.

    Attributes:
      cuts: the dims that are cut, and into how many parts each.
      axes: of each of these, the mesh axes over which the parts are.
    """

    cuts: tuple[tuple[int, int], ...] = ()
    axes: tuple[tuple[str, ...], ...] = ()

    def mark(self, eqn: Eqn) -> Eqn:
        """The equation, with a scope that names the axes that cut its operand's first dims."""
        said = "|".join(map(",".join, self.axes))
        return _jaxpr.within_scope(eqn, f"jzero.parts[{said}]") if self.cuts else eqn

    def split(self, x: jax.Array) -> jax.Array:
        """`[n, d]` as `[q, n, d/q]`, if d is cut into q parts."""
        nums, shape, places = dict(self.cuts), list[int](), list[int]()
        for d, size in enumerate(x.shape):
            if d in nums:
                places.append(len(shape))
                shape.append(nums[d])
            shape.append(size // nums.get(d, 1))
        return jnp.moveaxis(x.reshape(shape), places, range(len(places)))

    def join(self, x: jax.Array) -> jax.Array:
        nums, first = dict(self.cuts), len(self.cuts)
        shape = [size * nums.get(d, 1) for d, size in enumerate(x.shape[first:])]
        places = [d + i for i, (d, _) in enumerate(self.cuts)]
        return jnp.moveaxis(x, range(first), places).reshape(shape)


def axes_of_parts(eqn: Eqn) -> tuple[tuple[str, ...], ...]:
    """The axes that cut an equation's first dims, if it is marked with them."""
    found = filter(None, map(_SCOPE.fullmatch, _jaxpr.scopes(eqn)))
    return next((tuple(tuple(dim.split(",")) for dim in x.group(1).split("|")) for x in found), ())
