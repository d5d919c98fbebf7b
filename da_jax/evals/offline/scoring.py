"""Exact scores of free text.

What counts is what follows the last "Answer:" (in any case, also in Markdown's bold); without one
it is the whole text. In it, all values of the form that the question asks for are looked up: every
number of seven digits, say, or every name of a known list. They must be exactly the expected ones,
so that an answer that lists every candidate is wrong. What the question itself names may be
repeated.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable

from da_jax.evals.offline import words
from da_jax.evals.task import Score

_ANSWER = re.compile(r"\banswer\b[*_`]*\s*:", re.IGNORECASE)
_THOUSANDS = re.compile(r"(?<![\d,])\d{1,3}(?:,\d{3})+(?!\d|,\d)")
_LISTED = 20
"""Most values that the details of a score list."""

_COUNTS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
).split()
_COUNT = re.compile(rf"(?<![\w-])(?:{'|'.join(_COUNTS)})(?![\w-])", re.IGNORECASE)

UUID = re.compile(
    r"(?<![0-9a-f-])[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?![0-9a-f-])", re.IGNORECASE
)

_MONTH = "|".join(words.MONTHS)
_DAY = r"(\d{1,2})(?:st|nd|rd|th)?"
_DATE = re.compile(
    rf"\b{_DAY}(?:\s+of)?\s+({_MONTH})\b|\b({_MONTH})\s+(?:the\s+)?{_DAY}\b", re.IGNORECASE
)

Find = Callable[[str], Iterable[str]]
"""Finds the values in a text, each in its normal form."""


def final(answer: str) -> str:
    """What follows the last "Answer:", or all of the text."""
    found = list(_ANSWER.finditer(answer))
    return answer[found[-1].end() :] if found else answer


def numbers(digits: int) -> Find:
    """Finds numbers of so many digits; commas between thousands are left out."""
    pattern = re.compile(rf"(?<!\d)\d{{{digits}}}(?!\d)")
    return lambda text: pattern.findall(_plain(text))


def integers(text: str) -> list[str]:
    """Finds numbers, also those up to fifteen that are written as a word."""
    text = _COUNT.sub(lambda match: str(_COUNTS.index(match[0].lower())), _plain(text))
    return [str(int(digits)) for digits in re.findall(r"\d+", text)]


def uuids(text: str) -> list[str]:
    """Finds UUIDs, in lower case."""
    return [found.lower() for found in UUID.findall(text)]


def listed(candidates: Collection[str]) -> Find:
    """Finds the candidates that a text names as whole words, in whatever case."""
    by_name = {candidate.lower(): candidate for candidate in candidates}
    longest_first = sorted(map(re.escape, by_name), key=len, reverse=True)
    pattern = re.compile(rf"(?<![\w-])(?:{'|'.join(longest_first)})(?![\w-])", re.IGNORECASE)
    return lambda text: [
        by_name[" ".join(found.lower().split())]
        for found in pattern.findall(re.sub(r"\s+", " ", text))
    ]


def dates(text: str) -> list[str]:
    """Finds days with their month, such as "3 May"; also "May 3rd"."""
    return [
        f"{int(before or after)} {(first or then).capitalize()}"
        for before, first, then, after in _DATE.findall(text)
    ]


def matches(pattern: str) -> Find:
    """Finds what a pattern matches, as it stands."""
    return re.compile(pattern).findall


def exact(find: Find, answer: str, expected: Collection[str], named: Collection[str] = ()) -> Score:
    """1 if the answer holds the expected values and no others, else 0.

    Args:
      find: finds values.
      answer: the answer.
      expected: the values that are right.
      named: values that the question names; they count for nothing, unless they are right.
    """
    found = set(find(final(answer))) - (set(named) - set(expected))
    return Score(float(found == set(expected)), _details(found, set(expected)))


def overlap(find: Find, answer: str, expected: Collection[str]) -> Score:
    """F1 of the set of values in the answer against the expected set."""
    found, wanted = set(find(final(answer))), set(expected)
    both = len(found & wanted)
    value = 2 * both / (len(found) + len(wanted)) if both else 0.0
    return Score(value, _details(found, wanted))


def likeness(answer: str, prefix: str, expected: str) -> Score:
    """The measure of MRCR: `SequenceMatcher.ratio` of what follows the last `prefix`.

    0 if the prefix is not there. (The original wants the prefix at the very start; here an answer
    may reason before it.)
    """
    _, there, text = answer.rpartition(prefix)
    if not there:
        return Score(0.0, {"prefix": False})
    ratio = difflib.SequenceMatcher(None, text.strip(), expected).ratio()
    return Score(ratio, {"prefix": True, "characters": len(text.strip())})


def _plain(text: str) -> str:
    return _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)


def _details(found: set[str], expected: set[str]) -> dict[str, list[str]]:
    parts = {"found": found, "missing": expected - found, "extra": found - expected}
    return {name: sorted(values)[:_LISTED] for name, values in parts.items()}
