"""A model's chat template, rendered such that every piece of every message can be found again.

Two stand-ins make this exact without knowing the template. Control tokens in the caller's text
are masked by private-use characters before the template runs, so that the template cannot take
them for structure. And the template runs a second time with a private-use marker at each border
between two pieces: split there, its output tells what came from where, whatever was trimmed or
escaped; without the markers it must equal the first output.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2

from da_jax.protocol import encoding as encoding_lib
from da_jax.protocol.tags import THINK_STARTS

if TYPE_CHECKING:
    import transformers

SLOT = object()
"""In a message's `extra`: the text of the message goes here, and its content stays empty."""

_OWN_KEYS = ("messages", "conversation", "tools", "tokenize", "add_generation_prompt")
_MARKS = 32  # markers cycle through so many characters; a template that reorders is noticed


class Part(NamedTuple):
    """A piece of a message; trusted text is the style's own. `chunk` 0 is no chunk."""

    text: str
    trusted: bool
    chunk: int = 0


class Message(NamedTuple):
    """A message of a conversation; `extra` holds further keys, such as `tool_calls`.

    The text is the message's content, unless `extra` has a place for it (`SLOT`).
    """

    role: str
    parts: Sequence[Part]
    extra: Mapping[str, Any] = {}


class Segment(NamedTuple):
    """A piece of the rendered text; `part` is None for what the template wrote itself."""

    text: str
    trusted: bool
    part: Part | None


class Wrapper(NamedTuple):
    """What a template writes around the text of a tool response.

    `opening` begins with the call of the first chunk, `closing` ends the response of each.
    """

    opening: str
    closing: str


