"""Prompt styles: how chunks, question and instructions are worded. Data, not code."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import string
from collections.abc import Iterator
from typing import Any, Literal

from da_jax.protocol import chunks as chunks_lib

STYLE_FILE = "da_style.json"
"""Name of the file in which a checkpoint folder carries its own style."""

_FORMATS: dict[str, tuple[set[str], set[str]]] = {
    "chunk": ({"n", "label", "text"}, {"n", "text"}),
    "label": ({"label"}, {"label"}),
    "question": ({"question"}, {"question"}),
    "instructions": ({"count", "s", "highest"}, set()),
    "vanilla_question": ({"question"}, {"question"}),
}
_KINDS = {"int": int, "bool": bool}


@dataclasses.dataclass(frozen=True)
class Style:
    """How a prompt is worded. Travels with a checkpoint as JSON.

    The formats hold `{names}` as in `str.format`; a literal brace is doubled.

    Attributes:
      name: Name of the style.
      rendering: "tool" makes each chunk the response of a native tool call (no tool is run);
        "plain" puts all chunks in one user turn.
      preamble: Start of the system message. It is the attention sink: at least 16 tokens.
      chunk: Format of a chunk: `{n}` its number, `{text}`, and `{label}`, where labels are shown.
      label: Format of `{label}` in `chunk`; empty for a chunk that has none.
      separator: Text between two chunks (plain rendering).
      after_chunks: Text between the last chunk and what follows in the same turn.
      question: Format of the question.
      instructions: Follows the question after a blank line; `{count}` is the number of chunks,
        `{s}` an "s" unless there is one, and `{highest}` their highest number. Empty for
        checkpoints that are trained on the protocol.
      vanilla_preamble: Start of the system message of the vanilla arm; may be empty.
      vanilla_question: Format of the question in the vanilla arm.
      vanilla_separator: Text between the caller's own chunks in the vanilla arm.
      target: Tokens a chunk aims at.
      cap: Tokens no chunk exceeds.
      tool_name: The tool that the tool rendering pretends to call.
      tool_argument: The argument of that tool that carries the chunk's number.
      tool_description: What the tool's schema says of it.
      empty_context: Text of an empty chunk.
      da_only: The checkpoint knows only this format: the vanilla arm has the same prompt.
    """

    name: str
    rendering: Literal["tool", "plain"]
    preamble: str
    chunk: str = "Magic Chunk {n}{label}\n{text}"
    label: str = ": {label}"
    separator: str = "\n\n"
    after_chunks: str = "\n\n"
    question: str = "# Question\n{question}"
    instructions: str = ""
    vanilla_preamble: str = ""
    vanilla_question: str = "# Question\n{question}"
    vanilla_separator: str = "\n\n"
    target: int = chunks_lib.DEFAULT_TARGET
    cap: int = chunks_lib.DEFAULT_CAP
    tool_name: str = "get_magic_chunk"
    tool_argument: str = "magic_chunk"
    tool_description: str = "Returns one numbered chunk of the context."
    empty_context: str = "<empty_context>"
    da_only: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), _KINDS.get(str(field.type), str)
            if type(value) is not kind:
                raise ValueError(
                    f"style {self.name!r}: {field.name} is {value!r}; "
                    f"give a value of type {kind.__name__}"
                )
        if self.rendering not in ("tool", "plain"):
            raise ValueError(f"style {self.name!r}: rendering {self.rendering!r}: tool or plain")
        if not 1 <= self.target <= self.cap:
            raise ValueError(
                f"style {self.name!r} needs 1 <= target <= cap, got {self.target}, {self.cap}"
            )
        for name in ("empty_context", "tool_name", "tool_argument"):
            if not getattr(self, name).strip():
                raise ValueError(f"style {self.name!r}: {name} must not be blank")
        for name, (known, needed) in _FORMATS.items():
            text = getattr(self, name)
            try:
                names = {field for _, field in parse_format(text) if field is not None}
            except ValueError as error:
                raise ValueError(f"style {self.name!r}: {name}={text!r}: {error}") from error
            if names - known or needed - names:
                raise ValueError(
                    f"style {self.name!r}: {name}={text!r} must name {sorted(needed)} "
                    f"and nothing beyond {sorted(known)}"
                )

    def texts(self) -> Iterator[str]:
        """Yields the texts that the style writes, with 0 for every number."""
        for field in dataclasses.fields(self):
            text = getattr(self, field.name)
            if field.name in _FORMATS:
                fill = {"n": "0", "count": "0", "s": "s", "highest": "0"}
                parts = parse_format(text)
                yield "".join(part + fill.get(name or "", "\n") for part, name in parts)
            elif isinstance(text, str):
                yield text

    def tool(self) -> dict[str, Any]:
        """Returns the schema of the tool that the tool rendering pretends to call."""
        number = {"type": "integer", "description": "The number of the chunk."}
        parameters = {
            "type": "object",
            "properties": {self.tool_argument: number},
            "required": [self.tool_argument],
        }
        function = {
            "name": self.tool_name,
            "description": self.tool_description,
            "parameters": parameters,
        }
        return {"type": "function", "function": function}

    def to_json(self) -> str:
        """Returns the style as a JSON object."""
        return json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Style:
        """Reads a style from a JSON object.

        Raises:
          ValueError: If it is no JSON object, a key is unknown or missing, or a value is not valid.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ValueError(f"style: this is no JSON: {error}") from error
        if not isinstance(data, dict):
            raise ValueError(f"style: a JSON object is needed, not {data!r}")
        unknown = data.keys() - {f.name for f in dataclasses.fields(cls)}
        missing = {"name", "rendering", "preamble"} - data.keys()
        if unknown or missing:
            raise ValueError(f"style: unknown keys {sorted(unknown)}, missing {sorted(missing)}")
        return cls(**data)

    @classmethod
    def of_folder(cls, folder: str | pathlib.Path) -> Style | None:
        """Returns the style that a checkpoint folder carries in `da_style.json`, if any.

        Raises:
          ValueError: If the file holds no valid style.
        """
        path = pathlib.Path(folder) / STYLE_FILE
        if not path.is_file():
            return None
        try:
            return cls.from_json(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def parse_format(text: str) -> list[tuple[str, str | None]]:
    """Splits a format into (literal text, name of the field that follows it or None).

    Raises:
      ValueError: If a brace is not closed, or a field has a format of its own.
    """
    fields = []
    for literal, name, spec, conversion in string.Formatter().parse(text):
        if spec or conversion:
            raise ValueError(f"field {{{name}}} of {text!r} takes no format; write the name alone")
        fields.append((literal, name))
    return fields


INSTRUCTIONS = """\
# How to answer
The context above is cut into {count} numbered magic chunk{s}. While you write, tags decide how \
much of the context you can see. There are three modes:
- global: you see the whole context. This is the mode outside all tags; use it to find out where \
to look.
- focus: you see only the chunks that you name, the question, and what you have written so far.
- local: you see no chunk, only the question and what you have written so far.

The tags:
- <global>...</global> looks over the whole context.
- <focus magic_chunks="3">...</focus> reads one chunk, <focus magic_chunks="2,5">...</focus> reads \
several. These numbers come from a longer context of 12 chunks.
- <local>...</local> thinks with what you have already written down.
- <answer>...</answer> gives the final answer, inside local.
A tag acts from its ">" on. The highest number in this context is {highest}. After a wrong number \
or a malformed tag everything stays visible.

The usual orders:
- global, focus, local, answer
- local, global, focus, local, answer
- global, then several focus blocks one after the other, local, answer

The rules:
1. In global, say in a few words what you look for and the numbers of the chunks that hold it.
2. Use focus at least once. Inside focus, write only the value you came for, copied word for word \
from the chunk: 1 to 12 words, nothing else.
3. Inside local you cannot read the chunks, so never recall their text there. Work only with the \
values that you wrote inside focus.
4. End in a local block that names the value and gives it as the answer.
5. Close every tag before you open the next; only <answer> stands inside <local>.

An example, from a longer context of 12 chunks, for the question "In which year was the older of \
the two bridges built?":
<global>The two bridges are described in chunks 4 and 9.</global>
<focus magic_chunks="4">opened to traffic in 1894</focus>
<focus magic_chunks="9">completed in 1931</focus>
<local>One was opened in 1894, the other completed in 1931; the older is from 1894.
<answer>1894</answer></local>"""

_PREAMBLE = (
    "You answer questions about a context that comes in numbered magic chunks. "
    "While you write, you declare with tags which of these chunks you need to see."
)

TOOL = Style(
    name="tool",
    rendering="tool",
    preamble=_PREAMBLE,
    instructions=INSTRUCTIONS,
    tool_description="Returns one numbered chunk of the context. All chunks have been fetched; "
    "never call this tool again.",
)
PLAIN = Style(name="plain", rendering="plain", preamble=_PREAMBLE, instructions=INSTRUCTIONS)
COMPACT = Style(
    name="compact",
    rendering="plain",
    preamble="The context is a list of numbered chunks. Say which chunk holds the answer, "
    "read the value there, then answer.",
    chunk='<chunk id="{n}">{text}</chunk>',
    separator="",
    after_chunks="",
    question="Question: {question}",
    da_only=True,
)
STYLES: dict[str, Style] = {style.name: style for style in (TOOL, PLAIN, COMPACT)}
"""The built-in styles by name."""
