# SPDX-License-Identifier: Apache-2.0
"""Renamed options of jzero 0.x: messages show the new line. For one release."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jzero._blocks import Blocks
from jzero._given_fields import given_fields
from jzero._groups import GROUPS, grouped
from jzero._quantities import parse_bytes

# Where each has gone: another name, or `option.field` of a group. [docs/migrate/options.md]
MOVED = {
    "accumulate": "microbatches.num",
    "reduce": "microbatches.reduce",
    "accumulate_dtype": "microbatches.dtype",
    "layer_major": "microbatches.order",
    "axis_names": "axes.batch",
    "param_axes": "axes.params",
    "optimizer_axes": "axes.optimizer",
    "full": "axes.replicate",
    "offload": "memory.optimizer",
    "offload_params": "memory.params",
    "offload_activations": "memory.activations",
    "state_argnums": "state",
    "state_argnames": "state",
    "num_params": "model",
    "config": "model",
    "mesh": "devices",
    "param_bytes": "bytes_per_param.params",
    "gradient_bytes": "bytes_per_param.gradients",
    "optimizer_bytes": "bytes_per_param.optimizer",
    **{
        field: f"{option}.{field}"
        for option, fields in {
            "comm": "gather_dtype reduce_dtype gather prefetch_bytes tile_bytes max_gather_bytes",
            "axes": "axis_name auto_specs min_shard_bytes",
            "workload": "tokens layers width recompute",
            "rates": "peak pcie interconnect host_update disk",
        }.items()
        for field in fields.split()
    },
}


def new_line(moved: Sequence[str], given: Mapping[str, Any]) -> str:
    """`Write microbatches=jzero.Microbatches(4, reduce='once').`, for old options among `given`."""
    written, whole = dict[str, str](), dict[str, list[Any]]()
    for name in moved:
        option, _, field = MOVED[name].partition(".")
        if field:
            for other, value in _fields(option, given.get(option)).items():
                written.setdefault(f"{option}.{other}", _value("", value))
            written[MOVED[name]] = _value(name, given[name])
        else:
            whole.setdefault(option, []).extend(_listed(given[name]))
    for option, values in whole.items():
        values += _listed(given.get(option))
        if values:
            written[option] = _value(option, values[0] if len(values) == 1 else tuple(values))
    lines = [f"{option}={value}" for option, value in grouped(written, _call).items()]
    return f"Write {', '.join(lines)}." if lines else "Drop it."


def _fields(option: str, given: Any) -> dict[str, Any]:
    """Fields of a group that the user gave under its new name."""
    kind, short = GROUPS[option]
    if given is None or not (short or isinstance(given, kind)):
        return {}
    if not isinstance(given, kind):
        return {short: given}
    return given_fields(given)


def _call(kind: type[Any], *first: str, **fields: str) -> str:
    return f"jzero.{kind.__name__}({', '.join([*first, *(f'{k}={x}' for k, x in fields.items())])})"


def _listed(value: Any) -> list[Any]:
    """Names or positions of arguments as a list."""
    if value is None:
        return []
    return [*value] if isinstance(value, list | tuple) else [value]


def _value(name: str, value: Any) -> str:
    """A value as Python source for the new option."""
    if name == "layer_major":
        return repr("layer" if value else "microbatch")
    if name == "tile_bytes" and isinstance(value, str):
        return repr(parse_bytes(value))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k!r}: {_value('', x)}" for k, x in value.items()) + "}"
    if isinstance(value, Blocks):
        more = "".join(
            f", {name}={x!r}" for name, x in given_fields(value).items() if name != "dtype"
        )
        return f"jzero.Blocks(jnp.{value.dtype}{more})"
    if type(value).__module__.startswith("jzero."):
        return f"jzero.{value!r}"
    if hasattr(value, "axis_names"):
        return "mesh"
    is_scalar_type = hasattr(value, "dtype") and hasattr(value, "__name__")  # jnp.bfloat16
    if is_scalar_type or isinstance(value, np.dtype):
        return f"jnp.{np.dtype(value).name}"
    return repr(value)
