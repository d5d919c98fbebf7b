"""Recognises the protocol's tags in a stream of generated text.

A tag begins with ``<`` directly followed by ``focus``, ``local``, ``answer`` or ``global`` (or a
closer, ``</focus`` and so on) and ends at the first ``>``, also inside quotes. What follows from
"when in doubt, widen":

* An opener that cannot be honoured exactly is *declined*, with a `Reason`. A closer with anything
  odd in it still closes.
* A name continues over letters, digits and ``_ - . :``, so ``<focusing>`` and ``<local-name>`` are
  other markup, which is text and swallows nothing: a ``<`` inside it starts afresh.
* A ``<`` inside an unfinished protocol tag makes that tag malformed up to the first ``>``. A tag
  that ends there is still reported: a widening one is honoured, a narrowing one declined.
* A tag that reaches the longest legal length without a ``>`` is decided at once.
* In code (see `Code`) narrowing tags are text and reported as *quoted*; a backtick or another
  ``<`` inside any tag there shows that it was none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum

from da_jax.protocol import ids as ids_lib
from da_jax.protocol.code import Code

TOOL_MARKERS = (("<tool_call>", "</tool_call>"), ("<|tool_call>", "<tool_call|>"))
"""Opening and closing markers of the tool calls of Qwen and of Gemma."""

THINK_ENDS = ("</think>", "<channel|>")
"""End markers of the thoughts of Qwen and of Gemma."""

THINK_STARTS = ("<think>", "<|channel>")
"""Opening markers of those thoughts; the scanner does not look for them."""

_SPACE = " \t\r\n\f\v"
_SLACK = 128
_NARROWING = frozenset({"focus", "local", "answer"})
_HEADS = frozenset(f"<{slash}{name}" for slash in ("", "/") for name in (*_NARROWING, "global"))
_HEAD = re.compile(r"<(/?)(focus|local|answer|global)(?![\w.:-])")
_LITERAL = re.compile(r"<[^<>`\s]*>")
_ATTRIBUTE = re.compile(
    rf"""[{_SPACE}]++([^{_SPACE}=/"']++)[{_SPACE}]*+=[{_SPACE}]*+(?:"([^"]*+)"|'([^']*+)')?+"""
)
_ITEM = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_IN_QUOTED_TAG = re.compile("[<>`]")
_IN_INLINE_TAG = re.compile("[<>`\n]")


class Kind(StrEnum):
    """What a `TagEvent` reports."""

    OPEN = "open"
    """An opener that is honoured."""
    CLOSE = "close"
    """A closer."""
    DECLINED = "declined"
    """An opener that cannot be honoured: the mode becomes GLOBAL."""
    QUOTED = "quoted"
    """A narrowing tag in code: text."""
    UNFINISHED = "unfinished"
    """A ``<focus`` that the end of the generation cut off: text, but an attempt."""
    THINK_END = "think_end"
    """The end marker of the model's thoughts."""
    TOOL_CALL = "tool_call"
    """The opening marker of a tool call."""
    TOOL_END = "tool_end"
    """The closing marker of a tool call."""


class Reason(StrEnum):
    """Why an opener was declined."""

    MALFORMED = "malformed"
    SELF_CLOSING = "self_closing"
    UNKNOWN_ATTRIBUTE = "unknown_attribute"
    DUPLICATE_ATTRIBUTE = "duplicate_attribute"
    UNQUOTED = "unquoted"
    EMPTY = "empty"
    UNKNOWN_CHUNK = "unknown_chunk"
    TOO_MANY = "too_many"
    TOO_LONG = "too_long"
    NESTED = "nested"
    """It is well-formed or not, but stands inside an unfinished tag."""


@dataclass(frozen=True, slots=True)
class TagEvent:
    """One recognised tag or marker.

    Attributes:
      kind: what was recognised.
      name: ``focus``, ``local``, ``answer`` or ``global``; for markers the marker itself.
      text: its characters; another ``<`` ends them.
      start: offset of the ``<`` in the response, in characters.
      end: offset just after the character that decided it: the first ``>``, or the character
        that made it too long. The mode changes here. Never decreases from event to event.
      ids: chunk numbers of an honoured ``<focus>``, ascending, without repetition.
      reason: why an opener was declined, or why a closer is none as written; else None.
    """

    kind: Kind
    name: str
    text: str
    start: int
    end: int
    ids: tuple[int, ...] = ()
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """What may become a tag or marker: it is not decided yet.

    Attributes:
      text: its characters so far, from the ``<`` on.
      start: offset of the ``<`` in the response, in characters.
      quoted: whether it stands in code.
      room: characters that a tag of this name may still take, its ``>`` included.
    """

    text: str
    start: int
    quoted: bool
    room: int


class _State(Enum):
    TEXT = 0
    HEAD = 1
    BODY = 2


class TagScanner:
    """Turns text deltas into tag events; any split of a text into deltas gives the same events.

    Costs O(1) per character (and O(chunks) for each ``<focus>`` that names so many) and keeps at
    most the longest legal tag. That is 128 characters, of which white space may use what the tag
    itself does not, plus, for a ``<focus``, room for the range ``lo-hi, `` of the greatest id for
    each id that may be named.

    Args:
      chunks: number of chunks in the prompt, whose ids run from 1 to this; or their ids.
      max_ids: most ids that one ``<focus>`` may name; None for no limit.
      tool_markers: opening and closing marker of a tool call, one pair per model family.
      think_ends: markers that end the model's thoughts.

    Raises:
      ValueError: a number is out of range, or a marker could not be told from a tag.
    """

    def __init__(
        self,
        chunks: int | Iterable[int],
        *,
        max_ids: int | None = None,
        tool_markers: Iterable[tuple[str, str]] = TOOL_MARKERS,
        think_ends: Iterable[str] = THINK_ENDS,
    ) -> None:
        if max_ids is not None and max_ids < 1:
            raise ValueError(f"max_ids is {max_ids}; give 1 or more, or None for no limit")
        self._ids = ids_lib.known_ids(chunks)
        self._max_ids = max_ids
        self._think_ends = frozenset(think_ends)
        self._tool_ends = dict(tool_markers)
        self._markers = self._think_ends.union(self._tool_ends, self._tool_ends.values())
        for marker in self._markers:
            if not _LITERAL.fullmatch(marker) or _HEAD.match(marker):
                raise ValueError(
                    f"marker {marker!r} cannot be scanned for; it must begin with '<', end with "
                    "its only '>', hold no white space or backtick, and not be a protocol tag"
                )
        words = (*self._markers, *_HEADS)
        self._prefixes = frozenset(word[:n] for word in words for n in range(1, len(word)))
        self._prefixes |= _HEADS
        most = len(self._ids) if max_ids is None else min(len(self._ids), max_ids)
        self._longest_focus = _SLACK + (most * (2 * len(str(self._ids[-1])) + 3) if most else 0)

        self._code = Code()
        self._tool_end: str | None = None  # closes the tool call that is open
        self._state = _State.TEXT
        self._offset = 0  # characters of the response before the present delta
        self._last = "\n"  # the character before it; a response starts on a new line
        self._start = 0  # offset of the '<' of the candidate
        self._quoting = False  # whether that '<' stands in code
        self._parts: list[str] = []  # what it has read
        self._room = 0  # characters that the candidate may still take
        self._halt = _IN_QUOTED_TAG  # what ends it in code

    def feed(self, delta: str) -> list[TagEvent]:
        """Scans the next piece of the response.

        Args:
          delta: text that follows what was fed before; may be empty.

        Returns:
          The tags and markers that end in it, in order.
        """
        code = self._code
        if self._state is _State.TEXT and not code.closing and not code.stops.search(delta):
            if delta:
                self._last = delta[-1]
                self._offset += len(delta)
            return []
        events: list[TagEvent] = []
        self._scan(delta, self._offset, events)
        self._offset += len(delta)
        return events

    @property
    def open(self) -> bool:
        """Whether a ``<`` was read that may still become a tag or a marker."""
        return self._state is not _State.TEXT

    @property
    def room(self) -> int:
        """Characters, none of them ``>``, before the last of which no event can come.

        They count from the next ``<`` on where none is `open`.
        """
        if self._state is _State.TEXT or self._quoting:
            return _SLACK  # a tag that grows too long has yet to begin
        if self._state is _State.HEAD:
            return _SLACK - len(self._parts[0])
        return self._room

    @property
    def candidate(self) -> Candidate | None:
        """What is open, or None in plain text."""
        if self._state is _State.TEXT:
            return None
        text = "".join(self._parts)
        room = self._room if self._state is _State.BODY else self._longest(text) - len(text)
        return Candidate(text, self._start, self._quoting, room)

    def finish(self) -> list[TagEvent]:
        """Ends the response: an unfinished tag is text.

        Returns:
          One `Kind.UNFINISHED` for each ``<focus`` that was cut off outside code.
        """
        state, self._state = self._state, _State.TEXT
        if state is _State.TEXT or self._quoting:
            return []
        return [
            TagEvent(Kind.UNFINISHED, "focus", part, self._start + at, self._offset)
            for at, part in _split("".join(self._parts))
            if (head := _HEAD.match(part)) and head.group() == "<focus"
        ]

    def _scan(self, text: str, base: int, events: list[TagEvent]) -> None:
        """Reads `text`, whose first character has offset `base`."""
        at = 0
        while at < len(text):
            if self._state is _State.TEXT:
                at = self._text(text, base, at)
            elif self._state is _State.HEAD:
                at = self._head(text, base, at, events)
            else:
                at = self._body(text, at, events)
        self._last = text[-1:] or self._last

    def _text(self, text: str, base: int, at: int) -> int:
        """Reads plain text up to the next character that may matter; returns where to go on."""
        code = self._code
        stop = code.stops.search(text, at)
        found = stop.start() if stop else len(text)
        code.plain(text, at, found)
        if stop is None:
            return found
        char = text[found]
        if char == "<":
            code.plain(text, found, found + 1)
            self._start, self._quoting, self._parts = base + found, code.open, [char]
            self._state = _State.HEAD
        elif char == "`":
            code.backtick(text[found - 1] if found else self._last)
        else:
            code.newline()
        return found + 1

    def _head(self, text: str, base: int, at: int, events: list[TagEvent]) -> int:
        """Reads a candidate's name until it is a marker, a tag's name or text."""
        read = self._parts[0]
        for here in range(at, len(text)):
            longer = read + text[here]
            if longer in self._prefixes:
                read = longer
            elif longer in self._markers:
                self._state = _State.TEXT
                self._marker(longer, base + here + 1, events)
                return here + 1
            else:
                self._parts = [read]
                self._state = _State.TEXT
                if read in _HEADS and _HEAD.match(longer):
                    self._state = _State.BODY
                    self._room = self._longest(read) - len(read)
                    inline = self._code.inline and read[1:] in _NARROWING
                    self._halt = _IN_INLINE_TAG if inline else _IN_QUOTED_TAG
                return here
        self._parts = [read]
        return len(text)

    def _body(self, text: str, at: int, events: list[TagEvent]) -> int:
        """Reads a tag after its name, up to its end."""
        limit = min(len(text), at + self._room)
        if self._quoting:
            stop = self._halt.search(text, at, limit)
            found = stop.start() if stop else -1
        else:
            found = text.find(">", at, limit)
        if found >= 0 and text[found] != ">":
            self._parts.append(text[at:found])
            self._replay(events)
            return found
        end = limit if found < 0 else found + 1
        self._parts.append(text[at:end])
        self._room -= end - at
        if found >= 0:
            self._complete(events)
        elif not self._room:
            self._overflow(events)
        return end

    def _longest(self, head: str) -> int:
        """Characters of the longest legal tag that begins with `head`."""
        return self._longest_focus if head == "<focus" else _SLACK

    def _replay(self, events: list[TagEvent]) -> None:
        """Makes the candidate plain text, which matters to what is code."""
        self._state = _State.TEXT
        self._scan("".join(self._parts)[1:], self._start + 1, events)

    def _complete(self, events: list[TagEvent]) -> None:
        """Decides the candidate at its ``>``."""
        text = "".join(self._parts)
        end = self._start + len(text)
        name = self._parts[0][1:]
        if self._quoting and name in _NARROWING:
            events.append(TagEvent(Kind.QUOTED, name, text, self._start, end))
            self._replay(events)
            return
        self._state = _State.TEXT
        self._code.reset()
        *outer, (at, last) = _split(text)
        for outer_at, part in outer:
            self._tag(part, outer_at, end, events, Reason.MALFORMED)
        if last in self._markers:
            self._marker(last, end, events)
        else:
            self._tag(last, at, end, events, Reason.NESTED if outer else None)

    def _overflow(self, events: list[TagEvent]) -> None:
        """Decides a candidate that has no room left for its ``>``."""
        if self._quoting:
            self._replay(events)
            return
        text = "".join(self._parts)
        end = self._start + len(text)
        self._state = _State.TEXT
        self._code.reset()
        parts = _split(text)
        for at, part in parts[: max(1, len(parts) - 1)]:
            self._tag(part, at, end, events, Reason.TOO_LONG)
        if len(parts) > 1:  # the last one may still become a tag
            at, part = parts[-1]
            self._scan(part, self._start + at, events)

    def _tag(
        self, part: str, at: int, end: int, events: list[TagEvent], reason: Reason | None
    ) -> None:
        """Reports the protocol tag `part`, if it is one; `at` counts from the candidate's start."""
        head = _HEAD.match(part)
        if not head:
            return
        slash, name = head.groups()
        ids: tuple[int, ...] = ()
        if not slash and (reason is None or (reason is Reason.NESTED and name == "global")):
            body = part[head.end() : -1]
            ids, reason = _parse_opener(name, body, self._ids, self._max_ids)
        kind = Kind.CLOSE if slash else Kind.DECLINED if reason else Kind.OPEN
        events.append(TagEvent(kind, name, part, self._start + at, end, ids, reason))

    def _marker(self, marker: str, end: int, events: list[TagEvent]) -> None:
        """Reports a marker, unless it is text where it stands."""
        code = self._code
        if marker in self._think_ends:
            kind = Kind.THINK_END
            self._tool_end = None
            code.reset()
        elif marker == self._tool_end:
            kind = Kind.TOOL_END
            self._tool_end = None
            code.reset()
        elif marker in self._tool_ends and not code.open:
            kind = Kind.TOOL_CALL
            self._tool_end = self._tool_ends[marker]
            code.call = True
        else:
            return
        events.append(TagEvent(kind, marker, marker, end - len(marker), end))


def _split(text: str) -> list[tuple[int, str]]:
    """Cuts `text`, which begins with ``<``, before each ``<``: offsets and pieces."""
    parts = []
    at = 0
    for rest in text.split("<")[1:]:
        parts.append((at, "<" + rest))
        at += 1 + len(rest)
    return parts


def _parse_opener(
    name: str, body: str, known: Sequence[int], max_ids: int | None
) -> tuple[tuple[int, ...], Reason | None]:
    """Reads what stands between an opener's name and its ``>``: (ids, None) or ((), reason)."""
    if body.rstrip(_SPACE).endswith("/"):
        return (), Reason.SELF_CLOSING
    value: str | None = None
    at = 0
    while found := _ATTRIBUTE.match(body, at):
        at = found.end()
        attribute, double, single = found.groups()
        if name != "focus" or attribute != "magic_chunks":
            return (), Reason.UNKNOWN_ATTRIBUTE
        if value is not None:
            return (), Reason.DUPLICATE_ATTRIBUTE
        value = single if double is None else double
        if value is None:
            return (), Reason.MALFORMED if body[at : at + 1] in ('"', "'", "") else Reason.UNQUOTED
    if body[at:].strip(_SPACE):
        return (), Reason.MALFORMED
    if name != "focus":
        return (), None
    return _parse_ids(value or "", known, max_ids)


def _parse_ids(
    value: str, known: Sequence[int], max_ids: int | None
) -> tuple[tuple[int, ...], Reason | None]:
    """Reads a list of chunk numbers and ranges: (ids, None) or ((), reason)."""
    if not value.strip(_SPACE):
        return (), Reason.EMPTY
    spans = []  # of places in `known`, so that a range costs no more than what exists of it
    for part in value.split(","):
        for item in re.split(f"[{_SPACE}]+", part.strip(_SPACE)):
            found = _ITEM.fullmatch(item)
            if not found:
                return (), Reason.MALFORMED
            low = _number(found[1], known)
            high = low if found[2] is None else _number(found[2], known)
            if not (ids_lib.positions(known, low, low) and ids_lib.positions(known, high, high)):
                return (), Reason.UNKNOWN_CHUNK
            if high < low:
                return (), Reason.MALFORMED
            span = ids_lib.positions(known, low, high)
            if span is None:
                return (), Reason.UNKNOWN_CHUNK
            spans.append((span.start, span.stop))
    places: list[int] = []
    for start, stop in sorted(spans):  # overlapping ranges must not cost more than the union
        places.extend(range(max(start, places[-1] + 1 if places else 0), stop))
    if max_ids is not None and len(places) > max_ids:
        return (), Reason.TOO_MANY
    return tuple(known[place] for place in places), None


def _number(digits: str, known: Sequence[int]) -> int:
    """The value of `digits`, or 0 if they are too many for a chunk number (or for `int`)."""
    digits = digits.lstrip("0")
    return int(digits) if known and 0 < len(digits) <= len(str(known[-1])) else 0
