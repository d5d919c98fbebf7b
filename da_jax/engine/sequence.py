"""One running request: its text, its mode, what it sees, and when it ends. Host side only.

A response token goes two ways. `receive` takes it from the device, which is all that the next burst
needs as long as no tag can have ended; `read` turns it into text and events, later if need be.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections import deque
from collections.abc import Iterable

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
from da_jax.protocol import ids
from da_jax.protocol.guide import Guides
from da_jax.protocol.modes import Arm, Mode, ModeTracker
from da_jax.protocol.tags import Kind
from da_jax.protocol.trace import Trace
from da_jax.protocol.visibility import visible_spans

MOST_PENDING_BYTES = 3
"""Bytes of an unfinished character, which the next token may turn into as many characters."""


def most_spans(entries: int, tokens: int, page_size: int) -> int:
    """Visible spans that a mask of so many entries surely holds, of a sequence of `tokens`.

    A page that several spans touch has an entry for each of them.
    """
    return entries - -(-tokens // page_size)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Tokens of a sequence that one prefill step feeds.

    Attributes:
      tokens: int32 [n].
      start: absolute position of the first.
      view: what they see, each only up to itself.
    """

    tokens: np.ndarray
    start: int
    view: View

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)


@dataclasses.dataclass(frozen=True)
class View:
    """What a mode shows of one sequence.

    Attributes:
      prompt_tokens: visible tokens of the prompt.
      span, block: int32 [W] entries of the block mask, ascending by position; they reach to the
        longest length of the sequence. Their pages are those of the blocks.
      count: entries in use.
      first: int64 [count], absolute position of the first valid slot of each entry.
    """

    prompt_tokens: int
    span: np.ndarray
    block: np.ndarray
    count: int
    first: np.ndarray

    def entries(self, length: int) -> int:
        """Entries that hold a token before position `length`."""
        return int(self.first.searchsorted(length))


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
      guides: makes the guide of a request that asks for one.

    Attributes:
      rank: who goes first, the smallest: priority, then arrival.
      prompt_len: tokens of the prompt.
      pages: int32, physical pages in order; they grow with the sequence.
      slot: where its rings and states are; -1 while it waits.
      cached: tokens of prompt and response that are in the cache.
      names: of the whole pages of the prompt, see `cache.prefix`; None until somebody asks.
      tokens: response tokens that were read.

    Raises:
      ValueError: the request asks for guided declarations and stops at a token that tags need.
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
        guides: Guides | None = None,
    ):
        self.request_id, self.request = request_id, request
        self.prompt_len = len(request.prompt.ids)
        self.rank: tuple[float, int] = (request.priority, request_id)
        self.max_len, self.stop_ids, self.key = max_len, stop_ids, key
        self.pages, self.slot = np.zeros(0, np.int32), -1
        self.cached = 0
        self.names: list[bytes] | None = None
        self.tokens: list[int] = []
        self._unread: deque[TokenLogprob] = deque()
        self.finish_reason: str | None = None
        self._page_size, self._width = page_size, entries
        self._decoder = IncrementalDecoder(table)
        # A checkpoint that knows only the DA prompt gets it in the vanilla arm too, and then writes
        # tags there: that arm is the unmasked one.
        plain = request.arm is Arm.VANILLA and not request.prompt.chunks
        self._tracker = ModeTracker(
            request.prompt.numbers,
            initial=request.initial,
            answer_mode=request.answer_mode,
            arm=Arm.VANILLA if plain else Arm.UNMASKED,
            max_ids=self._most_ids(),
        )
        self._guide = None
        if request.params.guided and not plain:
            assert guides is not None, "a guided request needs the engine's guides"
            self._guide = guides.guide(
                ids.known_ids(request.prompt.numbers),
                max_ids=self._most_ids(), stop_ids=stop_ids,
            )  # fmt: skip
        self._stops: StopStrings[Mode] = StopStrings(request.params.stop)
        self._trace = Trace(self.prompt_len, log=True)
        self._logprobs: list[TokenLogprob] = []
        self._text: list[str] = []
        self._known_borders, self._shown_mode = 1, self._tracker.mode
        self._view = functools.cache(self._build_view)

    @functools.cached_property
    def _views(self) -> list[tuple[int, View]]:
        """From which position on tokens are fed under which view, as far as they were read.

        The prompt is prefilled with everything visible, apart from its last token, which gives the
        first token of the response.
        """
        views, first = [(0, self._view(Mode.GLOBAL, ()))], self.view()
        if first is not views[0][1]:
            views.append((self.prompt_len - 1, first))
        return views

    @property
    def tokens_left(self) -> int:
        """Tokens that may still be generated."""
        return self.max_len - self.length

    @property
    def length(self) -> int:
        """Tokens of prompt and response so far, unread ones too."""
        return self.prompt_len + len(self.tokens) + len(self._unread)

    @property
    def last_token(self) -> int:
        """The newest response token."""
        return self._unread[-1].token_id if self._unread else self.tokens[-1]

    @property
    def unread(self) -> list[int]:
        """The response tokens that were received and not yet read."""
        return [choice.token_id for choice in self._unread]

    @property
    def generated(self) -> list[int]:
        """The response tokens so far, unread ones too."""
        return [*self.tokens, *self.unread]

    def steps(self, burst: int) -> int:
        """Steps of a burst that it takes: one at a time where it is guided through a tag."""
        return 1 if self.in_tag else min(burst, self.tokens_left)

    @property
    def fed(self) -> int:
        """Tokens that must be in the cache before the next one can be chosen by a burst.

        The newest response token is fed by the burst itself. Without a response it is the whole
        prompt, whose last token gives the first choice.
        """
        return max(self.prompt_len, self.length - 1)

    @property
    def decoding(self) -> bool:
        """Whether the next token comes from a burst."""
        return self.length > self.prompt_len and self.cached >= self.fed

    @property
    def shareable(self) -> int:
        """Tokens of the prompt that are prefilled with everything visible."""
        return min([self.prompt_len, *(start for start, _ in self._views[1:2])])

    @property
    def open(self) -> bool:
        """Whether a tag may have begun in what was read."""
        return self._tracker.open

    @property
    def room(self) -> int | None:
        """Bytes from the next `<` on (from now on, if `open`) that change nothing it sees.

        None if nothing that it writes changes what it sees.
        """
        if self.request.arm is not Arm.DA or self.request.visible is not None:
            return None
        room = self._tracker.room
        return None if room is None else room - MOST_PENDING_BYTES

    @property
    def guided(self) -> bool:
        """Whether tokens may be masked, so that it also pauses at a token that holds a `<`."""
        return self._guide is not None

    @property
    def in_tag(self) -> bool:
        """Whether it is guided through an open tag, so that `allowed` holds for one token only."""
        candidate = self._tracker.candidate if self.guided else None
        return candidate is not None and not candidate.quoted

    def allowed(self) -> np.ndarray | None:
        """The tokens that may be chosen next; None for all of them.

        A token that holds a `<` must have been read; it changes the mask.

        Returns:
          uint32 [ceil(V / 32)], read-only: bit `i % 32` of word `i // 32`, counted from the least
          significant, stands for token `i`.
        """
        if self._guide is None:
            return None
        # Bytes of an unfinished character are not scanned yet, but they end any name.
        return self._guide.allowed(None if self._decoder.pending else self._tracker.candidate)

    def next_chunk(self, longest: int, border: int | None = None) -> Chunk:
        """The tokens to feed next, of one view: at most `longest`, none beyond `border`."""
        start = self.cached
        at = bisect.bisect_right(self._views, start, key=lambda entry: entry[0]) - 1
        end = min(start + longest, self.fed)
        if at + 1 < len(self._views):
            end = min(end, self._views[at + 1][0])
        if border is not None and start < border:
            end = min(end, border)
        prompt, length = self.request.prompt.ids[start:end], self.prompt_len
        response = self.tokens[max(start - length, 0) : max(end - length, 0)]
        tokens = np.concatenate([prompt, np.asarray(response, np.int32)])
        return Chunk(tokens, start, self._views[at][1])

    def lose_cache(self) -> None:
        """Forgets pages and slot; its tokens are computed anew under the views that they had."""
        assert not self._unread
        self.pages, self.slot, self.cached = np.zeros(0, np.int32), -1, 0

    def view(self) -> View:
        """What the newest token sees when it is fed.

        Before there is a response that is the last token of the prompt, which chooses the first
        token: it sees what the caller declared for the start. The rest of the prompt sees all.
        """
        request = self.request
        if request.arm is not Arm.DA:
            return self._view(Mode.GLOBAL, ())
        if request.visible is not None:
            return self._view(request.start.mode, request.start.focus)
        return self._view(self._tracker.mode, self._tracker.focus)

    def forced(self, count: int) -> list[int]:
        """The next `count` response tokens that are given, -1 where the model chooses."""
        start = self.length - self.prompt_len
        given = self.request.forced[start : start + count]
        return [*given, *[-1] * (count - len(given))]

    def receive(self, choices: Iterable[TokenLogprob]) -> None:
        """Takes response tokens that a program chose, the last of them not yet in the cache."""
        self._unread.extend(choices)
        self.cached = self.fed

    def read(self) -> list[Event]:
        """Reads what was received; says what it brought about. What follows an end is dropped."""
        events: list[Event] = []
        while self._unread and self.finish_reason is None:
            events += self._accept(self._unread[0])
        self._unread.clear()
        return events

    def _accept(self, choice: TokenLogprob) -> list[Event]:
        self._account()
        self._unread.popleft()
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
        views, view, fed = self._views, self.view(), len(self.tokens)
        if not fed:
            self._trace.prefill(self._tracker.mode)
            return
        if view is not views[-1][1]:
            views.append((self.prompt_len + fed - 1, view))
        read = view.entries(self.prompt_len + fed) * self._page_size
        self._trace.record(self._tracker.mode, view.prompt_tokens + fed, read)

    def _reason_to_end(self) -> str | None:
        if self._stops.found is not None:
            return "stop"
        if self.request.params.stop_after_answer and self._tracker.answer_closed:
            return "stop"
        if self._tracker.tool_ended:
            return "tool_call"
        return "length" if self.prompt_len + len(self.tokens) == self.max_len else None

    def _read(self, text: str, *, hidden: bool) -> list[Event]:
        """Scans new text, and passes it on unless a special token wrote it."""
        before = self._tracker.mode, self._tracker.focus
        found = self._tracker.feed(text, hidden=hidden)
        events: list[Event] = self._emit(self._stops.flush()) if hidden else []
        for piece, mode in self._by_mode(text):
            if not hidden or self._stops.found is not None:  # which shows nothing, but counts it
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
        prompt = self.request.prompt
        spare = most_spans(self._width, self.max_len, self._page_size) - len(prompt.scaffold)
        return max(spare, 1) if len(prompt.chunks) > 2 * spare else None

    def _build_view(self, mode: Mode, focus: tuple[int, ...]) -> View:
        prompt = self.request.prompt
        spans = visible_spans(prompt, mode, focus, self.request.scaffold)
        if len(spans) > most_spans(self._width, self.max_len, self._page_size):
            spans = visible_spans(prompt, Mode.GLOBAL)  # the mask cannot list them apart
        blocks = -(-self.max_len // self._page_size)
        # The prompt ends with the question, which is visible: its span takes in the response.
        reach = (*spans[:-1], (spans[-1][0], blocks * self._page_size))
        _, span, block, count = compact(np.arange(blocks), reach, self._page_size, self._width)
        first = block[:count].astype(np.int64) * self._page_size + (span[:count] & 0xFFFF)
        seen = sum(end - start for start, end in spans)
        return View(seen, span, block, count, first)

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
