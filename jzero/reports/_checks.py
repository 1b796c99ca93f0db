# SPDX-License-Identifier: Apache-2.0
"""What `estimate` is given, checked before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jzero._errors import OptionError, message
from jzero._quantities import BYTES_RULE, COUNT_RULE, parse_bytes
from jzero.reports._presets import NEED_ALL_SHARDS, OPTIMIZERS, PRECISIONS
from jzero.reports._sizes import BytesPerParam
from jzero.sharding.plan._offload import Backend

WHO = "estimate"


def data_axes(devices: Any, mesh: Any) -> dict[str, int] | None:
    """Names and sizes of the axes; None for what is neither."""
    if mesh is None:
        return {"data": devices} if _is_size(devices) else None
    sizes = mesh if isinstance(mesh, Mapping) else getattr(mesh, "shape", None)
    fits = isinstance(sizes, Mapping) and sizes and all(map(_is_size, sizes.values()))
    return dict(sizes) if isinstance(sizes, Mapping) and fits else None


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check(
    num_params: Any, count: int | None, devices: Any, mesh: Any, axes: Any, model_parallel: Any,
    optimizer: Any, precision: Any, given: Mapping[str, float | None],
) -> None:  # fmt: skip
    """Raises an `OptionError` that names all arguments that are not what they should be."""
    bad = []
    if num_params is None and count is None:
        bad.append("neither num_params nor config")
    elif count is None:
        bad.append(f"num_params={num_params!r} is not {COUNT_RULE}")
    if devices is not None and mesh is not None:
        bad.append(f"devices={devices!r} and mesh={mesh!r}, of which one is enough")
    elif axes is None and mesh is None:
        bad.append(f"devices={devices!r} is not an int from 1")
    elif axes is None:
        bad.append(f"mesh={mesh!r} does not map names of axes to their sizes")
    if not _is_size(model_parallel):
        bad.append(f"model_parallel={model_parallel!r} is not an int from 1")
    for name, value, known in (
        ("optimizer", optimizer, OPTIMIZERS),
        ("precision", precision, PRECISIONS),
    ):
        if value not in tuple(known):  # It may not be hashable.
            bad.append(f"{name}={value!r} is not one of {', '.join(map(repr, known))}")
    for name, size in given.items():
        if size is not None and not _is_bytes(size, above_zero=name == "param_bytes"):
            bad.append(f"{name}={size!r} is not a number of bytes")
    if bad:
        raise OptionError(message(
            WHO, bad, "Each argument is a number, or a name in the docstring's lists.",
            "Write estimate('7.5B', devices=64, stage=3).", things="arguments"))  # fmt: skip


def check_offload(offload: Backend, sizes: BytesPerParam, optimizer: str, num_devices: int) -> None:
    """Raises an `OptionError` for a policy that numbers alone cannot tell, or that a step would refuse."""
    if offload.updates_on_host and num_devices > 1 and optimizer in NEED_ALL_SHARDS:
        raise OptionError(message(
            WHO, f"offload={offload}, optimizer={optimizer!r} and {num_devices} devices",
            "Its update needs the shards of other devices, and a host takes part in no collective.",
            "Use offload=jzero.PinnedHost(), which streams its state through the devices."))  # fmt: skip
    if offload.share is None:
        raise OptionError(message(
            WHO, "offload=HostCPU(ratio='auto')", "It is measured on the devices, and there are none here.",
            "Use a number, such as describe() reports it for a real step."))  # fmt: skip
    if offload.share and not sizes.optimizer_state:
        raise OptionError(message(
            WHO, f"offload={offload}, and the optimizer has no state",
            "Moments, averages and masters are offloaded.", "Drop offload, or use another optimizer."
        ))  # fmt: skip


def check_tile(tile_bytes: Any) -> int | None:
    """The bytes of a tile as an int; None without tiles. Raises an `OptionError` for what is no size."""
    found = None if tile_bytes is None else parse_bytes(tile_bytes)
    if tile_bytes is not None and not found:
        raise OptionError(message(
            WHO, f"tile_bytes={tile_bytes!r}", f"It is {BYTES_RULE}.",
            "Write tile_bytes='64MiB', or drop it to gather whole matrices."))  # fmt: skip
    return found


def _is_bytes(value: Any, above_zero: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    return value > 0 if above_zero else value >= 0
