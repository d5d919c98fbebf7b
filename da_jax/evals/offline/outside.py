"""How often a right value stands in a response, but not in the answer that is scored.

`python -m da_jax.evals.offline.outside FOLDER` counts it for each arm of a run of `da-jax eval`. Of
a response that declares, the answer is its last `<answer>` or LOCAL text. One that obeys the
question after that, in a line of its own, loses by its form and not by what it read.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from da_jax.evals.folder import read_records
from da_jax.evals.offline import scoring
from da_jax.evals.records import Record


def outside(record: Record) -> bool:
    """Whether all right values follow the last "Answer:" of a text, but are not all in its answer.

    Values are looked for as they are expected, apart from case and commas between thousands.
    """
    said = scoring.answered(record.text)
    return said is not None and _holds(said, record) and not _holds(record.answer, record)


def count(records: Iterable[Record]) -> dict[str, tuple[int, int]]:
    """By arm: (responses, those of them whose right values are outside of the answer)."""
    total, found = Counter[str](), Counter[str]()
    for record in records:
        total[record.arm] += 1
        found[record.arm] += outside(record)
    return {arm: (number, found[arm]) for arm, number in sorted(total.items())}


def _holds(text: str, record: Record) -> bool:
    text = scoring.plain(text).lower()
    return all(scoring.matches(re.escape(value.lower()))(text) for value in record.expected)


def main() -> None:
    """Prints a line for each arm."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder that `da-jax eval` wrote")
    for arm, (number, found) in count(read_records(parser.parse_args().folder)).items():
        print(f"{arm}: {found} of {number} responses have the right value outside of their answer")


if __name__ == "__main__":
    main()
