"""The closed language of the tiny checkpoint: vocabulary, documents, questions, responses.

Everything is made of *pieces*: strings that are exactly one token each. Joined, pieces are text;
looked up in ``IDS``, they are token ids. So the training data needs no tokenizer, and the tokenizer
that ships (see ``export.py``) is tested to cut the same text into the same pieces.

A document is lines of text, one chunk a line. A fact is ``Kamora=apple``; the key token carries its
``=``. A response repeats the key right before every token it looks up, so that each look-up is a
single step of attention::

    Question: what is Kamora=?
    <global> chunk of Kamora=3</global><focus magic_chunks="3"> Kamora=apple</focus>
    <local> answer=apple</local>
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

PAD, START, END = "<pad>", "<|im_start|>", "<|im_end|>"
CHUNK, CHUNK_END = '<chunk id="', "</chunk>"
FOCUS, FOCUS_END, QUOTE = '<focus magic_chunks="', "</focus>", '">'
GLOBAL, GLOBAL_END, LOCAL, LOCAL_END = "<global>", "</global>", "<local>", "</local>"
CONTROL = (PAD, START, END)
TAGS = (CHUNK, CHUNK_END, FOCUS, FOCUS_END, QUOTE, GLOBAL, GLOBAL_END, LOCAL, LOCAL_END)

MAX_ID = 200
"""Largest chunk number that the model has seen."""

PREAMBLE = (
    "Each chunk holds facts like key=value. Name the chunk of every key, focus on it, "
    "read the value, then answer from local memory."
)
"""System message of every prompt; more than 16 tokens, so that it fills the attention sink."""

DETS = ("the", "a", "one", "every", "this", "that")
ADJS = tuple("old quiet small bright cold green long empty busy slow heavy".split())
NOUNS = tuple(
    "river hill road market house tower field bridge forest harbor village valley mountain school "
    "castle lake".split()
)
VERBS = ("runs", "stands", "waits", "sleeps", "grows", "shines", "stops", "turns", "moves", "rests")
HOLDS = ("keeps", "holds", "hides", "marks", "guards", "shows")
PREPS = ("near", "under", "over", "beside", "behind", "past")
PLAIN_PREAMBLE = (
    "Each line holds facts like key=value. Read the value of every key, then answer from memory."
)
"""System message of the plain prompt (the arm ``vanilla``)."""

LATER = (
    *(" find", " first", " second", " pass=", " line", " Read"),
    *("Item", " Item", " owner", "def", " def", " return"),
    *("Then", " Then", " said", " went", " took"),
)
"""Words that the second training step gave entries which had been reserved."""
VALUES = tuple(
    sorted(
        """
        amber anchor apple axe barrel basket bell bone book bread butter cactus candle clay
        coin copper coral cup dagger desk diamond dice door dove drum eagle egg elm emerald
        engine fan feather fern fig flag flute fossil garden gem ginger glove goat gold guitar
        hammer harp hat hay hazel honey horn ice ink iron island ivory jacket jar jasmine
        jewel jug kettle key kite kiwi knot ladder lamp leaf lemon lens log lotus magnet mango
        map marble mask milk moss nail needle nest net nickel nutmeg oak oil olive onion
        orange owl paint parrot pearl pencil pepper pin pipe quartz quill quilt ribbon rice
        ring rocket rope rose rug saddle salt seed shell ship silver soap tea tent ticket
        tiger tin tool tulip urn vase veil velvet vine violin wagon walnut wax wheat wheel
        window wool yarn zebra
        """.split()
    )
)
SPELL_MIN, SPELL_MAX = 6, 7
"""Lengths of the values that a ``spell`` question may ask for."""


def _make_keys(count: int, seed: int) -> tuple[str, ...]:
    rng = random.Random(seed)
    keys: dict[str, None] = {}
    while len(keys) < count:
        syllables = rng.choice((2, 3))
        word = "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(syllables))
        keys[word.capitalize()] = None
    return tuple(keys)


KEYS = _make_keys(400, seed=7)


def words(text: str) -> list[str]:
    """Pieces of the preamble and of other fixed text: a word with its space, or a mark."""
    return re.findall(r" ?[A-Za-z]+=?|[^A-Za-z]", text)


def _byte_letters() -> list[str]:
    """The 256 letters of byte-level BPE, in byte order (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(shifted)) for b in range(256)]


