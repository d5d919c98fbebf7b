"""A document and a question to token ids, and the map of which tokens belong to which chunk."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from da_jax.protocol import chunks as chunks_lib
from da_jax.protocol import encoding as encoding_lib
from da_jax.protocol import rendered as rendered_lib
from da_jax.protocol import styles as styles_lib
from da_jax.protocol import template as template_lib
from da_jax.protocol.chunks import Chunk
from da_jax.protocol.modes import Arm
from da_jax.protocol.spans import Group, Span, chunk_chars
from da_jax.protocol.styles import Style
from da_jax.protocol.tags import THINK_ENDS, THINK_STARTS, TOOL_MARKERS
from da_jax.protocol.template import Message, Part, Segment

if TYPE_CHECKING:
    import transformers

_MARKERS = (*THINK_STARTS, *THINK_ENDS, *itertools.chain(*TOOL_MARKERS))
_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclasses.dataclass(frozen=True)
class PromptMap:
    """A prompt, and which of its tokens belong to what.

    The chunks that one turn brings follow each other without a gap; all else is scaffold: what
    stands before the first chunk, turns between groups of chunks, and what follows the last one. A
    token that straddles a border belongs to both sides.

    Attributes:
      ids: [N] int32, read-only.
      chunks: Token span (start, end) of each chunk with its header and wrapper, in order. Empty in
        a vanilla prompt, unless the style is `da_only`, and where there is no document.
      scaffold: Token spans of everything that is not a chunk, in order; the last one runs from the
        end of the last chunk to the end of the prompt.
      text: The rendered text.
      chunk_chars: Character spans in `text` of the chunks with their headers and wrappers.
      chunk_texts: What the chunks say, without header and wrapper.
      labels: The caller's label of each chunk, or None.
      arm: The arm that it is for.
      numbers: What tags call each of `chunks`: the caller's ids, else 1, 2, 3 and so on.
    """

    ids: np.ndarray
    chunks: tuple[Span, ...]
    scaffold: tuple[Span, ...]
    text: str
    chunk_chars: tuple[Span, ...]
    chunk_texts: tuple[str, ...]
    labels: tuple[str | None, ...]
    arm: Arm
    numbers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        numbers = self.numbers or tuple(range(1, len(self.chunks) + 1))
        if len(numbers) != len(self.chunks):
            raise ValueError(f"{len(self.chunks)} chunks have {len(numbers)} numbers: {numbers}")
        object.__setattr__(self, "numbers", numbers)

    @functools.cached_property
    def span_of(self) -> Mapping[int, Span]:
        """Token span of each chunk by its number."""
        return dict(zip(self.numbers, self.chunks))

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.ids)


class _Turn(NamedTuple):
    """The chunks that a turn brings, and its message; None where the chunks are all of it."""

    chunks: Sequence[Chunk]
    message: Message | None


class PromptRenderer:
    """Renders a document and a question through a model's own chat template.

    Args:
      tokenizer: A fast Hugging Face tokenizer with a chat template.
      style: A style, the name of a built-in one, or "auto" (or None): the style that the
        tokenizer's folder carries in `da_style.json`, else "tool" if the template supports tools,
        else "plain".
      thinking: Whether the model thinks before it answers. The template is told in either case.
      template_kwargs: Passed to the chat template, such as `{"reasoning_effort": "low"}`.

    Raises:
      ValueError: If there is no chat template, or it does not support the style or `thinking`.
      TypeError: If the tokenizer is not a fast one.
    """

    def __init__(
        self,
        tokenizer: transformers.PreTrainedTokenizerBase,
        style: Style | str | None = "auto",
        *,
        thinking: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(thinking, bool):
            raise ValueError(f"thinking is {thinking!r}; give True or False")
        folder = getattr(tokenizer, "name_or_path", "")
        candidates = _candidates(style, folder)
        structure = [str(getattr(tokenizer, "chat_template", "")), *_MARKERS]
        structure += [text for candidate in candidates for text in candidate.texts()]
        self._encoder = encoding_lib.SafeEncoder(tokenizer, structure)
        self._template = template_lib.ChatTemplate(tokenizer, self._encoder)
        # Thoughts of earlier turns are dropped, so that there are none to preserve.
        self._kwargs = {"preserve_thinking": False, **template_lib.checked_kwargs(template_kwargs)}
        self._template.check_thinking(thinking, **self._kwargs)
        self._kwargs["enable_thinking"] = thinking
        self.style = self._choose(candidates)

    @property
    def template_kwargs(self) -> Mapping[str, Any]:
        """What the chat template is given besides messages and tools."""
        return dict(self._kwargs)

    def split(self, document: str) -> list[str]:
        """Cuts a document into chunks of the style's size; none for an empty one."""
        starts = self._encoder.encode([(_text("document", document), False)]).starts
        return chunks_lib.split(document, starts, self.style.target, self.style.cap)

    def render(
        self,
        document: str | Sequence[str | Chunk] | None,
        question: str,
        *,
        chunks: Sequence[str | Chunk] = (),
        system: str | None = None,
        history: Sequence[Mapping[str, Any]] = (),
        arm: Arm | str = Arm.DA,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> PromptMap:
        """Renders a prompt.

        The order is system message, document, earlier turns, question, instructions. Chunks that a
        turn brings stand right before its text, so that the prompt of a later question begins as
        this one does, up to the question. Special tokens in the arguments stay plain text.

        Args:
          document: The context, which is cut into chunks, or the caller's own chunks. Of an empty
            one the prompt says that it is; None where there is none.
          question: The question.
          chunks: Chunks that come with the question.
          system: The caller's system message; it follows the style's preamble.
          history: Earlier turns as {"role", "content"} with string contents; a user's turn may hold
            "chunks", those that came with it. Where the template knows thoughts, those in an
            assistant's content are dropped.
          arm: "da" and "unmasked" have the same prompt; "vanilla" has the same document without
            chunk markup and instructions (unless the style is `da_only`).
          template_kwargs: Added to those of the renderer.

        Raises:
          ValueError: If the arm or a role is not known, an argument is no text, ids of chunks
            cannot be, or the template refuses the conversation or hides where the chunks are.
        """
        arm = Arm(arm)
        kwargs = {**self._kwargs, **template_lib.checked_kwargs(template_kwargs)}
        vanilla = arm is Arm.VANILLA and not self.style.da_only
        _text("question", question)
        if system is not None:
            _text("system", system)
        turns = [_Turn(*self._turn(turn, number)) for number, turn in enumerate(history, 1)]
        turns.append(_Turn(_own_chunks("the question", chunks), Message("user", ())))
        turns = self._with_document(self._chunks(document, vanilla), turns)
        every = [chunk for turn in turns for chunk in turn.chunks]
        numbers = chunks_lib.numbers(every)
        asked = self._question(question, numbers, vanilla)
        turns[-1] = turns[-1]._replace(message=Message("user", asked))
        messages, groups = self._messages(turns, numbers, vanilla, kwargs)
        tools = [self.style.tool()] if self.style.rendering == "tool" and not vanilla else None
        messages = self._with_system(messages, system, vanilla, kwargs)
        segments = self._template.render(messages, tools, **kwargs)
        if vanilla:
            return self._map(segments, (), (), (), arm)
        return self._map(segments, chunk_chars(segments, groups), every, numbers, arm)

    def read(self, text: str, arm: Arm | str = Arm.DA) -> PromptMap:
        """Finds the chunks in a prompt that is rendered already; see `rendered.find`.

        Control tokens count everywhere in it, for who wrote them cannot be told.

        Raises:
          ValueError: If they do not stand there as style and template write them, from 1 on.
        """
        arm = Arm(arm)
        segments = [Segment(_text("the prompt", text), True, None)]
        if arm is Arm.VANILLA and not self.style.da_only:
            return self._map(segments, (), (), (), arm)
        spans, chunks = rendered_lib.find(text, self.style, self.render)
        return self._map(segments, spans, chunks, chunks_lib.numbers(chunks), arm)

    def _chunks(
        self, document: str | Sequence[str | Chunk] | None, vanilla: bool
    ) -> Sequence[Chunk]:
        """The document as chunks, an empty one too; a text is one chunk in the vanilla arm."""
        if document is None:
            return ()
        if isinstance(document, str):
            _text("document", document)
            return chunks_lib.as_chunks([document] if vanilla else self.split(document) or [""])
        if not isinstance(document, Sequence):
            raise ValueError(
                f"document is {document!r}; give a string, a list of chunks, or None for none"
            )
        return _checked_chunks(document) or (Chunk(""),)

    def _with_document(self, document: Sequence[Chunk], turns: list[_Turn]) -> list[_Turn]:
        """Puts the document into the first turn, or before it if that is not the user's."""
        first = turns[0]
        if first.message is not None and first.message.role == "user":
            return [first._replace(chunks=(*document, *first.chunks)), *turns[1:]]
        return [_Turn(document, None), *turns] if document else turns

    def _messages(
        self,
        turns: Sequence[_Turn],
        numbers: Sequence[int],
        vanilla: bool,
        kwargs: Mapping[str, Any],
    ) -> tuple[list[Message], list[Group]]:
        """The turns as messages, each after its chunks, and the groups of chunks."""
        messages: list[Message] = []
        groups: list[Group] = []
        done = 0
        for chunks, message in turns:
            places = range(done + 1, done + len(chunks) + 1)
            numbered = list(zip(places, numbers[done:], chunks))
            done += len(chunks)
            if not chunks or self.style.rendering == "plain" or vanilla:
                block = self._document(chunks) if vanilla else self._block(numbered)
                messages.append(self._under(list(block), message))
                groups += [Group(len(chunks))] * bool(chunks)
                continue
            groups.append(Group(len(chunks), self._wrapper_after(messages, numbered[0][1], kwargs)))
            for place, number, chunk in numbered:
                messages += self._call(self.style, number, self._chunk(chunk, number, place))
            messages += [message] if message else []
        return messages, groups

    def _under(self, block: Sequence[Part], message: Message | None) -> Message:
        """A message that begins with a block of chunks."""
        if message is None:
            return Message("user", block)
        if not block:
            return message
        parts = [*block, Part(self.style.after_chunks, True), *message.parts]
        return message._replace(parts=parts)

    def _choose(self, candidates: Sequence[Style]) -> Style:
        """The first style that the template supports."""
        for style in candidates:
            if style.rendering == "plain" or self._wrapper(style):
                return style
        raise ValueError(
            f"style {style.name!r} needs a chat template with tools, and this one does not "
            "render a tool call and its response; use style 'plain' or 'auto'"
        )

    def _wrapper(
        self,
        style: Style,
        number: int = 1,
        before: Sequence[Message] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> template_lib.Wrapper | None:
        call = self._call(style, number, [Part("Magic", True)])
        kwargs = self._kwargs if kwargs is None else kwargs
        return self._template.wrapper(call, [style.tool()], style.tool_name, before, **kwargs)

    def _wrapper_after(
        self, messages: Sequence[Message], number: int, kwargs: Mapping[str, Any]
    ) -> template_lib.Wrapper:
        """The wrapper of a group of chunks after these messages; `number` is that of its first."""
        turn = max((i for i, m in enumerate(messages) if m.role == "user"), default=0)
        before = [
            m._replace(parts=[Part("x", True)] * any(part.text for part in m.parts))
            for m in messages[turn:]
        ]
        wrapper = self._wrapper(self.style, number, before, kwargs)
        if wrapper is None:
            raise ValueError(
                "the chat template does not render tool calls after these turns; use style 'plain'"
            )
        return wrapper

    def _call(self, style: Style, number: int, parts: Sequence[Part]) -> list[Message]:
        """A tool call whose response is a chunk, in one message or two."""
        call_id = f"{number:09d}"  # some templates insist on nine characters
        function = {"name": style.tool_name, "arguments": {style.tool_argument: number}}
        call = {"type": "function", "id": call_id, "function": function}
        if re.search(r"""['".]tool_responses\b""", self._template.source):
            # Gemma 4's own form, and the only one in which its first templates write responses.
            response = {"name": style.tool_name, "response": template_lib.SLOT}
            return [
                Message("assistant", parts, {"tool_calls": [call], "tool_responses": [response]})
            ]
        return [
            Message("assistant", [], {"tool_calls": [call]}),
            Message("tool", parts, {"name": style.tool_name, "tool_call_id": call_id}),
        ]

    def _turn(self, turn: Mapping[str, Any], number: int) -> tuple[Sequence[Chunk], Message]:
        """The chunks of one earlier turn, and its message."""
        if not isinstance(turn, Mapping):
            raise ValueError(f"turn {number} is {turn!r}; give a dict with role and content")
        role = turn.get("role")
        if role not in _ROLES:
            raise ValueError(f"turn {number} has role {role!r}; choose one of {', '.join(_ROLES)}")
        content = turn.get("content")
        if content is None and turn.get("tool_calls"):
            content = ""
        content = _text(f"the content of turn {number}", content)
        chunks = _own_chunks(f"turn {number}", turn.get("chunks") or ())
        if chunks and role != "user":
            raise ValueError(
                f"turn {number} has chunks and the role {role!r}; only the user's turns have some"
            )
        extra = {k: v for k, v in turn.items() if k not in ("role", "content", "chunks")}
        for text in template_lib.strings(extra):
            _text(f"turn {number}", text)
        if role == "assistant":
            for marker in THINK_ENDS:
                if marker in self._template.source:
                    content = content.rpartition(marker)[2].lstrip("\n")
        return chunks, Message(role, [Part(content, False)], extra)

    def _question(self, question: str, numbers: Sequence[int], vanilla: bool) -> list[Part]:
        style = self.style
        asked = [Part(question, False)]
        if vanilla:
            return _fill(style.vanilla_question, question=asked)
        parts = _fill(style.question, question=asked)
        if style.instructions and numbers:  # without chunks there is nothing to declare
            parts.append(Part("\n\n", True))
            parts += _fill(
                style.instructions,
                count=[Part(str(len(numbers)), True)],
                s=[Part("s", True)] * (len(numbers) != 1),
                highest=[Part(str(max(numbers)), True)],
            )
        return parts

    def _chunk(self, chunk: Chunk, number: int, place: int) -> list[Part]:
        """What a chunk says, under its number; it is the prompt's chunk at `place`, from 1."""
        style = self.style
        label = _fill(style.label, label=[Part(chunk.label, False)]) if chunk.label else []
        text = Part(chunk.text, False) if chunk.text else Part(style.empty_context, True)
        parts = _fill(style.chunk, n=[Part(str(number), True)], label=label, text=[text])
        return [part._replace(chunk=place) for part in parts]

    def _block(self, numbered: Sequence[tuple[int, int, Chunk]]) -> Iterator[Part]:
        """Chunks as text of one turn; a separator belongs to the chunk before it."""
        for at, (place, number, chunk) in enumerate(numbered):
            if at:
                yield Part(self.style.separator, True, place - 1)
            yield from self._chunk(chunk, number, place)

    def _document(self, chunks: Sequence[Chunk]) -> Iterator[Part]:
        """The same document for the vanilla arm."""
        for number, chunk in enumerate(chunks, 1):
            if number > 1:
                yield Part(self.style.vanilla_separator, True)
            if chunk.label:
                yield from (Part(chunk.label, False), Part("\n", True))
            yield Part(chunk.text, False) if chunk.text else Part(self.style.empty_context, True)

    def _with_system(
        self,
        turns: Sequence[Message],
        system: str | None,
        vanilla: bool,
        kwargs: Mapping[str, Any],
    ) -> list[Message]:
        preamble = self.style.vanilla_preamble if vanilla else self.style.preamble
        parts = [Part(preamble, True)] if preamble else []
        if system:
            parts += [Part("\n\n", True)] * bool(preamble) + [Part(system, False)]
        if not parts:
            return list(turns)
        if self._template.has_system(**kwargs):
            return [Message("system", parts), *turns]
        first = turns[0]
        if first.role != "user":
            return [Message("user", parts), *turns]
        return [first._replace(parts=[*parts, Part("\n\n", True), *first.parts]), *turns[1:]]

    def _map(
        self,
        segments: Sequence[Segment],
        chars: tuple[Span, ...],
        chunks: Sequence[Chunk],
        numbers: tuple[int, ...],
        arm: Arm,
    ) -> PromptMap:
        encoding = self._encoder.encode([(s.text, s.trusted) for s in segments])
        ids = encoding.ids
        ids.setflags(write=False)
        scaffold: tuple[Span, ...] = ((0, len(ids)),)
        if chars:
            between = ((end, start) for (_, end), (start, _) in itertools.pairwise(chars))
            gaps = [(0, chars[0][0]), *((a, b) for a, b in between if a < b)]
            tail = encoding.tokens_of(chars[-1][1], chars[-1][1] + 1)[0]
            scaffold = (*(encoding.tokens_of(a, b) for a, b in gaps), (tail, len(ids)))
        return PromptMap(
            ids=ids,
            chunks=tuple(encoding.tokens_of(a, b) for a, b in chars),
            scaffold=tuple((a, b) for a, b in scaffold if a < b),
            text="".join(s.text for s in segments),
            chunk_chars=chars,
            chunk_texts=tuple(c.text or self.style.empty_context for c in chunks),
            labels=tuple(c.label for c in chunks),
            arm=arm,
            numbers=numbers,
        )


def _own_chunks(what: str, chunks: Sequence[str | Chunk]) -> tuple[Chunk, ...]:
    """The chunks that a turn brings."""
    if isinstance(chunks, str) or not isinstance(chunks, Sequence):
        raise ValueError(
            f"{what} has the chunks {chunks!r}; give a list (`PromptRenderer.split` cuts a text)"
        )
    try:
        return _checked_chunks(chunks)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


def _checked_chunks(given: Sequence[str | Chunk]) -> tuple[Chunk, ...]:
    """The caller's own chunks, if they are text that can be encoded."""
    chunks = chunks_lib.as_chunks(given)
    for number, chunk in enumerate(chunks, 1):
        _text(f"the text of chunk {number}", chunk.text)
        if chunk.label is not None:
            _text(f"the label of chunk {number}", chunk.label)
    return chunks


def _candidates(style: Style | str | None, folder: str) -> tuple[Style, ...]:
    """The styles to choose from, the best first."""
    if isinstance(style, Style):
        return (style,)
    if style is None or style == "auto":
        own = Style.of_folder(folder) if folder and pathlib.Path(folder).is_dir() else None
        return (own,) if own else (styles_lib.TOOL, styles_lib.PLAIN)
    if style in styles_lib.STYLES:
        return (styles_lib.STYLES[style],)
    raise ValueError(f"style {style!r}: choose auto, {', '.join(styles_lib.STYLES)}")


def _text(what: str, value: Any) -> str:
    """The value, if it is text that can be encoded."""
    if not isinstance(value, str):
        raise ValueError(f"{what} is {value!r}; give a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} holds half a surrogate pair, {value[error.start]!r}, at character "
            f"{error.start}; decode the text with errors='replace'"
        ) from error
    return value


def _fill(text: str, /, **values: Sequence[Part]) -> list[Part]:
    """The parts of a format of the style, with the values in their places."""
    parts: list[Part] = []
    for literal, name in styles_lib.parse_format(text):
        if literal:
            parts.append(Part(literal, True))
        if name is not None:
            parts += values[name]
    return parts
