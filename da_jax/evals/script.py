"""A response with declarations, and what each of its steps must see by the protocol alone.

The modes are known because the response is put together from pieces, each with the mode that holds
after it: neither the tag scanner of the engine nor its views have a part in it.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from da_jax.bench.transcript import Words
from da_jax.engine.llm import LLM
from da_jax.protocol.modes import Mode
from da_jax.protocol.prompt import PromptMap
from da_jax.protocol.visibility import visible_spans

State = tuple[Mode, tuple[int, ...]]
WIDE: State = (Mode.GLOBAL, ())
CHUNKS = 4
_PAGES = 2.5  # of a chunk: hidden ones then hide whole pages, and parts of others
_BLOCKS: tuple[tuple[str, str, State], ...] = (
    ('<focus magic_chunks="2">', "</focus>", (Mode.FOCUS, (2,))),
    ("<local>", "</local>", (Mode.LOCAL, ())),
    ('<focus magic_chunks="1,3-4">', "</focus>", (Mode.FOCUS, (1, 3, 4))),
)
_BEFORE, _NARROW, _BETWEEN = 6, 12, 4  # tokens of filler


@dataclasses.dataclass(frozen=True)
class Document:
    """Text of words that the model has.

    Attributes:
      chunks: what the caller gives as chunks.
      question: some words.
    """

    chunks: tuple[str, ...]
    question: str


@dataclasses.dataclass(frozen=True)
class Script:
    """A response with three narrow blocks.

    Attributes:
      ids: its tokens.
      states: mode and focus in force when each of them is fed, which is after it was read.
    """

    ids: tuple[int, ...]
    states: tuple[State, ...]

    @functools.cached_property
    def chosen_under(self) -> tuple[State, ...]:
        """Mode and focus in force while each token is chosen."""
        return WIDE, *self.states[:-1]

    @property
    def blocks(self) -> list[range]:
        """The tokens that were chosen in each narrow block."""
        found, start = [], 0
        for i, state in enumerate((*self.chosen_under[1:], None), 1):
            if state != self.chosen_under[start]:
                found.append(range(start, i))
                start = i
        return [block for block in found if self.chosen_under[block[0]] != WIDE]

    def visible(self, prompt: PromptMap, position: int, size: int) -> np.ndarray:
        """What full attention may see when the token at a position is fed; bool [size].

        The prompt sees all of itself; tokens of the response see all tokens of the response. That
        nobody sees later tokens is left to the operation.
        """
        state = self.states[position - len(prompt)] if position >= len(prompt) else WIDE
        seen = np.zeros(size, bool)
        for start, end in visible_spans(prompt, *state):
            seen[start:end] = True
        seen[len(prompt) :] = True
        return seen

    def masks(self, prompt: PromptMap) -> tuple[list[np.ndarray], np.ndarray]:
        """The few masks of the whole sequence of T tokens.

        Returns:
          (bool [T] masks as of `visible`, int32 [T] which of them holds while a token is fed).
        """
        total = len(prompt) + len(self.ids)
        states = dict.fromkeys([WIDE, *self.states])
        number = {state: i for i, state in enumerate(states)}
        which = np.array([0] * len(prompt) + [number[state] for state in self.states], np.int32)
        firsts = [int(np.flatnonzero(which == i)[0]) for i in range(len(states))]
        return [self.visible(prompt, first, total) for first in firsts], which


def write(llm: LLM, seed: int = 0) -> tuple[Document, Script]:
    """Makes a document and a response for a model.

    Raises:
      ValueError: its tokenizer cannot write the tags, or has no words.
    """
    engine, rng = llm.engine, np.random.default_rng(seed)
    table = engine.table
    encode = lambda text: llm.tokenizer.encode(text, add_special_tokens=False)
    words = Words.from_tokenizer(table, llm.tokenizer).filler

    def text(tokens: float) -> str:
        found = ""
        while len(encode(found)) < tokens:
            some = rng.choice(words, 4).tolist()
            found += " ".join(["", *(table.bytes_of(i).decode().strip() for i in some)])
        return found.strip()

    ids: list[int] = []
    states: list[State] = []

    def add(piece: list[int], before: State, after: State) -> None:
        ids.extend(piece)
        states.extend([*[before] * (len(piece) - 1), after])

    filler = lambda count: rng.choice(words, count).tolist()
    add(filler(_BEFORE), WIDE, WIDE)
    for opener, closer, state in _BLOCKS:
        for tag, before, after in ((opener, WIDE, state), (closer, state, WIDE)):
            piece = encode(tag)
            if b"".join(map(table.bytes_of, piece)).decode(errors="replace").strip() != tag:
                raise ValueError(f"the tokenizer cannot write {tag}, so nothing can be declared")
            add(piece, before, after)
            add(filler(_BETWEEN if after == WIDE else _NARROW), after, after)
    chunks = tuple(text(_PAGES * engine.config.page_size) for _ in range(CHUNKS))
    return Document(chunks, text(4)), Script(tuple(ids), tuple(states))
