# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of `estimate`."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping
from typing import Any

from jzero._errors import OptionError, message
from jzero._numbers import Rates, Workload
from jzero._quantities import COUNT_RULE, readable_flops, readable_rate
from jzero.reports._sizes import NEED_ALL_SHARDS, OPTIMIZERS, PRECISIONS, RoleBytes
from jzero.sharding.plan._backend import Backend
from jzero.sharding.plan._options import Options

WHO = "estimate"
_SHAPE = ("tokens", "layers", "width")


def data_axes(devices: Any) -> dict[str, int] | None:
    """Names and sizes of the axes; None for what is neither a number of devices nor a mesh."""
    if is_size(devices):
        return {"data": int(devices)}
    sizes = devices if isinstance(devices, Mapping) else getattr(devices, "shape", None)
    if not isinstance(sizes, Mapping) or not sizes:
        return None
    fits = all(isinstance(name, str) and is_size(size) for name, size in sizes.items())
    return dict(sizes) if fits else None


def is_size(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1


def check(
    model: Any, count: int | None, devices: Any, axes: Any, model_parallel: Any, optimizer: Any,
    precision: Any,
) -> None:  # fmt: skip
    """Refuses all invalid arguments in one message."""
    bad = []
    if count is None:
        bad.append(f"model={model!r} is not {COUNT_RULE}, and no configuration")
    if axes is None:
        bad.append(
            f"devices={devices!r} is no int from 1, and does not map names of axes to their sizes"
        )
    if not is_size(model_parallel):
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
    """Refuses a policy that numbers alone do not determine, or that a step would refuse."""
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


def check_workload(options: Options, workload: Workload) -> None:
    """Refuses a workload that does not fit the options."""
    if options.offload.streams and options.microbatches.reduce == "once":
        raise OptionError(message(
            WHO, "Microbatches(reduce='once') and Memory(params=)",
            "Gradients are reduced and sent to the host layer by layer, never accumulated unreduced.",
            "Drop reduce, or Memory(params=)."))  # fmt: skip
    if options.moves_activations and not workload.recompute:
        raise OptionError(message(
            WHO, "Memory(activations=) and Workload(recompute=False)",
            "What layers save without recomputation does not follow from numbers.",
            "Drop recompute, or see describe() of a real step."))  # fmt: skip
    missing = [name for name in _SHAPE if getattr(workload, name) is None]
    if options.moves_activations and missing:
        raise OptionError(message(
            WHO, f"Memory(activations=) without {' and without '.join(missing)}",
            "What a loop saves is the input of each of its layers: tokens * layers * width elements.",
            "Write workload=jzero.Workload(tokens='8K', layers=32, width=4096), or drop Memory(activations=)."
        ))  # fmt: skip
    idle = [name for name in ("layers", "width") if getattr(workload, name) is not None]
    if idle and not options.moves_activations:
        said = ", ".join(f"{name}={getattr(workload, name)}" for name in idle)
        raise OptionError(message(
            WHO, f"Workload({said}) without Memory(activations=)",
            "They determine only what a loop saves on the host for its backward loop.",
            f"Drop {' and drop '.join(idle)}, or use Memory(activations=jzero.PinnedHost())."))  # fmt: skip


def check_rates(
    options: Options, workload: Workload, given: Rates, moves: Mapping[str, bool]
) -> None:
    """Refuses rates of links on which nothing moves, and rates without what they need.

    `moves` says by the name of a rate whether a step moves anything at it.
    """
    named = {name: rate for name, rate in dataclasses.asdict(given).items() if rate is not None}
    missing = [name for name, x in (("peak", given.peak), ("tokens", workload.tokens)) if x is None]
    if named and missing:
        raise OptionError(message(
            WHO, f"Rates({_said(named)}) without {' and without '.join(missing)}",
            "A step takes the time of its operations on its tokens, and of traffic that these do not hide.",
            "Pass rates=jzero.Rates(peak='989TFLOP/s', ...), with the rates of your links, and "
            "workload=jzero.Workload(tokens='8K'); or none of them."))  # fmt: skip
    if workload.tokens is not None and not named and not options.moves_activations:
        raise OptionError(message(
            WHO, f"Workload(tokens={workload.tokens}) without peak",
            "Bytes do not depend on them; the time of a step does.",
            "Add rates=jzero.Rates(peak='989TFLOP/s'), or drop it."))  # fmt: skip
    if idle := {name: rate for name, rate in named.items() if not moves.get(name, True)}:
        raise OptionError(message(
            WHO, f"Rates({_said(idle)}), and nothing moves at such a rate",
            "pcie is for state in other memory, interconnect for several devices, host_update for "
            "jzero.HostCPU(), disk for jzero.NVMe(path).",
            f"Drop {' and drop '.join(idle)}."))  # fmt: skip


def _said(given: Mapping[str, int]) -> str:
    """`pcie='55GB/s'`."""
    units = {name: readable_flops if name == "peak" else readable_rate for name in given}
    return ", ".join(f"{name}='{units[name](n).replace(' ', '')}'" for name, n in given.items())
