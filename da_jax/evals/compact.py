"""Tasks of offline15 in the closed language of the small checkpoint that ships.

They ask for a value and for its letters, which are written under LOCAL; each has a short form that
asks for the value alone. Key and value pairs are those that training never saw.

Run as ``python -m da_jax.evals.compact`` it measures the three arms on a checkpoint that knows the
language, and prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
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
TASKS: dict[str, Task] = {}
"""Every task by name: the suite `compact` first, then the short forms of those with letters."""
for _task in (*_READ, *_OTHERS, *_SHORT):
    _task.name = f"compact_{_task.name}"
    TASKS[_task.name] = _task
SUITE = len(_READ) + len(_OTHERS)
"""How many of them make the suite."""


ARMS = ("da", "unmasked", "vanilla")


def measure(llm: Any, chosen: dict[str, Task], length: int, n: int, seed: int) -> dict[str, Any]:
    """Accuracy and attended tokens of each task in the three arms, greedy.

    Returns:
      For each task and for all of them: ``accuracy`` by arm; ``gap``, vanilla's less that of da,
      in points, with its standard error over paired examples; ``attended`` positions a response by
      arm; ``saved``, the part that da's masks save of da's own response, and ``saved_of_vanilla``,
      the part by which it attends less than vanilla's response, negative if more.
    """
    count = lambda text: len(llm.tokenizer.encode(text, add_special_tokens=False))
    scores: dict[str, dict[str, list[float]]] = {}
    attended: dict[str, dict[str, list[int]]] = {}
    visible: dict[str, list[int]] = {}
    for name, task in chosen.items():
        examples = list(task.examples(length, n, seed, count))
        for arm in ARMS:
            asked = [[e.document for e in examples], [e.question for e in examples]]
            responses = llm.generate(*asked, arm=arm, max_tokens=task.max_tokens)
            marks = [task.score(e, r.answer).value for e, r in zip(examples, responses)]
            scores.setdefault(name, {})[arm] = marks
            totals = [r.summary["attended"]["total"] for r in responses]
            attended.setdefault(name, {})[arm] = totals
            if arm == "da":
                visible[name] = [r.summary["attended_vanilla"] for r in responses]
    merged = lambda of: {arm: [x for each in of.values() for x in each[arm]] for arm in ARMS}
    everything = [x for each in visible.values() for x in each]
    return {
        "length": length,
        "seed": seed,
        "tasks": {name: _summary(scores[name], attended[name], visible[name]) for name in chosen},
        "all": _summary(merged(scores), merged(attended), everything),
    }


def _summary(
    scores: dict[str, list[float]], attended: dict[str, list[int]], visible: list[int]
) -> dict[str, Any]:
    differences = np.subtract(scores["vanilla"], scores["da"]) * 100
    error = differences.std(ddof=1) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
    return {
        "n": len(differences),
        "accuracy": {arm: round(float(np.mean(scores[arm])), 4) for arm in ARMS},
        "gap": round(float(differences.mean()), 2),
        "gap_error": round(float(error), 2),
        "attended": {arm: round(float(np.mean(attended[arm])), 1) for arm in ARMS},
        "saved": round(1 - sum(attended["da"]) / sum(visible), 4),
        "saved_of_vanilla": round(1 - sum(attended["da"]) / sum(attended["vanilla"]), 4),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measures the compact tasks in three arms.")
    parser.add_argument("--checkpoint", default="tiny")
    parser.add_argument("--length", type=int, default=1400, help="tokens of document and question")
    parser.add_argument("--n", type=int, default=50, help="examples a task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short", action="store_true", help="without letters")
    parser.add_argument("--dtype", default="auto", help="what the engine computes in")
    arguments = parser.parse_args()
    from da_jax.engine.llm import LLM

    llm = LLM.from_pretrained(arguments.checkpoint, dtype=arguments.dtype, max_model_len=4096)
    names = list(TASKS)[SUITE:] if arguments.short else list(TASKS)[:SUITE]
    chosen = {name: TASKS[name] for name in names}
    found = measure(llm, chosen, arguments.length, arguments.n, arguments.seed)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
