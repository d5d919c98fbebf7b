"""Tasks of offline15 in the closed language of the small checkpoint that ships.

They ask for a value and for its letters, which are written under LOCAL; each has a short form that
asks for the value alone. Key and value pairs are those that training never saw.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from da_jax.checkpoints.tiny import language as lang
from da_jax.checkpoints.tiny import scenes, tasks
from da_jax.evals.task import Count, Example, Group, Score, Task

_TRIES = 50
_SHORT_LINE = 14
"""Tokens of a line that is shorter than most."""


class CompactTask(Task):
    """Documents of one topic, and questions of some types about them.

    Args:
      name: of the task.
      group: how its evidence lies.
      description: of the task.
      topic: see `scenes.TOPICS`.
      kinds: question types, in turn.
      key: the key that is always asked for, if it is always the same.
    """

    max_tokens = 128

    def __init__(
        self,
        name: str,
        group: Group,
        description: str,
        topic: str,
        kinds: Sequence[str],
        key: str | None = None,
    ):
        self.name, self.group, self.description = name, group, description
        self._topic, self._kinds, self._key = topic, tuple(kinds), key

    def examples(self, length: int, n: int, seed: int, count: Count) -> Iterator[Example]:
        """See `Task.examples`; one question about each document."""
        for index in range(n):
            rng = np.random.default_rng((seed, length, index, *self.name.encode()))
            yield self._example(rng, length, index, count)

    def _example(self, rng: np.random.Generator, length: int, index: int, count: Count) -> Example:
        kind, room = self._kinds[index % len(self._kinds)], length - 16
        for _ in range(_TRIES):
            lines = min(lang.MAX_ID, 1 + room // _SHORT_LINE)
            scene = scenes.make_scene(
                rng, self._topic, lines, held_out=True, max_tokens=room, wrapped=False
            )
            question = self._question(rng, scene, kind)
            size = count(scene.text) + (count(question.text) if question else 0)
            if size > length:
                room = int(room * min(0.95, length / size))
            elif question is not None:
                return self._asked(scene, question, index)
        raise ValueError(
            f"{self.name}: no document of {length} tokens was found; choose a greater length"
        )

    def _question(
        self, rng: np.random.Generator, scene: scenes.Scene, kind: str
    ) -> lang.Question | None:
        if self._key is not None:
            return tasks.Question(kind, (self._key,)) if self._key in scene.facts else None
        if self.group is Group.MULTI and kind in tasks.KINDS:  # of links, from their start
            ends = {key: scene.path(key)[-1].value for key in scene.links}
            fits = [key for key, end in ends.items() if kind == "find" or tasks.spellable(end)]
            return tasks.Question(kind, (fits[int(rng.integers(len(fits)))],)) if fits else None
        return tasks.ask(rng, scene, kind)

    def _asked(self, scene: scenes.Scene, question: lang.Question, index: int) -> Example:
        if isinstance(question, tasks.Question):
            facts = tasks.path(scene, question)
            expected, spelled = (facts[-1].value,), question.spelled
        else:
            facts = [scene.facts[key] for key in question.keys]
            expected, spelled = tuple(fact.value for fact in facts), False
        starts = np.cumsum([0, *map(len, scene.chunk_texts)])
        evidence = []
        for fact in facts:
            text, end = scene.chunk_texts[fact.chunk - 1], fact.value
            written = next(
                w for w in (f"{fact.key}={end}", f"{fact.key}= {end}=") if f" {w}" in text
            )
            at = int(starts[fact.chunk - 1]) + text.index(f" {written}") + 1
            evidence.append((at, at + len(written)))
        return Example(
            self.name, index, scene.text, question.text, expected, tuple(evidence),
            {"spelled": spelled, "hops": len(facts), "lines": len(scene.chunks)},
        )  # fmt: skip

    def score(self, example: Example, answer: str) -> Score:
        """1 if values and letters, where they are asked for, are right to the last one."""
        given = answer.rpartition("answer=")[2].strip().split(",")
        value = "answer=" in answer and tuple(given) == example.expected
        details: dict[str, Any] = {"value": value}
        if example.details["spelled"]:
            letters = "".join(t.piece for t in lang.spelling(example.expected[0])).strip()
            details["letters"] = letters in answer
        return Score(float(all(details.values())), details)


_ONE, _MORE = Group.SINGLE, Group.MULTI
_READ = (
    CompactTask("niah_single", _ONE, "One of one to three facts in noise.", "needle", ["read"]),
    CompactTask("niah_multikey", _ONE, "One fact of many.", "story", ["read"]),
    CompactTask("kv_retrieval", _ONE, "Lines of nothing but facts.", "pairs", ["read"]),
    CompactTask("meeting_qa", _ONE, "The owner of an item.", "meeting", ["read"]),
    CompactTask("code_lookup", _ONE, "What a function returns.", "code", ["read"]),
    CompactTask("dialogue", _ONE, "What somebody said.", "dialogue", ["read"]),
    CompactTask(
        "mrcr_2", _ONE, "The first or the second mention of a key.", "repeats",
        ["read_first", "read_second"],
    ),
    CompactTask(
        "variable_tracking", _MORE, "A value at the end of one or two links.", "chains", ["read"]
    ),
    CompactTask("babilong_2", _MORE, "Who took what, and went where.", "people", ["read"]),
)  # fmt: skip
_OTHERS = (
    CompactTask("niah_multiquery", _MORE, "Three facts of many at once.", "story", ["three"]),
    CompactTask("passkey", _ONE, "A number in noise.", "needle", ["find"], key=scenes.PASS),
)
_SHORT = [
    CompactTask(
        f"{task.name}_short", task.group, f"{task.description[:-1]}, without letters.",
        task._topic, [kind.replace("read_", "").replace("read", "find") for kind in task._kinds],
    )
    for task in _READ
]  # fmt: skip
for _task in (*_READ, *_OTHERS, *_SHORT):
    _task.name = f"compact_{_task.name}"
TASKS: dict[str, Task] = {task.name: task for task in (*_READ, *_OTHERS)}
"""The suite `compact`, by name."""
SHORT: dict[str, Task] = {task.name: task for task in _SHORT}
"""The short forms of those with letters, by name: the suite `compact_short`."""
