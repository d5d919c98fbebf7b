"""What Declarative Attention would have attended in recorded responses of any system.

No model runs: a response is walked through the same `Sequence` that the engine keeps for a request,
as if each of its tokens were forced, so that modes, views and sums are those of the engine.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from da_jax.engine.config import MAX_PAGE_SIZE
from da_jax.engine.detokenize import TokenTable
from da_jax.engine.request import Done, Request, SamplingParams, TokenLogprob
from da_jax.evals.records import Run, runs
from da_jax.protocol import turns
from da_jax.protocol.chunks import Chunk
from da_jax.protocol.modes import AnswerMode, Arm, Declaration, Mode
from da_jax.protocol.prompt import PromptMap, PromptRenderer
from da_jax.protocol.tags import THINK_ENDS, THINK_STARTS
from da_jax.protocol.trace import Step
from da_jax.protocol.visibility import Scaffold

if TYPE_CHECKING:
    import transformers

MOST_TOKENS = 2**24
"""Of a prompt that is given in numbers."""
_FORMS = {
    "document": ("document", "question"),
    "chunks": ("chunks", "question"),
    "messages": ("messages",),
    "prompt": ("prompt",),
    "prompt_tokens": ("prompt_tokens", "chunk_spans"),
}
"""How a prompt may be given: the field that tells the form, and the fields that it needs."""
_EXTRA = {"document": ("system",), "chunks": ("system",), "messages": ("documents",)}
_RESPONSES = ("response", "response_token_ids")
_OPTIONAL = ("id", "task", "arm", "score", "finish_reason")
_KINDS: dict[str, tuple[str, type | tuple[type, ...]]] = {
    "document": ("a text", str),
    "question": ("a text", str),
    "system": ("a text", str),
    "prompt": ("a text", str),
    "response": ("a text", str),
    "chunks": ("a list", list),
    "messages": ("a list", list),
    "documents": ("a text or a list", (str, list)),
    "chunk_spans": ("a list", list),
    "response_token_ids": ("a list", list),
    "prompt_tokens": ("a whole number", int),
    "id": ("a text or a whole number", (str, int)),
    "task": ("a text", str),
    "arm": ("a text", str),
    "score": ("a number", (int, float)),
    "finish_reason": ("a text", str),
}


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A recorded response, its fields checked one by one.

    Attributes:
      where: file and line, for messages.
      fields: what stands there.
      arm: the arm that it is counted in.
    """

    where: str
    fields: Mapping[str, Any]
    arm: Arm


@dataclasses.dataclass(frozen=True)
class Replayed:
    """What a recorded response would have attended.

    Attributes:
      recorded: the response.
      exact: whether its token ids were recorded; else its text was tokenized anew.
      summary: see `Trace.summary`. The reason for its end is the recorded one, else what its last
        token says, else None.
      steps: its decode steps.
    """

    recorded: Recorded
    exact: bool
    summary: Mapping[str, Any]
    steps: Sequence[Step]

    @property
    def trace(self) -> tuple[Run, ...]:
        """The decode steps, those of one mode in a row together."""
        return runs(self.steps)

    def to_json(self) -> str:
        """One line, without the newline."""
        fields = self.recorded.fields
        kept = {name: fields[name] for name in ("id", "task", "score") if name in fields}
        return json.dumps(
            {
                "source": self.recorded.where,
                **kept,
                "arm": self.recorded.arm.value,
                "tokens": "recorded" if self.exact else "tokenized anew",
                "summary": self.summary,
                "trace": self.trace,
            },
            ensure_ascii=False,
        )


