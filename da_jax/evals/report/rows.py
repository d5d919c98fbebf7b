"""Records as rows of numbers, and rows by source."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from da_jax.evals.records import Record

MODES = ("global", "focus", "local")
ARMS = ("vanilla", "unmasked", "da")
Example = tuple[str, int, int]


@dataclasses.dataclass(frozen=True)
class Row:
    """What a report needs of a record.

    Attributes:
      numbers: what is averaged, by name.
      declines: declined openers by reason.
      hit: whether its focuses named every chunk of the evidence; None where that has no meaning.
    """

    task: str
    group: str
    length: int
    index: int
    arm: str
    numbers: Mapping[str, float]
    declines: Mapping[str, int]
    hit: bool | None
    answer: str
    text: str
    expected: tuple[str, ...]

    @property
    def example(self) -> Example:
        """Which example it answers."""
        return self.task, self.length, self.index

    @property
    def terminated(self) -> bool:
        """Whether the response ended by itself."""
        return not self.numbers["non_terminating"]


def row(record: Record) -> Row:
    """The row of a record."""
    summary = record.summary
    modes = {
        f"{what}_{mode}": summary[what][mode] for what in ("tokens", "attended") for mode in MODES
    }
    numbers = {
        "score": record.score,
        "attended": summary["attended"]["total"],
        "read": summary["read"]["total"],
        "attended_vanilla": summary["attended_vanilla"],
        "steps": sum(steps for _, steps, _, _ in record.trace),
        "prompt_tokens": record.prompt_tokens,
        "attempts": summary["focus"]["attempts"],
        "successes": summary["focus"]["successes"],
        "format_correct": summary["format_correct"],
        "non_terminating": record.finish_reason == "length",
        **modes,
    }
    known = bool(record.evidence_chunks) and record.arm != "vanilla"
    return Row(
        task=record.task,
        group=record.group,
        length=record.length,
        index=record.index,
        arm=record.arm,
        numbers={name: float(value) for name, value in numbers.items()},
        declines=summary["declines"],
        hit=set(record.evidence_chunks) <= set(record.focused_chunks) if known else None,
        answer=record.answer,
        text=record.text,
        expected=record.expected,
    )


def terminating(rows: Sequence[Row]) -> list[Row]:
    """The rows of examples whose responses ended by themselves, in every arm."""
    endless = {row.example for row in rows if not row.terminated}
    return [row for row in rows if row.example not in endless]


def by_source(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each source, in the order in which sources come first."""
    sources: dict[str, list[Row]] = {}
    for one in rows:
        sources.setdefault(one.task, []).append(one)
    return sources
