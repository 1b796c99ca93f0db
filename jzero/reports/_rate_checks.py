# SPDX-License-Identifier: Apache-2.0
"""Whether the workload and the rates that `estimate` is given go with the options."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jzero._errors import OptionError, message
from jzero._numbers import Rates, Workload
from jzero._quantities import readable_flops, readable_rate
from jzero.reports._checks import WHO
from jzero.sharding.plan._options import Options

_SHAPE = ("tokens", "layers", "width")


def check_workload(options: Options, workload: Workload) -> None:
    """Raises an `OptionError` for a workload that does not go with the options."""
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
    """Raises an `OptionError` for rates without what they are the rates of.

    Args:
      options: where activations are stored.
      workload: the tokens.
      given: the rates.
      moves: by the name of a rate, whether a step moves anything at it.
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
    """As they are written: `pcie='55GB/s'`."""
    units = {name: readable_flops if name == "peak" else readable_rate for name in given}
    return ", ".join(f"{name}='{units[name](n).replace(' ', '')}'" for name, n in given.items())