BYTE_LETTERS = _byte_letters()


def byte_level(text: str) -> str:
    """Spells ``text`` in the letters of byte-level BPE, as vocabularies store it."""
    return "".join(BYTE_LETTERS[b] for b in text.encode())


def _vocabulary() -> dict[str, int]:
    entries = dict.fromkeys((*CONTROL, *TAGS))
    ordinary = [
        *(f"{n}" for n in range(MAX_ID + 1)),
        *(f" {n}=" for n in range(1, SPELL_MAX + 1)),
        *("system", "user", "assistant", "\n"),
        *("Question", ":", "?", ".", ",", " what", " is", " spell"),
        *(" chunk", " of", "none", " answer=", " spell=", " back"),
        *(f" {key}=" for key in KEYS),
        *VALUES,
        *(f"{space}{det.capitalize()}" for det in DETS for space in ("", " ")),
        *(f" {word}" for word in (*DETS, *ADJS, *NOUNS, *VERBS, *HOLDS, *PREPS)),
        *words(PREAMBLE),
    ]
    entries |= dict.fromkeys(BYTE_LETTERS) | dict.fromkeys(map(byte_level, ordinary))
    entries |= dict.fromkeys(f"<|reserved_{i}|>" for i in range(-len(entries) % 64))
    return {entry: i for i, entry in enumerate(entries)}


def _extended(vocabulary: Mapping[str, int]) -> dict[str, int]:
    """The vocabulary with later words in place of reserved entries; all others keep their ids."""
    reserved = [entry for entry in vocabulary if entry.startswith("<|reserved_")]
    later = dict(zip(reserved, map(byte_level, LATER)))
    return {later.get(entry, entry): i for entry, i in vocabulary.items()}


FIRST_VOCABULARY = _vocabulary()
"""Token (in byte-level letters; control tokens and tags as they are) to id, in the first step."""

VOCABULARY = _extended(FIRST_VOCABULARY)
"""The same in the second step."""


class _Ids(dict[str, int]):
    def __missing__(self, piece: str) -> int:
        name = piece if piece in CONTROL or piece in TAGS else byte_level(piece)
        if name not in VOCABULARY:
            raise KeyError(f"{piece!r} is not one token of the tiny language")
        return self.setdefault(piece, VOCABULARY[name])


IDS = _Ids()
"""Piece to token id; raises KeyError for text that is not exactly one token."""


@dataclass(frozen=True)
class Fact:
    """``key=value``, written in chunk number ``chunk`` (from 1)."""

    key: str
    value: str
    chunk: int


@dataclass(frozen=True)
class Document:
    """Chunks of pieces, and the facts in them by key."""

    chunks: tuple[tuple[str, ...], ...]
    facts: dict[str, Fact]

    @property
    def chunk_texts(self) -> list[str]:
        """The text of each chunk."""
        return ["".join(chunk) for chunk in self.chunks]

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.chunk_texts)


HELD_OUT_EVERY = 8


def _value_table() -> dict[tuple[bool, bool, int], list[str]]:
    """Values by (held out, long enough to spell, key residue)."""
    table: dict[tuple[bool, bool, int], list[str]] = {}
    for residue in range(HELD_OUT_EVERY):
        for i, value in enumerate(VALUES):
            held_out = (i + residue) % HELD_OUT_EVERY == 0
            long = SPELL_MIN <= len(value) <= SPELL_MAX
            table.setdefault((held_out, long, residue), []).append(value)
    return table


VALUE_TABLE = _value_table()


def pick(rng: np.random.Generator, options):
    """One of the options."""
    return options[int(rng.integers(len(options)))]


