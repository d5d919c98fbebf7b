"""A document as numbered chunks: lossless segmentation near a target size in tokens."""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from da_jax.protocol import ids as ids_lib

DEFAULT_TARGET = 2048
DEFAULT_CAP = 2560

_NEWLINE = r"(?:\r\n|[\n\r\x85\u2028\u2029])"
_BLANKS = r"[^\S\n\r\x85\u2028\u2029]*+"
_CLOSERS = "[\"'”’»)\\]]*+"
_CJK_CLOSERS = "[」』”’）】》]*+"

# Coarsest border first; a border lies at the end of each match.
_LEVELS = (
    re.compile(rf"{_NEWLINE}(?:{_BLANKS}{_NEWLINE})+"),  # blank line
    re.compile(_NEWLINE),
    # sentence end; the look-behind keeps long runs of dots linear
    re.compile(
        rf"(?<![.!?…؟۔])[.!?…؟۔]++{_CLOSERS}\s++|[।॥]\s*+"
        rf"|(?:[。！？｡…]|．(?!\d))++{_CJK_CLOSERS}\s*+"
    ),
    re.compile(r"[,;:،؛–—]\s++|[、，；：､]\s*+"),  # clause end
    re.compile(r"\s+"),
)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A chunk that the caller brings: a file, a page, a turn, a tool result.

    Attributes:
      text: The chunk's text, as the model is to read it.
      label: A name shown in the chunk's header. Tags always carry the chunk's number.
      id: The chunk's number, up to nine digits. Without it the chunks of a prompt are numbered
        from 1; all of them have one, or none.
    """

    text: str
    label: str | None = None
    id: int | None = None


def as_chunks(chunks: Iterable[str | Chunk]) -> tuple[Chunk, ...]:
    """Returns the caller's own chunks as `Chunk` objects.

    Raises:
      ValueError: If an element is neither a string nor a `Chunk`.
    """
    out = []
    for i, chunk in enumerate(chunks, 1):
        if isinstance(chunk, str):
            chunk = Chunk(chunk)
        if not isinstance(chunk, Chunk):
            raise ValueError(f"chunk {i} is a {type(chunk).__name__}; give a str or a Chunk")
        out.append(chunk)
    return tuple(out)


def numbers(chunks: Sequence[Chunk]) -> tuple[int, ...]:
    """Returns the number of each chunk of a prompt, in order: the caller's ids, or 1 to N.

    Raises:
      ValueError: If only some have an id, two have the same, or one cannot be.
    """
    given = [i for i, chunk in enumerate(chunks, 1) if chunk.id is not None]
    if not given:
        return tuple(range(1, len(chunks) + 1))
    places: dict[int, int] = {}
    for i, chunk in enumerate(chunks, 1):
        if chunk.id is None:
            first = given[0]
            raise ValueError(
                f"chunk {i} has no id, but chunk {first} has {chunks[first - 1].id}; give every "
                "chunk of a conversation an id, or none of them"
            )
        number = ids_lib.check_id(f"the id of chunk {i}", chunk.id)
        if (other := places.setdefault(number, i)) != i:
            raise ValueError(
                f"chunks {other} and {i} both have the id {number}; give each one of its own"
            )
    return tuple(places)


def split(
    document: str,
    token_starts: np.ndarray | Sequence[int],
    target: int = DEFAULT_TARGET,
    cap: int = DEFAULT_CAP,
) -> list[str]:
    """Cuts a document into chunks of about `target` and at most `cap` tokens.

    Only a unit over the cap is split, at the coarsest border available: blank line, newline,
    sentence end, clause end, white space, and as a last resort between graphemes. The units are
    then joined in order so that each chunk comes as near to the target as its borders allow.
    The cost is linear in the length of the document.

    Args:
      document: The text.
      token_starts: [T] int, the character at which each token of `document` begins, ascending.
        A range of characters counts as many tokens as begin in it.
      target: Tokens a chunk aims at.
      cap: Tokens no chunk exceeds. (One code point is never cut, whatever its tokens.)

    Returns:
      Chunks that concatenate to `document`; one if it fits the cap, none if it is empty.

    Raises:
      ValueError: If not `1 <= target <= cap`.
    """
    if not 1 <= target <= cap:
        raise ValueError(f"chunk sizes need 1 <= target <= cap, got target={target}, cap={cap}")
    if not document:
        return []
    starts = np.asarray(token_starts, dtype=np.int64)
    borders = _borders(document, starts, cap)
    cuts = _pack(np.searchsorted(starts, borders), target, cap)
    ends = borders[cuts].tolist()
    return [document[a:b] for a, b in zip([0, *ends[:-1]], ends)]


def _borders(document: str, starts: np.ndarray, cap: int) -> np.ndarray:
    """Ends of the units of the document, in order: the coarsest that are not over the cap."""
    units = np.array([0, len(document)])
    finders = [*(_finder(pattern) for pattern in _LEVELS), _graphemes, _code_points]
    for finder in finders:
        over = np.flatnonzero(np.diff(np.searchsorted(starts, units)) > cap)
        if not over.size:
            break
        found = [finder(document, int(units[i]), int(units[i + 1])) for i in over]
        units = np.sort(np.concatenate([units, *found]))
        units = units[np.flatnonzero(np.diff(units, prepend=-1))]
    return units[1:]


def _finder(pattern: re.Pattern[str]) -> Callable[[str, int, int], np.ndarray]:
    return lambda text, start, end: np.array(
        [match.end() for match in pattern.finditer(text, start, end)], dtype=np.int64
    )


def _code_points(text: str, start: int, end: int) -> np.ndarray:
    return np.arange(start, end)


def _graphemes(text: str, start: int, end: int) -> np.ndarray:
    """Ends of the grapheme clusters in text[start:end], nearly those of UAX #29.

    Marks stay with what they follow, a carriage return with its line feed, flags in pairs, and the
    parts of a Hangul syllable together. Nothing is cut after a zero-width joiner or a virama,
    whatever follows. Marks that belong to what comes after them are not known.
    """
    kinds = {c: _KINDS.index(_grapheme_kind(c)) for c in set(text[start:end])}
    kind = np.fromiter(map(kinds.__getitem__, text[start:end]), np.int8, end - start)
    joined = _JOINED[kind[:-1], kind[1:]]
    flag = kind == _KINDS.index("flag")  # flags are pairs, counted from the start of a run
    count = np.cumsum(flag)
    in_run = count - np.maximum.accumulate(np.where(flag, 0, count))
    joined &= ~(flag[1:] & (in_run[:-1] % 2 == 0))
    return np.append(start + 1 + np.flatnonzero(~joined), end)


def _grapheme_kind(c: str) -> str:
    """How a character joins its neighbours. Hangul syllables have parts l, v, t."""
    code, category = ord(c), unicodedata.category(c)
    if c == "\u200d" or unicodedata.combining(c) == 9:
        return "joiner"
    if category in ("Mn", "Me", "Mc") or _in(code, _EXTENDING):
        return "extend"
    if category in ("Cc", "Zl", "Zp"):
        return {"\r": "cr", "\n": "lf"}.get(c, "control")
    if 0xAC00 <= code <= 0xD7A3:
        return "lv" if (code - 0xAC00) % 28 == 0 else "lvt"
    return next((kind for kind, ranges in _RANGES.items() if _in(code, ranges)), "other")


def _in(code: int, ranges: Sequence[tuple[int, int]]) -> bool:
    return any(first <= code <= last for first, last in ranges)


def _joined_table() -> np.ndarray:
    """[K, K] bool: whether a character of one kind is never cut from one of another after it."""
    pairs = {("cr", "lf"), ("flag", "flag")}
    pairs |= {("l", k) for k in ("l", "v", "lv", "lvt")}
    pairs |= {(k, "v") for k in ("v", "lv")} | {(k, "t") for k in ("v", "lv", "t", "lvt")}
    for kind in set(_KINDS) - {"cr", "lf", "control"}:
        pairs |= {(kind, "extend"), (kind, "joiner"), ("joiner", kind)}
    return np.array([[(a, b) in pairs for b in _KINDS] for a in _KINDS])


_KINDS = "other cr lf control extend joiner flag l v t lv lvt".split()
_EXTENDING = (
    (0x200C, 0x200C),  # zero-width non-joiner
    (0x0E33, 0x0E33),  # Thai and Lao vowel am
    (0x0EB3, 0x0EB3),
    (0xFF9E, 0xFF9F),  # half-width voicing marks
    (0x1F3FB, 0x1F3FF),  # skin tones
    (0xE0020, 0xE007F),  # tags
)
_RANGES = {
    "flag": ((0x1F1E6, 0x1F1FF),),
    "l": ((0x1100, 0x115F), (0xA960, 0xA97C)),
    "v": ((0x1160, 0x11A7), (0xD7B0, 0xD7C6)),
    "t": ((0x11A8, 0x11FF), (0xD7CB, 0xD7FB)),
}
_JOINED = _joined_table()


def _pack(tokens: np.ndarray, target: int, cap: int) -> list[int]:
    """Indices of the units that end a chunk, given the tokens up to each unit's end [U]."""
    cuts: list[int] = []
    done, first = 0, 0
    while first < len(tokens):
        if tokens[-1] - done <= cap:
            cuts.append(len(tokens) - 1)
            break
        # `above` is the first unit that passes the target; the chunk ends there or one before.
        above = int(np.searchsorted(tokens, done + target, side="right"))
        last = above - 1
        over = tokens[above] - done
        if over <= cap and over - target < target - (tokens[last] - done if last >= first else 0):
            last = above
        last = max(last, first)
        cuts.append(last)
        done, first = int(tokens[last]), last + 1
    return cuts
