"""Stop strings: text is held back as long as it may be the beginning of one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

Tag = TypeVar("Tag")


class StopStrings(Generic[Tag]):
    """Passes text on until a stop string is complete, however it is split over the pieces.

    Of several that a piece completes, the one that begins first counts.

    Pieces carry a tag (the mode they were written under) that goes with their characters.

    Args:
      stops: non-empty strings.
    """

    def __init__(self, stops: Iterable[str]):
        self._stops = tuple(stops)
        self._held: list[tuple[str, Tag]] = []
        self.found: str | None = None
        self.withheld = 0  # characters of the text from the beginning of `found` on

    def push(self, text: str, tag: Tag) -> list[tuple[str, Tag]]:
        """Adds a piece and returns what may be shown; nothing once a stop string was found."""
        if self.found is not None:
            self.withheld += len(text)
            return []
        if not text:
            return []
        if not self._stops:
            return [(text, tag)]
        self._held.append((text, tag))
        whole = "".join(piece for piece, _ in self._held)
        hits = [(whole.find(stop), stop) for stop in self._stops if stop in whole]
        if hits:
            cut, self.found = min(hits)
            self.withheld = len(whole) - cut
        else:
            cut = len(whole) - self._possible_beginning(whole)
        shown, self._held = _split(self._held, cut)
        return shown

    def flush(self) -> list[tuple[str, Tag]]:
        """What is still held back at the end of the response."""
        held, self._held = self._held, []
        return [] if self.found is not None else held

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest suffix of `text` that begins a stop string."""
        longest = max(map(len, self._stops)) - 1
        sizes = range(min(longest, len(text)), 0, -1)
        return next((n for n in sizes if any(s.startswith(text[-n:]) for s in self._stops)), 0)


def _split(
    pieces: list[tuple[str, Tag]], cut: int
) -> tuple[list[tuple[str, Tag]], list[tuple[str, Tag]]]:
    before, after = [], []
    for text, tag in pieces:
        if text[:cut]:
            before.append((text[:cut], tag))
        if text[cut:]:
            after.append((text[cut:], tag))
        cut = max(cut - len(text), 0)
    return before, after
