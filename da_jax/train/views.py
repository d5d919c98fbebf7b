"""What each token of a prompt and a given response sees: lists of spans, without a dense mask."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from da_jax.engine.detokenize import IncrementalDecoder, TokenTable
from da_jax.protocol.modes import AnswerMode, Arm, Declaration, Mode, ModeTracker
from da_jax.protocol.prompt import PromptMap, Span
from da_jax.protocol.tags import THINK_ENDS, THINK_STARTS
from da_jax.protocol.visibility import Scaffold, visible_spans


class Views(NamedTuple):
    """The mask of one sequence, as few lists of spans that its tokens share.

    Attributes:
      view: int32 [T], number of the list that holds for a token while it is fed; T counts prompt
        and response.
      spans: int32 [V, S, 2], (start, end) spans of visible positions in each list, empty ones at
        the end. A token sees those before it and itself.
    """

    view: np.ndarray
    spans: np.ndarray

    def dense(self) -> np.ndarray:
        """bool [T, T], True where the query (row) sees the key."""
        at = np.arange(len(self.view))
        inside = np.asarray((at >= self.spans[..., :1]) & (at < self.spans[..., 1:]))  # [V, S, T]
        return np.any(inside, axis=1)[self.view] & (at <= at[:, None])


def token_table(tokenizer: object) -> TokenTable:
    """The table that the engine reads responses with."""
    return TokenTable.from_tokenizer(tokenizer, shown=(*THINK_STARTS, *THINK_ENDS))


def of_response(
    prompt: PromptMap,
    response: Sequence[int],
    table: TokenTable,
    *,
    arm: Arm | str = Arm.DA,
    initial: Declaration | None = None,
    answer_mode: AnswerMode = "local",
    scaffold: Scaffold = "all",
) -> Views:
    """Follows a response's declarations token by token, as the engine does while it decodes.

    The prompt sees everything; its last token, which chooses the first one of the response, sees
    what is declared for the start. A token of the response is fed under the mode that holds once it
    has been read.

    Args:
      prompt: the rendered prompt.
      response: token ids, also those that end it.
      table: see `token_table`.
      arm: only in `da` do declarations hide anything.
      initial: what is declared for the start; None for GLOBAL.
      answer_mode, scaffold: as in `LLM.generate`.
    """
    everything = ((0, len(prompt)),)
    lists: dict[tuple[Span, ...], int] = {everything: 0}
    view = np.zeros(len(prompt) + len(response), np.int32)
    if Arm(arm) is Arm.DA and prompt.chunks:
        modes = _modes(prompt, response, table, initial, answer_mode)
        for at, (mode, focus) in enumerate(modes, len(prompt) - 1):
            spans = visible_spans(prompt, mode, focus, scaffold)
            view[at] = lists.setdefault(spans, len(lists))
    return Views(view, _as_array(lists, len(prompt), len(view)))


def _modes(
    prompt: PromptMap,
    response: Iterable[int],
    table: TokenTable,
    initial: Declaration | None,
    answer_mode: AnswerMode,
) -> Iterable[tuple[Mode, tuple[int, ...]]]:
    """Mode and focus at the start, and after each token."""
    decoder = IncrementalDecoder(table)
    tracker = ModeTracker(prompt.numbers, initial=initial, answer_mode=answer_mode)
    yield tracker.mode, tracker.focus
    for token in response:
        for text, special in decoder.pieces([token]):
            tracker.feed(text, hidden=special)
        yield tracker.mode, tracker.focus


def _as_array(lists: Iterable[tuple[Span, ...]], prompt: int, total: int) -> np.ndarray:
    """[V, S, 2] spans; the last one of each list ends with the prompt and takes in the response."""
    reaching = [(*spans[:-1], (spans[-1][0], total)) for spans in lists]
    assert all(spans[-1][1] == prompt for spans in lists), "a prompt ends with what is visible"
    out = np.zeros((len(reaching), max(map(len, reaching)), 2), np.int32)
    for i, spans in enumerate(reaching):
        out[i, : len(spans)] = spans
    return out
