# SPDX-License-Identifier: Apache-2.0
"""What `estimate` is told of tiers on the hosts and of rates, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jzero._errors import OptionError, message
from jzero._policy import NoOffload, PinnedHost
from jzero._quantities import (
    COUNT_RULE,
    FLOPS_RULE,
    RATE_RULE,
    parse_count,
    parse_flops,
    parse_rate,
    readable_flops,
    readable_rate,
)
from jzero.reports._checks import WHO
from jzero.reports._host_tiers import HostTiers
from jzero.reports._step_time import Rates
from jzero.sharding.plan._options import Options

_SHAPE = ("tokens", "layers", "width")
_EXAMPLES = {
    "tokens": "'8K'", "layers": "32", "width": "4096", "peak": "'989TFLOP/s'", "pcie": "'55GB/s'",
    "interconnect": "'350GB/s'", "host_update": "'4GB/s'", "disk": "'5GB/s'",
}  # fmt: skip


def host_tiers(activations: Any, shape: Mapping[str, Any], recompute: Any) -> HostTiers:
    """The tiers, and the batch's shape as numbers.

    Raises:
      OptionError: an argument is not what it should be.
    """
    if not isinstance(activations, NoOffload | PinnedHost):
        raise OptionError(message(
            WHO, f"offload_activations={activations!r}",
            "It is jzero.PinnedHost(device_bytes=...): the memory that devices fetch from.",
            "Use offload_activations=jzero.PinnedHost(), or drop it."))  # fmt: skip
    if not isinstance(recompute, bool):
        raise OptionError(
            message(WHO, f"recompute={recompute!r}", "It is True or False.", "Drop it.")
        )
    counts = _numbers(shape, parse_count, COUNT_RULE)
    return HostTiers(activations, recompute=recompute, **counts)


def rates(**given: Any) -> Rates:
    """The rates as numbers.

    Raises:
      OptionError: one is none.
    """
    peak = _numbers({"peak": given.pop("peak")}, parse_flops, FLOPS_RULE)
    return Rates(**peak, **_numbers(given, parse_rate, RATE_RULE))


def _numbers(
    given: Mapping[str, Any], parse: Callable[[object], int | None], rule: str
) -> dict[str, int | None]:
    found = {name: None if value is None else parse(value) for name, value in given.items()}
    bad = [name for name, n in found.items() if n is None and given[name] is not None]
    if bad:
        edit = f"Write {', '.join(f'{name}={_EXAMPLES[name]}' for name in bad)}."
        said = [f"{name}={given[name]!r}" for name in bad]
        raise OptionError(message(WHO, said, f"It is {rule}.", edit, things="arguments"))
    return found


def check_tiers(options: Options, tiers: HostTiers) -> None:
    """Raises an `OptionError` for tiers that do not go with each other, or with the options."""
    _raise_first(_TIER_RULES, options, tiers)
    missing = [name for name in _SHAPE if getattr(tiers, name) is None]
    if tiers.offloads_activations and missing:
        raise OptionError(message(
            WHO, f"offload_activations without {' and without '.join(missing)}",
            "What a loop keeps is the input of each of its layers: tokens * layers * width elements.",
            "Give them, or drop offload_activations."))  # fmt: skip
    idle = [name for name in ("layers", "width") if getattr(tiers, name) is not None]
    if idle and not tiers.offloads_activations:
        raise OptionError(message(
            WHO, f"{' and '.join(f'{name}={getattr(tiers, name)}' for name in idle)} without "
            "offload_activations", "What a loop keeps on the host for its backward loop goes by that.",
            f"Drop {' and drop '.join(idle)}, or use offload_activations=jzero.PinnedHost()."))  # fmt: skip


def check_rates(tiers: HostTiers, given: Rates, moves: Mapping[str, bool]) -> None:
    """Raises an `OptionError` for rates without what they are the rates of.

    Args:
      tiers: of parameters and activations, and the tokens.
      given: the rates.
      moves: by the name of a rate, whether a step moves anything at it.
    """
    named = {name: rate for name, rate in given._asdict().items() if rate is not None}
    missing = [name for name, x in (("peak", given.peak), ("tokens", tiers.tokens)) if x is None]
    if named and missing:
        raise OptionError(message(
            WHO, f"{_said(named)} without {' and without '.join(missing)}",
            "The time of a step is that of its operations on so many tokens, and what hides behind them.",
            "Give peak='989TFLOP/s', tokens='8K' and the rates of your links, or none of them."))  # fmt: skip
    if tiers.tokens is not None and not named and not tiers.offloads_activations:
        raise OptionError(message(
            WHO, f"tokens={tiers.tokens} without peak", "Bytes do not go by them; the time of a step does.",
            "Add peak='989TFLOP/s', or drop it."))  # fmt: skip
    if idle := {name: rate for name, rate in named.items() if not moves.get(name, True)}:
        raise OptionError(message(
            WHO, f"{_said(idle)}, and nothing moves at such a rate",
            "pcie is for offload, interconnect for several devices, host_update for offload=jzero.HostCPU(), "
            "disk for offload=jzero.NVMe(path).",
            f"Drop {' and drop '.join(idle)}."))  # fmt: skip


def _said(given: Mapping[str, int]) -> str:
    """As they are written: `pcie='55GB/s'`."""
    units = {name: readable_flops if name == "peak" else readable_rate for name in given}
    return " and ".join(f"{name}='{units[name](n).replace(' ', '')}'" for name, n in given.items())


# What must not be, what is then found, the rule, and what to do; the first that holds is said.
_Rule = tuple[Callable[[Options, HostTiers], bool], str, str, str]
_TIER_RULES: tuple[_Rule, ...] = (
    (lambda o, t: o.offload.streams and o.reduce == "once", "reduce='once' and offload_params",
     "Gradients leave for the host, reduced, as each layer ends; none waits whole.",
     "Drop reduce, or offload_params."),
    (lambda o, t: t.offloads_activations and not t.recompute, "offload_activations and recompute=False",
     "What layers keep that do not compute anything again is not told by numbers.",
     "Drop recompute, or see describe() of a real step."),
)  # fmt: skip


def _raise_first(rules: tuple[_Rule, ...], options: Options, tiers: HostTiers) -> None:
    for broken, found, rule, edit in rules:
        if broken(options, tiers):
            raise OptionError(message(WHO, found.format(o=options, t=tiers), rule, edit))
