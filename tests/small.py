"""Meshes, options by single names, and steps of models so small that every leaf is below the byte floor.

Tables and samplers of options draw each option by itself; `grouped` puts them into jzero's groups, by the
names that they had in jzero 0.x.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

import jzero
from jzero._groups import GROUPS
from jzero._moved_options import MOVED


def mesh(kind: AxisType | None = None, /, **sizes: int) -> jax.sharding.Mesh:
    """`mesh(data=4)`, `mesh(node=2, local=4)`: the first devices; axes are of JAX's default kind."""
    kinds = None if kind is None else (kind,) * len(sizes)
    devices = jax.devices()[: math.prod(sizes.values())]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), kinds, devices=devices)


def auto_mesh(**sizes: int) -> jax.sharding.Mesh:
    return mesh(AxisType.Auto, **sizes)


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    """Equal leaves, but for the sign of zero and what is in a NaN."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=where)


def grouped(**options: Any) -> dict[str, Any]:
    """`accumulate=2, reduce="once"` as `microbatches=jzero.Microbatches(2, reduce="once")`."""
    found = dict[str, Any]()
    groups = dict[str, dict[str, Any]]()
    for name, value in options.items():
        option, _, field = MOVED.get(name, name).partition(".")
        if name not in MOVED or name == "mesh":
            found[name] = value
        elif not field:
            if value is not None and (value != () or name != "state_argnames"):
                found[option] = value
        elif name == "layer_major":
            groups.setdefault("microbatches", {})["order"] = "layer" if value else "microbatch"
        elif option != "memory" or value is not None:
            groups.setdefault(option, {})[field] = value
    return found | {option: GROUPS[option].kind(**fields) for option, fields in groups.items()}


def _shard_train_step(step_fn: Any = None, **options: Any) -> Any:
    """`jzero.shard_train_step` with the options by single names, and leaves of any size in shards."""
    options = grouped(**options)
    axes = options.get("axes")
    if not isinstance(axes, jzero.Axes):
        axes = jzero.Axes(axes, min_shard_bytes=0)
    elif axes.min_shard_bytes is None:
        axes = dataclasses.replace(axes, min_shard_bytes=0)
    return jzero.shard_train_step(step_fn, **options | {"axes": axes})


# Any: tests look into a step, where not everything has a type.
shard_train_step: Any = _shard_train_step
