"""How answers to the public tasks are compared with what is right."""

from __future__ import annotations

import re
from collections.abc import Sequence

from da_jax.evals.task import Score

_LETTER = re.compile(r"(?<![A-Za-z])\(?([A-D])\)?(?![A-Za-z'’])")
_SAID = re.compile(r"(?:answer|choice|option)\b[^A-Za-z(]*(?:is\b)?[^A-Za-z(]*\(?([A-D])\b", re.I)
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def contained(answer: str, expected: Sequence[str]) -> Score:
    """The part of the expected strings that the answer contains, whatever their case (RULER)."""
    found = [text.lower() in answer.lower() for text in expected]
    return Score(sum(found) / len(found), {"found": found})


def letter(answer: str, expected: str) -> Score:
    """Whether the answer chooses a letter from A to D: after "answer is" first, else the last."""
    said = [match.upper() for match in _SAID.findall(answer)]
    alone = _LETTER.findall(answer)
    chosen = said[-1] if said else alone[-1] if alone else None
    return Score(float(chosen == expected), {"chosen": chosen})


def percentage(answer: str, expected: str) -> Score:
    """Exponential similarity of two percentages (ZeroSCROLLS): 2 ** (-10 |a - b|), a part of 1.

    Ten points off is half. Without a number from 0 to 100 the score is 0.
    """
    numbers = _NUMBER.findall(answer)
    if not numbers or not 0 <= (value := float(numbers[0])) <= 100:
        return Score(0.0, {"percentage": None})
    right = float(_NUMBER.findall(expected)[0])
    return Score(2.0 ** (-abs(value - right) / 10), {"percentage": value})
