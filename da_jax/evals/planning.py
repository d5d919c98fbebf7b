"""What a run will ask: every example and arm, how its prompt reads, and whether it fits."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from da_jax.evals.folder import Key
from da_jax.evals.task import Example, FiniteTask, Task
from da_jax.protocol.modes import Arm
from da_jax.protocol.prompt import PromptMap, PromptRenderer

if TYPE_CHECKING:
    import transformers

ORDER = (Arm.DA, Arm.UNMASKED, Arm.VANILLA)
"""The first two have one prompt, which the second finds in the prefix cache."""


@dataclasses.dataclass(frozen=True)
class Selection:
    """Which examples are asked, and how.

    Attributes:
      tasks: the tasks.
      lengths: most tokens of document and question, each; kept in ascending order. An example of
        a `FiniteTask` is asked at the least of them that it fits, and at no other.
      n: examples of each task and length.
      seed: which ones.
      arms: the arms.
      max_tokens: most tokens of a response; None is what each task says.

    Raises:
      ValueError: an argument out of range.
    """

    tasks: tuple[Task, ...]
    lengths: tuple[int, ...]
    n: int
    seed: int = 0
    arms: tuple[Arm, ...] = ORDER
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(sorted(set(self.lengths))))
        object.__setattr__(self, "arms", tuple(arm for arm in ORDER if arm in self.arms))
        for name in ("tasks", "lengths", "arms"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; name at least one")
        numbers = {"lengths": min(self.lengths), "n": self.n, "max_tokens": self.max_tokens or 1}
        for name, value in numbers.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")

    def tokens(self, task: Task) -> int:
        """Most tokens of a response."""
        return self.max_tokens or task.max_tokens


class Case(NamedTuple):
    """One example, and where it comes from."""

    task: Task
    length: int
    example: Example

    def key(self, arm: Arm) -> Key:
        """What its record in an arm is found by."""
        return self.task.name, self.length, self.example.index, arm.value


class Prompts:
    """Renders examples, always in the same way.

    Args:
      renderer: writes the prompts.
      tokenizer: the one that it uses.
      system: a system message for all of them.
    """

    def __init__(
        self,
        renderer: PromptRenderer,
        tokenizer: transformers.PreTrainedTokenizerBase,
        system: str | None = None,
    ):
        self.renderer, self.system, self._tokenizer = renderer, system, tokenizer

    @property
    def da_only(self) -> bool:
        """Whether the model knows only the DA prompt: then `vanilla` is `unmasked`."""
        return self.renderer.style.da_only

    def count(self, text: str) -> int:
        """Tokens of a text."""
        # A document may be longer than the model is made for: what does not fit is refused later.
        return len(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def asked(self, arm: Arm) -> Arm:
        """The arm that the engine runs."""
        return Arm.UNMASKED if self.da_only and arm is Arm.VANILLA else arm

    def render(self, example: Example, arm: Arm) -> PromptMap:
        """The prompt of an example."""
        return self.renderer.render(
            example.document, example.question, system=self.system, arm=self.asked(arm)
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run will ask.

    Attributes:
      prompts: {key: sha256 of its prompt}, of every response, in the order of the run.
      longest: tokens of the longest prompt and its response.
      where: says which one that is, for messages.
      finite: names of the tasks whose examples are each asked once.
    """

    prompts: Mapping[Key, str]
    longest: int
    where: str
    finite: frozenset[str] = frozenset()


def cases(selection: Selection, count: Callable[[str], int]) -> Iterator[Case]:
    """The examples of a selection.

    Raises:
      ValueError: a task has no such examples, or gives others than it should.
    """
    for task in selection.tasks:
        total, finite = 0, isinstance(task, FiniteTask)
        for above, length in itertools.pairwise((0, *selection.lengths)):
            made = 0
            try:
                for example in _examples(task, above, length, selection, count):
                    if (example.task, example.index) != (task.name, made):
                        raise ValueError(
                            f"example {made} calls itself {example.task} {example.index}"
                        )
                    made += 1
                    yield Case(task, length, example)
            except ValueError as error:
                raise ValueError(f"task {task.name}, length {length}: {error}") from error
            if made != selection.n and not finite:
                raise ValueError(
                    f"task {task.name} has {made} examples of length {length}, but --n is "
                    f"{selection.n}; lower --n, or raise --lengths"
                )
            total += made
        if not total:
            raise ValueError(
                f"task {task.name} has no example of up to {selection.lengths[-1]} tokens; add a "
                "greater one to --lengths, or leave the task out"
            )


def _examples(
    task: Task, above: int, length: int, selection: Selection, count: Callable[[str], int]
) -> Iterator[Example]:
    """The examples of a length; of a finite task those that do not fit the one before it."""
    if isinstance(task, FiniteTask):
        return task.examples(length, selection.n, selection.seed, count, above)
    return task.examples(length, selection.n, selection.seed, count)


