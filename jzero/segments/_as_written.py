# SPDX-License-Identifier: Apache-2.0
"""A step of the whole batch as it is written, for those who differentiate it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding

from jzero.tracing import _jaxpr


def as_written(
    traced: _jaxpr.Traced, places: Sequence[NamedSharding], closes_over: Sequence[Any], num_new: int
) -> Callable[..., Any]:
    """A step as it is written, `(values, state leaves, argument leaves) -> (new state leaves, outputs)`.

    Args:
      traced: its trace, of the whole batch.
      places: where its leaves lie, in their true shapes.
      closes_over: those of its constants in whose place it takes the values.
      num_new: how many of its results are leaves of the state.
    """
    numbers = {id(x): i for i, x in enumerate(closes_over)}

    @jax.jit
    def written(values: Sequence[Any], state: Sequence[Any], arrays: Sequence[Any]) -> Any:
        consts = [values[numbers[id(x)]] if id(x) in numbers else x for x in traced.consts]
        leaves = map(lax.with_sharding_constraint, [*state, *arrays], places)
        outs = _jaxpr.evaluate(traced.jaxpr, consts, *leaves)
        return outs[:num_new], outs[num_new:]

    return written
