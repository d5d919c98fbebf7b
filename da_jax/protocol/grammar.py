"""What may follow in a protocol tag so that the scanner honours it, character by character.

It writes a little less than the scanner honours: a closer holds nothing but white space after its
name, and a name is never gone on with (``<focusing>`` is other markup to the scanner).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

from da_jax.protocol.tags import _SPACE as SPACE

_ATTRIBUTE = "magic_chunks"
_DIGITS = "0123456789"

NEEDED = {"white space": SPACE, "a quote": "\"'", **{c: c for c in f"{_ATTRIBUTE}=>{_DIGITS}"}}
"""Characters without which some tag could not be completed, one of each value."""


class Phase(Enum):
    """What a tag has reached."""

    NAME = auto()
    """The name ``<focus``."""
    GAP = auto()
    """White space after it."""
    ATTRIBUTE = auto()
    """Characters of ``magic_chunks``, or white space after all of them."""
    VALUE = auto()
    """The ``=``."""
    ITEM = auto()
    """The quote, or a comma: a number must come."""
    NUMBER = auto()
    """Digits of a number."""
    HIGH = auto()
    """The ``-`` of a range, and digits of its end."""
    NEXT = auto()
    """White space after a number or range."""
    CLOSED = auto()
    """The closing quote, or the name of a tag that has no attribute."""
    END = auto()
    """The ``>``."""


class State(NamedTuple):
    """A place in a tag; two texts that reach the same one may go on alike.

    Attributes:
      phase: what was read last.
      read: characters of the attribute's name, or the value of a number's digits.
      quote: the quote that is open.
      named: ids named so far, ascending; empty where their number is not limited.
      low, most: start of a range that is open, and the greatest end that it may have.
    """

    phase: Phase
    read: int = 0
    quote: str = ""
    named: tuple[int, ...] = ()
    low: int = 0
    most: int = 0


class Grammar:
    """The legal continuations of tags.

    Args:
      ids: ids of the chunks, ascending and positive.
      max_ids: most ids that one ``<focus>`` may name; None for no limit.
      quotes: the quotes that may be used.
    """

    def __init__(
        self, ids: Sequence[int], *, max_ids: int | None = None, quotes: str = "\"'"
    ) -> None:
        self._ids, self._quotes = ids, quotes
        self._limit = max_ids if max_ids is not None and max_ids < len(ids) else None
        shortest = len(str(ids[0])) if ids else 0
        value = shortest + len('">')
        self._needs = {
            Phase.END: 0,
            Phase.CLOSED: 1,
            Phase.NEXT: 2,
            Phase.VALUE: 1 + value,
            Phase.ATTRIBUTE: len(_ATTRIBUTE) + 2 + value,
            Phase.GAP: len(_ATTRIBUTE) + 2 + value,
            Phase.NAME: 1 + len(_ATTRIBUTE) + 2 + value,
        }
        self.longest_need = self._needs[Phase.NAME] + (len(str(ids[-1])) if ids else 0)
        """No state needs more characters than this; see `need`."""

    def start(self, head: str) -> State | None:
        """The state after a complete head such as ``<focus`` or ``</local``.

        None for ``<focus`` where there are no chunks.
        """
        if head != "<focus":
            return State(Phase.CLOSED)
        return State(Phase.NAME) if self._ids else None

    def need(self, state: State) -> int:
        """Fewest characters that complete the tag, its ``>`` included."""
        if state.phase in (Phase.ITEM, Phase.NUMBER, Phase.HIGH):
            missing = _missing(state.read, self._within(state))
            assert missing is not None, f"{state} leads nowhere"
            return missing + len('">')
        return self._needs[state.phase] - (state.read if state.phase is Phase.ATTRIBUTE else 0)

    def step(self, state: State, char: str) -> State | None:
        """The state after one more character; None where it is not legal."""
        match state.phase:
            case Phase.NAME:
                return State(Phase.GAP) if char in SPACE else None
            case Phase.GAP if char in SPACE:
                return state
            case Phase.GAP | Phase.ATTRIBUTE if state.read < len(_ATTRIBUTE):
                right = char == _ATTRIBUTE[state.read]
                return State(Phase.ATTRIBUTE, state.read + 1) if right else None
            case Phase.ATTRIBUTE:
                return state if char in SPACE else State(Phase.VALUE) if char == "=" else None
            case Phase.VALUE if char in self._quotes:
                return State(Phase.ITEM, quote=char)
            case Phase.VALUE:
                return state if char in SPACE else None
            case Phase.CLOSED:
                return state if char in SPACE else State(Phase.END) if char == ">" else None
            case Phase.END:
                return None
        return self._in_list(state, char)

    def _in_list(self, state: State, char: str) -> State | None:
        """`step` between the quotes."""
        phase = state.phase
        if char in _DIGITS and phase in (Phase.ITEM, Phase.NUMBER, Phase.NEXT, Phase.HIGH):
            digits = Phase.HIGH if phase is Phase.HIGH else Phase.NUMBER
            longer = state._replace(phase=digits, read=10 * state.read + int(char))
            return longer if _missing(longer.read, self._within(state)) is not None else None
        if phase is Phase.ITEM:
            return state if char in SPACE else None
        if phase is Phase.NUMBER and char == "-":
            if _missing(state.read, self._within(state)) != 0:
                return None
            most = self._most(state.read, state.named)
            return state._replace(phase=Phase.HIGH, read=0, low=state.read, most=most)
        if phase is Phase.NEXT:
            named = state.named
        elif _missing(state.read, self._within(state)) == 0:
            low = state.low if phase is Phase.HIGH else state.read
            named = self._with(state.named, low, state.read)
        else:
            return None
        if char == state.quote:
            return State(Phase.CLOSED)
        after = Phase.NEXT if char in SPACE else Phase.ITEM if char == "," else None
        return State(after, quote=state.quote, named=named) if after else None

    def _within(self, state: State) -> Sequence[int]:
        """What the number that is being written may be, ascending."""
        if state.phase is Phase.HIGH:
            return range(state.low, state.most + 1)
        full = self._limit is not None and len(state.named) == self._limit
        return state.named if full else self._ids

    def _with(self, named: tuple[int, ...], low: int, high: int) -> tuple[int, ...]:
        """`named` and the ids from `low` to `high`, if it matters how many there are."""
        if self._limit is None:
            return ()
        return tuple(sorted({*named, *range(low, high + 1)}))

    def _most(self, low: int, named: tuple[int, ...]) -> int:
        """The greatest end of a range that begins with the id `low`."""
        ids = self._ids
        at = bisect_left(ids, low)
        places = range(at, len(ids))
        end = at + bisect_right(places, low - at, key=lambda place: ids[place] - place)
        if self._limit is None:
            return ids[end - 1]
        free = self._limit - len(named)
        for place in range(at, end):
            free -= ids[place] not in named
            if free < 0:
                return ids[place - 1]
        return ids[end - 1]


def _missing(value: int, ids: Sequence[int]) -> int | None:
    """Fewest digits that, written after those of `value`, make one of `ids`; None if none do."""
    width = 1
    for count in range(len(str(ids[-1])) + 1):
        at = bisect_left(ids, value * width)
        if at < len(ids) and ids[at] < (value + 1) * width:
            return count
        width *= 10
    return None
