"""Documents of the second training step: topics, links, and keys that occur twice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from da_jax.checkpoints.tiny import language as lang
from da_jax.checkpoints.tiny.language import Fact, pick

PASS = "pass"
"""The key of the pass key; its value is a number."""

TOPICS = ("story", "needle", "pairs", "meeting", "code", "dialogue", "repeats", "chains", "people")
"""What documents are made of; ``mixed`` draws each line from any of them."""

MAX_FACTS = 360
"""Most facts of a document: there are 400 keys."""


@dataclass(frozen=True)
class Scene(lang.Document):
    """A document with links and repeated keys; ``facts`` are the unique keys with a value.

    Attributes:
        topic: what its lines are made of.
        links: key to the fact whose value is another key.
        repeated: key to its two mentions, in the order of the text.
    """

    topic: str = "story"
    links: Mapping[str, Fact] = field(default_factory=dict)
    repeated: Mapping[str, tuple[Fact, Fact]] = field(default_factory=dict)

    @property
    def keys(self) -> set[str]:
        """Every key in the text."""
        return {*self.facts, *self.links, *self.repeated}

    def path(self, key: str) -> list[Fact]:
        """The facts from a key along its links to a value."""
        found = []
        while key in self.links:
            found.append(self.links[key])
            key = found[-1].value
        return [*found, self.facts[key]]


@dataclass
class _Draft:
    """Lines with places for facts: ``k5`` and ``v5`` stand for key and value of slot 5."""

    rng: np.random.Generator
    slots: list[tuple[int, str]] = field(default_factory=list)  # (chunk, family)

    def slot(self, chunk: int, family: str) -> tuple[str, str]:
        """A new place for a fact."""
        self.slots.append((chunk, family))
        return f"k{len(self.slots) - 1}", f"v{len(self.slots) - 1}"

    def sentence(self, family: str, pair: tuple[str, str] | None) -> list[str]:
        """Pieces of a sentence; the first has no space before it."""
        rng = self.rng
        if pair is None or family in ("story", "needle", "repeats", "chains"):
            return lang.sentence(rng, pair)
        place = [
            f" {pick(rng, lang.PREPS)}",
            f" {pick(rng, lang.DETS)}",
            f" {pick(rng, lang.NOUNS)}",
        ]
        tail = place if rng.random() < 0.5 else []
        fact = [f" {pair[0]}=", pair[1]]
        if family == "meeting":
            return ["Item", *fact, " owner", *tail, "."]
        if family == "code":
            return ["def", *fact, ";", " return", *tail, "."]
        verb = {"dialogue": " said", "people": pick(rng, (" went", " took"))}[family]
        return ["Then", *fact, verb, *tail, "."]

    def line(self, chunk: int, family: str, facts: int) -> tuple[str, ...]:
        """A line of 11 to 20 tokens with its newline."""
        if family == "pairs" and facts:
            pieces: list[str] = []
            for _ in range(int(self.rng.integers(4, 7))):
                key, value = self.slot(chunk, family)
                pieces += [f" {key}=", value, ","]
            return (*pieces[:-1], ".", "\n")
        pairs = [self.slot(chunk, family) for _ in range(facts)]
        return self._filled([(family, pair) for pair in pairs])

    def _filled(self, wanted: list[tuple[str, tuple[str, str]]]) -> tuple[str, ...]:
        """The sentences for the facts in any order, with others between them up to a length."""
        rng = self.rng
        target = int(rng.integers(lang.LINE_MIN, lang.LINE_MAX))
        sentences: list[list[str]] = []
        size = lang.LINE_MAX
        while size > lang.LINE_MAX - 1:
            sentences = [self.sentence(*want) for want in wanted]
            size = sum(map(len, sentences))
        while size + len(extra := self.sentence("story", None)) <= target or (
            size < lang.LINE_MIN - 1
        ):
            if size + len(extra) < lang.LINE_MAX:
                sentences.append(extra)
                size += len(extra)
        pieces: list[str] = []
        for i in rng.permutation(len(sentences)):
            first, *rest = sentences[int(i)]
            pieces += [f" {first}", *rest] if pieces else [first, *rest]
        return (*pieces, "\n")


def make_scene(
    rng: np.random.Generator,
    topic: str,
    chunks: int,
    *,
    held_out: bool,
    max_tokens: int | None = None,
    wrapped: bool = True,
) -> Scene:
    """Draws a document of up to ``chunks`` chunks.

    Args:
        rng: the source of randomness.
        topic: one of ``TOPICS``, or ``mixed``.
        chunks: number of chunks.
        held_out: as for ``language.make_document``; links are pairs too.
        max_tokens: stop before the chunks exceed this many tokens.
        wrapped: count the chunks as they are rendered, not their text alone.
    """
    draft = _Draft(rng)
    written: list[tuple[str, ...]] = []
    needles = {int(i) for i in rng.permutation(chunks)[: int(rng.integers(1, 4))]}
    size = 0
    for number in range(1, chunks + 1):
        family = pick(rng, TOPICS) if topic == "mixed" else topic
        facts = 1 if rng.random() < 0.65 else 2
        if topic == "needle":
            facts = 1 if number - 1 in needles else 0
        if len(draft.slots) > MAX_FACTS - 6:
            facts = 0
        before = len(draft.slots)
        pieces = draft.line(number, family, facts)
        size += len(lang.prompt_chunk(number, pieces)) if wrapped else len(pieces)
        if written and max_tokens is not None and size > max_tokens:
            del draft.slots[before:]
            break
        written.append(pieces)
    if rng.random() < 0.5:
        written[-1] = written[-1][:-1]
    return _filled_in(rng, topic, written, draft.slots, held_out)


class _Pairs:
    """Draws keys, each once, and what fits them on one side of the held-out split."""

    def __init__(self, rng: np.random.Generator, held_out: bool):
        self.rng, self.held_out = rng, held_out
        self._free = [int(i) for i in rng.permutation(len(lang.KEYS))]

    def key(self, after: int | None = None) -> int:
        """A new key; one that may follow the key ``after`` by a link."""
        for place, i in enumerate(self._free):
            if after is None or ((i + after) % lang.HELD_OUT_EVERY == 0) == self.held_out:
                return self._free.pop(place)
        raise AssertionError("a document has more facts than there are keys")

    def value(self, key: int, but: str = "") -> str:
        """A value of the key, another than ``but``."""
        long = bool(self.rng.random() < 0.6)
        values = lang.VALUE_TABLE[self.held_out, long, key % lang.HELD_OUT_EVERY]
        return pick(self.rng, [value for value in values if value != but])

    def number(self) -> str:
        """A number for the pass key."""
        fits = [
            n for n in range(1, lang.MAX_ID + 1) if (n % lang.HELD_OUT_EVERY == 0) == self.held_out
        ]
        return f"{pick(self.rng, fits)}"


REPEATED = {"repeats": 0.8, "mixed": 0.25}
LINKED = {"chains": 0.8, "people": 0.8, "mixed": 0.3}
"""Share of the facts that become mentions of one key, and links with what they lead to."""


class _Filling:
    """Gives keys and values to the places of a document.

    Args:
        rng: the source of randomness.
        slots: (chunk, family) of each place.
        held_out: which side of the split pairs come from.
    """

    def __init__(self, rng: np.random.Generator, slots: list[tuple[int, str]], held_out: bool):
        self.rng, self.slots, self.pairs = rng, slots, _Pairs(rng, held_out)
        self.free = [int(i) for i in rng.permutation(len(slots))]
        self.facts: dict[str, Fact] = {}
        self.links: dict[str, Fact] = {}
        self.repeated: dict[str, tuple[Fact, Fact]] = {}
        self.pieces: dict[str, str] = {}

    def _put(self, slot: int, key: str, value: str, link: bool = False) -> Fact:
        self.pieces[f" k{slot}="] = f" {key}="
        self.pieces[f"v{slot}"] = f" {value}=" if link else value
        return Fact(key, value, self.slots[slot][0])

    def _take(self, size: int) -> list[int]:
        """Takes places in different chunks; fewer if there are no more."""
        taken: list[int] = []
        for slot in self.free:
            chunks = {self.slots[other][0] for other in taken}
            if self.slots[slot][0] not in chunks and len(taken) < size:
                taken.append(slot)
        for slot in taken:
            self.free.remove(slot)
        return taken

    def place_pass_key(self, always: bool) -> None:
        """Writes the pass key, always or half of the time."""
        (slot,) = self._take(1)
        if always or self.rng.random() < 0.5:
            self.facts[PASS] = self._put(slot, PASS, self.pairs.number())
        else:
            self.free.append(slot)

    def repeat(self, share: float) -> None:
        """Makes a share of the places mentions of keys that occur twice."""
        total = len(self.free)
        while len(self.free) > total * (1 - share) and len(self.free) > 1:
            taken = sorted(self._take(2))
            if len(taken) < 2:
                self.free.extend(taken)
                break
            key = self.pairs.key()
            name = lang.KEYS[key]
            first = self._put(taken[0], name, self.pairs.value(key))
            second = self._put(taken[1], name, self.pairs.value(key, but=first.value))
            self.repeated[name] = (first, second)

    def link(self, share: float, *, long: bool) -> None:
        """Makes a share of the places links and what they lead to, some over two links."""
        total = len(self.free)
        while len(self.free) > total * (1 - share) and len(self.free) > 1:
            taken = self._take(2 if not long or self.rng.random() < 0.6 else 3)
            key = self.pairs.key()
            for slot in taken[:-1]:
                follower = self.pairs.key(after=key)
                name = lang.KEYS[key]
                self.links[name] = self._put(slot, name, lang.KEYS[follower], link=True)
                key = follower
            if taken:
                name = lang.KEYS[key]
                self.facts[name] = self._put(taken[-1], name, self.pairs.value(key))
            if len(taken) < 2:
                break

    def rest(self) -> None:
        """Gives all other places a fact of their own."""
        for slot in self.free:
            key = self.pairs.key()
            name = lang.KEYS[key]
            self.facts[name] = self._put(slot, name, self.pairs.value(key))


def _filled_in(
    rng: np.random.Generator,
    topic: str,
    written: list[tuple[str, ...]],
    slots: list[tuple[int, str]],
    held_out: bool,
) -> Scene:
    """The document, with a key and a value in every place."""
    filling = _Filling(rng, slots, held_out)
    if filling.free and (topic == "needle" or (topic == "mixed" and rng.random() < 0.5)):
        filling.place_pass_key(always=topic == "mixed")
    filling.repeat(REPEATED.get(topic, 0.0))
    filling.link(LINKED.get(topic, 0.0), long=topic != "people")
    filling.rest()
    pieces = filling.pieces
    lines = tuple(tuple(pieces.get(piece, piece) for piece in line) for line in written)
    return Scene(lines, filling.facts, topic, filling.links, filling.repeated)
