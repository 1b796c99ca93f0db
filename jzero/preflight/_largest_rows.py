# SPDX-License-Identifier: Apache-2.0
"""How many rows of a batch fit, by few compilations."""

from __future__ import annotations

from collections.abc import Callable, Mapping

_MOST_COMPILATIONS = 24


def largest_rows(peak: Callable[[int], int], rows: int, first: int, limit: int) -> int:
    """The most rows whose peak is within the limit; 0 if none are.

    Args:
      peak: bytes at so many rows; it grows with them, about linearly, and takes a compilation.
      rows: where the search begins.
      first: the peak there.
      limit: bytes.
    """
    known, unit = {rows: first}, 1
    for turn in range(_MOST_COMPILATIONS):
        low = max((n for n, p in known.items() if p <= limit), default=0)
        high = min((n for n, p in known.items() if p > limit), default=None)
        if high is not None and high - low <= unit:
            break
        # Peaks grow in small steps, which a line does not meet: near the limit, halve the interval.
        guess = (low + high) // 2 if high is not None and turn > 3 else _guess(known, limit)
        guess = max(guess // unit * unit, low + unit)
        guess = guess if high is None else min(guess, high - unit)
        try:
            known[guess] = peak(guess)
        except (TypeError, ValueError):  # A step that cuts its batch itself takes only some sizes.
            if unit == rows:
                raise
            unit = rows
            known = {n: p for n, p in known.items() if n % unit == 0}
    return max((n for n, p in known.items() if p <= limit), default=0)


def _guess(known: Mapping[int, int], limit: int) -> int:
    """Where a line through the two points next to the limit meets it."""
    if len(known) == 1:
        ((rows, peak),) = known.items()
        return 2 * rows if peak <= limit else rows // 2
    (n, p), (m, q) = sorted(known.items(), key=lambda point: abs(point[1] - limit))[:2]
    slope = (q - p) / (m - n)
    return n + int((limit - p) // slope) if slope > 0 else 2 * max(known)
