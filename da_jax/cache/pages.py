"""The page pool: which physical pages are free (host side)."""

from __future__ import annotations

from collections.abc import Sequence


class PoolExhausted(RuntimeError):
    """Not enough free pages now; they come back when running requests end."""


class PagePool:
    """Hands out the ids 0 .. num_pages - 1.

    Args:
      num_pages: pages in the device pool.
    """

    def __init__(self, num_pages: int):
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}; the pool needs at least one page")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        """Pages that can be taken."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages, or none at all.

        Raises:
          PoolExhausted: when fewer are free.
        """
        if count > len(self._free):
            raise PoolExhausted(f"{count} pages asked, {len(self._free)} free of {self.num_pages}")
        pages = [self._free.pop() for _ in range(count)]
        self._used.update(pages)
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Returns pages. A page that is not in use is an error: its owner would be overwritten."""
        if strange := [page for page in pages if page not in self._used]:
            raise ValueError(f"pages {strange} are not in use")
        self._used.difference_update(pages)
        self._free.extend(pages)
