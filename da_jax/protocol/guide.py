"""Masks of the tokens that may be chosen, so that every tag that is written is one to honour.

A token is judged as a whole: what it adds to an open tag must be legal (see `Grammar`), and so must
what follows the tag's ``>`` in the same token. Nothing is masked in code, and in plain text only a
token that by itself spells the beginning of a tag that cannot be honoured.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from da_jax.protocol.grammar import NEEDED, SPACE, Grammar, Phase, State
from da_jax.protocol.tags import _HEADS as HEADS
from da_jax.protocol.tags import _SLACK as SLACK
from da_jax.protocol.tags import Candidate

_HEAD = re.compile("</?(?:focus|local|answer|global)")
_TAILS = frozenset(head[at:] for head in HEADS for at in range(1, len(head)))
_BEGINNINGS = frozenset(head[:at] for head in HEADS for at in range(1, len(head)))
_ATTRIBUTE = "magic_chunks"
_PIECES = {_ATTRIBUTE[a:b] for a in range(len(_ATTRIBUTE)) for b in range(a + 1, 13)}
_PART = re.compile(
    rf"(?:{'|'.join(sorted(_TAILS, key=len, reverse=True))})?"
    rf"[{SPACE}]*+(?:{'|'.join(sorted(_PIECES, key=len, reverse=True))})?[{SPACE}]*+=?[{SPACE}]*+"
    rf"""["']?[0-9,\-{SPACE}]*+["']?[{SPACE}]*+(>.*)?""",
    re.DOTALL,
)
_MOST_MASKS = 256
_MOST_GRAMMARS = 8


class Guides:
    """Makes the guides of responses; what depends on the vocabulary alone is read once.

    Args:
      tokens: the bytes of each token id; empty where an id has no token.
      vocabulary: size of the logits; tokens beyond it are never chosen.

    Raises:
      ValueError: the vocabulary cannot write every character of a tag by itself.
    """

    def __init__(self, tokens: Iterable[bytes], vocabulary: int) -> None:
        # In tags all is ASCII, and Latin-1 keeps each byte a character of its own.
        texts = [token.decode("latin-1") for token in tokens][:vocabulary]
        self._index = _Index(texts, vocabulary)
        self._masks = functools.lru_cache(_MOST_GRAMMARS)(functools.partial(_Masks, self._index))
        self.check(())

    def check(self, stop_ids: Iterable[int]) -> None:
        """Refuses stop tokens without which some tag cannot be written.

        Raises:
          ValueError: with the character that is missing.
        """
        self._index.quotes(frozenset(stop_ids))

    def guide(
        self, ids: Sequence[int], *, max_ids: int | None = None, stop_ids: Iterable[int] = ()
    ) -> Guide:
        """A guide for one response.

        Args:
          ids: ids of the chunks, ascending and positive.
          max_ids: most ids that one ``<focus>`` may name; None for no limit. As in the scanner.
          stop_ids: tokens that end the response; none of them can be chosen in a tag.

        Raises:
          ValueError: as in `check`.
        """
        ids = ids if isinstance(ids, range) else tuple(ids)
        return Guide(self._masks(ids, max_ids, frozenset(stop_ids)))


class Guide:
    """Follows the open tag of one response.

    Masks are uint32 [ceil(V / 32)], read-only: token ``i`` may be chosen where bit ``i % 32`` of
    word ``i // 32`` is set, counted from the least significant one.
    """

    def __init__(self, masks: _Masks) -> None:
        self._masks = masks
        self._start = self._read = -1
        self._state: State | None = None

    def allowed(self, candidate: Candidate | None) -> np.ndarray | None:
        """The tokens that may be chosen next; None for all of them.

        Args:
          candidate: `TagScanner.candidate`, or None where bytes are pending that end it.
        """
        masks = self._masks
        if candidate is None or candidate.quoted:
            return masks.text
        if candidate.text in _BEGINNINGS:
            return masks.name(candidate.text, candidate.room)
        state = self._follow(candidate)
        if state is None or masks.grammar.need(state) > candidate.room:
            return masks.text  # it was forced, and is declined at its end
        return masks.tag(state, candidate.room)

    def _follow(self, candidate: Candidate) -> State | None:
        """The state of a candidate whose name is complete; None if it cannot be honoured."""
        text = candidate.text
        if candidate.start != self._start:
            head = _HEAD.match(text)
            self._start, self._read = candidate.start, head.end() if head else 0
            self._state = self._masks.grammar.start(head.group()) if head else None
        for char in text[self._read :]:
            self._state = self._state and self._masks.grammar.step(self._state, char)
        self._read = len(text)
        return self._state


class _Node:
    """A place in a trie of tokens: what may follow, and the ids that end here."""

    __slots__ = ("children", "ids")

    def __init__(self) -> None:
        self.children: dict[str, _Node] = {}
        self.ids: list[int] = []

    def at(self, text: str, *, grow: bool = False) -> _Node | None:
        """The node that `text` leads to."""
        node: _Node | None = self
        for char in text:
            assert node is not None
            after = node.children.get(char)
            if after is None and grow:
                after = node.children[char] = _Node()
            if after is None:
                return None
            node = after
        return node


