# SPDX-License-Identifier: Apache-2.0
"""What `estimate` is given, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jzero._errors import OptionError, message
from jzero._quantities import COUNT_RULE
from jzero.reports._presets import NEED_ALL_SHARDS, OPTIMIZERS, PRECISIONS
from jzero.reports._sizes import RoleBytes
from jzero.sharding.plan._offload import Backend

WHO = "estimate"


def data_axes(devices: Any) -> dict[str, int] | None:
    """Names and sizes of the axes; None for what is neither a number of devices nor a mesh."""
    if _is_size(devices):
        return {"data": int(devices)}
    sizes = devices if isinstance(devices, Mapping) else getattr(devices, "shape", None)
    if not isinstance(sizes, Mapping) or not sizes:
        return None
    fits = all(isinstance(name, str) and _is_size(size) for name, size in sizes.items())
    return dict(sizes) if fits else None


def _is_size(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= 1


def check(
    model: Any, count: int | None, devices: Any, axes: Any, model_parallel: Any, optimizer: Any,
    precision: Any,
) -> None:  # fmt: skip
    """Raises an `OptionError` that names all arguments that are not what they should be."""
    bad = []
    if count is None:
        bad.append(f"model={model!r} is not {COUNT_RULE}, and no configuration")
    if axes is None:
        bad.append(
            f"devices={devices!r} is no int from 1, and does not map names of axes to their sizes"
        )
    if not _is_size(model_parallel):
        bad.append(f"model_parallel={model_parallel!r} is not an int from 1")
    for name, value, known in (
        ("optimizer", optimizer, OPTIMIZERS),
        ("precision", precision, PRECISIONS),
    ):
        if value not in tuple(known):  # It may not be hashable.
            bad.append(f"{name}={value!r} is not one of {', '.join(map(repr, known))}")
    if bad:
        raise OptionError(message(
            WHO, bad, "Each argument is a number, or a name in the docstring's lists.",
            "Write estimate('7.5B', devices=64, stage=3).", things="arguments"))  # fmt: skip


def check_offload(offload: Backend, sizes: RoleBytes, optimizer: str, num_devices: int) -> None:
    """Raises an `OptionError` for a policy that numbers alone cannot tell, or that a step would refuse."""
    if offload.updates_on_host and num_devices > 1 and optimizer in NEED_ALL_SHARDS:
        raise OptionError(message(
            WHO, f"{offload}, optimizer={optimizer!r} and {num_devices} devices",
            "Its update needs the shards of other devices, and hosts run no collectives.",
            "Use memory=jzero.PinnedHost(), which streams its state through the devices."))  # fmt: skip
    if offload.share is None:
        raise OptionError(message(
            WHO, "HostCPU(ratio='auto')", "It is measured on the devices, and there are none here.",
            "Use a number, such as describe() reports it for a real step."))  # fmt: skip
    if offload.share and not sizes.optimizer_state:
        raise OptionError(message(
            WHO, f"{offload}, and the optimizer has no state",
            "Moments, averages and masters are stored there.", "Drop memory, or use another optimizer."
        ))  # fmt: skip
