"""Responses as benchmarks force them: tags and filler, in the mix of modes that is expected."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from da_jax.engine.detokenize import TokenTable
from da_jax.protocol.modes import Mode
from da_jax.protocol.trace import Step
from da_jax.roofline.workload import SHARES

_FILLER = re.compile(rb" ?[A-Za-z]+")
_JITTER = 0.5  # of the length of a block: rows of a batch must not change modes together


@dataclasses.dataclass(frozen=True)
class Mix:
    """What share of a response is what.

    Attributes:
      modes: of the decode steps, by mode; they add up to 1.
      tags: of the tokens, those at which a tag ends.
    """

    modes: Mapping[Mode, float]
    tags: float


EXPECTED = Mix(SHARES, 0.04)


@dataclasses.dataclass(frozen=True)
class Words:
    """What responses are made of.

    Attributes:
      encode: token ids of a tag.
      filler: int32, ids of tokens that are plain words.
    """

    encode: Callable[[str], list[int]]
    filler: np.ndarray

    @classmethod
    def of(cls, table: TokenTable, encode: Callable[[str], list[int]]) -> Words:
        """The words of a vocabulary.

        Raises:
          ValueError: no token is a plain word.
        """
        filler = [
            i
            for i in range(len(table))
            if table.known[i] and not table.special[i] and _FILLER.fullmatch(table.bytes_of(i))
        ]
        if not filler:
            raise ValueError("the vocabulary has no token of letters, which filler is made of")
        return cls(encode, np.array(filler, np.int32))

    @classmethod
    def from_tokenizer(cls, table: TokenTable, tokenizer: Any) -> Words:
        """The words of a Hugging Face tokenizer, whose table is given."""
        return cls.of(table, lambda text: tokenizer.encode(text, add_special_tokens=False))


def transcript(
    words: Words, count: int, chunks: int, seed: int = 0, mix: Mix = EXPECTED
) -> tuple[int, ...]:
    """Token ids of a response: GLOBAL text, a block of FOCUS on two chunks or of LOCAL, and so on.

    Each block is as long as it takes to have the mix up to there, give or take a random part.

    Args:
      words: what it is made of.
      count: tokens.
      chunks: chunks of the prompt, at least 2.
      seed: of filler, chunk numbers and lengths.
      mix: what share is what.

    Raises:
      ValueError: fewer than 2 chunks, or tags of so many tokens that there is no room for GLOBAL.
    """
    if chunks < 2:
        raise ValueError(f"{chunks} chunks; a transcript focuses on two, so give at least 2")
    rng = np.random.default_rng(seed)
    cycle = 4 / mix.tags  # two blocks, each with an opener and a closer
    openers = len(words.encode(_focus(chunks - 1, chunks))) + len(words.encode("<local>"))
    if openers > mix.modes[Mode.GLOBAL] * cycle:
        raise ValueError(
            f"a focus and a local tag take {openers} tokens here, but GLOBAL has only "
            f"{mix.modes[Mode.GLOBAL] * cycle:.0f} of {cycle:.0f}; give a mix with fewer tags"
        )
    ids: list[int] = []
    due, written = dict.fromkeys(Mode, 0.0), dict.fromkeys(Mode, 0)
    turn = int(rng.integers(2))
    while len(ids) < count:
        block = Mode.FOCUS if turn % 2 else Mode.LOCAL
        turn += 1
        numbers = np.sort(rng.choice(chunks, 2, replace=False)) + 1
        opener = _focus(*numbers.tolist()) if block is Mode.FOCUS else "<local>"
        due[Mode.GLOBAL] += mix.modes[Mode.GLOBAL] * cycle / 2
        due[block] += mix.modes[block] * cycle
        for mode, tag in ((Mode.GLOBAL, opener), (block, f"</{block.value}>")):
            end = words.encode(tag)
            wish = (due[mode] - written[mode]) * rng.uniform(1 - _JITTER, 1 + _JITTER)
            filler = max(round(wish) - len(end), 0)
            ids += [*rng.choice(words.filler, filler).tolist(), *end]
            written[mode] += filler + len(end)
    return tuple(ids[:count])


def mix_of(steps: Iterable[Step], ids: Iterable[int], table: TokenTable) -> Mix:
    """The mix that a response really has: its decode steps, and its tokens that hold a `>`."""
    modes = Counter(step.mode for step in steps)
    total = max(sum(modes.values()), 1)
    ends = [b">" in table.bytes_of(i) for i in ids]
    return Mix({mode: modes[mode] / total for mode in Mode}, sum(ends) / max(len(ends), 1))


def _focus(first: int, second: int) -> str:
    return f'<focus magic_chunks="{first},{second}">'


_PIECES = (
    "<focus", " magic", "_chunks", '="', '">', ",", "</focus", "<local", "</local", ">",
    *map(str, range(10)),
)  # fmt: skip
_SPLIT = re.compile("|".join(map(re.escape, sorted(_PIECES, key=len, reverse=True))))


def synthetic(size: int) -> tuple[TokenTable, Words]:
    """A vocabulary of so many ids without a tokenizer: the pieces of the tags, and words.

    Raises:
      ValueError: too small to hold them.
    """
    if size <= len(_PIECES):
        raise ValueError(f"a vocabulary of {size} ids; it needs more than {len(_PIECES)}")
    letters = "abcdefghij"
    fill = (
        " " + "".join(letters[int(digit)] for digit in str(i)) for i in range(len(_PIECES), size)
    )
    table = TokenTable([piece.encode() for piece in (*_PIECES, *fill)])
    place = {piece: i for i, piece in enumerate(_PIECES)}
    return table, Words.of(table, lambda text: [place[piece] for piece in _SPLIT.findall(text)])
