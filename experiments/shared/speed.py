"""What is said of a training's speed and memory: model FLOPs, the devices' peak, bytes in use."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jzero.targets import _target


def flops_per_token(num_params: int, layers: int, dim: int, context: int) -> int:
    """Of a forward and a backward pass of a GPT, as PaLM's appendix B counts them; remat is not counted."""
    return 6 * num_params + 12 * layers * dim * context


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 operations per second of a device; None if jzero does not know its kind."""
    known = (_target.find_target("speed", name) for name in _target.TARGETS)
    speeds = {target.name: target.bf16_flops for target in known}
    return speeds.get(device_kind)


def utilization(
    tokens_per_second: float, flops: float, devices: Sequence[jax.Device]
) -> float | None:
    """MFU: model FLOPs per second as a share of the devices' peak, where it is known."""
    peak = peak_flops(devices[0].device_kind)
    return None if peak is None else tokens_per_second * flops / (peak * len(devices))


def bytes_in_use(devices: Sequence[jax.Device], name: str = "bytes_in_use") -> int | None:
    """The most of any of the devices of this process, by the runtime's count; None if it does not count."""
    found = [(device.memory_stats() or {}).get(name) for device in devices]
    counts = [count for count in found if count is not None]
    return max(counts, default=None)


class Meter(NamedTuple):
    """Of one training: model FLOPs of a token, and the devices it runs on, those of this process."""

    flops: float
    num_devices: int
    devices: Sequence[Any]

    def said(self, tokens_per_second: float) -> str:
        """`9,153 tokens/s`, and MFU and memory where they can be told."""
        parts = [f"{tokens_per_second:,.0f} tokens/s"]
        own = tokens_per_second * len(self.devices) / self.num_devices
        share = utilization(own, self.flops, self.devices)
        parts += [] if share is None else [f"MFU {share:.1%}"]
        used = bytes_in_use(self.devices)
        parts += [] if used is None else [f"{used / 2**30:.2f} GiB in use on each device"]
        return ", ".join(parts)
