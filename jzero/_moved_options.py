# SPDX-License-Identifier: Apache-2.0
"""The options of jzero 0.x, which have other names now: the new line. For one release."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jzero._blocks import Blocks
from jzero._quantities import parse_bytes


class Moved(NamedTuple):
    """Where an option of jzero 0.x has gone: a field of a group, or another name."""

    option: str
    group: str = ""
    field: str = ""


# The options of jzero 0.x, for one release. [docs/migrate/options.md]
MOVED = {
    "accumulate": Moved("microbatches", "Microbatches", "num"),
    "reduce": Moved("microbatches", "Microbatches", "reduce"),
    "accumulate_dtype": Moved("microbatches", "Microbatches", "dtype"),
    "layer_major": Moved("microbatches", "Microbatches", "order"),
    **{
        name: Moved("comm", "Comm", name)
        for name in ("gather_dtype", "reduce_dtype", "gather", "prefetch_bytes", "tile_bytes",
                     "max_gather_bytes")
    },
    "axis_names": Moved("axes", "Axes", "batch"),
    "param_axes": Moved("axes", "Axes", "params"),
    "optimizer_axes": Moved("axes", "Axes", "optimizer"),
    "full": Moved("axes", "Axes", "replicate"),
    **{
        name: Moved("axes", "Axes", name)
        for name in ("axis_name", "auto_specs", "min_shard_bytes")
    },
    "offload": Moved("memory", "Memory", "optimizer"),
    "offload_params": Moved("memory", "Memory", "params"),
    "offload_activations": Moved("memory", "Memory", "activations"),
    "state_argnums": Moved("state"),
    "state_argnames": Moved("state"),
    "num_params": Moved("model"),
    "config": Moved("model"),
    "mesh": Moved("devices"),
    "param_bytes": Moved("bytes_per_param", "BytesPerParam", "params"),
    "gradient_bytes": Moved("bytes_per_param", "BytesPerParam", "gradients"),
    "optimizer_bytes": Moved("bytes_per_param", "BytesPerParam", "optimizer"),
    **{
        name: Moved("workload", "Workload", name)
        for name in ("tokens", "layers", "width", "recompute")
    },
    **{
        name: Moved("rates", "Rates", name)
        for name in ("peak", "pcie", "interconnect", "host_update", "disk")
    },
}  # fmt: skip
# What one value alone of a group is written as.
_SHORT = {"Microbatches": "num", "Axes": "batch", "Memory": "optimizer"}
_FIRST = {"Microbatches": "num", "Axes": "batch"}  # fields that are given by position


def new_line(moved: Sequence[str], given: Mapping[str, Any]) -> str:
    """`Write microbatches=jzero.Microbatches(4, reduce='once').`, of old options among what was given."""
    options = dict[str, list[str]]()
    for name in moved:
        options.setdefault(MOVED[name].option, []).append(name)
    lines = []
    for option, names in options.items():
        group = MOVED[names[0]].group
        if group:
            fields = _fields(group, given.get(option)) | {
                MOVED[name].field: _value(name, given[name]) for name in names
            }
            lines.append(f"{option}={_group(group, fields)}")
        elif found := [x for name in [*names, option] for x in _listed(given.get(name))]:
            lines.append(
                f"{option}={_value(option, found[0] if len(found) == 1 else tuple(found))}"
            )
    return f"Write {', '.join(lines)}." if lines else "Drop it."


def _fields(group: str, given: Any) -> dict[str, str]:
    """What a user gave of a group beside its old names."""
    if given is None:
        return {}
    if type(given).__name__ != group:
        return {_SHORT[group]: _value("", given)} if group in _SHORT else {}
    return {
        x.name: _value("", getattr(given, x.name))
        for x in dataclasses.fields(given)
        if getattr(given, x.name) != x.default
    }


def _group(group: str, fields: dict[str, str]) -> str:
    """`jzero.Microbatches(4, reduce='once')`, or `4`."""
    if [*fields] == [_SHORT.get(group)]:
        return next(iter(fields.values()))
    first = fields.pop(_FIRST.get(group, ""), None)
    written = [*([] if first is None else [first]), *(f"{k}={x}" for k, x in fields.items())]
    return f"jzero.{group}({', '.join(written)})"


def _listed(value: Any) -> list[Any]:
    """Arguments of the state: by position or name, one or several, or none."""
    if value is None:
        return []
    return [*value] if isinstance(value, list | tuple) else [value]


def _value(name: str, value: Any) -> str:
    """A value as Python, as the new option takes it."""
    if name == "layer_major":
        return repr("layer" if value else "microbatch")
    if name == "tile_bytes" and isinstance(value, str):
        return repr(parse_bytes(value))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k!r}: {_value('', x)}" for k, x in value.items()) + "}"
    if isinstance(value, Blocks):
        bits = ", ".join(
            f"{x.name}={getattr(value, x.name)!r}"
            for x in dataclasses.fields(value)
            if x.name not in ("dtype", "size") and getattr(value, x.name) != x.default
        )
        return f"jzero.Blocks({', '.join(filter(None, [f'jnp.{value.dtype}', f'size={value.size}', bits]))})"
    if type(value).__module__.startswith("jzero."):
        return f"jzero.{value!r}"
    if hasattr(value, "axis_names"):
        return "mesh"
    # A dtype, as jnp.bfloat16 and np.dtype("float32") are.
    if hasattr(value, "dtype") and hasattr(value, "__name__"):
        return f"jnp.{value.__name__}"
    return f"jnp.{value.name}" if type(value).__module__.startswith("numpy.dtype") else repr(value)