def read(path: Path, arm: Arm = Arm.DA) -> list[Recorded]:
    """Reads recorded responses, and checks the fields of all of them.

    Args:
      path: JSON lines, or one JSON array, of objects.
      arm: the arm of those that name none.

    Raises:
      ValueError: one has a field that is missing, unknown or not valid; the message names it.
      OSError: the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text: {error}") from error
    found = [_recorded(where, value, arm) for where, value in _values(path, text)]
    if not found:
        raise ValueError(f"{path} holds no response; give one JSON object a line, or an array")
    return found


class Replayer:
    """Walks recorded responses as the engine would have.

    Args:
      tokenizer: of the model; it renders prompts and tokenizes texts.
      renderer: of the same tokenizer.
      stop_ids: tokens that end a response.
      page_size: tokens of a KV page.
      scaffold: what stays visible besides chunks: `all`, or `paper`.
      answer_mode: what `<answer>` does: `local`, `keep` or `global`.
      initial: the mode that responses of the arm `da` start in; None is GLOBAL.

    Raises:
      ValueError: the page size is out of range, or the tokenizer's decoder is not known.
    """

    def __init__(
        self,
        tokenizer: transformers.PreTrainedTokenizerBase,
        renderer: PromptRenderer,
        stop_ids: frozenset[int],
        *,
        page_size: int = 64,
        scaffold: Scaffold = "all",
        answer_mode: AnswerMode = "local",
        initial: Declaration | Mode | str | None = None,
    ):
        if not 1 <= page_size <= MAX_PAGE_SIZE:
            raise ValueError(f"page_size is {page_size}; it must be from 1 to {MAX_PAGE_SIZE}")
        self.page_size, self._scaffold, self._answer_mode = page_size, scaffold, answer_mode
        self._initial = None if initial is None else Declaration.of(initial)
        self._tokenizer, self._renderer, self._stop_ids = tokenizer, renderer, stop_ids
        self._table = TokenTable.from_tokenizer(tokenizer, shown=(*THINK_STARTS, *THINK_ENDS))

    def replay(self, recorded: Recorded) -> Replayed:
        """Computes what a response would have attended, step by step.

        The mask has room for every focus, however small the chunks are.

        Raises:
          ValueError: the prompt cannot be rendered or read, or the response has no token, or one
            that the tokenizer does not have.
        """
        try:
            return self._replay(recorded)
        except ValueError as error:
            raise ValueError(f"{recorded.where}: {error}") from error

    def _replay(self, recorded: Recorded) -> Replayed:
        from da_jax.engine.sequence import Sequence as Walk

        fields = recorded.fields
        ids, prompt = self._ids(fields), self._prompt(fields, recorded.arm)
        request = Request(
            prompt,
            SamplingParams(max_tokens=len(ids)),
            arm=recorded.arm,
            forced=ids,
            answer_mode=self._answer_mode,
            scaffold=self._scaffold,
            initial=self._initial if recorded.arm is Arm.DA else None,
        )
        longest = len(prompt) + len(ids)
        # One entry a page, and one more for each span that a view can have.
        entries = -(-longest // self.page_size) + len(prompt.chunks) + len(prompt.scaffold) + 2
        walk = Walk(
            0, request, self._table, self._stop_ids, key=np.zeros(2, np.uint32), max_len=longest,
            page_size=self.page_size, entries=entries,
        )  # fmt: skip
        walk.receive(TokenLogprob(token, 0.0) for token in ids)
        done = walk.read()[-1]
        assert isinstance(done, Done)
        response = done.response
        # `length` is only that the recording ends here.
        ended = None if response.finish_reason == "length" else response.finish_reason
        return Replayed(
            recorded,
            "response_token_ids" in fields,
            {**response.summary, "finish_reason": fields.get("finish_reason", ended)},
            response.steps,
        )

    def _ids(self, fields: Mapping[str, Any]) -> tuple[int, ...]:
        given = fields.get("response_token_ids")
        if given is None:
            given = self._tokenizer.encode(fields["response"], add_special_tokens=False)
        name = "response_token_ids" if "response_token_ids" in fields else "response"
        if not given:
            raise ValueError(f"{name} is empty; a response has at least one token")
        for token in given:
            if not _whole(token) or not 0 <= token < len(self._table):
                raise ValueError(
                    f"{name} holds {token!r}; the model's tokens are 0 to {len(self._table) - 1}. "
                    "Name the model that wrote it, or give the text of the response"
                )
        return tuple(given)

    def _prompt(self, fields: Mapping[str, Any], arm: Arm) -> PromptMap:
        if "prompt_tokens" in fields:
            return _numbers(fields["prompt_tokens"], fields["chunk_spans"], arm)
        if "prompt" in fields:
            return self._renderer.read(fields["prompt"], arm)
        if "messages" in fields:
            return self._messages(fields, arm)
        document = fields.get("document")
        if document is None:
            document = _chunks("chunks", fields["chunks"])
        return self._renderer.render(
            document, fields["question"], system=fields.get("system"), arm=arm
        )

    def _messages(self, fields: Mapping[str, Any], arm: Arm) -> PromptMap:
        messages = []
        for number, message in enumerate(fields["messages"]):
            if not isinstance(message, dict):
                raise ValueError(f"message {number} is {message!r}; give an object")
            if "chunks" in message:
                own = _chunks(f"chunks of message {number}", message["chunks"])
                message = {**message, "chunks": own}
            messages.append(message)
        parts = turns.split(messages)
        documents = fields.get("documents")
        if isinstance(documents, list):
            documents = _chunks("documents", documents)
        return self._renderer.render(
            documents, parts.question, system=parts.system, history=parts.history,
            chunks=parts.chunks, arm=arm,
        )  # fmt: skip


def sums(found: Iterable[Replayed]) -> dict[str, dict[str, Any]]:
    """Adds up the responses of each arm.

    Returns:
      By arm: ``responses``; ``tokenized_anew``, those whose token ids were not recorded;
      ``prompt_tokens``; ``tokens``, ``attended`` and ``read``, each by mode and in ``total``;
      ``attended_vanilla``; ``reduction``, of the sums; ``focus`` with ``attempts``, ``successes``,
      ``declines`` and ``success_rate`` (None without attempts); ``declines`` by reason;
      ``format_correct``, and ``scored`` with ``mean_score`` (None without scores).
    """
    arms: dict[str, list[Replayed]] = {}
    for one in found:
        arms.setdefault(one.recorded.arm.value, []).append(one)
    return {arm.value: _sum(arms[arm.value]) for arm in Arm if arm.value in arms}


def _sum(found: Sequence[Replayed]) -> dict[str, Any]:
    summaries = [one.summary for one in found]

    def added(name: str) -> dict[str, int]:
        total: Counter[str] = Counter()
        for summary in summaries:
            total.update(summary[name])
        return dict(total)

    attended, vanilla = added("attended"), sum(s["attended_vanilla"] for s in summaries)
    focus = added("focus")
    scores = [one.recorded.fields["score"] for one in found if "score" in one.recorded.fields]
    return {
        "responses": len(found),
        "tokenized_anew": sum(not one.exact for one in found),
        "prompt_tokens": sum(s["prompt_tokens"] for s in summaries),
        "tokens": added("tokens"),
        "attended": attended,
        "read": added("read"),
        "attended_vanilla": vanilla,
        "reduction": 1 - attended["total"] / vanilla if vanilla else 0.0,
        "focus": focus
        | {"success_rate": focus["successes"] / focus["attempts"] if focus["attempts"] else None},
        "declines": added("declines"),
        "format_correct": sum(s["format_correct"] for s in summaries),
        "scored": len(scores),
        "mean_score": sum(scores) / len(scores) if scores else None,
    }


def _values(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Each value of a file, and where it stands."""
    if text.lstrip().startswith("["):
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path} is no JSON array: {error}") from error
        for number, value in enumerate(values, 1):
            yield f"{path}, element {number}", value
        return
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            yield where, json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where} is no JSON: {error}") from error


