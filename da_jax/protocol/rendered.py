"""Finds the chunks in a prompt that is rendered already, by the headers of a style."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from da_jax.protocol.chunks import Chunk
from da_jax.protocol.spans import Span
from da_jax.protocol.styles import Style, parse_format

if TYPE_CHECKING:
    from da_jax.protocol.prompt import PromptMap

_SHOWN = 60  # characters of the text in a message
_REMEDY = "; or give the numbers alone, as prompt_tokens and chunk_spans"


def find(
    text: str, style: Style, render: Callable[[list[Chunk], str], PromptMap]
) -> tuple[tuple[Span, ...], tuple[Chunk, ...]]:
    """Finds the chunks of one group, which are numbered 1 to N.

    A chunk begins at its header (the style's `chunk` up to `{text}`, such as `Magic Chunk 3`, with
    any label), or at the tool call before it. What stands between two chunks is compared with what
    style and template write there. The last chunk ends where they begin the question or, if that
    is worded in another way, at what ends a chunk.

    Args:
      text: the prompt.
      style: how it is written.
      render: renders chunks and a question with this style.

    Returns:
      The characters of each chunk with its header and wrapper, and what the chunks say.

    Raises:
      ValueError: There is no chunk, they are not numbered 1 to N, or something else stands before
        one or after the last.
    """
    headers = list(_header(style, r"([0-9]+)").finditer(text))
    numbers = [int(header[1]) for header in headers]
    if not headers:
        raise ValueError(
            f"no header of a chunk is in the prompt; style {style.name!r} writes "
            f"{_literal(style, 1)!r}. Name the style that wrote it{_REMEDY}"
        )
    if numbers != list(range(1, len(numbers) + 1)):
        shown = ", ".join(map(str, numbers[:20])) + ", ..." * (len(numbers) > 20)
        raise ValueError(
            f"the headers of chunks in the prompt have the numbers {shown}, where 1 to N must "
            "follow each other. If one stands in the text of the document, it cannot be told "
            f"from ours: render the document itself{_REMEDY}"
        )
    marker = "daProbe"
    while marker in text:
        marker += "x"
    before, closings, after = _literals(render([Chunk(marker)] * len(headers), marker), style)
    starts = []
    for number, (header, wanted) in enumerate(zip(headers, before), 1):
        opening = len(wanted)
        wanted = (closings[number - 2] if number > 1 else "") + wanted
        if not text.endswith(wanted, 0, header.start()):
            there = text[max(header.start() - len(wanted), 0) : header.start()][-_SHOWN:]
            raise ValueError(
                f"before the header of chunk {number} stands {there!r}, where style "
                f"{style.name!r} and the model's chat template write {wanted[-_SHOWN:]!r}. Name "
                f"the style and the model that the prompt is written for{_REMEDY}"
            )
        starts.append(header.start() - opening)
    last = _end(text, headers[-1].end(), closings[-1], after) + len(closings[-1])
    spans = tuple(zip(starts, [*starts[1:], last]))
    chunks = (
        Chunk(text[header.end() : end - len(closing)])
        for header, closing, (_, end) in zip(headers, closings, spans)
    )
    return spans, tuple(chunks)


def _literal(style: Style, number: int) -> str:
    """The header of a chunk without label."""
    return "".join(
        part + (str(number) if name == "n" else "") for part, name in _header_parts(style)
    )


def _header(style: Style, number: str) -> re.Pattern[str]:
    """What headers match; `number` is the pattern of the number."""
    label = "".join(
        re.escape(part) + (r"[^\n]*?" if name else "") for part, name in parse_format(style.label)
    )
    slots = {"n": number, "label": f"(?:{label})?", None: ""}
    return re.compile("".join(re.escape(part) + slots[name] for part, name in _header_parts(style)))


def _header_parts(style: Style) -> Iterator[tuple[str, str | None]]:
    """The format of a chunk up to its text."""
    for part, name in parse_format(style.chunk):
        yield part, None if name == "text" else name
        if name == "text":
            return


def _literals(probe: PromptMap, style: Style) -> tuple[list[str], list[str], str]:
    """What is written before each header, after each chunk's text, and then up to the question."""
    before, closings = [], []
    marker = probe.chunk_texts[0]
    for number, (start, end) in enumerate(probe.chunk_chars, 1):
        opening, found, closing = probe.text[start:end].partition(marker)
        header = _literal(style, number)
        if not found or not opening.endswith(header):
            raise ValueError(
                f"the model's chat template changes the headers of style {style.name!r}, so that "
                f"they cannot be found{_REMEDY}"
            )
        before.append(opening.removesuffix(header))
        closings.append(closing)
    return before, closings, probe.text[probe.chunk_chars[-1][1] :].partition(marker)[0]


def _end(text: str, start: int, closing: str, after: str) -> int:
    """Where the text of the last chunk ends."""
    for literal in (closing + after, closing):
        if literal.strip() and text.count(literal, start) == 1:
            return text.index(literal, start)
    raise ValueError(
        f"the end of the last chunk cannot be told: {closing + after!r} is "
        f"{text.count(closing + after, start)} times after its header, where it must be once"
        f"{_REMEDY}"
    )
