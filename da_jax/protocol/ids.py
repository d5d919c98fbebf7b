"""The numbers by which tags name chunks: 1 to N, or ids of the caller's choice."""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Collection, Iterable, Sequence

MAX_ID = 999_999_999
"""Greatest id of a chunk: nine digits, which every chat template and id of a tool call holds."""


def check_id(what: str, value: object) -> int:
    """The value, if it can number a chunk.

    Raises:
      ValueError: it is no whole number from 1 to `MAX_ID`; the message begins with `what`.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_ID:
        raise ValueError(f"{what} is {value!r}; give a whole number from 1 to {MAX_ID}")
    return value


def parse(what: str, text: str) -> tuple[int, ...]:
    """Reads chunk numbers separated by commas.

    Raises:
      ValueError: one of them is none; the message begins with `what`.
    """
    if not re.fullmatch(r"\s*[0-9]{1,9}\s*(,\s*[0-9]{1,9}\s*)*", text):
        raise ValueError(
            f"{what} is {text!r}; give chunk numbers of up to nine digits, separated by commas"
        )
    return tuple(check_id(f"a number of {what}", int(number)) for number in text.split(","))


def known_ids(chunks: int | Iterable[int]) -> Sequence[int]:
    """The ids of the chunks of a prompt, ascending.

    Args:
      chunks: how many there are, then their ids run from 1 to it; or their ids in any order.

    Raises:
      ValueError: an id that cannot be, or one that is given twice.
    """
    if isinstance(chunks, int):
        if not 0 <= chunks <= MAX_ID:
            raise ValueError(
                f"chunks is {chunks}; give the number of chunks, from 0 to {MAX_ID}, or their ids"
            )
        return range(1, chunks + 1)
    ids = sorted(check_id("an id of a chunk", chunk) for chunk in chunks)
    for one, other in itertools.pairwise(ids):
        if one == other:
            raise ValueError(f"the id {one} is given twice; give each chunk an id of its own")
    return tuple(ids)


def positions(ids: Sequence[int], low: int, high: int) -> range | None:
    """Where in `ids`, ascending, every number from `low` to `high` is; None if one is not there.

    Costs the logarithm of the number of ids, however far apart `low` and `high` are.
    """
    first, last = bisect.bisect_left(ids, low), bisect.bisect_right(ids, high)
    return range(first, last) if last - first == high - low + 1 else None


def check_known(what: str, wanted: Iterable[int], chunks: Collection[int]) -> None:
    """Checks that a prompt whose chunks have the ids `chunks` has all that are wanted.

    Raises:
      ValueError: it has not; the message begins with `what` and says which there are.
    """
    if wrong := [chunk for chunk in wanted if chunk not in chunks]:
        raise ValueError(
            f"{what} names {', '.join(map(str, wrong))}, but the prompt has {described(chunks)}"
        )


def described(chunks: Collection[int]) -> str:
    """Says in a few words which chunks there are."""
    ids = sorted(chunks)
    if not ids:
        return "no chunks"
    if len(ids) == ids[-1] - ids[0] + 1:
        return f"chunks {ids[0]} to {ids[-1]}"
    shown = [*map(str, ids[:8]), *["..."] * (len(ids) > 8)]
    return f"chunks {', '.join(shown)}"
