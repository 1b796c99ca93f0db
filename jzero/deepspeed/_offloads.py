# SPDX-License-Identifier: Apache-2.0
"""Sections that have something rest on the hosts: optimizer state, parameters, activations."""

from __future__ import annotations

from typing import Any

from jzero.deepspeed._expressions import called
from jzero.deepspeed._settings import Settings, refuse
from jzero.offload._nvme import NVMe
from jzero.offload._policy import HostCPU, PinnedHost

_OPTIMIZER, _PARAM = (
    f"zero_optimization.{name}" for name in ("offload_optimizer", "offload_param")
)
_OLD = {_OPTIMIZER: "zero_optimization.cpu_offload", _PARAM: "zero_optimization.cpu_offload_param"}
_RATIO = f"{_OPTIMIZER}.ratio"
_HPZ = "zero_optimization.zero_hpz_partition_size"
_PATH, _PARAM_PATH = f"{_OPTIMIZER}.nvme_path", f"{_PARAM}.nvme_path"
_BUFFERS = f"{_PARAM}.buffer_count", f"{_PARAM}.buffer_size"
_SAID = {
    _OPTIMIZER: "offload=jzero.HostCPU(...). Masters and moments rest in the hosts' memory and are updated "
    "there (pip install 'jzero[offload]').",
    _PARAM: "offload_params=jzero.PinnedHost(): parameters rest in pinned memory of the hosts, and a layer "
    "at a time is on a device.",
}
_OFF = "Off: it rests on the devices."
_IN_FILES = {
    _OPTIMIZER: "offload=jzero.NVMe(nvme_path). Masters and moments rest in files and are updated by the "
    "hosts, tile by tile (pip install 'jzero[offload]').",
    _PARAM: "offload_params=jzero.NVMe(nvme_path). Parameters rest in files, too, and a layer at a time is "
    "on a device.",
}
_UNUSED = "Without effect: it is of offload to NVMe, which this configuration does not use."
# DeepSpeed's defaults; its buffers hold 16-bit parameters.
_COUNT, _SIZE, _ITEMSIZE = 5, 10**8, 2


def policies(settings: Settings, stage: int) -> dict[str, Any]:
    """The options `offload`, `offload_params` and `offload_activations`, where they are on.

    Raises:
      OptionError: a stage that has nothing to offload, or tiers that cannot be together.
    """
    found = {**_optimizer(settings, stage), **_params(settings, stage)}
    if "offload_params" in found:
        _check_params(settings)
    return {**found, **_activations(settings, "offload_params" in found)}


def _optimizer(settings: Settings, stage: int) -> dict[str, Any]:
    """Where optimizer state rests."""
    device = _device(settings, _OPTIMIZER)
    if _PATH in settings.given:
        used = "offload=jzero.NVMe(nvme_path)."
        settings.note(_PATH, used if device == "nvme" else _UNUSED)
    if device == "none":
        return {}
    if stage == 0:
        raise refuse(
            f"{_OPTIMIZER} is on, at stage 0",
            "It offloads a device's shards of optimizer state, from stage 1 on.",
            "Write stage 1, 2 or 3, or drop it.")  # fmt: skip
    ratio = settings.get(_RATIO, 1.0)
    if not 0 <= ratio <= 1:
        raise refuse(f"{_RATIO} is {ratio}", "It is a share, from 0 to 1.", "Correct it.")
    if ratio == 0:
        settings.overrule([f"{_OPTIMIZER}.device", _RATIO], "a ratio of 0 offloads nothing.")
        return {}
    if device == "nvme":
        return _in_files(settings, ratio)
    more = {} if ratio == 1 else {"ratio": float(ratio)}
    return {"offload": called("jzero.HostCPU", HostCPU, **more)}


def _in_files(settings: Settings, ratio: float) -> dict[str, Any]:
    path = _path(settings, _OPTIMIZER)
    if ratio != 1:
        raise refuse(
            f"{_OPTIMIZER}.device is 'nvme', and ratio is {ratio}", "All optimizer state rests in files.",
            "Drop ratio, or use 'cpu'.")  # fmt: skip
    return {"offload": called("jzero.NVMe", NVMe, path)}


