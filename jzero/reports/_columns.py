# SPDX-License-Identifier: Apache-2.0
"""A table as lines that fit: words give way, numbers stay whole."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from jzero.reports._lines import wrapped

_GAP = 2  # spaces between columns
_NAME = 20  # columns that names get at least; longer ones have a line of their own
_REMARK = 20  # columns that remarks need beside the numbers, to stand there


def lay_out(
    header: Sequence[str], rows: Sequence[Sequence[str]], texts: Collection[int], width: int
) -> list[str]:
    """The lines of a table; column 0 has names, other `texts` remarks, and the rest numbers.

    If it is wider than `width`, words of the header stand below each other. If that is not enough, remarks
    take several lines, long names have lines of their own, and numbers left over a second table.
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
    """The words of a title below each other, in as many columns as its cells take, or two lines."""
    return wrapped(title, width=max([3 * len(title) // 5, *map(len, [*cells, *title.split()])]))


def _groups(numbers: Sequence[int], widths: Sequence[int], room: int) -> list[list[int]]:
    """As many columns together as fit into `room`, at least one."""
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
    """Some columns, and below each row its `remarks`."""

    def line(cells: Sequence[str]) -> str:
        placed = [
            cells[i].ljust(widths[i]) if i in texts else cells[i].rjust(widths[i]) for i in columns
        ]
        return (" " * _GAP).join(placed).rstrip()

    height = max(len(titles[i]) for i in columns)
    for level in range(height):
        # The words of a short title stand above its numbers, in the last lines.
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
    """A row and its remark: beside it, in several lines if need be, or below."""
    if width - at < _REMARK:
        return [line, *(wrapped(remark, "    ", width, "    ") if remark else [])]
    first, *more = wrapped(remark, width=width - at)
    return [f"{line:<{at}}{first}".rstrip(), *(" " * at + each for each in more)]
