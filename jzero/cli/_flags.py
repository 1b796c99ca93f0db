# SPDX-License-Identifier: Apache-2.0
"""The flags of the command line: what they take, and errors in their words."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import itertools
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jzero._errors import escaped, named
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
from jzero.reports._lines import WIDTH, wrapped

# How policies are said in flags.
_POLICIES = {
    "memory=jzero.HostCPU()": "--offload host",
    "memory=jzero.PinnedHost()": "--offload pinned",
    "Memory(params=jzero.PinnedHost())": "--offload-params 2GiB",
    "Memory(activations=jzero.PinnedHost())": "--offload-activations",
    "Memory(activations=)": "--offload-activations",
    "Memory(params=)": "--offload-params",
    "the other axes": "model_parallel",
}
_OFFLOADS: dict[str, tuple[str, type[HostCPU | PinnedHost | NVMe]]] = {
    "HostCPU": ("host", HostCPU),
    "PinnedHost": ("pinned", PinnedHost),
    "NVMe": ("nvme", NVMe),
}
_VALUE = r"(\([^()]*\)|\{[^{}]*\}|'[^']*'|-?[\w.*]*\w)"


class Parser(argparse.ArgumentParser):
    """Names what is mistyped; its help has an example, and so has an error about what is missing."""

    def __init__(self, *, description: str, example: str = "", **settings: Any):
        lines = wrapped(description, width=terminal_columns())
        super().__init__(
            description="\n".join(lines), allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            epilog=f"example:\n  {example}" if example else None, **settings,
        )  # fmt: skip

    @property
    def flags(self) -> dict[str, str]:
        """The flag of each argument that has one."""
        return {a.dest: a.option_strings[-1] for a in self._actions if a.option_strings}

    @property
    def commands(self) -> list[str]:
        """The names of its commands; none of a command's own parser."""
        found = [a.choices for a in self._actions if isinstance(a, argparse._SubParsersAction)]
        return [name for choices in found for name in choices]

    # Typed as argparse does, by overloads that differ in the namespace alone.
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Else `argparse` would first say that `--params` is missing, and of `--param` nothing."""
        given = list(sys.argv[1:] if args is None else args)
        if bad := self._mistyped(given):
            self.error(" And ".join(bad))
        return super().parse_known_args(given, namespace)

    def _mistyped(self, given: Sequence[str]) -> list[str]:
        flags, names = [*self._option_string_actions], self.commands
        mine = list(itertools.takewhile(lambda text: text != "--", given))
        if names:  # What comes after the command is the command's.
            mine = list(itertools.takewhile(lambda text: text.startswith("-"), mine))
        typed = [text.partition("=")[0] for text in mine if re.match(r"-+[A-Za-z_]", text)]
        bad = [_no(name, flags) for name in typed if name not in flags]
        command = next(iter(given[len(mine) :]), None) if names else None
        if not bad and command is not None and command not in names:
            return [_no(command, names, all_of_them=True)]
        return bad

    def error(self, message: str) -> NoReturn:
        """Ends with exit status 2."""
        text = f"{self.prog}: {message.removeprefix('argument ')}"
        lines = wrapped(escaped(text), "  ", terminal_columns(), cut=False)
        if "required" in message and self.epilog:
            lines += self.epilog.splitlines()
        self.exit(2, "\n".join([*lines, f"See {self.prog} --help.", ""]))


# Flags of jzero 0.x, for one release.
_MOVED = {"--accumulate": "--microbatches", "--accumulate-dtype": "--accumulator-dtype"}


def _no(name: str, names: Sequence[str], all_of_them: bool = False) -> str:
    """That there is none of that name, and which was meant."""
    if name in _MOVED and _MOVED[name] in names:
        return f"there is no {name}. Write {_MOVED[name]}."
    like = difflib.get_close_matches(name, [x for x in names if x not in ("-h", "--help")], 1, 0.6)
    meant = f" Did you mean {like[0]}?" if like else f" There are {', '.join(names)}." * all_of_them
    return f"there is no {named(name)}.{meant}"


def terminal_columns() -> int:
    """Of the terminal; `COLUMNS` of the environment comes first."""
    return shutil.get_terminal_size((WIDTH, 24)).columns


def in_flags(text: str, flags: Mapping[str, str]) -> str:
    """What the library says of arguments, as it is said of flags: `--stage 0` for `stage=0`.

    Args:
      text: a message; whose it is stands before its first colon.
      flags: the flag of each argument.
    """
    for policy, value in _POLICIES.items():
        text = text.replace(policy, value)
    policy = r"(\w+)\(([^()]*)\)"
    text = re.sub(
        rf"\bMemory\(params={policy}(?:, optimizer={policy})?\)",
        lambda m: " and ".join([_offload(m[3], m[4], flags)] * bool(m[3]) + [_window(m[2])]), text,
    )  # fmt: skip
    text = re.sub(
        rf"(?<!jzero\.)\b(?:memory=)?({'|'.join(_OFFLOADS)})\(([^()]*)\)",
        lambda m: _offload(m[1], m[2], flags), text)  # fmt: skip
    text = re.sub(r"\bauto={(.*?)}", lambda m: f"--auto {_pairs(m[1])}", text)
    who, _, said = text.partition(": ")
    for argument, (kind, _) in GROUPS.items():
        group = kind.__name__
        fields = {
            dest.partition(".")[2]: flag
            for dest, flag in flags.items()
            if dest.startswith(f"{argument}.")
        }
        text = re.sub(
            rf"(\w+=)?(?:jzero\.)?\b{group}\(((?:[^()]|\([^()]*\))*)\)",
            functools.partial(_group_in_flags, fields), text)  # fmt: skip
        if group == who:
            text = _in_flags(text, fields)
        if one := flags.get(f"{argument}.num"):
            text = re.sub(rf"\b{argument}={_VALUE}", functools.partial(_value_in_flags, one), text)
    text = _in_flags(text, {dest: flag for dest, flag in flags.items() if "." not in dest})
    grouped = {dest.partition(".")[2]: flag for dest, flag in flags.items() if "." in dest}
    text = re.sub(
        rf"\b([Dd]rop|[Cc]orrect|and drop|and without|without) ({'|'.join(grouped) or '$'})(?=[ ,.:])",
        lambda m: f"{m[1]} {grouped[m[2]]}", text)  # fmt: skip
    text = re.sub(r"\bestimate\('([^']*)', ([^)]*)\)",
                  lambda m: f"--params {m[1]} {m[2].replace(',', '')}", text)  # fmt: skip
    who, _, said = text.replace("jnp.", "").partition(": ")
    return said or who


def _group_in_flags(fields: Mapping[str, str], group: re.Match[str]) -> str:
    return _in_flags(re.sub(r"^(\d+), \.\.\.$", r"num=\1", group[2]), fields)


def _value_in_flags(flag: str, value: re.Match[str]) -> str:
    return _given(flag, value[1])


def _in_flags(text: str, flags: Mapping[str, str]) -> str:
    """The arguments of a text, of which these are the flags."""
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
    """Parameters that rest on the hosts, or in files, with what is on a device at a time."""
    found = re.search(r"device_bytes=(\d+)", settings)
    return f"--offload-params {found[1]}B" if found else "--offload-params"


def _offload(name: str, settings: str, flags: Mapping[str, str]) -> str:
    """A policy as a flag each for it and for what it sets that is no default and has a flag."""
    if name not in _OFFLOADS:
        return "no --offload"
    kind, policy = _OFFLOADS[name]
    defaults = {field.name: repr(field.default) for field in dataclasses.fields(policy)}
    pairs = [pair.partition("=") for pair in settings.split(", ") if pair]
    given = [
        _given(flags[field], f"{value}{'B' * field.endswith('_bytes')}")
        for field, _, value in pairs
        if field in flags and defaults[field] != value
    ]
    return " ".join([f"--offload {kind}", *given])


def _given(flag: str, value: str) -> str:
    """A flag with its value as it is written on a command line."""
    pairs = [f"{name}={x.strip(chr(39))}" for name, x in re.findall(r"'([^']*)': ([^,}]*)", value)]
    words = ",".join(pairs or re.findall(r"'([^']*)'", value)) or value
    switch = "False" if flag.startswith("--no-") else "True"
    return flag if words in (switch, "layer") else f"{flag} {words}"


def _pairs(entries: str) -> str:
    """The entries of a dict as they are written on a command line."""
    return re.sub(r'[" ]', "", entries).replace(":", "=")


def num_params(text: str) -> str:
    """A number of parameters, as it was written."""
    if parse_count(text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 350M, 7.5B or 1e9")
    return text


def positive(text: str) -> int:
    """A whole number from 1."""
    if (found := parse_count(text)) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return found


def num_bytes(text: str) -> str:
    """A number of bytes, as it was written, with its unit."""
    if text.isdecimal() and int(text) < 10**6:
        raise argparse.ArgumentTypeError(f"{text} of what? Write {text}GiB, {text}GB or {text}B")
    if parse_bytes(text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes such as 80GiB or 80GB")
    return text


def rate(text: str) -> str:
    """Bytes per second, as they were written, with their unit."""
    if parse_rate(text) is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of bytes per second such as 55GB/s"
        )
    return text


def flops(text: str) -> str:
    """Operations per second, as they were written."""
    if parse_flops(text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 989TFLOP/s")
    return text


def count(text: str) -> str:
    """A whole number, as it was written."""
    if parse_count(text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number such as 8192 or 8K")
    return text


def names(text: str) -> tuple[str, ...]:
    """Names with commas between them."""
    return tuple(text.split(","))


def ratio(text: str) -> float | str:
    """A number; the policy says what else it may be."""
    try:
        return float(text)
    except ValueError:
        return text


def mesh(text: str) -> dict[str, int]:
    """Names and sizes of axes."""
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name and size.isdecimal() and int(size) for name, _, size in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form node=8,local=8")
    if len({name for name, _, _ in pairs}) < len(pairs):
        raise argparse.ArgumentTypeError(f"{text!r} names an axis twice")
    return {name: int(size) for name, _, size in pairs}


def bandwidths(text: str) -> dict[str, str]:
    """Names of axes and what each device sends along them, as it was written."""
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name and found for name, _, found in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form node=100Gb/s,local=450GB/s")
    for name, _, found in pairs:
        if parse_bandwidth(found) is None:
            raise argparse.ArgumentTypeError(
                f"{found!r} along {name}. It is what a device sends, and receives, {BANDWIDTH_RULE}"
            )
    return {name: found for name, _, found in pairs}