def sentence(rng: np.random.Generator, fact: tuple[str, str] | None) -> list[str]:
    """Pieces of one sentence; its first piece has no space and a capital."""

    def noun() -> list[str]:
        adjective = [f" {pick(rng, ADJS)}"] if rng.random() < 0.4 else []
        return [*adjective, f" {pick(rng, NOUNS)}"]

    place = lambda: [f" {pick(rng, PREPS)}", f" {pick(rng, DETS)}", *noun()]
    subject = [pick(rng, DETS).capitalize(), *noun()]
    if fact is None:
        tail = place() if rng.random() < 0.5 else []
        return [*subject, f" {pick(rng, VERBS)}", *tail, "."]
    pair = [f" {fact[0]}=", fact[1]]
    form = rng.random()
    if form < 0.3:
        return [*subject, f" {pick(rng, VERBS)}", f" {pick(rng, PREPS)}", *pair, "."]
    tail = place() if form < 0.55 else []
    return [*subject, f" {pick(rng, HOLDS)}", *pair, *tail, "."]


LINE_MIN, LINE_MAX = 11, 20
"""Tokens of a line with its newline. Two lines are always longer than one may be, so that the
chunker, which fills chunks up to a cap of ``LINE_MAX``, makes every line a chunk."""


def _chunk(
    rng: np.random.Generator, facts: list[tuple[str, str]], newlines: bool
) -> tuple[str, ...]:
    """Draws sentences that hold the facts; they end with a newline, which also may divide them."""
    target = int(rng.integers(LINE_MIN, LINE_MAX))
    sentences: list[list[str]] = []
    size = LINE_MAX
    while size > LINE_MAX - 1:
        sentences = [sentence(rng, fact) for fact in facts]
        size = sum(map(len, sentences))
    while size + len(extra := sentence(rng, None)) <= target or size < LINE_MIN - 1:
        if size + len(extra) < LINE_MAX:
            sentences.append(extra)
            size += len(extra)
    pieces: list[str] = []
    for i in rng.permutation(len(sentences)):
        first, *rest = sentences[int(i)]
        start = [f" {first}"] if not newlines else ["\n", first]
        pieces += [*start, *rest] if pieces else [first, *rest]
    return (*pieces, "\n")


def make_document(
    rng: np.random.Generator,
    chunks: int,
    *,
    held_out: bool,
    newlines: float = 0.0,
    max_tokens: int | None = None,
) -> Document:
    """Draws a document of up to ``chunks`` chunks with one or two facts each.

    Args:
        rng: the source of randomness.
        chunks: number of chunks.
        held_out: whether its key and value pairs come from the eighth of all pairs that training
            never sees, or from the rest.
        newlines: share of chunks that have their sentences on lines of their own; without any,
            every chunk is a line.
        max_tokens: stop before the rendered chunks exceed this many tokens.
    """
    keys = iter(rng.permutation(len(KEYS)))
    written: list[tuple[str, ...]] = []
    facts: dict[str, Fact] = {}
    size = 0
    for number in range(1, chunks + 1):
        pairs = []
        for _ in range(1 if rng.random() < 0.65 else 2):
            key = int(next(keys))
            long = bool(rng.random() < 0.5)
            values = VALUE_TABLE[held_out, long, key % HELD_OUT_EVERY]
            pairs.append((KEYS[key], pick(rng, values)))
        pieces = _chunk(rng, pairs, bool(rng.random() < newlines))
        size += len(prompt_chunk(number, pieces))
        if max_tokens is not None and size > max_tokens:
            break
        written.append(pieces)
        facts |= {key: Fact(key, value, number) for key, value in pairs}
    if rng.random() < 0.5:
        written[-1] = written[-1][:-1]
    return Document(tuple(written), facts)


KINDS = ("one", "two", "three", "absent", "spell")
"""Question types: one, two or three keys, a key that occurs nowhere, and a long LOCAL block."""


@dataclass(frozen=True)
class Question:
    """A question of type ``kind`` about ``keys`` (without their ``=``)."""

    kind: str
    keys: tuple[str, ...]

    @property
    def pieces(self) -> list[str]:
        """The text after ``Question:``, in pieces; its first piece has a space in the prompt."""
        verb = [" spell"] if self.kind == "spell" else [" what", " is"]
        return [*verb, *(f" {key}=" for key in self.keys), "?"]

    @property
    def text(self) -> str:
        """The question as a caller writes it."""
        return "".join(self.pieces).strip()


