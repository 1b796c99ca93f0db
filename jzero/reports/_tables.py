# SPDX-License-Identifier: Apache-2.0
"""What estimate() and describe() both report, in the same words: bytes by role, traffic by collective.

A `Table` is a value; its text has the lines that fit a terminal.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jzero._errors import escaped
from jzero._memory_kinds import DEVICE, HOST, NVME, PINNED
from jzero._quantities import readable_bytes
from jzero.offload.schedule._folds import Transfer
from jzero.reports._columns import lay_out
from jzero.reports._lines import WIDTH
from jzero.sharding.analysis._traffic import Collective
from jzero.sharding.plan._leaves import LeafPlan


class Memory(NamedTuple):
    """Bytes of one role.

    Attributes:
      role: 'parameter', 'optimizer state', 'other', 'gradient', ...
      whole: bytes of all of it, held once.
      per_device: bytes that each device holds.
      at_rest: stored between steps too; False for what lives within a step.
      note: what the number means.
      on_host: bytes that each device's host holds for it.
      on_disk: bytes that a disk of this host holds for it.
    """

    role: str
    whole: int
    per_device: int
    at_rest: bool
    note: str
    on_host: int = 0
    on_disk: int = 0


class Table(NamedTuple):
    """A header and rows of cells; all but the first column and those without a title are aligned right."""

    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def text(self, width: int = WIDTH) -> list[str]:
        """Its lines, none wider than `width`, with every number whole."""
        return lay_out(self.header, self._escaped(), self._prose(), width)

    def html(self) -> str:
        """The same for a notebook."""
        prose = self._prose()

        def row(cells: Sequence[str], tag: str) -> str:
            sides = ["left" if i in prose else "right" for i in range(len(cells))]
            return "<tr>" + "".join(
                f'<{tag} style="text-align:{side}">{html.escape(cell)}</{tag}>'
                for cell, side in zip(cells, sides, strict=True)
            ) + "</tr>"  # fmt: skip

        rows = [row(self.header, "th"), *(row(cells, "td") for cells in self._escaped())]
        return f"<table>{''.join(rows)}</table>"

    def _prose(self) -> set[int]:
        return {i for i, title in enumerate(self.header) if i == 0 or not title}

    def _escaped(self) -> list[tuple[str, ...]]:
        """Names may come from files that others wrote."""
        return [tuple(escaped(cell, keep="") for cell in row) for row in self.rows]


def memory_of(role: str, leaves: Sequence[LeafPlan], note: str, at_rest: bool = True) -> Memory:
    """The bytes of some leaves, by the memory in which they are."""
    here, there, files = (
        sum(leaf.nbytes_per_device for leaf in leaves if leaf.tier in tiers)
        for tiers in ((DEVICE,), (PINNED, HOST), (NVME,))
    )
    whole = sum(leaf.nbytes for leaf in leaves)
    return Memory(role, whole, here, at_rest, note, there, files)


def old_state(rows: Sequence[Memory]) -> Memory:
    """What `donate=False` takes beside a state of these roles."""
    resting = [row for row in rows if row.at_rest]
    return Memory(
        "old state",
        sum(row.whole for row in resting),
        sum(row.per_device for row in resting),
        False,
        "a step keeps the state passed to it",
        sum(row.on_host for row in resting),
    )


def at_rest(rows: Sequence[Memory]) -> int:
    """Bytes on each device between steps."""
    return sum(row.per_device for row in rows if row.at_rest)


def elements(traffic: Sequence[Collective], op: str, dtype: str | None = None) -> int:
    """Elements that a step moves by one op, of one dtype or of all."""
    chosen = [c for c in traffic if c.op == op and dtype in (None, c.dtype)]
    return sum(c.total_elements for c in chosen)


def memory_table(rows: Sequence[Memory]) -> Table:
    """A row for each stored role and their sum; then, if there are any, those within a step and all."""
    resting, passing = [r for r in rows if r.at_rest], [r for r in rows if not r.at_rest]
    groups = [("stored", resting, resting), ("total within a step", passing, rows)]
    places = [place for place in _PLACES if place in _PLACES[:2] or any(map(_AT[place], rows))]
    lines: list[tuple[str, ...]] = []
    for title, shown, summed in groups[: 2 if passing else 1]:
        lines += [_memory_row(row.role, [row], row.note, places) for row in shown]
        lines.append(_memory_row(title, summed, "", places))
    return Table(("memory", *places, ""), lines)


def traffic_table(traffic: Sequence[Collective]) -> Table | None:
    """Elements and bytes by op, dtype and axes, those of a `while` apart; None if nothing moves."""
    groups: dict[tuple[str, str, str, bool], list[Collective]] = {}
    for c in traffic:
        groups.setdefault((c.op, c.dtype, ",".join(c.axes), c.each_iteration), []).append(c)
    rows = [
        (*key, f"{sum(c.total_elements for c in group):,}",
         readable_bytes(sum(c.nbytes for c in group)),
         f"{sum(c.times for c in group)}{' per iteration' * each_iteration}")
        for (*key, each_iteration), group in sorted(groups.items())
    ]  # fmt: skip
    header = ("per step", "dtype", "axes", "elements", "bytes", "times")
    return Table(header, rows) if rows else None


def transfer_table(transfers: Sequence[Transfer]) -> Table | None:
    """Elements and bytes by direction, role and dtype, those of a `while` apart; None if nothing crosses."""
    groups: dict[tuple[str, str, str, bool], list[Transfer]] = {}
    for x in transfers:
        groups.setdefault((x.direction, x.what, x.dtype, x.each_iteration), []).append(x)
    rows = [
        (*key, f"{sum(x.elements for x in group):,}",
         readable_bytes(sum(x.nbytes for x in group)) + " per iteration" * each_iteration)
        for (*key, each_iteration), group in groups.items()
    ]  # fmt: skip
    header = ("per step, each device", "what", "dtype", "elements", "bytes")
    return Table(header, rows) if rows else None


_AT: dict[str, Callable[[Memory], int]] = {
    "whole": lambda row: row.whole,
    "on each device": lambda row: row.per_device,
    "on its host": lambda row: row.on_host,
    "on its disk": lambda row: row.on_disk,
}
_PLACES = list(_AT)


def _memory_row(
    title: str, rows: Sequence[Memory], note: str, places: Sequence[str]
) -> tuple[str, ...]:
    sums = [sum(map(_AT[place], rows)) for place in places]
    return (title, *map(readable_bytes, sums), note)
