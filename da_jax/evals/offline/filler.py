"""What surrounds the evidence: sentences that say nothing, and real prose."""

from __future__ import annotations

import functools
import gzip
import importlib.resources

from da_jax.evals.offline.stream import Stream

_NOISE = (
    "The street is quiet at this hour.",
    "A light rain falls on the roofs.",
    "Somebody has left the window open.",
    "The bus comes every ten minutes.",
    "There is a smell of fresh coffee.",
    "The leaves turn brown in autumn.",
    "A dog sleeps in front of the bakery.",
    "The river is wider after the bend.",
    "Nobody remembers who planted the tree.",
    "The path leads up the hill and down again.",
    "It will probably be sunny tomorrow.",
    "The shop on the corner sells apples.",
    "Children play in the yard until supper.",
    "The train was late, as it often is.",
    "Snow lay on the fields for a week.",
    "The old clock has stopped again.",
    "Two birds sit on the wire.",
    "The wind has changed since the morning.",
    "They talked about the weather for a while.",
    "The bridge was painted last spring.",
    "A cat walks along the wall.",
    "The soup needs a little more salt.",
    "The lamp flickers when the door closes.",
    "On market days the square is full.",
    "The newspaper lies unread on the table.",
    "Fog comes in from the sea at night.",
    "The stairs creak under every step.",
    "Most of the shops close at noon.",
    "The grass is wet in the early hours.",
    "A bicycle leans against the fence.",
    "The kettle takes a long time to boil.",
    "We went there once and came back.",
)


def noise(stream: Stream, lines: int) -> list[str]:
    """Lines of three sentences each, which hold no digits and no names."""
    return [" ".join(stream.some(3, _NOISE)) + "\n" for _ in range(lines)]


@functools.cache
def _paragraphs() -> tuple[tuple[str, ...], ...]:
    """The shipped prose (see NOTICE): paragraphs of sentences."""
    data = importlib.resources.files(__package__).joinpath("prose.txt.gz").read_bytes()
    text = gzip.decompress(data).decode("ascii")
    return tuple(tuple(paragraph.split("\n")) for paragraph in text.strip().split("\n\n"))


def prose(stream: Stream, sentences: int) -> list[str]:
    """Real English prose from a drawn place on, a piece for each sentence or verse.

    After its end it goes on at its start. A text longer than the 247,123 characters there are
    comes from the same paragraphs again, in a drawn order.
    """
    paragraphs = _paragraphs()
    start = stream.below(len(paragraphs))
    order = list(range(start, len(paragraphs))) + list(range(start))
    out: list[str] = []
    while len(out) < sentences:
        for number in order:
            *first, last = paragraphs[number]
            out += [f"{sentence} " for sentence in first]
            out.append(f"{last}\n\n")
            if len(out) >= sentences:
                break
        order = stream.shuffled(order)
    return out[:sentences]