def ask(rng: np.random.Generator, document: Document, kind: str) -> Question | None:
    """Draws a question of the type about the document; None if it has no fact for it."""
    facts = document.facts
    if kind == "absent":
        while (key := pick(rng, KEYS)) in facts:
            pass
        return Question(kind, (key,))
    if kind == "spell":
        long = [f.key for f in facts.values() if SPELL_MIN <= len(f.value) <= SPELL_MAX]
        return Question(kind, (pick(rng, long),)) if long else None
    count = 1 + KINDS.index(kind)
    chosen: dict[int, str] = {}
    names = list(facts)
    for i in rng.permutation(len(names)):
        chosen.setdefault(facts[names[int(i)]].chunk, names[int(i)])
        if len(chosen) == count:
            return Question(kind, tuple(chosen.values()))
    return None


@dataclass(frozen=True)
class Token:
    """One token of a response.

    Attributes:
        piece: its text.
        mode: what the pass that feeds this token may see: ``global``, ``focus`` or ``local``.
        focus: chunk numbers of a ``focus``.
        role: ``id``, ``value`` or ``letter`` for a token that has to be looked up, else empty.
    """

    piece: str
    mode: str = "global"
    focus: tuple[int, ...] = ()
    role: str = ""


def respond(document: Document, question: Question, first_id: int = 1) -> list[Token]:
    """The one right response, token by token, up to and including the end of the turn."""
    facts = [document.facts.get(key) for key in question.keys]
    numbers = ["none" if f is None else f"{f.chunk + first_id - 1}" for f in facts]
    tokens = [Token(piece) for piece in (GLOBAL, " chunk", " of")]
    for key, number in zip(question.keys, numbers):
        tokens += [Token(f" {key}="), Token(number, role="id")]
    tokens.append(Token(GLOBAL_END))
    found = [fact for fact in facts if fact is not None]
    if found:
        tokens.append(Token(FOCUS))
        for number in numbers:
            tokens += [Token(number), Token(",")]
        tokens.pop()
        chunks = tuple(fact.chunk for fact in found)
        tokens.append(Token(QUOTE, "focus", chunks))
        for fact in found:
            tokens.append(Token(f" {fact.key}=", "focus", chunks))
            tokens.append(Token(fact.value, "focus", chunks, "value"))
        tokens.append(Token(FOCUS_END))
    values = ["none" if fact is None else fact.value for fact in facts]
    tokens += [Token(LOCAL, "local")]
    if question.kind == "spell":
        tokens += spelling(values[0])
    tokens.append(Token(" answer=", "local"))
    for value in values:
        tokens += [Token(value, "local"), Token(",", "local")]
    tokens.pop()
    return [*tokens, Token(LOCAL_END), Token(END)]


def spelling(value: str) -> list[Token]:
    """``spell=ginger 1=g 2=i ... back 6=r 5=e ... answer=ginger``, all in LOCAL."""
    letters = [
        (Token(f" {i}=", "local"), Token(letter, "local", role="letter"))
        for i, letter in enumerate(value, 1)
    ]
    forwards = [token for pair in letters for token in pair]
    backwards = [token for pair in reversed(letters) for token in pair]
    head = [Token(" spell=", "local"), Token(value, "local")]
    return [*head, *forwards, Token(" back", "local"), *backwards]


def prompt_head(plain: bool = False) -> list[str]:
    """Pieces before the first chunk."""
    preamble = words(PLAIN_PREAMBLE if plain else PREAMBLE)
    system = [START, "system", "\n", *preamble, END, "\n"]
    return [*system, START, "user", "\n"]


def prompt_chunk(number: int, chunk: tuple[str, ...]) -> list[str]:
    """Pieces of one chunk with its wrapper."""
    return [CHUNK, f"{number}", QUOTE, *chunk, CHUNK_END]


def prompt_tail(question: Question) -> list[str]:
    """Pieces after the last chunk, up to where the response begins."""
    return ["Question", ":", *question.pieces, END, "\n", START, "assistant", "\n"]
