# SPDX-License-Identifier: Apache-2.0
"""Look-ups in a table `[vocabulary, d]` of which each device has columns, and the gradient of such a table.

For k devices: `places [b, 1]` are gathered, `[k, b, 1]`, and looked up by each device in its columns,
`[k, b, d/k]`, which the devices exchange for their own rows, `[b, d]`. The gradient takes the way back. What
moves is rows, and not the table. The equations are those of the step, with a dim of k more.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jzero.sharding.analysis._tables import added_dims, kept_dims
from jzero.sharding.run import _collectives
from jzero.sharding.run._collectives import Axes
from jzero.tracing import _jaxpr
from jzero.tracing._types import Eqn


class RowsAdded(NamedTuple):
    """Rows `[b, d]` whose sum by their places is a table `[vocabulary, d]`, of zeros before.

    Attributes:
      table: the sum; of another array, made of it, these are not the rows.
      eqn: that adds them up.
      places: where each row goes, `[b, 1]`.
      rows: the rows.
    """

    table: jax.Array
    eqn: Eqn
    places: jax.Array
    rows: jax.Array


def look_up(
    eqn: Eqn, columns: jax.Array, places: jax.Array, dim: int, axes: Axes, name: str
) -> jax.Array:
    """`[n, d/k]` and this device's `[b, 1]` -> its rows `[b, d]`; `dim` is the second one of the table's."""
    numbers, sizes = eqn.params["dimension_numbers"], list(eqn.params["slice_sizes"])
    sizes[dim] = columns.shape[dim]
    numbers = numbers._replace(offset_dims=_behind(numbers.offset_dims))
    places = _collectives.gather(places[None], 0, axes, name, ())
    params = {"dimension_numbers": numbers, "slice_sizes": tuple(sizes)}
    params |= {"indices_are_sorted": False, "unique_indices": False}
    (found,) = _jaxpr.bind(eqn, columns, places, **params)
    rows: jax.Array = _collectives.exchange(found, 0, kept_dims(eqn)[dim] + 1, axes, name)[0]
    return rows


def add_up(added: RowsAdded, dim: int, axes: Axes, name: str, scale: float) -> jax.Array:
    """Of the table to which the rows of all devices are added, this one's columns `[n, d/k]`, along `dim`.

    Rows travel in the narrower of their dtype and the table's, and are added up in 32 bits at least.
    """
    params, table, rows = added.eqn.params, added.table, added.rows[None]
    numbers = params["dimension_numbers"]
    numbers = numbers._replace(update_window_dims=_behind(numbers.update_window_dims))
    if table.dtype.itemsize <= rows.dtype.itemsize:
        rows = rows.astype(table.dtype)
    places = _collectives.gather(added.places[None], 0, axes, name, ())
    columns = added_dims(added.eqn)[dim] + 1
    rows = _collectives.exchange(rows, columns, 0, axes, name)
    wide = jnp.promote_types(table.dtype, rows.dtype)
    if jnp.issubdtype(wide, jnp.floating):
        wide = jnp.promote_types(wide, jnp.float32)
    rows = rows.astype(wide)
    if scale != 1:
        rows = rows * jnp.asarray(scale, wide)
    shape = [rows.shape[columns] if d == dim else n for d, n in enumerate(table.shape)]
    # What a device knows of its places is not known of all: they are not sorted, nor unique.
    total: jax.Array = lax.scatter_add(
        jnp.zeros(shape, wide), places, rows, numbers, mode=params["mode"]
    )
    return total.astype(table.dtype)


def _behind(dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dim + 1 for dim in dims)
