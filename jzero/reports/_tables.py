# SPDX-License-Identifier: Apache-2.0
"""Tables and prose of reports, as text and as HTML; and the tables that several reports share."""

from __future__ import annotations

import abc
import dataclasses
import html
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from jzero._errors import escaped
from jzero._memory_kinds import DEVICE, HOST, NVME, PINNED
from jzero._quantities import readable_bytes
from jzero.offload.schedule._folds import Transfer
from jzero.reports._lines import WIDTH, prose, wrapped
from jzero.sharding.analysis._traffic import Collective
from jzero.sharding.plan._leaves import LeafPlan

_GAP = 2  # spaces between columns
_NAME = 20  # least columns of names; longer names have a line of their own
_REMARK = 20  # least columns of remarks beside the numbers


class Memory(NamedTuple):
    """Bytes of one role."""

    role: str  # 'parameter', 'optimizer state', 'other', 'gradient', ...
    whole: int  # bytes of a single copy
    per_device: int  # bytes that each device holds
    at_rest: bool  # False if it lives within a step
    note: str  # what the number means
    on_host: int = 0  # bytes that each device's host holds for it
    on_disk: int = 0  # bytes that a disk of this host holds for it


class Table(NamedTuple):
    """A header and rows of cells; text columns (the first, and untitled ones) are aligned left."""

    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def text(self, width: int = WIDTH) -> list[str]:
        return _lay_out(self.header, self._escaped(), self._prose(), width)

    def html(self) -> str:
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
        # Names may come from files that others wrote.
        return [tuple(escaped(cell, keep="") for cell in row) for row in self.rows]


Block: TypeAlias = Table | list[str] | None


class Printed(abc.ABC):
    """A report that consists of blocks: a table each, or lines of prose. `print` it."""

    @abc.abstractmethod
    def blocks(self) -> Iterable[Block]:
        """The report's tables and paragraphs; an empty block is left out."""

    def lines(self, width: int = WIDTH) -> list[str]:
        """The text, at most `width` columns wide, with an empty line between blocks."""
        found = list[str]()
        for block in self.blocks():
            lines = block.text(width) if isinstance(block, Table) else prose(block or (), width)
            found += [*[""] * bool(found and lines), *lines]
        return found

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        return "".join(
            block.html() if isinstance(block, Table)
            else f"<pre>{html.escape(chr(10).join(prose(block)))}</pre>"
            for block in self.blocks() if block
        )  # fmt: skip


def plain(record: Any) -> dict[str, Any]:
    """A named tuple or a dataclass as plain types."""
    fields = record._asdict() if hasattr(record, "_asdict") else dataclasses.asdict(record)
    return {name: list(x) if isinstance(x, tuple) else x for name, x in fields.items()}


def memory_of(role: str, leaves: Sequence[LeafPlan], note: str, at_rest: bool = True) -> Memory:
    """Sums the bytes of leaves by the memory that holds them."""
    here, there, files = (
        sum(leaf.nbytes_per_device for leaf in leaves if leaf.tier in tiers)
        for tiers in ((DEVICE,), (PINNED, HOST), (NVME,))
    )
    whole = sum(leaf.nbytes for leaf in leaves)
    return Memory(role, whole, here, at_rest, note, there, files)


def old_state(rows: Sequence[Memory]) -> Memory:
    """The state that `donate=False` keeps beside the new one."""
    stored = [row for row in rows if row.at_rest]
    return Memory(
        "old state",
        sum(row.whole for row in stored),
        sum(row.per_device for row in stored),
        False,
        "a step keeps the state passed to it",
        sum(row.on_host for row in stored),
    )


def elements(traffic: Sequence[Collective], op: str, dtype: str | None = None) -> int:
    chosen = [c for c in traffic if c.op == op and dtype in (None, c.dtype)]
    return sum(c.total_elements for c in chosen)


def memory_table(rows: Sequence[Memory]) -> Table:
    """Rows of stored roles and their sum; then, if there are any, of those within a step, and the total."""
    stored, passing = [r for r in rows if r.at_rest], [r for r in rows if not r.at_rest]
    groups = [("stored", stored, stored), ("total within a step", passing, rows)]
    places = [place for place in _PLACES if place in _PLACES[:2] or any(map(_AT[place], rows))]
    lines: list[tuple[str, ...]] = []
    for title, shown, summed in groups[: 2 if passing else 1]:
        lines += [_memory_row(row.role, [row], row.note, places) for row in shown]
        lines.append(_memory_row(title, summed, "", places))
    return Table(("memory", *places, ""), lines)


def traffic_rows(traffic: Sequence[Collective]) -> list[dict[str, Any]]:
    """Collectives summed by op, dtype and axes; those of a `while` apart."""
    sums = {"elements": "total_elements", "bytes": "nbytes", "times": "times"}
    found = _summed(traffic, ("op", "dtype", "axes", "each_iteration"), sums)
    return [row | {"axes": list(row["axes"])} for row in found]


