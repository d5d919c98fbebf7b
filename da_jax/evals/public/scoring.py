"""How answers to the public tasks are compared with what is right."""

from __future__ import annotations

import re
from collections.abc import Sequence

from da_jax.evals.task import Score

_SAYS = r"(?:\s+is(?:\s+(?!not\b|an?\b)[a-z]+)?|\s*[*_]*:)[^A-Za-z.]*"
_CHOICE = r"(?:(?i:option|choice)[^A-Za-z.]*)?([A-D])(?![A-Za-z'’])"
_READ = (  # the last of the first kind that is there
    re.compile(rf"\b(?i:answer){_SAYS}{_CHOICE}"),
    re.compile(rf"\b(?i:option|choice){_SAYS}([A-D])(?![A-Za-z'’])"),
    re.compile(r"\A\W*([A-D])(?=\)|[.:,]|\W*\Z)"),
    re.compile(r"\(([A-D])\)"),
    re.compile(r"(?<![A-Za-z])([B-D]|A(?!\s+[a-z]))(?![A-Za-z'’])"),
)
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_PERCENT = re.compile(rf"({_NUMBER.pattern})\s*(?:%|per\s?cent)", re.IGNORECASE)


def contained(answer: str, expected: Sequence[str]) -> Score:
    """The part of the expected strings that the answer contains, whatever their case (RULER)."""
    found = [text.lower() in answer.lower() for text in expected]
    return Score(sum(found) / len(found), {"found": found})


def letter(answer: str, expected: str) -> Score:
    """Whether the answer chooses a letter from A to D.

    It is the last one after "answer is" or "answer:"; else after "option is" or "choice is"; else
    the one that the text begins with, as in "(B) A man"; else the last one in brackets, or alone.
    """
    found = (pattern.findall(answer) for pattern in _READ)
    chosen = next((letters[-1] for letters in found if letters), None)
    return Score(float(chosen == expected), {"chosen": chosen})


def percentage(answer: str, expected: str) -> Score:
    """Exponential similarity of two percentages (ZeroSCROLLS): 2 ** (-10 |a - b|), a part of 1.

    Ten points off is half. The last number with a percent sign counts, else the last number; where
    it is not from 0 to 100 the score is 0.
    """
    found = _PERCENT.findall(answer) or _NUMBER.findall(answer)
    if not found or (value := float(found[-1])) > 100:
        return Score(0.0, {"percentage": None})
    right = float(_NUMBER.findall(expected)[0])
    return Score(2.0 ** (-abs(value - right) / 10), {"percentage": value})
