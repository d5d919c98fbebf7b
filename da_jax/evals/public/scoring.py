"""How answers to the public tasks are compared with what is right."""

from __future__ import annotations

import re
from collections.abc import Sequence

from da_jax.evals.task import Score

_IS = r"(?:is|(?:must|should|would|will)\s+be)"
_SAYS = rf"(?:\s+{_IS}(?:\s+(?!not\b|an?\b)[a-z]+){{0,2}}|\s*[*_]*[:–—-])[^A-Za-z.]*"
_NAME = r"(?i:option|choice)"
_CHOICE = rf"(?:{_NAME}[^A-Za-z.]*)?([A-D])(?![A-Za-z'’])"
_READ = (  # the last of the first kind that is there
    re.compile(r"\\boxed\{\W*(?:\\text\{\W*)?([A-D])\b"),
    re.compile(rf"\b(?i:answer){_SAYS}{_CHOICE}"),
    re.compile(rf"\b{_NAME}{_SAYS}([A-D])(?![A-Za-z'’])"),
    re.compile(rf"\b{_NAME}[^A-Za-z.]*([A-D])\W*\s{_IS}\s+(?:the\s+)?(?i:right|correct|best)\b"),
    re.compile(r"\A\W*([A-Da-d])\W*\Z"),
    re.compile(r"\A\W*([A-D])(?=\)|[.:,])"),
    re.compile(r"\(([A-D])\)"),
    re.compile(r"(?<![A-Za-z])([B-D]|A(?!\s+[a-z]))(?![A-Za-z'’])"),
)
_NUMBER = r"(\d+(?:[.,]\d+)?)"  # none is above 100, so that a comma is that of a decimal
_PERCENTAGE = (  # the last of the first kind that is there
    re.compile(rf"{_NUMBER}\s*(?i:%|per\s?cent|pct)"),
    re.compile(rf"\b(?i:answer|percentage)(?:\s+{_IS}|\s*[*_]*:)\D{{0,20}}?{_NUMBER}"),
    re.compile(_NUMBER),
)


def contained(answer: str, expected: Sequence[str]) -> Score:
    """The part of the expected strings that the answer contains, whatever their case (RULER)."""
    found = [text.lower() in answer.lower() for text in expected]
    return Score(sum(found) / len(found), {"found": found})


def letter(answer: str, expected: str) -> Score:
    r"""Whether the answer chooses a letter from A to D.

    It is the last one in a box (`\boxed`), else the last one after "answer is" or "answer:"; else
    after "option is" or "choice is", or in "option C is right"; else the one that is the whole
    text, or that the text begins with, as in "(B) A man"; else the last one in brackets, or alone.
    """
    found = _last(_READ, answer)
    chosen = None if found is None else found.upper()
    return Score(float(chosen == expected), {"chosen": chosen})


def percentage(answer: str, expected: str) -> Score:
    """Exponential similarity of two percentages (ZeroSCROLLS): 2 ** (-10 |a - b|), a part of 1.

    Ten points off is half. The last number with a percent sign counts, else the last one after
    "answer" or "percentage is", else the last one; where it is not from 0 to 100 the score is 0.
    """
    found = _last(_PERCENTAGE, answer)
    if found is None or (value := _value(found)) > 100:
        return Score(0.0, {"percentage": None})
    right = _last(_PERCENTAGE, expected)
    if right is None:
        raise ValueError(f"{expected!r} holds no percentage; get the data again")
    return Score(2.0 ** (-abs(value - _value(right)) / 10), {"percentage": value})


def _last(patterns: Sequence[re.Pattern[str]], text: str) -> str | None:
    """What the first of the patterns that match found last."""
    found = (pattern.findall(text) for pattern in patterns)
    return next((each[-1] for each in found if each), None)


def _value(number: str) -> float:
    return float(number.replace(",", "."))