def traffic_table(traffic: Sequence[Collective]) -> Table | None:
    """Elements and bytes by op, dtype and axes; None if nothing moves between devices."""
    alike = operator.itemgetter("op", "dtype", "axes", "each_iteration")
    rows = [
        (row["op"], row["dtype"], ",".join(row["axes"]), f"{row['elements']:,}",
         readable_bytes(row["bytes"]), f"{row['times']}{' per iteration' * row['each_iteration']}")
        for row in sorted(traffic_rows(traffic), key=alike)
    ]  # fmt: skip
    header = ("per step", "dtype", "axes", "elements", "bytes", "times")
    return Table(header, rows) if rows else None


def transfer_rows(transfers: Sequence[Transfer]) -> list[dict[str, Any]]:
    """Transfers summed by direction, role and dtype; those of a `while` apart."""
    sums = {"elements": "elements", "nbytes": "nbytes"}
    found = _summed(transfers, ("direction", "what", "dtype", "each_iteration"), sums)
    order = ("direction", "what", "dtype", "elements", "nbytes", "each_iteration")
    return [{name: row[name] for name in order} for row in found]


def transfer_table(transfers: Sequence[Transfer]) -> Table | None:
    rows = [
        (row["direction"], row["what"], row["dtype"], f"{row['elements']:,}",
         readable_bytes(row["nbytes"]) + " per iteration" * row["each_iteration"])
        for row in transfer_rows(transfers)
    ]  # fmt: skip
    header = ("per step, each device", "what", "dtype", "elements", "bytes")
    return Table(header, rows) if rows else None


def _summed(
    found: Sequence[Any], alike: Sequence[str], sums: Mapping[str, str]
) -> list[dict[str, Any]]:
    """A row for each group with equal attributes `alike`; the attributes `sums` are summed."""
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for x in found:
        groups.setdefault(tuple(getattr(x, name) for name in alike), []).append(x)
    return [
        dict(zip(alike, key, strict=True))
        | {name: sum(getattr(x, summed) for x in group) for name, summed in sums.items()}
        for key, group in groups.items()
    ]


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


# -- layout of a table -----------------------------------------------------------------------------------


def _lay_out(
    header: Sequence[str], rows: Sequence[Sequence[str]], texts: Collection[int], width: int
) -> list[str]:
    """The lines of a table: column 0 has names, other `texts` have remarks, and the rest numbers.

    If the table is wider than `width`, titles are stacked. If that does not suffice, remarks wrap, long names
    get lines of their own, and remaining number columns form a second table.
    """
    grid = [header, *rows]
    columns = list(range(len(header)))
    for titles in (
        [[title] for title in header],
        [_stacked(*column) for column in zip(*grid, strict=True)],
    ):
        widths = [max(map(len, [*titles[i], *(row[i] for row in rows)])) for i in columns]
        if sum(widths) + _GAP * (len(columns) - 1) <= width:
            return [*_grid(titles, rows, columns, widths, texts)]
    groups = _groups([i for i in columns if i not in texts], widths, width - min(widths[0], _NAME))
    longest, lines = widths[0], list[str]()
    for group in groups:
        widths[0] = min(longest, width - sum(widths[i] + _GAP for i in group))
        remarks = [i for i in texts if i and group is groups[-1]]
        lines += [""] * bool(lines)
        lines += _grid(titles, rows, [0, *group], widths, texts, remarks, width)
    return lines


def _stacked(title: str, *cells: str) -> list[str]:
    """Wraps a title to the width of its cells, or to two lines."""
    return wrapped(title, width=max([3 * len(title) // 5, *map(len, [*cells, *title.split()])]))


def _groups(numbers: Sequence[int], widths: Sequence[int], room: int) -> list[list[int]]:
    """Groups of columns that fit into `room` together."""
    groups: list[list[int]] = [[]]
    for i in numbers:
        if groups[-1] and sum(widths[j] + _GAP for j in [*groups[-1], i]) > room:
            groups.append([])
        groups[-1].append(i)
    return groups


def _grid(
    titles: Sequence[Sequence[str]], rows: Sequence[Sequence[str]], columns: Sequence[int],
    widths: Sequence[int], texts: Collection[int], remarks: Sequence[int] = (), width: int = 0,
) -> Iterator[str]:  # fmt: skip
    """The lines of some columns; `remarks` follow each row."""

    def line(cells: Sequence[str]) -> str:
        placed = [
            cells[i].ljust(widths[i]) if i in texts else cells[i].rjust(widths[i]) for i in columns
        ]
        return (" " * _GAP).join(placed).rstrip()

    height = max(len(titles[i]) for i in columns)
    for level in range(height):
        # Titles are aligned at the bottom.
        above = [["", *title][max(0, level - height + len(title) + 1)] for title in titles]
        yield line(above)
    for row in rows:
        if len(row[0]) > widths[0]:
            yield from wrapped(row[0], "  ", width)
            row = ["", *row[1:]]
        remark = "".join(row[i] for i in remarks)
        at = sum(widths[i] + _GAP for i in columns)
        yield from _with_remark(line(row), remark, at, width)


def _with_remark(line: str, remark: str, at: int, width: int) -> list[str]:
    """A row with its remark beside it, wrapped, or below it."""
    if width - at < _REMARK:
        return [line, *(wrapped(remark, "    ", width, "    ") if remark else [])]
    first, *more = wrapped(remark, width=width - at)
    return [f"{line:<{at}}{first}".rstrip(), *(" " * at + each for each in more)]
