"""Examples of a wanted length: a draft of any size, and the greatest size that fits."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from da_jax.evals.offline.stream import Stream
from da_jax.evals.task import Count, Example, Task

FILLED = 0.99
"""A draft that uses this share of the length is long enough; else it is the greatest that fits."""


class Evidence(str):
    """A piece of a document that the answer follows from."""


@dataclasses.dataclass(frozen=True)
class Draft:
    """An example that is not yet known to fit. See `Example` for the fields."""

    document: str
    question: str
    expected: tuple[str, ...]
    evidence: tuple[tuple[int, int], ...]
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def join(pieces: Iterable[str]) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Puts pieces together as they are.

    Returns:
      The document without white space at its end, and the (start, end) of each piece that is
      `Evidence`, without the white space at the end of the piece.
    """
    position, parts, spans = 0, [], []
    for piece in pieces:
        if isinstance(piece, Evidence):
            spans.append((position, position + len(piece.rstrip())))
        parts.append(piece)
        position += len(piece)
    return "".join(parts).rstrip(), tuple(spans)


def drawn_depths(stream: Stream, n: int) -> list[float]:
    """Where `n` items shall lie in a document, in order: 0 is its start, 1 its end."""
    return sorted(stream.uniform() for _ in range(n))


def scatter(filler: Sequence[str], items: Sequence[str], at: Sequence[float]) -> list[str]:
    """Puts items between pieces of filler, in the order they come in, at ascending depths."""
    out: list[str] = []
    done = 0
    for item, depth in zip(items, at):
        place = int(depth * (len(filler) + 1))
        out += filler[done:place]
        out.append(item)
        done = place
    return [*out, *filler[done:]]


def fit(build: Callable[[int], Draft], smallest: int, length: int, count: Count) -> Draft:
    """The draft of the size that fills a length.

    Args:
      build: a draft with so many units of filler; more units, more tokens.
      smallest: the least size.
      length: most tokens of document and question together.
      count: counts tokens; called a few times on drafts of about the length.

    Raises:
      ValueError: the smallest draft is too long.
    """

    def measured(size: int) -> tuple[Draft, int]:
        draft = build(size)
        return draft, count(draft.document) + count(draft.question)

    best, used = measured(smallest)
    if used > length:
        raise ValueError(
            f"needs at least {used} tokens for document and question, got {length}; "
            "give a greater length"
        )
    low, high, rate, tries = smallest, None, None, 0
    while used < FILLED * length and (high is None or high - low > 1):
        tries += 1
        if rate is None:
            guess = low + 16
        elif high is not None and tries > 8:
            guess = (low + high) // 2
        else:
            guess = low + max(1, int(((1 + FILLED) / 2 * length - used) / rate))
        if high is not None:
            guess = min(guess, high - 1)
        draft, tokens = measured(guess)
        rate = max((tokens - used) / (guess - low), 0.1)
        if tokens > length:
            high = guess
        else:
            best, low, used = draft, guess, tokens
    return best


class Generated(Task, abc.ABC):
    """A task whose examples follow from its name, the seed, the length and their index.

    The details of an example hold `depths`: where each piece of evidence begins, from 0 to 1.
    """

    max_tokens = 1024
    smallest = 0
    """Fewest units of filler."""

    @abc.abstractmethod
    def draft(self, stream: Stream, units: int) -> Draft:
        """An example with so many units of filler, always the same one for a stream and size."""

    def examples(self, length: int, n: int, seed: int, count: Count) -> Iterator[Example]:
        for index in range(n):
            build = functools.partial(self._build, f"{self.name}/{seed}/{length}/{index}")
            try:
                draft = fit(build, self.smallest, length, count)
            except ValueError as error:
                raise ValueError(f"{self.name}, seed {seed}, example {index}: {error}") from None
            depths = [round(start / len(draft.document), 4) for start, _ in draft.evidence]
            yield Example(
                self.name,
                index,
                draft.document,
                draft.question,
                draft.expected,
                draft.evidence,
                {**draft.details, "depths": depths},
            )

    def _build(self, key: str, units: int) -> Draft:
        return self.draft(Stream(key), units)
