"""Where the chunks are in a rendered prompt, in characters."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from da_jax.protocol.template import Segment, Wrapper

Span = tuple[int, int]


class Group(NamedTuple):
    """Chunks that follow each other without a gap: those that one turn brings.

    Attributes:
      size: how many.
      wrapper: what the template writes around each, if they are responses of tool calls.
    """

    size: int
    wrapper: Wrapper | None = None


def chunk_chars(segments: Sequence[Segment], groups: Sequence[Group]) -> tuple[Span, ...]:
    """Returns the characters of each chunk with its wrapper, in the joined text of the segments.

    Args:
      segments: The rendered prompt; the parts of chunk i, from 1, have `chunk` i.
      groups: The groups of the chunks, in order.

    Raises:
      ValueError: If the template does not write a wrapper where one must be.
    """
    text = "".join(segment.text for segment in segments)
    contents = _contents(segments, sum(group.size for group in groups), len(text))
    spans: list[Span] = []
    for group in groups:
        own = contents[len(spans) : len(spans) + group.size]
        if group.wrapper is None:
            borders = [start for start, _, _ in own] + [own[-1][1]]
        else:
            borders = list(_borders(text, own, group.wrapper))
        spans += itertools.pairwise(borders)
    return tuple(spans)


def _contents(
    segments: Sequence[Segment], count: int, length: int
) -> Sequence[tuple[int, int, int]]:
    """(start, end, start of the next piece of another) of what each chunk says."""
    starts, ends, following = [0] * count, [0] * count, [length] * count
    position, previous = 0, 0
    for segment in segments:
        if segment.part is not None:
            chunk = segment.part.chunk
            if previous and chunk != previous:
                following[previous - 1] = position
            if chunk and chunk != previous:
                starts[chunk - 1] = position
            previous = chunk
            if chunk:
                ends[chunk - 1] = position + len(segment.text)
        position += len(segment.text)
    return list(zip(starts, ends, following))


def _borders(
    text: str, contents: Sequence[tuple[int, int, int]], wrapper: Wrapper
) -> Iterator[int]:
    """The start of a group of tool calls, and the end of each."""
    start = contents[0][0]
    if not text.endswith(wrapper.opening, 0, start):
        raise ValueError(
            "the chat template renders the first tool call in a way of its own; use style 'plain'"
        )
    yield start - len(wrapper.opening)
    closing = wrapper.closing.lstrip()  # a template may trim white space before it
    for _, end, after in contents:
        found = text.find(closing, end, after)
        if found < 0:
            raise ValueError(
                "the chat template ends tool responses in different ways; use style 'plain'"
            )
        yield found + len(closing)
