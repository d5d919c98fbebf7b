"""Random draws that are the same in every version of Python."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Stream:
    """Draws that follow from a key.

    Python keeps the sequence of `random()` for a seed, and says so; `choice`, `sample` and
    `shuffle` may change between versions, so they are not used.

    Args:
      key: what all draws follow from.
    """

    def __init__(self, key: str) -> None:
        self._random = random.Random(key).random

    def uniform(self) -> float:
        """A number in [0, 1)."""
        return self._random()

    def below(self, n: int) -> int:
        """An integer in [0, n)."""
        return int(self._random() * n)

    def pick(self, items: Sequence[T]) -> T:
        """One of the items."""
        return items[self.below(len(items))]

    def distinct(self, n: int, bound: int) -> list[int]:
        """`n` integers in [0, bound), no two the same.

        Raises:
          ValueError: there are not so many.
        """
        if n > bound:
            raise ValueError(f"there are {bound} values, so no {n} distinct ones")
        if 2 * n > bound:
            return self.shuffled(range(bound))[:n]
        found: dict[int, None] = {}
        while len(found) < n:
            found[self.below(bound)] = None
        return list(found)

    def some(self, n: int, items: Sequence[T]) -> list[T]:
        """`n` of the items, in a drawn order."""
        return [items[i] for i in self.distinct(n, len(items))]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """The items in a drawn order."""
        out = list(items)
        for i in range(len(out) - 1, 0, -1):
            j = self.below(i + 1)
            out[i], out[j] = out[j], out[i]
        return out

    def number(self, digits: int) -> str:
        """A number of so many digits, the first one not 0."""
        low = 10 ** (digits - 1)
        return str(low + self.below(9 * low))

    def letters(self, n: int, alphabet: str) -> str:
        """A word of `n` letters."""
        return "".join(self.pick(alphabet) for _ in range(n))

    def uuid(self) -> str:
        """32 hexadecimal digits in five groups."""
        digits = self.letters(32, "0123456789abcdef")
        return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
