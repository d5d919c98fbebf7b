"""Which tokens of a prompt a mode sees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from da_jax.protocol.ids import check_known, described
from da_jax.protocol.modes import Mode
from da_jax.protocol.prompt import PromptMap, Span

Scaffold = Literal["all", "paper"]


def visible_spans(
    prompt: PromptMap,
    mode: Mode,
    focus: Sequence[int] = (),
    scaffold: Scaffold = "all",
    sink: int = 16,
) -> tuple[Span, ...]:
    """Returns the spans of prompt tokens that a mode sees.

    The response is always visible; its tokens follow the prompt and are the caller's to add.

    Args:
      prompt: The prompt.
      mode: GLOBAL sees all, FOCUS the scaffold and the named chunks, LOCAL the scaffold.
      focus: Numbers of the chunks that FOCUS sees.
      scaffold: "all" is everything that is not a chunk; "paper" is the narrower set of the paper:
        the first `sink` tokens, and everything after the last chunk, so not the turns between
        groups of chunks.
      sink: Tokens at the start of the prompt that the "paper" scaffold holds.

    Returns:
      Sorted, disjoint (start, end) spans, none empty. A token that straddles a border belongs to
      both sides.

    Raises:
      ValueError: If FOCUS names no chunk or one that the prompt does not have, or the scaffold is
        not known.
    """
    if scaffold not in ("all", "paper"):
        raise ValueError(f"scaffold {scaffold!r}: choose all or paper")
    if mode is Mode.GLOBAL:
        return merge_spans([(0, len(prompt))])
    spans = list(prompt.scaffold)
    if scaffold == "paper":
        spans = [(0, min(sink, len(prompt))), *prompt.scaffold[-1:]]
    if mode is Mode.FOCUS:
        if not focus:
            raise ValueError(f"the focus is empty; the prompt has {described(prompt.numbers)}")
        check_known("the focus", focus, prompt.span_of)
        spans += [prompt.span_of[number] for number in focus]
    return merge_spans(spans)


def merge_spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Returns the union of spans as sorted, disjoint spans that do not touch."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return tuple(merged)
