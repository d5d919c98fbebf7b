"""Follows code in generated text: what stands there is quoted, not declared."""

from __future__ import annotations

import re

_IN_TEXT = re.compile("[<`]")
_IN_CODE = re.compile("[<`\n]")


class Code:
    """Where in the text code is open, so that a tag there is quoted.

    Backticks on a line toggle inline code, so an odd run opens it; the line's end closes it. A line
    that starts with three or more opens a fence, unless it holds another backtick further on. The
    fence ends with a line of at least as many backticks and nothing else. A tool call is code up to
    its closing marker. Every honoured tag closes all of them; the tool call's end is still awaited.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Closes everything."""
        self.odd = False  # inline code
        self.fence = 0  # backticks that opened the fence, 0 outside one
        self.opening = False  # still on the line that opens the fence
        self.closing = False  # on a line that closes the fence if nothing more comes
        self.run = 0  # length of the run of backticks at the start of the line
        self.call = False  # in a tool call
        self.stops = _IN_TEXT  # characters of plain text that matter

    @property
    def open(self) -> bool:
        """Whether a tag that begins here is quoted."""
        return self.odd or self.fence > 0 or self.call

    @property
    def inline(self) -> bool:
        """Whether it is so only until the line ends."""
        return self.odd and not self.fence and not self.call

    def plain(self, text: str, start: int, end: int) -> None:
        """Takes text without backticks and newlines."""
        if self.closing and text[start:end].strip(" \t\r"):
            self.closing = False

    def newline(self) -> None:
        """Takes a newline."""
        if self.closing:
            self.fence = 0
        self.odd = self.opening = self.closing = False
        self.stops = _IN_CODE if self.fence else _IN_TEXT

    def backtick(self, previous: str) -> None:
        """Takes a backtick that follows the character `previous`."""
        if previous == "\n":
            self.run = 1
        else:
            self.run = self.run + 1 if self.run and previous == "`" else 0
        if self.fence and not self.opening:
            self.closing = self.run >= self.fence
            return
        self.odd = not self.odd
        self.opening = self.run >= 3
        self.fence = self.run if self.opening else 0
        self.stops = _IN_CODE if self.odd or self.fence else _IN_TEXT
