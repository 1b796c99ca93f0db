# SPDX-License-Identifier: Apache-2.0
"""Numbers as people write them: "7.5B" or "1e9" parameters, "80GiB", "55GB/s"."""

from __future__ import annotations

import numbers
import re
from fractions import Fraction
from typing import TypeGuard

_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_DECIMAL = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_PREFIXES = {"P": 10**15, "T": 10**12, "G": 10**9, "M": 10**6, "K": 10**3}
_NUMBER = re.compile(r"(\d{1,40}(?:\.\d{1,40})?(?:[eE]\+?\d{1,2})?)\s*([A-Za-z]*)")

_BITS = re.compile(r"(.+?)b(?:it)?/s")
_FLOPS = re.compile(r"(.+?)\s*flop(?:s|/s)", re.IGNORECASE)

COUNT_RULE = "a whole number from 1, or a string such as '350M', '7.5B', '1e9' or '1T'"
BYTES_RULE = "a whole number from 1, or a string such as '80GiB' or '80GB'"
RATE_RULE = (
    "bytes per second, a whole number from 1 or a string such as '55GB/s'; a capital B is a byte"
)
BANDWIDTH_RULE = "above 0, in bytes per second or in bits: '450GB/s', '100Gb/s'"
FLOPS_RULE = "operations per second, a whole number from 1 or a string such as '989TFLOP/s'"


def parse_count(value: object) -> int | None:
    """`7500000000` of `"7.5B"` and of `"7.5e9"`; None for what is not a positive count."""
    return _parse(value, _COUNTS)


def parse_bytes(value: object) -> int | None:
    """`85899345920` of `"80GiB"`, 80 billion of `"80GB"`; None for what is not a number of bytes."""
    return _parse(value, _DECIMAL | _BINARY)


def parse_rate(value: object) -> int | None:
    """55 billion of `"55GB/s"`; None for what is not bytes per second: `"400Gb/s"` are bits."""
    if isinstance(value, str):
        return parse_bytes(value.strip()[:-2]) if value.strip().endswith("B/s") else None
    return parse_bytes(value)


def parse_bandwidth(value: object) -> int | None:
    """450 billion for `"450GB/s"`, 12.5 billion for `"100Gb/s"`, as networks are specified; else None."""
    if isinstance(value, str) and (match := _BITS.fullmatch(value.strip())):
        bits = _parse(match[1], {"": 1, **_PREFIXES})
        return None if bits is None else bits // 8 or None
    return parse_rate(value)


def parse_flops(value: object) -> int | None:
    """989 * 10**12 for `"989TFLOP/s"`; None for what is not operations per second."""
    if isinstance(value, str):
        match = _FLOPS.fullmatch(value.strip())
        return _parse(match[1], {"": 1, **_PREFIXES}) if match else None
    return _parse(value, _COUNTS)


def readable_count(num: int, at_most: bool = False) -> str:
    """`7.5B`, rounded to two decimals, or with `at_most` down."""
    for unit, size in reversed(_COUNTS.items()):
        if num >= size:
            shown = num // (size // 100) / 100 if at_most and size > 1 else num / size
            return f"{shown:.2f}".rstrip("0").rstrip(".") + unit
    return str(num)


def readable_bytes(num: float) -> str:
    """`12.3 MiB`."""
    for unit in ("B", *_BINARY):
        if num < 1024 or unit == "TiB":
            return f"{num:.0f} {unit}" if unit == "B" else f"{num:.1f} {unit}"
        num /= 1024
    raise AssertionError


def readable_size(num: float) -> str:
    """`1.5 TB`: decimal units, as disks are specified."""
    return f"{_scaled(num)}B"


def readable_rate(num: float) -> str:
    """`55.1 GB/s`: decimal units, as links are specified."""
    return f"{_scaled(num)}B/s"


def readable_bits(num: float) -> str:
    """`100 Gb/s` for 12.5 billion bytes per second, as networks are specified."""
    return f"{_scaled(8 * num)}b/s"


def readable_flops(num: float) -> str:
    """`989 TFLOP/s`."""
    return f"{_scaled(num)}FLOP/s"


def readable_seconds(num: float) -> str:
    """`12.3 ms`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if num >= size:
            return f"{_three_digits(num / size)} {unit}"
    return f"{_three_digits(num * 1e6)} us" if num else "0 s"


def _scaled(num: float) -> str:
    letter, size = next(((u, size) for u, size in _PREFIXES.items() if num >= size), ("", 1))
    return f"{_three_digits(num / size)} {letter}"


def _three_digits(num: float) -> str:
    """`0.123`, `1.23`, `12.3` and `1,234`; 1 is `1`."""
    places = 0 if num >= 100 else 1 if num >= 10 else 2 if num >= 1 else 3
    text = f"{num:,.{places}f}"
    return text.rstrip("0").rstrip(".") if places else text


def is_number(x: object) -> TypeGuard[float]:
    """Whether it is a real number, NumPy's included, and no bool."""
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def _parse(value: object, units: dict[str, int]) -> int | None:
    number: float | Fraction = 0
    if is_number(value):
        number = int(value) if isinstance(value, numbers.Integral) else float(value)
    elif isinstance(value, str) and (match := _NUMBER.fullmatch(value.strip())):
        sizes = {unit.lower(): size for unit, size in units.items()}
        number = Fraction(match[1]) * sizes.get(match[2].lower() or _plain(units), 0)
    return int(number) if number > 0 and number % 1 == 0 else None


def _plain(units: dict[str, int]) -> str:
    """The unit of a number without one, in lower case."""
    return next(unit.lower() for unit, size in units.items() if size == 1)