def _recorded(where: str, value: Any, arm: Arm) -> Recorded:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {type(value).__name__}; give a JSON object")
    _check_names(where, value.keys())
    for name, given in value.items():
        kind, types = _KINDS[name]
        if not isinstance(given, types) or isinstance(given, bool):
            raise ValueError(f"{where}: {name} is {given!r}; it must be {kind}")
    if not 0 <= value.get("score", 0) <= 1:
        raise ValueError(f"{where}: score is {value['score']!r}; it must be from 0 to 1")
    try:
        return Recorded(where, value, Arm(value.get("arm", arm)))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _check_names(where: str, names: Iterable[str]) -> None:
    """Checks that the fields are those of one form of a prompt and one of a response."""
    names = set(names)
    if unknown := sorted(names - _KINDS.keys()):
        raise ValueError(f"{where}: unknown field {unknown[0]!r}; known are {', '.join(_KINDS)}")
    forms = [form for form in _FORMS if form in names]
    if len(forms) != 1:
        known = "; ".join(" and ".join(fields) for fields in _FORMS.values())
        found = f"{' and '.join(forms)} are given" if forms else "the prompt is missing"
        raise ValueError(f"{where}: {found}; give one of: {known}")
    (form,) = forms
    if missing := [name for name in _FORMS[form] if name not in names]:
        raise ValueError(f"{where}: {missing[0]} is missing, which {form} needs")
    given = [name for name in _RESPONSES if name in names]
    if len(given) != 1:
        found = "both are given" if given else "both are missing"
        raise ValueError(f"{where}: response or response_token_ids: {found}; give one of them")
    allowed = {*_FORMS[form], *_EXTRA.get(form, ()), *_RESPONSES, *_OPTIONAL}
    if foreign := sorted(names - allowed):
        raise ValueError(f"{where}: {foreign[0]} does not go with {form}; leave it out")


