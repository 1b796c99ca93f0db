# SPDX-License-Identifier: Apache-2.0
"""The numeric inputs of `estimate`: bytes of a parameter, the work of a step, rates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from jzero._errors import OptionError, message
from jzero._given_fields import GivenFields, given_fields
from jzero._quantities import (
    COUNT_RULE,
    FLOPS_RULE,
    RATE_RULE,
    is_number,
    parse_count,
    parse_flops,
    parse_rate,
)

_EXAMPLES = {
    "tokens": "'8K'", "layers": "32", "width": "4096", "peak": "'989TFLOP/s'", "pcie": "'55GB/s'",
    "interconnect": "'350GB/s'", "host_update": "'4GB/s'", "disk": "'5GB/s'",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class BytesPerParam(GivenFields):
    """Bytes per parameter, where names of optimizers and precisions do not cover them: ZeRO's 2 + 2 + K.

    >>> import jzero
    >>> sizes = jzero.BytesPerParam(params=1, optimizer=6)
    >>> jzero.estimate("1B", devices=8, bytes_per_param=sizes).nbytes("parameter")
    125000000

    Attributes:
      params: as they are stored, above 0; None for those of `precision`.
      gradients: as the optimizer receives them; None for those of `precision`.
      optimizer: of its state, masters included, the K of the paper; None for those of both names.

    Raises:
      OptionError: one is no number of bytes.
    """

    params: float | None = None
    gradients: float | None = None
    optimizer: float | None = None

    def __post_init__(self) -> None:
        bad = [
            f"{name}={x!r} is not a number of bytes"
            for name, x in given_fields(self).items()
            if not _is_bytes(x) or (name == "params" and x == 0)
        ]
        if bad:
            raise OptionError(message(
                "BytesPerParam", bad, "Each is a number from 0, and params above it.",
                "Write BytesPerParam(params=2, gradients=2, optimizer=12).", things="fields"))  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Workload(GivenFields):
    """The inputs of a step on which its bytes and time depend.

    >>> import jzero
    >>> jzero.Workload(tokens="8K").tokens
    8000

    Attributes:
      tokens: of a step on each device, those of all microbatches: rows times their length; with
        `model_parallel` of each such group of devices. An int, or a string such as '8K'.
      layers: how many the loop over layers has; for activations in host memory. A configuration has it.
      width: elements of a layer's input for each token, the hidden size; like `layers`.
      recompute: whether the backward pass recomputes layers.

    Raises:
      OptionError: a field is no number.
    """

    tokens: Any = None
    layers: Any = None
    width: Any = None
    recompute: bool = True

    def __post_init__(self) -> None:
        _parse(self, ("tokens", "layers", "width"), parse_count, COUNT_RULE)
        self._check_bools("recompute")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Rates(GivenFields):
    """What devices and links do in a second, for the time of a step; None if not given.

    Each is a number, or a string such as '55GB/s', decimal, as makers state it; it is kept as an int.

    >>> import jzero
    >>> jzero.Rates(peak="989TFLOP/s", pcie="55GB/s").pcie
    55000000000

    Attributes:
      peak: operations of a device, '989TFLOP/s', or the rate it reaches in practice.
      pcie: bytes between each device and its host, in each direction, while all devices copy.
        `jzero.bandwidth` measures this rate, and the two that follow.
      interconnect: bytes of the whole value that an all-gather or a reduce-scatter moves; of several axes,
        the slowest.
      host_update: bytes of optimizer state that the host updates for each of its devices.
      disk: bytes that the host's disks read and write for each of its devices, both together.

    Raises:
      OptionError: a field is no rate.
    """

    peak: Any = None
    pcie: Any = None
    interconnect: Any = None
    host_update: Any = None
    disk: Any = None

    def __post_init__(self) -> None:
        _parse(self, ("peak",), parse_flops, FLOPS_RULE)
        _parse(self, ("pcie", "interconnect", "host_update", "disk"), parse_rate, RATE_RULE)


def _parse(
    group: Any, names: tuple[str, ...], parse: Callable[[object], int | None], rule: str
) -> None:
    """Replaces the given fields by parsed integers."""
    given = {name: x for name, x in given_fields(group).items() if name in names}
    found = {name: parse(value) for name, value in given.items()}
    if bad := [name for name, n in found.items() if n is None]:
        who = type(group).__name__
        edit = f"Write {who}({', '.join(f'{name}={_EXAMPLES[name]}' for name in bad)})."
        said = [f"{name}={given[name]!r}" for name in bad]
        raise OptionError(message(who, said, f"It is {rule}.", edit, things="fields"))
    for name, n in found.items():
        object.__setattr__(group, name, n)


def _is_bytes(x: Any) -> bool:
    return is_number(x) and math.isfinite(x) and x >= 0
