"""Turns tag events into the attention mode, and finds the answer of a response."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

from da_jax.protocol import ids as ids_lib
from da_jax.protocol.tags import (
    THINK_ENDS,
    TOOL_MARKERS,
    Candidate,
    Kind,
    Reason,
    TagEvent,
    TagScanner,
)

AnswerMode = Literal["local", "keep", "global"]

_TOOL_KINDS = (Kind.TOOL_CALL, Kind.TOOL_END)


class Arm(enum.StrEnum):
    """How a prompt is written and whether declarations act.

    DA: the Declarative Attention prompt, declarations mask. UNMASKED: the same prompt, everything
    stays visible. VANILLA: a plain prompt, everything visible.
    """

    DA = "da"
    UNMASKED = "unmasked"
    VANILLA = "vanilla"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise ValueError(f"arm is {value!r}; use 'da', 'unmasked' or 'vanilla'")


class Mode(enum.Enum):
    """What the next token sees besides the scaffold and the response."""

    GLOBAL = "global"
    """All chunks."""
    FOCUS = "focus"
    """The named chunks."""
    LOCAL = "local"
    """No chunk."""


@dataclass(frozen=True)
class Declaration:
    """A mode that the caller declares for the start of a response.

    Attributes:
      mode: what the first token sees, until the response's own tags change it.
      focus: numbers of the chunks that FOCUS sees, kept ascending; empty in the other modes.

    Raises:
      ValueError: FOCUS without chunks, chunks without FOCUS, or a number that cannot be.
    """

    mode: Mode
    focus: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        focus = {ids_lib.check_id("a chunk of the focus", chunk) for chunk in self.focus}
        object.__setattr__(self, "focus", tuple(sorted(focus)))
        if not isinstance(self.mode, Mode):
            raise ValueError(f"mode is {self.mode!r}; use a Mode")
        if self.mode is Mode.FOCUS and not focus:
            raise ValueError("FOCUS names no chunk; give the numbers of the chunks that it sees")
        if focus and self.mode is not Mode.FOCUS:
            raise ValueError(f"{self.mode.name} has the focus {self.focus}; only FOCUS has one")

    @classmethod
    def of(cls, value: Declaration | Mode | str) -> Declaration:
        """Reads a declaration: one, a mode without focus, or "global", "local", "focus:3,7".

        Raises:
          ValueError: it is none of these.
        """
        if isinstance(value, Declaration):
            return value
        if isinstance(value, Mode):
            return cls(value)
        name, colon, numbers = str(value).partition(":")
        if name not in [mode.value for mode in Mode] or bool(colon) != (name == "focus"):
            raise ValueError(
                f"the initial mode is {value!r}; use 'global', 'local' or 'focus:3,7' with the "
                "numbers of the chunks"
            )
        return cls(Mode(name), ids_lib.parse("the focus", numbers) if colon else ())


@dataclass(frozen=True)
class Stats:
    """What a response declared.

    Attributes:
      attempts: ``<focus`` openers outside code, honoured, declined or cut off by the end.
      successes: those that were honoured.
      focus_declines: those that were declined.
      declines: declined openers of any name, by reason.
      mismatched: closers of neither the mode that is open (or of the LOCAL around an answer)
        nor of a declined opener.
      quoted: narrowing tags in code.
      transitions: changes of the mode or of the chunks in focus.
      format_correct: the answer stood in a non-empty ``<answer>`` or LOCAL text (for the arm
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
      chunks: number of chunks in the prompt, or their ids.
      initial: the mode at the start, GLOBAL by default. It counts as open: its closer matches it,
        and what is written in an initial LOCAL is LOCAL text.
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
        chunks: int | Sequence[int],
        *,
        initial: Declaration | None = None,
        answer_mode: AnswerMode = "local",
        arm: Arm | str = Arm.DA,
        max_ids: int | None = None,
        tool_markers: Iterable[tuple[str, str]] = TOOL_MARKERS,
        think_ends: Iterable[str] = THINK_ENDS,
    ) -> None:
        if answer_mode not in ("local", "keep", "global"):
            raise ValueError(f"answer_mode is {answer_mode!r}; use 'local', 'keep' or 'global'")
        self._scanner = TagScanner(
            chunks, max_ids=max_ids, tool_markers=tool_markers, think_ends=think_ends
        )
        self._answer_mode = answer_mode
        self._vanilla = Arm(arm) is Arm.VANILLA
        initial = initial or Declaration(Mode.GLOBAL)
        ids_lib.check_known("the initial focus", initial.focus, ids_lib.known_ids(chunks))
        if self._vanilla and initial.mode is not Mode.GLOBAL:
            raise ValueError(f"a vanilla response starts in {initial.mode.name}; it has no modes")
        self.mode = initial.mode
        self.focus: tuple[int, ...] = initial.focus
        self.answer_closed = False
        """Whether an ``</answer>`` has ended an ``<answer>``: where `stop_after_answer` stops."""
        self.tool_ended = False
        """Whether a tool call has ended: where the response ends."""
        self.borders: list[tuple[int, Mode]] = [(0, self.mode)]
        """Offsets at which the mode or the focus changed, each with the mode from there on."""
        self.length = 0
        """Characters of the response so far."""

        self._pieces: list[str] = []
        self._tags: list[tuple[int, int]] = []  # spans that are no part of an answer
        self._call_open = False
        # What is open: one, or an answer in LOCAL.
        self._openers = [] if self.mode is Mode.GLOBAL else [self.mode.value]
        self._declined: Counter[str] = Counter()  # openers whose closer may still come
        self._answering = False  # an answer has begun whose closer may still come
        self._thought_end = 0  # end of the thoughts
        self._answers = _Blocks()
        self._locals = _Blocks()
        if self.mode is Mode.LOCAL:
            self._locals.begin(0)
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
    def open(self) -> bool:
        """Whether a ``<`` was read that may still become a tag."""
        return self._scanner.open

    @property
    def room(self) -> int | None:
        """Characters, none of them ``>``, before the last of which the mode cannot change.

        They count from the next ``<`` on where none is `open`.

        None in the arm ``vanilla``, where it never does.
        """
        return None if self._vanilla else self._scanner.room

    @property
    def candidate(self) -> Candidate | None:
        """What may become a tag; None in plain text, and in the arm ``vanilla``."""
        return None if self._vanilla else self._scanner.candidate

    @property
    def tool_called(self) -> bool:
        """Whether a tool call is open or has ended; the end of thoughts drops an open one."""
        return self._call_open or self.tool_ended

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
            format_correct=bool(self.answer() if self._vanilla else self._declared()),
        )

    def answer(self) -> str:
        """The answer of the response so far, without tags and surrounding white space.

        Returns:
          The text of the last ``<answer>`` that holds any, else the last LOCAL text, else the
          whole text. What stands after the thoughts goes before all that stands in them. For the
          arm ``vanilla`` the whole text after the thoughts.
        """
        declared = "" if self._vanilla else self._declared()
        return declared or self._spoken() or self._clean(0, None)

    def _spoken(self) -> str:
        """The text after the thoughts."""
        return self._clean(self._thought_end, None)

    def _declared(self) -> str:
        """The last answer or LOCAL text; one in the thoughts only if nothing follows them."""
        since = 0 if not self._spoken() else self._thought_end
        for start, end in (*reversed(self._answers.spans), *reversed(self._locals.spans)):
            if start >= since and (text := self._clean(start, end)):
                return text
        return ""

    def _clean(self, start: int, end: int | None) -> str:
        """The text from `start` to `end` without its tags."""
        text = self.text
        end = len(text) if end is None else end
        kept = []
        for tag_start, tag_end in sorted(self._tags):
            if tag_start < end and tag_end > start:
                kept.append(text[start:tag_start])
                start = tag_end
        kept.append(text[start:end])
        return "".join(kept).strip()

    def _take(self, events: list[TagEvent]) -> list[TagEvent]:
        if not events:
            return events
        for event in events:
            self.tool_ended |= event.kind is Kind.TOOL_END
            if event.kind in (*_TOOL_KINDS, Kind.THINK_END):
                self._call_open = event.kind is Kind.TOOL_CALL
            if event.kind is Kind.THINK_END:
                self._thought_end = event.end
                self._tags.append((event.start, event.end))
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
                self._openers.clear()
                self._declined[event.name] += 1
                if event.name != "local":
                    self._answers.end(event.start)
                self._set(event, Mode.GLOBAL)
            case Kind.THINK_END:
                self._openers.clear()
                self._declined.clear()
                self._answering = False
                self._answers.end(event.start)
                self._set(event, Mode.GLOBAL)
            case Kind.QUOTED:
                self._counts["quoted"] += 1
            case Kind.UNFINISHED:
                self._counts["attempts"] += 1
        is_tag = event.kind in (Kind.OPEN, Kind.CLOSE, Kind.DECLINED)
        if is_tag and event.reason is not Reason.TOO_LONG:  # that one swallowed prose
            self._tags.append((event.start, event.start + len(event.text)))

    def _open(self, event: TagEvent) -> None:
        if event.name != "local":
            self._answers.end(event.start)
        if event.name != "answer" or self._openers != ["local"]:
            self._openers.clear()
        self._openers.append(event.name)
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
            self._answering = True
            if self._answer_mode == "local":
                self._set(event, Mode.LOCAL)
            elif self._answer_mode == "global":
                self._set(event, Mode.GLOBAL)

    def _close(self, event: TagEvent) -> None:
        if event.name in self._openers:
            del self._openers[self._openers.index(event.name) :]
        elif self._declined[event.name]:
            self._declined[event.name] -= 1
        else:
            self._counts["mismatched"] += 1
            self._openers.clear()
        self._answers.end(event.start)
        if event.name == "answer" and self._answering:
            self._answering, self.answer_closed = False, True
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

    def end(self, at: int) -> None:
        """Ends the open block at offset `at`, if one is open."""
        if self.spans and self.spans[-1][1] is None:
            self.spans[-1] = (self.spans[-1][0], at)
