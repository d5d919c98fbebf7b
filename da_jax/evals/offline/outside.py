"""How often a right value stands in a response, but not in the answer that is scored.

Of a response that declares, the answer is its last `<answer>` or LOCAL text. One that obeys the
question after that, in a line of its own, loses by its form and not by what it read: reports count
such responses.
"""

from __future__ import annotations

import re

from da_jax.evals.offline import scoring
from da_jax.evals.records import Record


def outside(record: Record) -> bool:
    """Whether all right values follow the last "Answer:" of a text, but are not all in its answer.

    Values are looked for as they are expected, apart from case and commas between thousands.
    """
    said = scoring.answered(record.text)
    return said is not None and _holds(said, record) and not _holds(record.answer, record)


def _holds(text: str, record: Record) -> bool:
    text = scoring.plain(text).lower()
    return all(scoring.matches(re.escape(value.lower()))(text) for value in record.expected)
