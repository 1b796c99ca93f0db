"""The largest number that works, found with few trials: from a guess up or down, then between."""

from collections.abc import Iterator


class Search:
    """Asks for trials until the largest that works and the smallest that does not are a tenth apart.

    Attributes:
      trains: the largest that worked; None if none did yet.
      fails: the smallest that did not.
    """

    def __init__(self, guess: int):
        self._next = guess
        self.trains: int | None = None
        self.fails: int | None = None

    def learn(self, number: int, works: bool) -> None:
        if works:
            self.trains = max(number, self.trains or 0)
        else:
            self.fails = min(number, self.fails or number)

    def candidates(self) -> Iterator[int]:
        """What to try next; its outcome is to be learned before the next is asked for."""
        while True:
            yield self._next
            if self.fails is None:
                assert self.trains is not None
                self._next = self.trains + max(1, self.trains // 6)
            elif self.trains is None:
                if self.fails == 1:
                    return
                self._next = max(1, self.fails - max(1, self.fails // 6))
            elif self.fails - self.trains <= max(1, self.trains // 10):
                return
            else:
                self._next = (self.trains + self.fails) // 2
