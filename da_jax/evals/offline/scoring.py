"""Exact scores of free text.

What counts is what follows the last "Answer:" (in any case, also in Markdown's bold); without one
it is the whole text. In it, all values of the form that the question asks for are looked up: every
number of seven digits, say, or every name of a known list. They must be exactly the expected ones,
so that an answer that lists every candidate is wrong. What the question itself names may be
repeated. Where values are made-up words (variables, coded words), only those of the document are
values: other words are how an answer is phrased. Markdown around a value is no part of it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable

from da_jax.evals.offline import words
from da_jax.evals.task import Score

# Borders of a word. Unlike those of `\b`, an underscore is Markdown and no letter.
_LEFT, _RIGHT = r"(?<![^\W_])", r"(?![^\W_])"

_ANSWER = re.compile(rf"{_LEFT}answer[*_`]*\s*:", re.IGNORECASE)
_THOUSANDS = re.compile(r"(?<![\d,])\d{1,3}(?:,\d{3})+(?!\d|,\d)")
_LISTED = 20
"""Most values that the details of a score list."""

_COUNTS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
).split()
_COUNT = re.compile(
    rf"(?<!-){_LEFT}(?:{'|'.join(_COUNTS)}){_RIGHT}(?!-)|(?P<digits>\d+(?:\.\d+)?)",
    re.IGNORECASE,
)

UUID = re.compile(
    r"(?<![0-9a-f-])[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?![0-9a-f-])", re.IGNORECASE
)

_MONTH = "|".join(words.MONTHS)
_DAY = r"(\d{1,2})(?:st|nd|rd|th)?"
_DATE = re.compile(
    rf"{_LEFT}{_DAY}(?:\s+of)?\s+({_MONTH}){_RIGHT}"
    rf"|{_LEFT}({_MONTH})\s+(?:the\s+)?{_DAY}{_RIGHT}",
    re.IGNORECASE,
)

Find = Callable[[str], Iterable[str]]
"""Finds the values in a text, each in its normal form."""


def final(answer: str) -> str:
    """What follows the last "Answer:", or all of the text."""
    said = answered(answer)
    return answer if said is None else said


def answered(text: str) -> str | None:
    """What follows the last "Answer:"; None without one."""
    found = list(_ANSWER.finditer(text))
    return text[found[-1].end() :] if found else None


def numbers(digits: int) -> Find:
    """Finds numbers of so many digits; commas between thousands are left out."""
    pattern = re.compile(rf"(?<!\d)\d{{{digits}}}(?!\d)")
    return lambda text: pattern.findall(plain(text))


def integers(text: str) -> list[str]:
    """Finds numbers, also those up to fifteen that are written as a word; "7.0" is 7.

    "One" is a number only where no other stands: else it is a pronoun, as in "no one".
    """
    found = list(_COUNT.finditer(plain(text)))
    others = [match for match in found if match[0].lower() != "one"]
    return [
        _decimal(match["digits"]) if match["digits"] else str(_COUNTS.index(match[0].lower()))
        for match in others or found
    ]


def uuids(text: str) -> list[str]:
    """Finds UUIDs, in lower case."""
    return [found.lower() for found in UUID.findall(text)]


def listed(candidates: Collection[str]) -> Find:
    """Finds the candidates that a text names as whole words, in whatever case."""
    by_name = {candidate.lower(): candidate for candidate in candidates}
    longest_first = sorted(map(re.escape, by_name), key=len, reverse=True)
    names = "|".join(longest_first)
    pattern = re.compile(rf"(?<!-){_LEFT}(?:{names}){_RIGHT}(?!-)", re.IGNORECASE)
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
    """Finds whole words that a pattern matches, as they stand."""
    return re.compile(rf"{_LEFT}(?:{pattern}){_RIGHT}").findall


def among(known: Iterable[str]) -> Find:
    """Finds words of letters and digits that are known ones, in whatever case."""
    by_name = {word.lower(): word for word in known}
    return lambda text: [
        by_name[word] for word in re.findall(r"[^\W_]+", text.lower()) if word in by_name
    ]


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


def overlap(
    find: Find, answer: str, expected: Collection[str], named: Collection[str] = ()
) -> Score:
    """F1 of the set of values in the answer against the expected set; see `exact`."""
    found, wanted = set(find(final(answer))) - (set(named) - set(expected)), set(expected)
    both = len(found & wanted)
    value = 2 * both / (len(found) + len(wanted)) if both else 0.0
    return Score(value, _details(found, wanted))


def likeness(answer: str, prefix: str, expected: str) -> Score:
    """The measure of MRCR: `SequenceMatcher.ratio` of the line that the last `prefix` begins.

    0 if the prefix is not there. (The original wants the prefix at the very start, and a whole text
    after it; here an answer may reason before the line, and say more after it.)
    """
    _, there, text = answer.rpartition(prefix)
    if not there:
        return Score(0.0, {"prefix": False})
    line = text.strip().partition("\n")[0].rstrip()
    ratio = difflib.SequenceMatcher(None, line, expected).ratio()
    return Score(ratio, {"prefix": True, "characters": len(line)})


def _decimal(digits: str) -> str:
    """A number without zeros that say nothing."""
    whole, _, fraction = digits.partition(".")
    return f"{int(whole)}.{fraction}" if fraction.strip("0") else str(int(whole))


def plain(text: str) -> str:
    """A text without commas between thousands."""
    return _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)


def _details(found: set[str], expected: set[str]) -> dict[str, list[str]]:
    parts = {"found": found, "missing": expected - found, "extra": found - expected}
    return {name: sorted(values)[:_LISTED] for name, values in parts.items()}
