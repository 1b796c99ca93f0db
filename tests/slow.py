"""Which tests run by default: all but the slow ones, of which CI runs a share.

`@pytest.mark.slow` above a test leaves it to `make test-all`; `@pytest.mark.slow(but=["a-1", "b-2"])` leaves
all but these of its cases. `JZERO_TEST_SHARE=3/20` keeps the tests of one share in twenty, by a checksum of
their names: `make test-share` runs slow ones so, others with each commit.
"""

import zlib
from collections.abc import Sequence

import pytest


def unmark(items: Sequence[pytest.Item]) -> None:
    """Takes the marker from the cases that it names.

    Raises:
      pytest.UsageError: it names none of a test's cases, of which all are there.
    """
    found: dict[int, tuple[pytest.Mark, list[str]]] = {}
    for item in items:
        for mark in [m for m in item.own_markers if m.name == "slow" and m.kwargs]:
            cases = found.setdefault(id(mark), (mark, []))[1]
            case = item.name.partition("[")[2].removesuffix("]")
            cases.append(case)
            if case in mark.kwargs["but"]:
                item.own_markers.remove(mark)
    for mark, cases in found.values():
        # One case alone is what somebody asked for by its name.
        if len(cases) > 1 and set(cases).isdisjoint(mark.kwargs["but"]):
            raise pytest.UsageError(
                f"slow(but={mark.kwargs['but']}) names none of the cases {cases[:5]}..."
            )


def keep_share(config: pytest.Config, items: list[pytest.Item], share: str) -> None:
    """Leaves out the tests of other shares: `share` is "k/n", k any number."""
    k, n = map(int, share.split("/"))
    mine = [zlib.crc32(item.nodeid.encode()) % n == k % n for item in items]
    config.hook.pytest_deselected(
        items=[x for x, is_mine in zip(items, mine, strict=True) if not is_mine]
    )
    items[:] = [x for x, is_mine in zip(items, mine, strict=True) if is_mine]
