# SPDX-License-Identifier: Apache-2.0
"""Types of flags, and messages in words of flags."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from jzero._groups import GROUPS
from jzero._policy import HostCPU, NVMe, PinnedHost
from jzero._quantities import (
    BANDWIDTH_RULE,
    parse_bandwidth,
    parse_bytes,
    parse_count,
    parse_flops,
    parse_rate,
)

# Policies as flags.
_POLICIES = {
    "memory=jzero.HostCPU()": "--offload host",
    "memory=jzero.PinnedHost()": "--offload pinned",
    "Memory(params=jzero.PinnedHost())": "--offload-params 2GiB",
    "Memory(activations=jzero.PinnedHost())": "--offload-activations",
    "Memory(activations=)": "--offload-activations",
    "Memory(params=)": "--offload-params",
    "the other axes": "model_parallel",
}
# Values of --offload: the policy, and its fields that have flags.
OFFLOADS: dict[str, tuple[type[Any], tuple[str, ...]]] = {
    "pinned": (PinnedHost, ("device_bytes",)),
    "host": (HostCPU, ("ratio", "delayed_update")),
    "nvme": (NVMe, ("host_bytes", "in_place", "gradients")),
}
_KINDS = {policy.__name__: kind for kind, (policy, _) in OFFLOADS.items()}
_VALUE = r"(\([^()]*\)|\{[^{}]*\}|'[^']*'|-?[\w.*]*\w)"


def in_flags(text: str, flags: Mapping[str, str]) -> str:
    """Rewrites a message about arguments in words of flags: `--stage 0` for `stage=0`.

    `flags` has the flag of each argument; the text before the first colon says who fails.
    """
    for policy, value in _POLICIES.items():
        text = text.replace(policy, value)
    policy = r"(\w+)\(([^()]*)\)"
    text = re.sub(
        rf"\bMemory\(params={policy}(?:, optimizer={policy})?\)",
        lambda m: " and ".join([_offload(m[3], m[4], flags)] * bool(m[3]) + [_window(m[2])]), text,
    )  # fmt: skip
    text = re.sub(
        rf"(?<!jzero\.)\b(?:memory=)?({'|'.join(_KINDS)})\(([^()]*)\)",
        lambda m: _offload(m[1], m[2], flags), text)  # fmt: skip
    text = re.sub(
        r"\bauto={(.*?)}", lambda m: "--auto " + re.sub(r'[" ]', "", m[1]).replace(":", "="), text
    )
    who, _, said = text.partition(": ")
    for argument in GROUPS:
        text = _group_in_flags(text, who, argument, flags)
    text = _in_flags(text, {dest: flag for dest, flag in flags.items() if "." not in dest})
    grouped = {dest.partition(".")[2]: flag for dest, flag in flags.items() if "." in dest}
    text = re.sub(
        rf"\b([Dd]rop|[Cc]orrect|and drop|and without|without) ({'|'.join(grouped) or '$'})(?=[ ,.:])",
        lambda m: f"{m[1]} {grouped[m[2]]}", text)  # fmt: skip
    text = re.sub(r"\bestimate\('([^']*)', ([^)]*)\)",
                  lambda m: f"--params {m[1]} {m[2].replace(',', '')}", text)  # fmt: skip
    who, _, said = text.replace("jnp.", "").partition(": ")
    return said or who


def _group_in_flags(text: str, who: str, argument: str, flags: Mapping[str, str]) -> str:
    """Rewrites the fields of a group, whether `who` is the group or not."""
    group = GROUPS[argument].kind.__name__
    of_group = [dest for dest in flags if dest.startswith(f"{argument}.")]
    fields = {dest.partition(".")[2]: flags[dest] for dest in of_group}
    text = re.sub(
        rf"(\w+=)?(?:jzero\.)?\b{group}\(((?:[^()]|\([^()]*\))*)\)",
        lambda m: _in_flags(re.sub(r"^(\d+), \.\.\.$", r"num=\1", m[2]), fields), text)  # fmt: skip
    if group == who:
        text = _in_flags(text, fields)
    if num := fields.get("num"):
        text = re.sub(rf"\b{argument}={_VALUE}", lambda m: _given(num, m[1]), text)
    return text


def _in_flags(text: str, flags: Mapping[str, str]) -> str:
    """Rewrites the arguments that have these flags."""
    if not flags:
        return text
    names = "|".join(sorted(flags, key=len, reverse=True))
    text = re.sub(rf"(?<!-)\b({names})={_VALUE}", lambda m: _given(flags[m[1]], m[2]), text)
    text = re.sub(rf"(?<!-)\b({names})=", lambda m: flags[m[1]], text)
    text = re.sub(
        rf"\b([Dd]rop|[Cc]orrect|without) ({names})\b", lambda m: f"{m[1]} {flags[m[2]]}", text
    )
    return re.sub(
        rf"(?<!-)\b({names})\b(?=.)", lambda m: flags[m[1]] if "_" in m[1] else m[1], text
    )


def _window(settings: str) -> str:
    """`--offload-params`, with the bytes on a device at a time."""
    found = re.search(r"device_bytes=(\d+)", settings)
    return f"--offload-params {found[1]}B" if found else "--offload-params"


def _offload(name: str, settings: str, flags: Mapping[str, str]) -> str:
    """A policy as `--offload`, and a flag for each field that is not as by default and has one."""
    if name not in _KINDS:
        return "no --offload"
    defaults = {x.name: repr(x.default) for x in dataclasses.fields(OFFLOADS[_KINDS[name]][0])}
    pairs = [pair.partition("=") for pair in settings.split(", ") if pair]
    given = [
        _given(flags[field], f"{value}{'B' * field.endswith('_bytes')}")
        for field, _, value in pairs
        if field in flags and defaults[field] != value
    ]
    return " ".join([f"--offload {_KINDS[name]}", *given])


def _given(flag: str, value: str) -> str:
    """A flag with its value as written on a command line."""
    pairs = [f"{name}={x.strip(chr(39))}" for name, x in re.findall(r"'([^']*)': ([^,}]*)", value)]
    words = ",".join(pairs or re.findall(r"'([^']*)'", value)) or value
    switch = "False" if flag.startswith("--no-") else "True"
    return flag if words in (switch, "layer") else f"{flag} {words}"


def _as_written(parse: Callable[[object], object], what: str) -> Callable[[str], str]:
    """The type of a flag whose value stays a text, which the library parses."""

    def checked(text: str) -> str:
        if parse(text) is None:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return text

    return checked


num_params = _as_written(parse_count, "a number such as 350M, 7.5B or 1e9")
rate = _as_written(parse_rate, "a number of bytes per second such as 55GB/s")
flops = _as_written(parse_flops, "a number such as 989TFLOP/s")
count = _as_written(parse_count, "a whole number such as 8192 or 8K")
_num_bytes = _as_written(parse_bytes, "a number of bytes such as 80GiB or 80GB")


def num_bytes(text: str) -> str:
    if text.isdecimal() and int(text) < 10**6:
        raise argparse.ArgumentTypeError(f"{text} of what? Write {text}GiB, {text}GB or {text}B")
    return _num_bytes(text)


def size(text: str) -> int | None:
    """Bytes as an int, for arguments that accept no text."""
    return parse_bytes(num_bytes(text))


def positive(text: str) -> int:
    if (found := parse_count(text)) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return found


def names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def ratio(text: str) -> float | str:
    """A number, or a text that the policy checks."""
    try:
        return float(text)
    except ValueError:
        return text


def mesh(text: str) -> dict[str, int]:
    """Sizes of axes by name."""
    pairs = _named_values(text, lambda size: size.isdecimal() and int(size), "node=8,local=8")
    if len(dict(pairs)) < len(pairs):
        raise argparse.ArgumentTypeError(f"{text!r} names an axis twice")
    return {name: int(size) for name, size in pairs}


def bandwidths(text: str) -> dict[str, str]:
    """Rates by the name of an axis, as written."""
    pairs = _named_values(text, bool, "node=100Gb/s,local=450GB/s")
    for name, found in pairs:
        if parse_bandwidth(found) is None:
            raise argparse.ArgumentTypeError(
                f"{found!r} along {name}. It is what a device sends, and receives, {BANDWIDTH_RULE}"
            )
    return dict(pairs)


def _named_values(text: str, fits: Callable[[str], object], form: str) -> list[tuple[str, str]]:
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name and fits(value) for name, _, value in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form {form}")
    return [(name, value) for name, _, value in pairs]
