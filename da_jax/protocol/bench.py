"""Measures how fast the tag scanner reads."""

from __future__ import annotations

import time
from typing import NamedTuple

from da_jax.protocol.tags import TagScanner

_PROSE = (
    "The river rose overnight, and by morning the lower road was gone. <focus "
    'magic_chunks="3,7">The bridge, it turns out, had been closed the day before.</focus>\n\n'
    "Nobody in the village was surprised: it had rained for two weeks, and the old men had said "
    "so. What they had not said was how long it would last, or what would be left of the mill.\n"
)
_CODE = (
    "```python\ndef visible(spans: list[tuple[int, int]], at: int) -> bool:\n"
    "    for start, end in spans:\n        if start <= at < end and (at << 1) > 0:\n"
    "            return True  # `at` is inside\n    return False\n```\n"
)


class Throughput(NamedTuple):
    """One measurement: `text` names the kind, `chars_per_s` is characters per second."""

    text: str
    chars: int
    chars_per_s: float


def scanner_throughput(
    lengths: tuple[int, ...] = (100_000, 1_000_000), delta: int = 4
) -> list[Throughput]:
    """Times `TagScanner.feed` on one core; a flat rate over `lengths` means O(1) per character.

    Args:
      lengths: characters of each text.
      delta: characters per feed, about a token.

    Returns:
      A row for each kind of text and each length.
    """
    rows = []
    for kind, sample in (("prose", _PROSE), ("code", _CODE)):
        for length in lengths:
            text = (sample * (length // len(sample) + 1))[:length]
            deltas = [text[at : at + delta] for at in range(0, length, delta)]
            scanner = TagScanner(64)
            start = time.perf_counter()
            for piece in deltas:
                scanner.feed(piece)
            rows.append(Throughput(kind, length, length / (time.perf_counter() - start)))
    return rows
