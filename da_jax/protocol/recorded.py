"""Recorded responses of any system, for replay and for training: JSON lines, or one JSON array.

A line is an object that holds the prompt in one of these forms:

* ``question``; optionally ``document`` (a text, which the prompt style cuts into chunks, a list of
  chunks, or null for none), ``system`` and ``history`` (earlier turns, as for ``LLM.generate``);
* ``messages``, the last of them the question; optionally ``documents``, as for ``LLM.chat``;
* ``prompt``: the rendered text, as a prompt style writes it;
* ``prompt_tokens`` and ``chunk_spans``: nothing but numbers, which replay makes do with;

and what was written, as ``response`` or as ``response_token_ids``. A chunk is a text, or an object
with ``text`` and, optionally, ``label`` and ``id``. Optional in every form: ``arm`` (``da``,
``unmasked`` or ``vanilla``), ``id``, ``task``, ``score`` (0 to 1) and ``finish_reason``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from da_jax.protocol import turns
from da_jax.protocol.chunks import Chunk
from da_jax.protocol.modes import Arm
from da_jax.protocol.prompt import PromptMap, PromptRenderer

if TYPE_CHECKING:
    import transformers

MOST_TOKENS = 2**24
"""Of a prompt that is given in numbers."""
_FORMS = {
    "question": ("question",),
    "messages": ("messages",),
    "prompt": ("prompt",),
    "prompt_tokens": ("prompt_tokens", "chunk_spans"),
}
"""How a prompt may be given: the field that tells the form, and the fields that it needs."""
_EXTRA = {"question": ("document", "system", "history"), "messages": ("documents",)}
_RESPONSES = ("response", "response_token_ids")
_OPTIONAL = ("id", "task", "arm", "score", "finish_reason")
_NONE = type(None)
_KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "document": ("a text, a list of chunks or null", (str, list, _NONE)),
    "question": ("a text", (str,)),
    "system": ("a text or null", (str, _NONE)),
    "history": ("a list", (list,)),
    "messages": ("a list", (list,)),
    "documents": ("a text, a list of chunks or null", (str, list, _NONE)),
    "prompt": ("a text", (str,)),
    "prompt_tokens": ("a whole number", (int,)),
    "chunk_spans": ("a list", (list,)),
    "response": ("a text", (str,)),
    "response_token_ids": ("a list", (list,)),
    "id": ("a text or a whole number", (str, int)),
    "task": ("a text", (str,)),
    "arm": ("a text", (str,)),
    "score": ("a number", (int, float)),
    "finish_reason": ("a text", (str,)),
}
_CHUNK = {field.name for field in dataclasses.fields(Chunk)}


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

    @classmethod
    def of(cls, where: str, value: Any, arm: Arm = Arm.DA) -> Recorded:
        """Checks the fields of a response.

        Raises:
          ValueError: one is missing, unknown or of a wrong kind; it starts with `where`.
        """
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
            return cls(where, value, Arm(value.get("arm", arm)))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    @property
    def exact(self) -> bool:
        """Whether the tokens of the response were recorded, and not its text."""
        return "response_token_ids" in self.fields

    def prompt(self, renderer: PromptRenderer) -> PromptMap:
        """The prompt; one of which only numbers are known holds token 0 everywhere.

        Raises:
          ValueError: it cannot be rendered, or its chunks cannot be found.
        """
        fields = self.fields
        if "prompt_tokens" in fields:
            return _numbers(fields["prompt_tokens"], fields["chunk_spans"], self.arm)
        if "prompt" in fields:
            return renderer.read(fields["prompt"], self.arm)
        if "messages" in fields:
            parts = turns.split(_turns("message", fields["messages"], first=0))
            return renderer.render(
                _document("documents", fields.get("documents")), parts.question,
                system=parts.system, history=parts.history, chunks=parts.chunks, arm=self.arm,
            )  # fmt: skip
        return renderer.render(
            _document("document", fields.get("document")), fields["question"],
            system=fields.get("system"), history=_turns("turn", fields.get("history", ()), first=1),
            arm=self.arm,
        )  # fmt: skip

    def response(
        self, tokenizer: transformers.PreTrainedTokenizerBase, vocabulary: int
    ) -> tuple[int, ...]:
        """The tokens of the response: those recorded, else those of its text.

        Args:
          tokenizer: of the model.
          vocabulary: how many tokens it has.

        Raises:
          ValueError: there is none, or one that the tokenizer does not have.
        """
        name = "response_token_ids" if self.exact else "response"
        given = self.fields[name]
        if not self.exact:
            given = tokenizer.encode(given, add_special_tokens=False)
        if not given:
            raise ValueError(f"{name} is empty; a response has at least one token")
        for token in given:
            if not _whole(token) or not 0 <= token < vocabulary:
                raise ValueError(
                    f"{name} holds {token!r}; the model's tokens are 0 to {vocabulary - 1}. "
                    "Name the model that wrote it, or give the text of the response"
                )
        return tuple(given)


def read(path: str | Path, arm: Arm = Arm.DA) -> list[Recorded]:
    """Reads recorded responses, and checks the fields of all of them.

    Args:
      path: the file; empty lines are skipped.
      arm: the arm of those that name none.

    Raises:
      ValueError: one has a field that is missing, unknown or not valid; the message names it.
      OSError: the file cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text: {error}") from error
    found = [Recorded.of(where, value, arm) for where, value in _values(path, text)]
    if not found:
        raise ValueError(f"{path} holds no response; give one JSON object a line, or an array")
    return found


def _values(path: str | Path, text: str) -> Iterator[tuple[str, Any]]:
    """Each value of a file, and where it stands."""
    if text.lstrip().startswith("["):
        for number, value in enumerate(_json(f"{path} is no JSON array", text), 1):
            yield f"{path}, element {number}", value
        return
    # JSON leaves U+2028 and its like in texts as they are: they end no line.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{path}, line {number}"
            yield where, _json(f"{where} is no JSON", line)


def _json(problem: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{problem}: {error}") from error


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


def _document(what: str, given: str | list | None) -> str | list[str | Chunk] | None:
    return _chunks(what, given) if isinstance(given, list) else given


def _turns(what: str, given: Sequence[Any], *, first: int) -> list[Mapping[str, Any]]:
    """Turns of a conversation, the chunks that came with them as `Chunk` objects."""
    found: list[Mapping[str, Any]] = []
    for number, turn in enumerate(given, first):
        if not isinstance(turn, dict):
            raise ValueError(f"{what} {number} is {turn!r}; give an object")
        if "chunks" in turn:
            turn = {**turn, "chunks": _chunks(f"chunks of {what} {number}", turn["chunks"])}
        found.append(turn)
    return found


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
