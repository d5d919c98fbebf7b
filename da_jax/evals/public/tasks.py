"""The paper's fifteen sources as tasks."""

from __future__ import annotations

import ast
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from da_jax.evals.offline.stream import Stream
from da_jax.evals.public import scoring
from da_jax.evals.public.sources import SOURCES, PublicOptions, SourceError, rows
from da_jax.evals.task import Count, Example, FiniteTask, Group, Score, Task

Row = Mapping[str, Any]


class Item(NamedTuple):
    """A document, a question, and what is right."""

    document: str
    question: str
    expected: tuple[str, ...]


def ruler(row: Row) -> Iterator[Item]:
    """{input, outputs, …}: the last line of the input, before the answer's beginning, asks."""
    text = row["input"].rstrip()
    document, _, question = text.rpartition("\n")
    yield Item(document, question, tuple(row["outputs"]))


def qmsum(row: Row) -> Iterator[Item]:
    """{input, context, answers}."""
    question = f"{row['input']}\nAnswer in one or more sentences."
    yield Item(row["context"], question, (" | or | ".join(row["answers"]),))


def longbench_v2(row: Row) -> Iterator[Item]:
    """{question, choice_A … choice_D, answer, context}."""
    choices = "\n".join(f"({c}) {row[f'choice_{c}'].strip()}" for c in "ABCD")
    question = (
        f"{row['question'].strip()}\nChoices:\n{choices}\n"
        'Answer with the letter alone: "The answer is (X)".'
    )
    yield Item(row["context"], question, (row["answer"],))


def loogle(row: Row) -> Iterator[Item]:
    """{input, qa_pairs: [{Q, A, S}]}; the hub has the pairs as a Python literal."""
    for pair in _pairs(row):
        yield Item(_input(row), str(pair["Q"]), (str(pair["A"]),))


def loogle_cloze(row: Row) -> Iterator[Item]:
    """As `loogle`, with the right entity of each mask in `A`."""
    for pair in _pairs(row):
        answer = pair["A"] if isinstance(pair["A"], str) else json.dumps(pair["A"])
        question = (
            f"{pair['Q']}\nWhich entity (person, place or organisation) does each <mask-n> stand "
            "for? The same mask is the same entity. Answer with a JSON object from mask to entity."
        )
        yield Item(_input(row), question, (answer,))


def loogle_summary(row: Row) -> Iterator[Item]:
    """{input, output}."""
    yield Item(_input(row), "Write a summary of this paper.", (row["output"],))


def zero_scrolls(row: Row) -> Iterator[Item]:
    """{input, output, document_start_index, document_end_index, …}: offsets of the document."""
    text, start, end = row["input"], row["document_start_index"], row["document_end_index"]
    if row.get("output") in (None, ""):
        raise SourceError(
            "a row without output: the test split of ZeroSCROLLS hides its answers; take validation"
        )
    question = "\n\n".join(part for part in (text[:start].strip(), text[end:].strip()) if part)
    output = row["output"]
    outputs = (output,) if isinstance(output, str) else tuple(output)
    yield Item(text[start:end].strip(), question, outputs)


def _input(row: Row) -> str:
    return row["input"] if "input" in row else row["context"]


