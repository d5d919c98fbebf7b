"""What a task is: where its examples come from, and how an answer to one is scored."""

from __future__ import annotations

import abc
import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Count = Callable[[str], int]
"""Tokens of a text, as the tokenizer of the model that is evaluated counts them."""


class Group(enum.StrEnum):
    """How the evidence of a task lies: in one place, in several, or everywhere.

    Controls are not expected to gain from declarations.
    """

    SINGLE = "single"
    MULTI = "multi"
    CONTROL = "control"


@dataclasses.dataclass(frozen=True)
class Example:
    """One question about one document.

    Attributes:
      task: name of its task.
      index: its number among those of a seed and length, from 0.
      document: a text, which is cut into chunks, or chunks of the task's own.
      question: the question, with the form that the answer should have. No arm adds to it.
      expected: what the scorer compares an answer with; a value each, or one for each part.
      evidence: (start, end) offsets of characters in the document (in the chunks one after the
        other, without anything between) that the answer follows from.
      details: what else is known of it, in values that JSON can hold.
    """

    task: str
    index: int
    document: str | tuple[str, ...]
    question: str
    expected: tuple[str, ...]
    evidence: tuple[tuple[int, int], ...] = ()
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def text(self) -> str:
        """The document as one text, which the offsets of `evidence` count in."""
        return self.document if isinstance(self.document, str) else "".join(self.document)


@dataclasses.dataclass(frozen=True)
class Score:
    """How good an answer is.

    Attributes:
      value: from 0 (wrong) to 1 (right).
      details: why, in values that JSON can hold; a judge's identity and verdict, for instance.
    """

    value: float
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Task(abc.ABC):
    """A source of examples.

    Attributes:
      name: names it on the command line and in records; lower case, with underscores.
      group: how its evidence lies.
      description: one sentence on what it asks.
      origin: where the examples come from: "generated", or the public data set.
      licence: of the examples, as its owner states it.
      max_tokens: most tokens of a response, in every arm.
    """

    name: str
    group: Group
    description: str
    origin: str = "generated"
    licence: str = "Apache-2.0"
    max_tokens: int = 512

    @abc.abstractmethod
    def examples(self, length: int, n: int, seed: int, count: Count) -> Iterator[Example]:
        """The first `n` examples of a length and seed, always the same ones whatever `n` is.

        Args:
          length: most tokens of document and question together.
          n: how many.
          seed: which ones.
          count: how tokens are counted.

        Raises:
          ValueError: the task has no example that is so short.
        """

    @abc.abstractmethod
    def score(self, example: Example, answer: str) -> Score:
        """Scores the answer of a response, as `Response.answer` gives it in every arm."""


class FiniteTask(Task):
    """A task with only so many examples, such as a public data set.

    A run takes those there are, if they are fewer than it asks for. Where it asks for several
    lengths, it takes each example at the least length that it fits, and so only once.
    """

    @abc.abstractmethod
    def examples(
        self, length: int, n: int, seed: int, count: Count, above: int = 0
    ) -> Iterator[Example]:
        """See `Task.examples`; there may be fewer, or none.

        Args:
          above: document and question together have more than so many tokens.
        """
