"""A document and a question to token ids, and the map of which tokens belong to which chunk."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from da_jax.protocol import chunks as chunks_lib
from da_jax.protocol import encoding as encoding_lib
from da_jax.protocol import styles as styles_lib
from da_jax.protocol import template as template_lib
from da_jax.protocol.chunks import Chunk
from da_jax.protocol.modes import Arm
from da_jax.protocol.styles import Style
from da_jax.protocol.tags import THINK_ENDS, THINK_STARTS, TOOL_MARKERS
from da_jax.protocol.template import Message, Part, Segment

if TYPE_CHECKING:
    import transformers

Span = tuple[int, int]

_MARKERS = (*THINK_STARTS, *THINK_ENDS, *itertools.chain(*TOOL_MARKERS))
_OWN_KEYS = ("messages", "conversation", "tools", "tokenize", "add_generation_prompt")
_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclasses.dataclass(frozen=True)
class PromptMap:
    """A prompt, and which of its tokens belong to what.

    Chunks follow each other without a gap; all else is scaffold. A token that straddles a border
    belongs to both sides.

    Attributes:
      ids: [N] int32, read-only.
      chunks: Token span (start, end) of each chunk with its header and wrapper: that of chunk
        number n is `chunks[n - 1]`. Empty in a vanilla prompt, unless the style is `da_only`.
      scaffold: Token spans of everything that is not a chunk; the last one runs from the end of
        the last chunk (earlier turns, question, instructions) to the end of the prompt.
      text: The rendered text.
      chunk_chars: Character spans in `text` of the chunks with their headers and wrappers.
      chunk_texts: What the chunks say, without header and wrapper.
      labels: The caller's label of each chunk, or None.
      arm: The arm that it is for.
    """

    ids: np.ndarray
    chunks: tuple[Span, ...]
    scaffold: tuple[Span, ...]
    text: str
    chunk_chars: tuple[Span, ...]
    chunk_texts: tuple[str, ...]
    labels: tuple[str | None, ...]
    arm: Arm

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.ids)


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
        self._kwargs = {"preserve_thinking": False, **_checked_kwargs(template_kwargs)}
        self._template.check_thinking(thinking, **self._kwargs)
        self._kwargs["enable_thinking"] = thinking
        self.style = self._choose(candidates)

    def split(self, document: str) -> list[str]:
        """Cuts a document into chunks of the style's size; none for an empty one."""
        starts = self._encoder.encode([(_text("document", document), False)]).starts
        return chunks_lib.split(document, starts, self.style.target, self.style.cap)

    def render(
        self,
        document: str | Sequence[str | Chunk],
        question: str,
        *,
        system: str | None = None,
        history: Sequence[Mapping[str, Any]] = (),
        arm: Arm | str = Arm.DA,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> PromptMap:
        """Renders a prompt.

        The order is system message, chunks, earlier turns, question, instructions, so that the
        turns of a chat share their prefix up to the last chunk. Special tokens in the arguments
        stay plain text.

        Args:
          document: The context, which is cut into chunks, or the caller's own chunks.
          question: The question.
          system: The caller's system message; it follows the style's preamble.
          history: Earlier turns as {"role", "content"} with string contents. Where the template
            knows thoughts, those in an assistant's content are dropped.
          arm: "da" and "unmasked" have the same prompt; "vanilla" has the same document without
            chunk markup and instructions (unless the style is `da_only`).
          template_kwargs: Added to those of the renderer.

        Raises:
          ValueError: If the arm or a role is not known, an argument is no text, or the template
            refuses the conversation or hides where the chunks are.
        """
        arm = Arm(arm)
        kwargs = {**self._kwargs, **_checked_kwargs(template_kwargs)}
        vanilla = arm is Arm.VANILLA and not self.style.da_only
        chunks = self._chunks(document, vanilla)
        _text("question", question)
        if system is not None:
            _text("system", system)
        asked = Message("user", self._question(question, len(chunks), vanilla))
        turns = [*(self._turn(turn, number) for number, turn in enumerate(history, 1)), asked]
        tools = None
        if vanilla:
            turns = self._before(self._document(chunks), turns)
        elif self.style.rendering == "plain":
            turns = self._before(self._block(chunks), turns)
        else:
            tools = [_tool(self.style)]
            turns = [*self._calls(chunks), *turns]
        turns = self._with_system(turns, system, vanilla, kwargs)
        segments = self._template.render(turns, tools, **kwargs)
        if vanilla:
            return self._map(segments, (), (), arm)
        return self._map(segments, self._chunk_chars(segments, len(chunks), kwargs), chunks, arm)

    def _chunks(self, document: str | Sequence[str | Chunk], vanilla: bool) -> Sequence[Chunk]:
        """The document as chunks, at least one; as a single one for the vanilla arm."""
        if isinstance(document, str):
            _text("document", document)
            return chunks_lib.as_chunks([document] if vanilla else self.split(document) or [""])
        if not isinstance(document, Sequence):
            raise ValueError(f"document is {document!r}; give a string or a list of chunks")
        chunks = chunks_lib.as_chunks(document)
        for number, chunk in enumerate(chunks, 1):
            _text(f"the text of chunk {number}", chunk.text)
            if chunk.label is not None:
                _text(f"the label of chunk {number}", chunk.label)
        return chunks or (Chunk(""),)

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
        self, style: Style, kwargs: Mapping[str, Any] | None = None
    ) -> template_lib.Wrapper | None:
        call = self._call(style, 1, [Part("Magic", True)])
        kwargs = self._kwargs if kwargs is None else kwargs
        return self._template.wrapper(call, [_tool(style)], style.tool_name, **kwargs)

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

    def _turn(self, turn: Mapping[str, Any], number: int) -> Message:
        """One earlier turn, as a message."""
        if not isinstance(turn, Mapping):
            raise ValueError(f"turn {number} is {turn!r}; give a dict with role and content")
        role = turn.get("role")
        if role not in _ROLES:
            raise ValueError(f"turn {number} has role {role!r}; choose one of {', '.join(_ROLES)}")
        content = turn.get("content")
        if content is None and turn.get("tool_calls"):
            content = ""
        content = _text(f"the content of turn {number}", content)
        for text in template_lib.strings(turn):
            _text(f"turn {number}", text)
        if role == "assistant":
            for marker in THINK_ENDS:
                if marker in self._template.source:
                    content = content.rpartition(marker)[2].lstrip("\n")
        extra = {k: v for k, v in turn.items() if k not in ("role", "content")}
        return Message(role, [Part(content, False)], extra)

    def _question(self, question: str, count: int, vanilla: bool) -> list[Part]:
        style = self.style
        asked = [Part(question, False)]
        if vanilla:
            return _fill(style.vanilla_question, question=asked)
        parts = _fill(style.question, question=asked)
        if style.instructions:
            parts.append(Part("\n\n", True))
            plural = [Part("s", True)] * (count != 1)
            parts += _fill(style.instructions, count=[Part(str(count), True)], s=plural)
        return parts

    def _chunk(self, chunk: Chunk, number: int) -> list[Part]:
        style = self.style
        label = _fill(style.label, label=[Part(chunk.label, False)]) if chunk.label else []
        text = Part(chunk.text, False) if chunk.text else Part(style.empty_context, True)
        parts = _fill(style.chunk, n=[Part(str(number), True)], label=label, text=[text])
        return [part._replace(chunk=number) for part in parts]

    def _calls(self, chunks: Sequence[Chunk]) -> Iterator[Message]:
        """The chunks as responses of tool calls."""
        for number, chunk in enumerate(chunks, 1):
            yield from self._call(self.style, number, self._chunk(chunk, number))

    def _block(self, chunks: Sequence[Chunk]) -> Iterator[Part]:
        """The chunks as text of one turn; a separator belongs to the chunk before it."""
        for number, chunk in enumerate(chunks, 1):
            if number > 1:
                yield Part(self.style.separator, True, number - 1)
            yield from self._chunk(chunk, number)

    def _document(self, chunks: Sequence[Chunk]) -> Iterator[Part]:
        """The same document for the vanilla arm."""
        for number, chunk in enumerate(chunks, 1):
            if number > 1:
                yield Part(self.style.vanilla_separator, True)
            if chunk.label:
                yield from (Part(chunk.label, False), Part("\n", True))
            yield Part(chunk.text, False) if chunk.text else Part(self.style.empty_context, True)

    def _before(self, block: Iterator[Part], turns: Sequence[Message]) -> list[Message]:
        """Puts a block at the start of the first turn, or before it if that is not the user's."""
        first = turns[0]
        if first.role != "user":
            return [Message("user", list(block)), *turns]
        parts = [*block, Part(self.style.after_chunks, True), *first.parts]
        return [first._replace(parts=parts), *turns[1:]]

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

    def _chunk_chars(
        self, segments: Sequence[Segment], count: int, kwargs: Mapping[str, Any]
    ) -> tuple[Span, ...]:
        """Character spans of the chunks, with their wrappers, in the rendered text."""
        text = "".join(s.text for s in segments)
        starts, ends, following = [0] * count, [0] * count, [len(text)] * count
        position, previous = 0, 0
        for segment in segments:
            if segment.part is not None:
                number = segment.part.chunk
                if previous and number != previous:
                    following[previous - 1] = position
                if number and number != previous:
                    starts[number - 1] = position
                previous = number
                if number:
                    ends[number - 1] = position + len(segment.text)
            position += len(segment.text)
        if self.style.rendering == "plain":
            return tuple(zip(starts, [*starts[1:], ends[-1]]))

        wrapper = self._wrapper(self.style, kwargs)
        if wrapper is None or not text.endswith(wrapper.opening, 0, starts[0]):
            raise ValueError(
                "the chat template renders the first tool call in a way of its own; "
                "use style 'plain'"
            )
        closing = wrapper.closing.lstrip()  # a template may trim white space before it
        borders = [starts[0] - len(wrapper.opening)]
        for end, after in zip(ends, following):
            found = text.find(closing, end, after)
            if found < 0:
                raise ValueError(
                    "the chat template ends tool responses in different ways; use style 'plain'"
                )
            borders.append(found + len(closing))
        return tuple(itertools.pairwise(borders))

    def _map(
        self,
        segments: Sequence[Segment],
        chunk_chars: tuple[Span, ...],
        chunks: Sequence[Chunk],
        arm: Arm,
    ) -> PromptMap:
        encoding = self._encoder.encode([(s.text, s.trusted) for s in segments])
        ids = encoding.ids
        ids.setflags(write=False)
        scaffold: tuple[Span, ...] = ((0, len(ids)),)
        if chunk_chars:
            head = encoding.tokens_of(0, chunk_chars[0][0])[1]
            tail = encoding.tokens_of(chunk_chars[-1][1], chunk_chars[-1][1] + 1)[0]
            scaffold = ((0, head), (tail, len(ids)))
        return PromptMap(
            ids=ids,
            chunks=tuple(encoding.tokens_of(a, b) for a, b in chunk_chars),
            scaffold=tuple((a, b) for a, b in scaffold if a < b),
            text="".join(s.text for s in segments),
            chunk_chars=chunk_chars,
            chunk_texts=tuple(c.text or self.style.empty_context for c in chunks),
            labels=tuple(c.label for c in chunks),
            arm=arm,
        )


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


def _checked_kwargs(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Refuses options of the template that the renderer sets itself."""
    kwargs = dict(kwargs or {})
    if "chat_template_kwargs" in kwargs:
        raise ValueError(
            f"template_kwargs holds chat_template_kwargs={kwargs['chat_template_kwargs']!r}; "
            "pass its keys directly"
        )
    if "enable_thinking" in kwargs:
        raise ValueError(
            f"template_kwargs holds enable_thinking={kwargs['enable_thinking']!r}; "
            "use the option thinking"
        )
    for key in _OWN_KEYS:
        if key in kwargs:
            raise ValueError(
                f"template_kwargs holds {key}={kwargs[key]!r}, which the renderer sets; "
                "leave it out"
            )
    return kwargs


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


def _tool(style: Style) -> dict[str, Any]:
    """The schema of the style's tool."""
    number = {"type": "integer", "description": "The number of the chunk."}
    parameters = {
        "type": "object",
        "properties": {style.tool_argument: number},
        "required": [style.tool_argument],
    }
    function = {
        "name": style.tool_name,
        "description": style.tool_description,
        "parameters": parameters,
    }
    return {"type": "function", "function": function}