def _pairs(row: Row) -> list[Row]:
    pairs = row["qa_pairs"]
    return ast.literal_eval(pairs) if isinstance(pairs, str) else pairs


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What a task is made of: its source, its file there and on the hub, and how it is read."""

    source: str
    local: tuple[str, ...]
    remote: str
    read: Callable[[Row], Iterator[Item]]
    group: Group
    metric: str  # contained, letter, percentage, judge
    description: str
    keep: Callable[[Row], bool] = lambda row: True


class PublicTask(FiniteTask):
    """Examples of a public data set: of up to a length, without repetitions, drawn by seed."""

    def __init__(self, name: str, kind: _Kind, options: PublicOptions) -> None:
        source = SOURCES[kind.source]
        self.name, self.group, self.description = name, kind.group, kind.description
        self.origin = source.home
        self.licence = "; ".join(filter(None, (source.licence, source.terms)))
        self.max_tokens = 2048
        self._kind, self._options, self._source = kind, options, source
        if kind.metric == "judge" and options.judge is None:
            raise SourceError(f"{name} has free-form answers; name a --judge (da_jax.evals.judge)")

    def examples(
        self, length: int, n: int, seed: int, count: Count, above: int = 0
    ) -> Iterator[Example]:
        """See `FiniteTask.examples`; what is longer than `length` is left out, never cut."""
        items, seen = [], set()
        for item in self._items():
            if item in seen:
                continue
            seen.add(item)
            if above < count(item.document) + count(item.question) <= length:
                items.append(item)
        drawn = Stream(f"{self.name} {seed}").shuffled(items)
        for index, item in enumerate(drawn[:n]):
            yield Example(self.name, index, *item)

    def score(self, example: Example, answer: str) -> Score:
        """Scores an answer; free-form ones by the judge, see `Judge.score`."""
        expected = example.expected
        if self._kind.metric == "judge":
            assert self._options.judge is not None
            return self._options.judge.score(example.question, expected[0], answer)
        if self._kind.metric == "contained":
            return scoring.contained(answer, expected)
        compare = scoring.letter if self._kind.metric == "letter" else scoring.percentage
        return compare(answer, _label(expected[0]) if compare is scoring.letter else expected[0])

    def _items(self) -> Iterator[Item]:
        kind = self._kind
        for number, row in enumerate(rows(self._source, kind.local, kind.remote, self._options), 1):
            try:
                if kind.keep(row):
                    yield from kind.read(row)
            except (KeyError, TypeError, SyntaxError, AttributeError) as error:
                raise SourceError(
                    f"{self._source.name}/{kind.local[0]}, row {number}: not as published "
                    f"({type(error).__name__}: {error}); get the file again from {self.origin}"
                ) from error


def _label(text: str) -> str:
    """The letter of a choice that is written as `(B) …` or `B`."""
    return text.strip().lstrip("(")[:1].upper()


_SYNTHETIC = "; the questions are the public ones, not those that the paper had written for it"


def _ruler(name: str) -> _Kind:
    return _Kind(
        "ruler", (f"{name}/validation.jsonl", f"{name}.jsonl"), "", ruler, Group.SINGLE,
        "contained", f"RULER {name}: the value of a key in a long text",
    )  # fmt: skip


def _v2(domain: str, sub: str | None, group: Group, text: str) -> _Kind:
    return _Kind(
        "longbench-v2", ("data.json",), "data.json", longbench_v2, group, "letter", text,
        lambda row: row["domain"] == domain and sub in (None, row["sub_domain"]),
    )  # fmt: skip


def _loogle(file: str, read: Any, group: Group, text: str) -> _Kind:
    names = (f"{file}.jsonl", f"{file}.json")
    return _Kind("loogle", names, f"data/{file}.json", read, group, "judge", text)


def _scrolls(name: str, group: Group, metric: str, text: str) -> _Kind:
    names = (f"{name}/validation.jsonl", "validation.jsonl", f"{name}.zip")
    return _Kind("zero_scrolls", names, f"{name}.zip", zero_scrolls, group, metric, text)


_QMSUM = ("qmsum.jsonl", "data/qmsum.jsonl")
_KINDS = {
    **{
        f"ruler_{name}": _ruler(name)
        for name in (
            "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_2", "niah_multikey_3",
        )
    },
    "longbench_qmsum": _Kind(
        "longbench", _QMSUM, "data.zip", qmsum, Group.SINGLE, "judge",
        "LongBench v1 qmsum: questions about meetings" + _SYNTHETIC,
    ),
    "longbench2_multidoc_qa": _v2(
        "Multi-Document QA", None, Group.SINGLE,
        "LongBench v2, multi-document questions with four choices" + _SYNTHETIC,
    ),
    "loogle_summarization": _loogle(
        "longdep_summarization", loogle_summary, Group.SINGLE,
        "LooGLE summarization: a summary of a paper, judged against its abstract" + _SYNTHETIC,
    ),
    "longbench2_code_repo": _v2(
        "Code Repository Understanding", None, Group.SINGLE,
        "LongBench v2, questions about code repositories with four choices",
    ),
    "zeroscrolls_quality": _scrolls(
        "quality", Group.SINGLE, "letter",
        "ZeroSCROLLS QuALITY: questions about stories with four choices (validation split)",
    ),
    "longbench2_singledoc_qa": _v2(
        "Single-Document QA", None, Group.MULTI,
        "LongBench v2, single-document questions with four choices" + _SYNTHETIC,
    ),
    "longbench2_dialogue_history": _v2(
        "Long-dialogue History Understanding", None, Group.MULTI,
        "LongBench v2, questions about long dialogues with four choices",
    ),
    "loogle_longdep_qa": _loogle(
        "longdep_qa", loogle, Group.MULTI, "LooGLE long-dependency questions"
    ),
    "loogle_shortdep_cloze": _loogle(
        "shortdep_cloze", loogle_cloze, Group.MULTI, "LooGLE cloze: the entities behind masks"
    ),
    "zeroscrolls_space_digest": _scrolls(
        "space_digest", Group.MULTI, "percentage",
        "ZeroSCROLLS SpaceDigest: the percentage of positive reviews (validation split)",
    ),
}  # fmt: skip

TASKS: dict[str, Callable[[PublicOptions], Task]] = {
    name: (lambda options, name=name, kind=kind: PublicTask(name, kind, options))  # type: ignore
    for name, kind in _KINDS.items()
}
"""The paper's sources by name, single-span ones first."""
