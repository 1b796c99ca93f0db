"""Stands in for tqdm where it is not installed: what docs/guide/recipes.md calls."""

from typing import Any


class tqdm:
    def __init__(self, *, total: int):
        self.n, self._total = 0, total

    def set_postfix(self, numbers: dict[str, Any]) -> None:
        assert numbers

    def update(self, n: int) -> None:
        self.n += n

    def close(self) -> None:
        assert self.n == self._total
