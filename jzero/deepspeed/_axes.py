# SPDX-License-Identifier: Apache-2.0
"""hpZ and MiCS: over which devices parameters and optimizer state rest, and the mesh that says it."""

from __future__ import annotations

from typing import Any

from jzero.deepspeed._settings import Settings, refuse

_NODE, _LOCAL = "node", "local"
_HPZ, _MICS = (
    f"zero_optimization.{name}" for name in ("zero_hpz_partition_size", "mics_shard_size")
)


def axes(
    settings: Settings, stage: int, devices: int | None
) -> tuple[dict[str, Any], dict[str, int]]:
    """The options of hpZ and MiCS, and the mesh that they need, `{"node": 2, "local": 8}`.

    Raises:
      OptionError: both are on, or a size does not fit.
    """
    sizes = {key: int(settings.get(key, 0)) for key in (_HPZ, _MICS)}
    on = {key: size for key, size in sizes.items() if size > (1 if key == _HPZ else 0)}
    for key in sizes.keys() & settings.given.keys() - on.keys():
        settings.note(key, "Off: parameters rest over all devices.")
    if not on:
        return {}, {}
    if len(on) > 1:
        raise refuse(
            [f"{key} is {size}" for key, size in on.items()],
            "hpZ keeps a copy of the parameters in each node, and MiCS a copy of everything.",
            "Drop one of them.")  # fmt: skip
    ((key, size),) = on.items()
    if stage < 3:
        raise refuse(
            f"{key} is {size}, at stage {stage}",
            "It says over how many devices parameters rest, at stage 3.",
            "Write stage 3, or drop it.")  # fmt: skip
    mesh = _mesh(key, size, devices)
    options = (
        {"param_axes": _LOCAL} if key == _HPZ else {"param_axes": _LOCAL, "optimizer_axes": _LOCAL}
    )
    said = ", ".join(f"{name}={axis!r}" for name, axis in options.items())
    settings.note(
        key, f"{said}, on a mesh {mesh}: make {size} devices with fast links between them neighbours, best "
        "those of a node.")  # fmt: skip
    return options, mesh


def _mesh(key: str, size: int, devices: int | None) -> dict[str, int]:
    if devices is None:
        raise refuse(
            f"{key} is {size}, of an unknown number of devices", "It divides the devices into groups.",
            "Say how many devices there are with devices=8.")  # fmt: skip
    if devices % size:
        raise refuse(
            f"{key} is {size}, of {devices} devices", "It divides the devices into groups of one size.",
            "Correct it.")  # fmt: skip
    return {_NODE: devices // size, _LOCAL: size}