def _path(settings: Settings, section: str) -> str:
    path = settings.get(f"{section}.nvme_path")
    if not isinstance(path, str) or not path:
        raise refuse(
            f"{section}.device is 'nvme', without a path in nvme_path", "State rests in files there.",
            "Write nvme_path, a folder of an NVMe disk.")  # fmt: skip
    return path


def _device(settings: Settings, section: str) -> str:
    """Where a section, or the key that was there before it, has something rest: 'none', 'cpu' or 'nvme'."""
    old = _OLD[section]
    device = str(settings.get(f"{section}.device", "none")).lower()
    before = settings.get(old, False)
    if before and section in settings.given:
        raise refuse(
            [f"{old} is true", f"{section} is there"], "They say the same.", f"Drop {old}."
        )
    device = "cpu" if before else device
    said = {"cpu": _SAID, "nvme": _IN_FILES}[device][section] if device != "none" else _OFF
    for key in (f"{section}.device", f"{section}.ratio", old):
        if key in settings.given:
            settings.note(key, said)
    return device


def _params(settings: Settings, stage: int) -> dict[str, Any]:
    device = _device(settings, _PARAM)
    used = dict.fromkeys(_BUFFERS, "offload_params=jzero.NVMe(host_bytes=...).")
    used[_PARAM_PATH] = "offload_params=jzero.NVMe(nvme_path)."
    for key in used.keys() & settings.given.keys():
        settings.note(key, used[key] if device == "nvme" else _UNUSED)
    if device == "none":
        return {}
    if stage < 3:
        raise refuse(
            f"{_PARAM} is on, at stage {stage}", "It offloads the shards of parameters, at stage 3.",
            "Write stage 3, or drop it.")  # fmt: skip
    if device == "nvme":
        return _params_in_files(settings)
    return {"offload_params": called("jzero.PinnedHost", PinnedHost)}


def _params_in_files(settings: Settings) -> dict[str, Any]:
    path, state = _path(settings, _PARAM), settings.get(f"{_OPTIMIZER}.device", "none")
    other = settings.get(_PATH)
    if str(state).lower() != "nvme" or path != other:
        raise refuse(
            [f"{_PARAM}.device is 'nvme', in {path}", f"{_OPTIMIZER}.device is {state!r}, in {other}"],
            "Parameters in files are updated with their optimizer state, in the same files.",
            "Write 'nvme' and the same nvme_path for both.")  # fmt: skip
    count, size = (settings.get(key, n) for key, n in zip(_BUFFERS, (_COUNT, _SIZE), strict=True))
    more = {}
    if any(key in settings.given for key in _BUFFERS):
        more = {"host_bytes": max(int(count * size * _ITEMSIZE), 2**16)}
    return {"offload_params": called("jzero.NVMe", NVMe, path, **more)}


def _check_params(settings: Settings) -> None:
    """What jzero cannot do while parameters rest on the hosts."""
    found = [f"{_RATIO} is {settings.get(_RATIO)}"] * (settings.get(_RATIO, 1) not in (0, 1))
    found += [f"{_HPZ} is {settings.get(_HPZ)}"] * (settings.get(_HPZ, 1) > 1)
    if found:
        raise refuse(
            [f"{_PARAM} is on", *found],
            "With parameters on the hosts, the hosts update all of them, and they rest over all devices.",
            "Drop one of them.")  # fmt: skip


def _activations(settings: Settings, params_too: bool) -> dict[str, Any]:
    keys = ("activation_checkpointing.cpu_checkpointing", "compile.offload_activation")
    on = [key for key in keys if settings.get(key)]
    if on and params_too:
        raise refuse(
            [*(f"{key} is true" for key in on), f"{_PARAM} is on"],
            "Layers whose parameters rest on the hosts are programs of their own; activations leave in one.",
            "Drop one of them.")  # fmt: skip
    for key in keys:
        if key in settings.given:
            settings.note(
                key, "offload_activations=jzero.PinnedHost(), with jax.checkpoint around each layer."
                if key in on else "Off: activations wait on the devices.")  # fmt: skip
    return {"offload_activations": called("jzero.PinnedHost", PinnedHost)} if on else {}
