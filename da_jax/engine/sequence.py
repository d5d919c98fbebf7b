"""One running request: its text, its mode, what it sees, and when it ends. Host side only."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from da_jax.engine.detokenize import IncrementalDecoder, TokenTable
from da_jax.engine.request import (
    Decline,
    Done,
    Event,
    ModeChange,
    Request,
    Response,
    TextDelta,
    TokenLogprob,
)
from da_jax.engine.stopping import StopStrings
from da_jax.kernels.paged_attention import compact
from da_jax.protocol.modes import Arm, Mode, ModeTracker
from da_jax.protocol.tags import Kind
from da_jax.protocol.trace import Trace
from da_jax.protocol.visibility import visible_spans

MOST_PENDING_BYTES = 3
"""Bytes of an unfinished character, which the next token may turn into as many characters."""


@dataclasses.dataclass(frozen=True)
class View:
    """What a mode shows of one sequence.

    Attributes:
      prompt_tokens: visible tokens of the prompt.
      page, span, block: int32 [W] entries of the block mask, ascending by position; they reach to
        the end of the sequence's pages.
      count: entries in use.
      first: int64 [count], absolute position of the first valid slot of each entry.
    """

    prompt_tokens: int
    page: np.ndarray
    span: np.ndarray
    block: np.ndarray
    count: int
    first: np.ndarray

    def entries(self, length: int) -> int:
        """Entries that hold a token before position `length`."""
        return int(np.searchsorted(self.first, length))


class Sequence:
    """A request from admission to its last token.

    Args:
      request_id: number of the request.
      request: what was asked.
      table: the tokens as bytes.
      stop_ids: tokens that end the response.
      key: uint32 [2], raw random key.
      max_len: most tokens of prompt and response.
      page_size: tokens a page.
      entries: width of a block mask.
    """

    def __init__(
        self,
        request_id: int,
        request: Request,
        table: TokenTable,
        stop_ids: frozenset[int],
        *,
        key: np.ndarray,
        max_len: int,
        page_size: int,
        entries: int,
    ):
        self.request_id, self.request = request_id, request
        self.max_len, self.stop_ids, self.key = max_len, stop_ids, key
        self.pages, self.slot = np.zeros(0, np.int32), -1
        self.prefilled = 0
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self._page_size, self._width = page_size, entries
        self._decoder = IncrementalDecoder(table)
        # A checkpoint that knows only the DA prompt gets it in the vanilla arm too, and then writes
        # tags there: that arm is the unmasked one.
        plain = request.arm is Arm.VANILLA and not request.prompt.chunks
        self._tracker = ModeTracker(
            len(request.prompt.chunks),
            answer_mode=request.answer_mode,
            arm=Arm.VANILLA if plain else Arm.UNMASKED,
            max_ids=self._most_ids(),
        )
        self._stops: StopStrings[Mode] = StopStrings(request.params.stop)
        self._trace = Trace(self.prompt_len, log=True)
        self._logprobs: list[TokenLogprob] = []
        self._text: list[str] = []
        self._known_borders, self._shown_mode = 1, Mode.GLOBAL
        self._view = functools.cache(self._build_view)

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt.ids)

    @property
    def tokens_left(self) -> int:
        """Tokens that may still be generated."""
        return self.max_len - self.prompt_len - len(self.tokens)

    @property
    def decoding(self) -> bool:
        """Whether the whole prompt is in the cache."""
        return self.prefilled == self.prompt_len

    @property
    def room(self) -> int | None:
        """Bytes after which what it sees may have changed, though no `>` was written.

        None if nothing that it writes changes what it sees.
        """
        if self.request.arm is not Arm.DA:
            return None
        room = self._tracker.room
        return None if room is None else room - MOST_PENDING_BYTES

    def place(self, pages: list[int], slot: int) -> None:
        """Gives the sequence the pages of its whole life, and its slot."""
        self.pages, self.slot = np.asarray(pages, np.int32), slot

    def view(self) -> View:
        """What the next forward pass of this sequence sees."""
        if self.request.arm is not Arm.DA:
            return self._view(Mode.GLOBAL, ())
        return self._view(self._tracker.mode, self._tracker.focus)

    def forced(self, count: int) -> list[int]:
        """The next `count` response tokens that are given, -1 where the model chooses."""
        start = len(self.tokens)
        given = self.request.forced[start : start + count]
        return [*given, *[-1] * (count - len(given))]

    def accept(self, choice: TokenLogprob) -> list[Event]:
        """Takes the next response token and says what it brought about."""
        self._account()
        self.tokens.append(choice.token_id)
        if self.request.params.logprobs is not None:
            self._logprobs.append(choice)
        forced = len(self.tokens) < len(self.request.forced)
        if choice.token_id in self.stop_ids and not forced:
            return self.finish("tool_call" if self._tracker.tool_called else "stop")
        events: list[Event] = []
        for text, special in self._decoder.pieces([choice.token_id]):
            events += self._read(text, hidden=special)
        reason = None if forced else self._reason_to_end()
        return events + self.finish(reason) if reason else events

    def finish(self, reason: str) -> list[Event]:
        """Ends the response: flushes what is held back and builds the result."""
        events = self._read(self._decoder.flush(), hidden=False)
        events += self._emit(self._stops.flush())
        self._tracker.finish()
        self._tracker.hide(self._stops.withheld)
        self.finish_reason = reason
        return [*events, Done(self.request_id, self._response())]

    def _account(self) -> None:
        """Records the decode step that led to the next token: it saw the present view."""
        if not self.tokens:
            self._trace.prefill()
            return
        view, fed = self.view(), len(self.tokens)
        read = view.entries(self.prompt_len + fed) * self._page_size
        self._trace.record(self._tracker.mode, view.prompt_tokens + fed, read)

    def _reason_to_end(self) -> str | None:
        if self._stops.found is not None:
            return "stop"
        if self.request.params.stop_after_answer and self._tracker.answer_closed:
            return "stop"
        if self._tracker.tool_ended:
            return "tool_call"
        return None if self.tokens_left else "length"

    def _read(self, text: str, *, hidden: bool) -> list[Event]:
        """Scans new text, and passes it on unless a special token wrote it."""
        before = self._tracker.mode, self._tracker.focus
        found = self._tracker.feed(text, hidden=hidden)
        events: list[Event] = self._emit(self._stops.flush()) if hidden else []
        for piece, mode in self._by_mode(text):
            if not hidden:
                events += self._emit(self._stops.push(piece, mode))
        for event in found:
            if event.kind is Kind.DECLINED:
                events.append(Decline(self.request_id, event.text, str(event.reason)))
        after = self._tracker.mode, self._tracker.focus
        if after != before:
            events.append(ModeChange(self.request_id, *after))
        return events

    def _by_mode(self, text: str) -> list[tuple[str, Mode]]:
        """Cuts the text that was fed last where the mode changed."""
        borders, offset = self._tracker.borders, self._tracker.length - len(text)
        pieces, start = [], 0
        for at, mode in borders[self._known_borders :]:
            pieces.append((text[start : at - offset], self._shown_mode))
            start, self._shown_mode = at - offset, mode
        self._known_borders = len(borders)
        return [*pieces, (text[start:], self._shown_mode)]

    def _emit(self, pieces: list[tuple[str, Mode]]) -> list[Event]:
        self._text += [text for text, _ in pieces]
        return [TextDelta(self.request_id, text, mode) for text, mode in pieces]

    def _most_ids(self) -> int | None:
        """How many chunks a focus may name: no limit, unless the mask has no room for them all.

        A mask has an entry for each page and one more for each visible span. Only a prompt of very
        many chunks smaller than a page can need more; then a focus on too many is declined.
        """
        spare = self._width - -(-self.max_len // self._page_size) - 2
        return spare if len(self.request.prompt.chunks) > 2 * spare else None

    def _build_view(self, mode: Mode, focus: tuple[int, ...]) -> View:
        prompt = self.request.prompt
        spans = visible_spans(prompt, mode, focus, self.request.scaffold)
        capacity = len(self.pages) * self._page_size
        # The prompt ends with the question, which is visible: its span takes in the response.
        reach = (*spans[:-1], (spans[-1][0], capacity))
        page, span, block, count = compact(self.pages, reach, self._page_size, self._width)
        first = block[:count].astype(np.int64) * self._page_size + (span[:count] & 0xFFFF)
        seen = sum(end - start for start, end in spans)
        return View(seen, page, span, block, count, first)

    def _response(self) -> Response:
        assert self.finish_reason is not None
        return Response(
            text="".join(self._text),
            answer=self._tracker.answer(),
            finish_reason=self.finish_reason,
            prompt_tokens=self.prompt_len,
            completion_tokens=len(self.tokens),
            token_ids=tuple(self.tokens),
            segments=tuple(self._tracker.segments),
            summary=self._trace.summary(self._tracker.stats, self.finish_reason),
            logprobs=tuple(self._logprobs),
            steps=tuple(self._trace.steps or ()),
        )
