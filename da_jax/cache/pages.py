"""The page pool: who holds which physical page, and which pages can be found again (host side).

A page in use has a count of its holders. A page whose content has a name (see `prefix`) stays when
its last holder lets go of it: it can be found and held again until its place is needed, the page
that was let go of longest ago first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


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
        self._empty = list(range(num_pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # named, held by nobody; oldest first
        self._holders: dict[int, int] = {}
        self._page_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Pages that can be taken, those of forgotten content included."""
        return len(self._empty) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Pages that nobody holds and whose content can still be found."""
        return len(self._idle)

    @property
    def filled(self) -> list[int]:
        """Pages whose content somebody holds or may find."""
        return sorted(self._holders.keys() | self._idle.keys())

    def holders(self, page: int) -> int:
        """How many hold a page."""
        return self._holders.get(page, 0)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages, or none at all; what idle pages among them held is forgotten.

        Raises:
          PoolExhausted: when fewer are free.
        """
        if count > self.num_free:
            raise PoolExhausted(f"{count} pages asked, {self.num_free} free of {self.num_pages}")
        while len(self._empty) < count:
            page, _ = self._idle.popitem(last=False)
            del self._page_of[self._name_of.pop(page)]
            self._empty.append(page)
        pages = [self._empty.pop() for _ in range(count)]
        self._holders.update(dict.fromkeys(pages, 1))
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Lets go of pages. One that nobody holds is an error: its owner would be overwritten."""
        if strange := [page for page in pages if page not in self._holders]:
            raise ValueError(f"pages {strange} are not in use")
        for page in reversed(pages):  # the end of a prefix is of no use without its beginning
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            del self._holders[page]
            if page in self._name_of:
                self._idle[page] = None
            else:
                self._empty.append(page)

    def name(self, page: int, name: bytes) -> None:
        """Makes a page in use findable; the page that had the name first keeps it."""
        if page not in self._holders:
            raise ValueError(f"page {page} is not in use")
        if name not in self._page_of and page not in self._name_of:
            self._page_of[name] = page
            self._name_of[page] = name

    def find(self, names: Iterable[bytes]) -> list[int]:
        """The pages of the longest run of `names` from their start that are all known."""
        pages = []
        for name in names:
            page = self._page_of.get(name)
            if page is None:
                break
            pages.append(page)
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        """Holds pages that `find` gave."""
        for page in pages:
            self._idle.pop(page, None)
            self._holders[page] = self._holders.get(page, 0) + 1

    def taken_by(self, pages: Iterable[int]) -> int:
        """How many fewer pages would be free if `pages` were held."""
        return sum(page not in self._holders for page in pages)