def _chunks(what: str, given: Any) -> list[str | Chunk]:
    """Chunks as JSON has them: texts, or objects of text, label and id."""
    if not isinstance(given, list):
        raise ValueError(f"{what} is {given!r}; give a list")
    found: list[str | Chunk] = []
    for number, chunk in enumerate(given, 1):
        if isinstance(chunk, str):
            found.append(chunk)
        elif isinstance(chunk, dict) and "text" in chunk and not chunk.keys() - _CHUNK:
            found.append(Chunk(**chunk))
        else:
            raise ValueError(
                f"{what}: chunk {number} is {chunk!r}; give a text, or an object with text and, "
                "optionally, label and id"
            )
    return found


_CHUNK = {field.name for field in dataclasses.fields(Chunk)}


def _numbers(tokens: int, spans: Sequence[Any], arm: Arm) -> PromptMap:
    """A prompt of which only numbers are known; all that is no chunk is scaffold."""
    if not 1 <= tokens <= MOST_TOKENS:
        raise ValueError(f"prompt_tokens is {tokens}; it must be from 1 to {MOST_TOKENS}")
    end, scaffold = 0, []
    for number, span in enumerate(spans, 1):
        pair = isinstance(span, list) and len(span) == 2 and all(map(_whole, span))
        if not pair or not end <= span[0] < span[1]:
            raise ValueError(
                f"chunk_spans: span {number} is {span!r}; it must be [start, end], tokens of the "
                f"prompt with start < end, not before {end}, where the one before it ends"
            )
        scaffold.append((end, span[0]))
        end = span[1]
    if end >= tokens:
        raise ValueError(
            f"chunk_spans end at {end} and prompt_tokens is {tokens}; the question must follow "
            "the last chunk"
        )
    return PromptMap(
        ids=np.broadcast_to(np.int32(0), tokens),
        chunks=tuple((start, end) for start, end in spans),
        scaffold=tuple((a, b) for a, b in [*scaffold, (end, tokens)] if a < b),
        text="",
        chunk_chars=(),
        chunk_texts=(),
        labels=(),
        arm=arm,
    )


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
