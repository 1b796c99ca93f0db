"""Which tests run by default: all but the slow ones, of which CI runs a share.

`@pytest.mark.slow` above a test leaves it to `make test-all`. `@pytest.mark.slow(but=["a-1", "b-2"])`
leaves all but these of its cases, `@pytest.mark.slow(but=[0, 7])` all but the first and the eighth, and
`@pytest.mark.slow(but=5)` all but five, evenly spread. What is named with `::` runs, slow or not.

`JZERO_TEST_SHARE=3/30` keeps one share in thirty, by a checksum of names (`make test-share`).
"""

import zlib
from collections.abc import Sequence

import pytest


def unmark(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Takes the marker from the cases that run by default, and from all tests that are named.

    Raises:
      pytest.UsageError: it names what is no case of a test.
    """
    if all("::" in argument for argument in config.args):
        for item in items:
            item.own_markers[:] = [m for m in item.own_markers if m.name != "slow"]
        return
    found: dict[int, tuple[pytest.Mark, list[pytest.Item]]] = {}
    for item in items:
        for mark in (m for m in item.own_markers if m.name == "slow" and m.kwargs):
            found.setdefault(id(mark), (mark, []))[1].append(item)
    for mark, cases in found.values():
        for item in _by_default(mark.kwargs["but"], mark, cases):
            item.own_markers.remove(mark)


def _by_default(
    but: int | Sequence[str | int], mark: pytest.Mark, cases: list[pytest.Item]
) -> list[pytest.Item]:
    if isinstance(but, int):
        others = [x for x in cases if sum(m.name == "slow" for m in x.own_markers) == 1]
        return [others[i * len(others) // but] for i in range(min(but, len(others)))]
    names = [x.name.partition("[")[2].removesuffix("]") for x in cases]
    if unknown := set(but) - {*names, *range(len(cases))}:
        raise pytest.UsageError(f"slow(but={but}) names no cases of {cases[0].nodeid}: {unknown}")
    return [x for i, x in enumerate(cases) if i in but or names[i] in but]


def keep_share(config: pytest.Config, items: list[pytest.Item], share: str) -> None:
    """Leaves out the tests of other shares: `share` is "k/n", k from 0."""
    k, n = map(int, share.split("/"))
    mine = [zlib.crc32(item.nodeid.encode()) % n == k for item in items]
    config.hook.pytest_deselected(
        items=[x for x, is_mine in zip(items, mine, strict=True) if not is_mine]
    )
    items[:] = [x for x, is_mine in zip(items, mine, strict=True) if is_mine]