class _Index:
    """The tokens that matter to tags.

    Attributes:
      texts: every token.
      words: words of a mask.
      root: trie of the tokens that may stand in a tag or end it, each up to its first ``>``.
      depth: length of the longest of them.
      spelled: ids of the tokens that hold a whole head.
      begins: for each end of a head, ids of the tokens that are equal to it, and of those that
        begin with it and go on.
    """

    def __init__(self, texts: list[str], vocabulary: int) -> None:
        self.texts, self.words = texts, -(-vocabulary // 32)
        self.root, self.depth = _Node(), 0
        self.spelled: list[int] = []
        self.begins: dict[str, tuple[list[int], list[int]]] = {tail: ([], []) for tail in _TAILS}
        tails: dict[str, list[str]] = {}
        for tail in _TAILS:
            tails.setdefault(tail[0], []).append(tail)
        for index, text in enumerate(texts):
            for tail in tails.get(text[:1], ()):
                if text.startswith(tail):
                    self.begins[tail][len(text) > len(tail)].append(index)
            if text and (found := _PART.fullmatch(text)):
                part = text[: found.start(1) + 1] if found[1] else text
                node = self.root.at(part, grow=True)
                assert node is not None
                node.ids.append(index)
                self.depth = max(self.depth, len(part))
            if "<" in text and _HEAD.search(text):
                self.spelled.append(index)
        self._single = {
            char: [i for i in node.ids if texts[i] == char]
            for char, node in self.root.children.items()
        }

    def quotes(self, stop_ids: frozenset[int]) -> str:
        """The quotes that the vocabulary can close, without its stop tokens.

        Raises:
          ValueError: a character that is needed cannot be written by itself.
        """
        writable = {c for c, ids in self._single.items() if not stop_ids.issuperset(ids)}
        for name, choice in NEEDED.items():
            if writable.isdisjoint(choice):
                what = name if len(choice) > 1 else repr(choice)
                if any(self._single.get(char) for char in choice):
                    why = f"stop_token_ids holds the only tokens that write {what}"
                    raise ValueError(f"{why}, which tags need; do not stop at it, or do not guide")
                why = f"the vocabulary has no token that writes {what} alone"
                raise ValueError(f"{why}, which tags need; use guided=False with this tokenizer")
        return "".join(sorted(writable.intersection("\"'")))

    def pack(self, ids: Collection[int]) -> np.ndarray:
        """The mask, uint32 [words], that holds `ids`."""
        mask = np.zeros(self.words, np.uint32)
        at = np.fromiter(ids, np.int64, len(ids))
        np.bitwise_or.at(mask, at // 32, np.uint32(1) << (at % 32).astype(np.uint32))
        return mask


class _Masks:
    """The masks of one grammar, each made when it is first asked for.

    Attributes:
      grammar: the grammar.
      text: mask of plain text; None if every token may be chosen there.
    """

    def __init__(
        self,
        index: _Index,
        ids: Sequence[int],
        max_ids: int | None,
        stop_ids: frozenset[int],
    ) -> None:
        self.grammar = Grammar(ids, max_ids=max_ids, quotes=index.quotes(stop_ids))
        self._index = index
        known = [i for i in stop_ids if 0 <= i < 32 * index.words]
        self._stops = index.pack(known)
        wrong = [i for i in index.spelled if i not in stop_ids and not self._is_text(i)]
        self._plain = ~index.pack(wrong)
        self._plain.flags.writeable = False
        self.text = self._plain if wrong else None
        self._enough = index.depth + self.grammar.longest_need
        self._name = functools.lru_cache(_MOST_MASKS)(self._make_name)
        self._tag = functools.lru_cache(_MOST_MASKS)(self._make_tag)

    def name(self, read: str, room: int) -> np.ndarray:
        """Mask where `read` is the beginning of a head, and `room` characters may follow."""
        return self._name(read, min(room, self._enough + len("/answer")))

    def tag(self, state: State, room: int) -> np.ndarray:
        """Mask within a tag, of which `room` characters may follow."""
        return self._tag(state, min(room, self._enough))

    def _make_name(self, read: str, room: int) -> np.ndarray:
        index, wrong, right = self._index, list[int](), list[int]()
        for head in HEADS:
            if not head.startswith(read):
                continue
            tail, state = head[len(read) :], self.grammar.start(head)
            complete, longer = index.begins[tail]
            wrong += longer
            if state is None:
                wrong += complete
            elif (node := index.root.at(tail)) is not None:
                right += self._after(node, state, room - len(tail))
        mask = self._plain & (~index.pack(wrong) | index.pack(right) | self._stops)
        mask.flags.writeable = False
        return mask

    def _make_tag(self, state: State, room: int) -> np.ndarray:
        right = self._after(self._index.root, state, room)
        mask = self._plain & self._index.pack(right) & ~self._stops
        mask.flags.writeable = False
        return mask

    def _after(self, node: _Node, state: State, room: int) -> list[int]:
        """Ids of the tokens below `node` that are legal after `state`."""
        step, need = self.grammar.step, self.grammar.need
        ids, open_ = list[int](), [(node, state, room - 1)]
        while open_:
            node, state, left = open_.pop()
            for char, child in node.children.items():
                after = step(state, char)
                if after is not None and need(after) <= left:
                    ids += child.ids
                    if child.children and after.phase is not Phase.END:
                        open_.append((child, after, left - 1))
        return ids

    def _is_text(self, index: int) -> bool:
        """Whether every tag in a token that begins in plain text is legal, or may become so."""
        text, end = self._index.texts[index], 0
        while head := _HEAD.search(text, end):
            end, start = head.end(), head.start()
            state = self.grammar.start(head.group())
            while state is not None and state.phase is not Phase.END and end < len(text):
                state = self.grammar.step(state, text[end])
                end += 1
            if state is None or end - start + self.grammar.need(state) > SLACK:
                return False
        return True