class ChatTemplate:
    """Renders conversations to segments.

    Args:
      tokenizer: A tokenizer with a chat template.
      encoder: The encoder of the same tokenizer.

    Raises:
      ValueError: If the tokenizer has no chat template.
    """

    def __init__(
        self,
        tokenizer: transformers.PreTrainedTokenizerBase,
        encoder: encoding_lib.SafeEncoder,
    ) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template; put the one that the model was trained with "
                "into chat_template.jinja in its folder, or set tokenizer.chat_template"
            )
        self._tokenizer = tokenizer
        self._encoder = encoder
        self.source = str(tokenizer.chat_template)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[Segment]:
        """Renders a conversation up to the start of the model's turn.

        Raises:
          ValueError: If the template refuses the conversation, or does not write every piece of
            it once and in order.
        """
        texts = [self.source, *(p.text for m in messages for p in m.parts)]
        texts += [s for m in messages for s in strings(m.extra)]
        free = encoding_lib.private_characters(encoding_lib.private_characters_in(texts))
        marks = "".join(itertools.islice(free, _MARKS))
        foreign = [p.text for m in messages for p in m.parts if not p.trusted]
        foreign += [s for m in messages for s in strings(m.extra)]
        masks = encoding_lib.Spelling(
            sorted({token for text in foreign for _, token in self._encoder.find(text)}), free
        )

        plain, marked, owners = [], [], []
        cycle = itertools.cycle(marks)
        for message in messages:
            texts = [
                p.text if p.trusted else self._encoder.respell(p.text, masks) for p in message.parts
            ]
            extra = {k: self._masked(v, masks) for k, v in message.extra.items()}
            content = _mark(texts, cycle)
            plain.append(_dictionary(message.role, "".join(texts), extra))
            marked.append(_dictionary(message.role, content, extra))
            if content != "".join(texts):
                owners += [*message.parts, None]

        expected = self._apply(plain, tools, kwargs)
        pieces = re.split(f"([{marks}])", self._apply(marked, tools, kwargs))
        found = "".join(pieces[1::2])
        wanted = "".join(itertools.islice(itertools.cycle(marks), len(owners)))
        if found != wanted or "".join(pieces[::2]) != expected:
            raise ValueError(
                "the chat template does not write each message once, in order and unchanged "
                "but for trimming or escaping, so the chunks cannot be found in its text; use "
                + ("style 'plain', or " if tools else "")
                + "a simpler chat template"
            )
        segments = []
        for text, part in zip(pieces[::2], [None, *owners]):
            for piece, masked in masks.undo(text):
                trusted = not masked and (part is None or part.trusted)
                segments.append(Segment(piece, trusted, part))
        return segments

    def has_system(self, **kwargs: Any) -> bool:
        """Whether the template writes a system message, and first.

        Old Gemma templates refuse it, and some of Mistral's write it before the last turn.
        """
        roles = ("system", "user", "assistant", "user")
        probe = [Message(role, [Part("x", True)]) for role in roles]
        try:
            self.render(probe, **kwargs)
        except ValueError:
            return False
        return True

    def check_thinking(self, wanted: bool, **kwargs: Any) -> None:
        """Checks that the template can switch thoughts on or off, as wanted, by `enable_thinking`.

        Raises:
          ValueError: If it cannot, or refuses any conversation.
        """
        question = [Message("user", [Part("x", True)])]

        def rendered(on: bool) -> list[Segment]:
            return self.render(question, **{**kwargs, "enable_thinking": on})

        try:
            off = rendered(False)
        except ValueError as error:
            rendered(True)  # raises if it is not the thoughts that the template complains of
            if wanted:
                return
            raise ValueError(
                f"the model's thoughts cannot be switched off ({error}); pass thinking=True"
            ) from error
        forced = off[-1].text.rstrip().endswith(THINK_STARTS)
        if forced and not wanted:
            raise ValueError(
                "the model's thoughts cannot be switched off: the chat template opens them "
                "whatever enable_thinking says; pass thinking=True"
            )
        if wanted and not forced and rendered(True) == off:
            raise ValueError(
                "thinking=True, but the chat template knows no thoughts (enable_thinking changes "
                "nothing); leave it out"
            )

    def wrapper(
        self,
        call: list[Message],
        tools: Sequence[Mapping[str, Any]],
        name: str,
        before: Sequence[Message] = (),
        **kwargs: Any,
    ) -> Wrapper | None:
        """Finds what the template writes around a tool response.

        Conversations with none, one and two calls are compared. Where turns that follow each
        other begin or end alike, the border between them is taken at a control token.

        Args:
          call: The messages of one call and its response.
          tools: The schema of the tool.
          name: The name of the tool, which must show in schema and call.
          before: What stands between the system message and the calls.
          **kwargs: For the template.

        Returns:
          The wrapper; None if the template does not support tools.
        """
        head = [Message("system", [Part("s", True)])] if self.has_system(**kwargs) else []
        user = Message("user", [Part("q", True)])
        if not head and not (before and before[0].role == "user"):
            head = [Message("user", [Part("s", True)])]
        try:
            none, one, two = (
                self._literals([*head, *before, *(call * n), user], tools, kwargs) for n in range(3)
            )
        except ValueError:
            return None
        # What the template writes before the calls, or where they would be, and after them.
        without, opening, after, closing = none[-2], one[-3], one[-2], two[-3]
        if name not in "".join(none[:-1]):
            return None
        start = self._border(without, opening, after)
        end = self._border(closing, after, opening)
        if name not in opening[start:] or name not in closing[end:]:
            return None
        return Wrapper(opening[start:], closing[:end])

    def _literals(
        self, messages: Sequence[Message], tools: Any, kwargs: Mapping[str, Any]
    ) -> list[str]:
        """What the template writes before, between and after the messages."""
        literals, inside = [""], False
        for segment in self.render(messages, tools, **kwargs):
            if segment.part is None:
                literals += [""] * inside
                literals[-1] += segment.text
            inside = segment.part is not None
        return literals

    def _border(self, text: str, before: str, after: str) -> int:
        """Where `text` leaves its common prefix with `before` for its common suffix with `after`.

        The two may overlap, as turns begin and end alike. The last control token in the overlap
        opens a turn, and there is the border.
        """
        high = _common_prefix(text, before)
        low = len(text) - _common_prefix(text[::-1], after[::-1])
        return max((i for i, _ in self._encoder.find(text) if low <= i <= high), default=high)

    def _apply(self, messages: Any, tools: Any, kwargs: Mapping[str, Any]) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True, **kwargs
            )
        except (jinja2.TemplateError, TypeError, KeyError, IndexError) as error:
            raise ValueError(f"the chat template refuses this conversation: {error}") from error
        return str(text)

    def _masked(self, value: Any, masks: encoding_lib.Spelling) -> Any:
        """Masks the control tokens in all strings of a JSON-like value."""
        if isinstance(value, str):
            return self._encoder.respell(value, masks)
        if isinstance(value, Mapping):
            return {self._masked(k, masks): self._masked(v, masks) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._masked(v, masks) for v in value]
        return value


def checked_kwargs(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
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


def _dictionary(role: str, content: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates know it."""
    filled = {key: _filled(value, content) for key, value in extra.items()}
    return {"role": role, "content": content if filled == extra else "", **filled}


def _filled(value: Any, content: str) -> Any:
    """A JSON-like value with `content` in its slot."""
    if isinstance(value, Mapping):
        return {k: _filled(v, content) for k, v in value.items()}
    if isinstance(value, list):
        return [_filled(v, content) for v in value]
    return content if value is SLOT else value


def _common_prefix(a: str, b: str) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def strings(value: Any) -> Iterator[str]:
    """Yields all strings in a JSON-like value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for k, v in value.items():
            yield from strings(k)
            yield from strings(v)
    elif isinstance(value, list | tuple):
        for v in value:
            yield from strings(v)


def _mark(texts: Sequence[str], marks: Iterator[str]) -> str:
    """Joins texts with a marker before each and one after the last.

    White space at the outer ends stays outside the markers, so that a template trims it as ever.
    """
    content = "".join(texts)
    if not content.strip():
        return content
    first, last = len(content) - len(content.lstrip()), len(content.rstrip())
    out, done = [], 0
    for border in itertools.accumulate(map(len, texts), initial=0):
        border = min(max(border, first), last)
        out += [content[done:border], next(marks)]
        done = border
    return "".join([*out, content[done:]])
