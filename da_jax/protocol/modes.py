"""Turns tag events into the attention mode, and finds the answer of a response."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from da_jax.protocol.tags import (
    THINK_ENDS,
    TOOL_MARKERS,
    Kind,
    Reason,
    TagEvent,
    TagScanner,
)

Arm = Literal["da", "unmasked", "vanilla"]
AnswerMode = Literal["local", "keep", "global"]

_TOOL_KINDS = (Kind.TOOL_CALL, Kind.TOOL_END)


class Mode(enum.Enum):
    """What the next token sees besides the scaffold and the response."""

    GLOBAL = "global"
    """All chunks."""
    FOCUS = "focus"
    """The named chunks."""
    LOCAL = "local"
    """No chunk."""


@dataclass(frozen=True)
class Stats:
    """What a response declared.

    Attributes:
        attempts: ``<focus`` openers outside code, honoured, declined or cut off by the end.
        successes: those that were honoured.
        focus_declines: those that were declined.
        declines: declined openers of any name, by reason.
        mismatched: closers that matched no opener, honoured or declined.
        quoted: narrowing tags in code.
        transitions: changes of the mode or of the chunks in focus.
        format_correct: an answer was found: a non-empty ``<answer>`` or LOCAL text (for the arm
            ``vanilla``, any text).
    """

    attempts: int
    successes: int
    focus_declines: int
    declines: Mapping[str, int]
    mismatched: int
    quoted: int
    transitions: int
    format_correct: bool


class ModeTracker:
    """Follows the mode of one response while it is generated.

    `mode` and `focus` hold from the forward pass after the delta that was fed last. The focus is
    never empty in FOCUS and always empty elsewhere.

    Args:
        num_chunks: number of chunks in the prompt.
        answer_mode: what ``<answer>`` does: LOCAL, keep the mode, or GLOBAL.
        arm: ``da`` and ``unmasked`` follow the tags alike (the caller ignores the mode where the
            mask is off). In ``vanilla`` tags are text: the mode stays GLOBAL, and only events of
            tool calls are reported.
        max_ids: most ids that one ``<focus>`` may name; None for no limit.
        tool_markers: see `TagScanner`.
        think_ends: see `TagScanner`.

    Raises:
        ValueError: an argument is unknown or out of range.
    """

    def __init__(
        self,
        num_chunks: int,
        *,
        answer_mode: AnswerMode = "local",
        arm: Arm = "da",
        max_ids: int | None = None,
        tool_markers: Iterable[tuple[str, str]] = TOOL_MARKERS,
        think_ends: Iterable[str] = THINK_ENDS,
    ) -> None:
        if answer_mode not in ("local", "keep", "global"):
            raise ValueError(f"answer_mode is {answer_mode!r}; use 'local', 'keep' or 'global'")
        if arm not in ("da", "unmasked", "vanilla"):
            raise ValueError(f"arm is {arm!r}; use 'da', 'unmasked' or 'vanilla'")
        self._scanner = TagScanner(
            num_chunks, max_ids=max_ids, tool_markers=tool_markers, think_ends=think_ends
        )
        self._answer_mode = answer_mode
        self._vanilla = arm == "vanilla"
        self.mode = Mode.GLOBAL
        self.focus: tuple[int, ...] = ()
        self.answer_closed = False
        """Whether an ``</answer>`` has ended an ``<answer>``: where `stop_after_answer` stops."""
        self.tool_called = False
        """Whether a tool call has begun."""
        self.borders: list[tuple[int, Mode]] = [(0, Mode.GLOBAL)]
        """Offsets at which the mode or the focus changed, each with the mode from there on."""
        self.length = 0
        """Characters of the response so far."""

        self._pieces: list[str] = []
        self._tags: list[tuple[int, int]] = []  # spans that are no part of an answer
        self._opener: str | None = None  # last opener, honoured or declined, not yet closed
        self._answers = _Blocks()
        self._locals = _Blocks()
        self._counts: Counter[str] = Counter()
        self._declines: Counter[str] = Counter()

    def feed(self, text: str, *, hidden: bool = False) -> list[TagEvent]:
        """Takes the next text delta; returns the events in it, in order.

        Args:
            text: the delta.
            hidden: the client does not see it (a special token wrote it), so that it is no part of
                an answer; it is scanned all the same.
        """
        if hidden:
            self._tags.append((self.length, self.length + len(text)))
        self._pieces.append(text)
        self.length += len(text)
        return self._take(self._scanner.feed(text))

    def hide(self, count: int) -> None:
        """Takes the last `count` characters out of the answer (a stop string, which was cut)."""
        self._tags.append((self.length - count, self.length))

    def finish(self) -> list[TagEvent]:
        """Ends the response; returns the events that its end causes."""
        return self._take(self._scanner.finish())

    @property
    def text(self) -> str:
        """The response so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return "".join(self._pieces)

    @property
    def segments(self) -> list[tuple[str, Mode]]:
        """The response so far, cut where the mode or the focus changed, each piece with its mode.

        The characters of a tag belong to the mode before it.
        """
        text = self.text
        ends = [start for start, _ in self.borders[1:]] + [len(text)]
        pieces = [(text[start:end], mode) for (start, mode), end in zip(self.borders, ends)]
        return [(piece, mode) for piece, mode in pieces if piece]

    @property
    def stats(self) -> Stats:
        """What the response declared so far."""
        return Stats(
            attempts=self._counts["attempts"],
            successes=self._counts["successes"],
            focus_declines=self._counts["focus_declines"],
            declines=dict(self._declines),
            mismatched=self._counts["mismatched"],
            quoted=self._counts["quoted"],
            transitions=self._counts["transitions"],
            format_correct=bool(self.answer() if self._vanilla else self._declared_answer()),
        )

    def answer(self) -> str:
        """The answer of the response so far, without tags and surrounding white space.

        Returns:
            The text of the last ``<answer>`` that holds any, else the last LOCAL text, else the
            whole text; for the arm ``vanilla`` the whole text.
        """
        return self._declared_answer() or self._clean(0, None)

    def _declared_answer(self) -> str:
        for start, end in (*reversed(self._answers.spans), *reversed(self._locals.spans)):
            if text := self._clean(start, end):
                return text
        return ""

    def _clean(self, start: int, end: int | None) -> str:
        """The text from `start` to `end` without its tags."""
        text = self.text
        end = len(text) if end is None else end
        kept = []
        for tag_start, tag_end in self._tags:
            if tag_start < end and tag_end > start:
                kept.append(text[start:tag_start])
                start = tag_end
        kept.append(text[start:end])
        return "".join(kept).strip()

    def _take(self, events: list[TagEvent]) -> list[TagEvent]:
        if not events:
            return events
        self.tool_called |= any(event.kind is Kind.TOOL_CALL for event in events)
        if self._vanilla:
            return [event for event in events if event.kind in _TOOL_KINDS]
        for event in events:
            self._apply(event)
        return events

    def _apply(self, event: TagEvent) -> None:
        match event.kind:
            case Kind.OPEN:
                self._open(event)
            case Kind.CLOSE:
                self._close(event)
            case Kind.DECLINED:
                self._declines[event.reason or Reason.MALFORMED] += 1
                if event.name == "focus":
                    self._counts.update(("attempts", "focus_declines"))
                self._opener = event.name
                self._set(event, Mode.GLOBAL)
            case Kind.THINK_END:
                self._opener = None
                self._answers.end(event.start)
                self._set(event, Mode.GLOBAL)
            case Kind.QUOTED:
                self._counts["quoted"] += 1
            case Kind.UNFINISHED:
                self._counts["attempts"] += 1
        is_tag = event.kind in (Kind.OPEN, Kind.CLOSE, Kind.DECLINED, Kind.THINK_END)
        if is_tag and event.reason is not Reason.TOO_LONG:  # that one swallowed prose
            self._tags.append((event.start, event.start + len(event.text)))

    def _open(self, event: TagEvent) -> None:
        self._opener = event.name
        if event.name == "focus":
            self._counts.update(("attempts", "successes"))
            self._set(event, Mode.FOCUS, event.ids)
        elif event.name == "global":
            self._set(event, Mode.GLOBAL)
        elif event.name == "local":
            self._set(event, Mode.LOCAL)
            self._locals.begin(event.end)
        else:
            self._answers.begin(event.end)
            if self._answer_mode == "local":
                self._set(event, Mode.LOCAL)
            elif self._answer_mode == "global":
                self._set(event, Mode.GLOBAL)

    def _close(self, event: TagEvent) -> None:
        if event.name != self._opener:
            self._counts["mismatched"] += 1
        self._opener = None
        if event.name == "answer" and self._answers.end(event.start):
            self.answer_closed = True
        self._set(event, Mode.GLOBAL)

    def _set(self, event: TagEvent, mode: Mode, focus: tuple[int, ...] = ()) -> None:
        self._locals.end(event.start)
        if (mode, focus) != (self.mode, self.focus):
            self._counts["transitions"] += 1
            self.borders.append((event.end, mode))
        self.mode, self.focus = mode, focus


class _Blocks:
    """Spans of text between openers and what ends them; the last may still be open."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int | None]] = []

    def begin(self, at: int) -> None:
        self.spans.append((at, None))

    def end(self, at: int) -> bool:
        """Ends the open block at offset `at`, if one is open; returns whether one was."""
        if not self.spans or self.spans[-1][1] is not None:
            return False
        self.spans[-1] = (self.spans[-1][0], at)
        return True