def make(
    selection: Selection,
    prompts: Prompts,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Plan:
    """Renders every prompt once, so that what cannot work is known before a model is loaded.

    Args:
      progress: called with (examples done, examples in all).

    Raises:
      ValueError: a task has no such examples.
    """
    total = len(selection.tasks) * len(selection.lengths) * selection.n
    hashes: dict[Key, str] = {}
    longest, where = 0, ""
    for done, case in enumerate(cases(selection, prompts.count), 1):
        known: dict[bool, str] = {}  # the arms `da` and `unmasked` share a prompt
        for arm in selection.arms:
            plain = prompts.asked(arm) is Arm.VANILLA
            if plain not in known:
                prompt = prompts.render(case.example, arm)
                known[plain] = digest(prompt)
                size = len(prompt) + selection.tokens(case.task)
                if size > longest:
                    longest, where = size, _where(case, arm, len(prompt), selection)
            hashes[case.key(arm)] = known[plain]
        progress(done, total)
    finite = frozenset(task.name for task in selection.tasks if isinstance(task, FiniteTask))
    return Plan(hashes, longest, where, finite)


def check_prompts(plan: Plan, there: Mapping[Key, str]) -> None:
    """Compares prompts with those of records that are there.

    Raises:
      ValueError: one differs, or is there as another example.
    """
    once = {
        (task, arm, sha): (length, index)
        for (task, length, index, arm), sha in there.items()
        if task in plan.finite
    }
    for key, sha in plan.prompts.items():
        if there.get(key, sha) != sha:
            task, length, index, arm = key
            raise ValueError(
                f"task {task}, length {length}, example {index}, arm {arm}: the prompt is not the "
                f"one that was answered before (sha256 {there[key][:12]} there, {sha[:12]} now). "
                "The task, its data or the chat template has changed, or, of public data, a lesser "
                "length was added, which takes its examples; name another folder"
            )
        task, length, index, arm = key
        before = once.get((task, arm, sha), (length, index))
        if before != (length, index):
            raise ValueError(
                f"task {task}, arm {arm}: example {index} of length {length} is there already, as "
                f"example {before[1]} of length {before[0]}, and would count twice. Of public "
                "data only greater lengths can be added; name another folder"
            )


def max_model_len(plan: Plan, wanted: int | None, declared: int) -> int:
    """The `max_model_len` that every prompt fits with its whole response.

    Args:
      wanted: what the user asks for; None is what is needed.
      declared: most positions of the checkpoint.

    Raises:
      ValueError: not everything fits; nothing is ever truncated.
    """
    limit = declared if wanted is None else wanted
    if plan.longest > limit:
        what = (
            f"the checkpoint declares {declared} positions"
            if wanted is None
            else f"--max-model-len is {wanted}; raise it to {plan.longest}"
        )
        raise ValueError(f"{plan.where}, but {what}. Or lower --lengths or --max-tokens")
    return plan.longest if wanted is None else wanted


def digest(prompt: PromptMap) -> str:
    """sha256 of a prompt's token ids as little-endian int32."""
    return hashlib.sha256(np.asarray(prompt.ids, "<i4").tobytes()).hexdigest()


def evidence_chunks(example: Example, prompt: PromptMap) -> tuple[int, ...]:
    """Numbers of the chunks of a prompt that hold an example's evidence, ascending.

    Empty where the evidence is not known, or the prompt has no chunks.
    """
    if not prompt.chunks:
        return ()
    own = isinstance(example.document, tuple)
    pieces: Sequence[str] = example.document if own else prompt.chunk_texts
    ends = itertools.accumulate(map(len, pieces))
    spans = [(end - len(piece), end) for piece, end in zip(pieces, ends)]
    return tuple(
        number
        for number, (start, end) in zip(prompt.numbers, spans)
        if any(max(start, first) < min(end, last) for first, last in example.evidence)
    )


def settings(selection: Selection, prompts: Prompts) -> dict[str, Any]:
    """What of these responses depend on, in values that JSON can hold.

    Lengths, arms and the number of examples are not among it: those may grow.
    """
    return {
        "tasks": {task.name: selection.tokens(task) for task in selection.tasks},
        "seed": selection.seed,
        "system": prompts.system,
        "style": dataclasses.asdict(prompts.renderer.style),
    }


def sources(selection: Selection) -> dict[str, dict[str, str]]:
    """What each task asks, where its examples come from, and their licence, for reports."""
    names = ("description", "origin", "licence")
    return {task.name: {n: getattr(task, n) for n in names} for task in selection.tasks}


def _where(case: Case, arm: Arm, size: int, selection: Selection) -> str:
    tokens = selection.tokens(case.task)
    return (
        f"task {case.task.name}, length {case.length}, example {case.example.index}, arm {arm}: "
        f"the prompt has {size} tokens and max_tokens is {tokens}, {size + tokens} in all"
    )
