"""Tasks in the language of the shipped checkpoint, and `da-jax` with them as the suite `facts`.

`python -m support.eval_tasks eval --suite facts ...` is the command.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from da_jax.checkpoints.tiny import language as lang
from da_jax.evals import suites
from da_jax.evals.task import Count, Example, Group, Score, Task


class Facts(Task):
    """Questions of one kind of the shipped checkpoint's language."""

    description = "looks facts up"
    max_tokens = 64

    def __init__(self, name: str, kind: str, group: Group):
        self.name, self.kind, self.group = name, kind, group

    def examples(self, length: int, n: int, seed: int, count: Count) -> Iterator[Example]:
        if length < 100:
            raise ValueError(f"no example is as short as {length} tokens; use 100 or more")
        for index in range(n):
            rng = np.random.default_rng((seed, length, index, lang.KINDS.index(self.kind)))
            yield self._example(rng, length, index)

    def _example(self, rng: np.random.Generator, length: int, index: int) -> Example:
        while True:
            document = lang.make_document(rng, 190, held_out=True, max_tokens=length - 20)
            if (question := lang.ask(rng, document, self.kind)) is not None:
                break
        ends = list(itertools.accumulate(map(len, document.chunk_texts), initial=0))
        facts = [document.facts[key] for key in question.keys]
        return Example(
            self.name,
            index,
            document.text,
            question.text,
            tuple(fact.value for fact in facts),
            tuple((ends[fact.chunk - 1], ends[fact.chunk]) for fact in facts),
        )

    def score(self, example: Example, answer: str) -> Score:
        given = answer.partition("answer=")[2].split(",")
        right = sum(a == b for a, b in zip(given, example.expected))
        return Score(right / len(example.expected), {"given": given})


TASKS = {
    "one": Facts("one", "one", Group.SINGLE),
    "two": Facts("two", "two", Group.MULTI),
}


def main() -> None:
    """Runs `da-jax` with the suite."""
    from da_jax.cli import main as cli

    suites._SUITES["facts"] = ("support.eval_tasks", "TASKS")
    cli.main()


if __name__ == "__main__":
    main()
