"""What is kept of a run: one JSON line for each response, and the settings that made them."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from da_jax.protocol.trace import Step

Run = tuple[str, int, int, int]
"""(mode, steps, attended, read): consecutive decode steps of one mode, and their sums."""


@dataclasses.dataclass(frozen=True)
class Record:
    """One response, with all that a report needs; nothing else is read from a run.

    Attributes:
      task, group, length, seed, index: which example of which task it answers.
      arm: `vanilla`, `unmasked` or `da`.
      prompt_sha256: of the prompt's token ids as little-endian int32.
      chunks: chunks of the prompt; 0 in the arm `vanilla`, unless the model knows only the DA
        prompt.
      prompt_tokens, completion_tokens, finish_reason, text, answer: see `Response`.
      token_ids: every token of the response.
      expected: what the answer was compared with.
      score, score_details: see `Score`.
      summary: the account of the response, see `Trace.summary`.
      trace: its decode steps, those of one mode in a row together.
      evidence_chunks: numbers of the chunks that hold the evidence; empty where it is not known.
      focused_chunks: numbers of the chunks that its focuses named and saw.
    """

    task: str
    group: str
    length: int
    seed: int
    index: int
    arm: str
    prompt_sha256: str
    chunks: int
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    text: str
    answer: str
    token_ids: tuple[int, ...]
    expected: tuple[str, ...]
    score: float
    score_details: Mapping[str, Any]
    summary: Mapping[str, Any]
    trace: tuple[Run, ...]
    evidence_chunks: tuple[int, ...] = ()
    focused_chunks: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[str, int, int, str]:
        """(task, length, index, arm): what it is the only record of in a run."""
        return self.task, self.length, self.index, self.arm

    def to_json(self) -> str:
        """One line, without the newline."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> Record:
        """Reads one line.

        Raises:
          ValueError, KeyError, TypeError: the line is no JSON, or a field is missing or unknown.
        """
        fields = json.loads(line)
        for name in ("token_ids", "expected", "evidence_chunks", "focused_chunks"):
            fields[name] = tuple(fields[name])
        fields["trace"] = tuple(tuple(run) for run in fields["trace"])
        return cls(**fields)


def runs(steps: Sequence[Step]) -> tuple[Run, ...]:
    """Puts consecutive decode steps of one mode together."""
    return tuple(
        (mode.value, len(group), sum(s.attended for s in group), sum(s.read for s in group))
        for mode, group in (
            (mode, list(found)) for mode, found in itertools.groupby(steps, lambda s: s.mode)
        )
    )
