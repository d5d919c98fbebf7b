"""What the second training step adds to the language: documents, questions, responses.

Documents of several topics hold unique facts, links (``Kamora= Sero=``, a key whose value is
another key) and keys that are mentioned twice. ``find`` asks for the value at the end of the links,
``read`` for the same and its letters. A response writes little under GLOBAL: the key and its
chunk's number, and the next hop's after each focus::

    Question: find Kamora=?
    Kamora=3<focus magic_chunks="3"> Kamora= Sero=</focus> Sero=9<focus magic_chunks="9">
    Sero=apple</focus><local> answer=apple</local>

The plain prompt has the same lines without numbers; its responses hold the same look-ups and the
same letters without declarations: ``Kamora= Sero=apple answer=apple``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from da_jax.checkpoints.tiny import language as lang
from da_jax.checkpoints.tiny.language import Fact, Token
from da_jax.protocol.styles import Style

STYLE = Style(
    name="tiny-2",
    rendering="plain",
    preamble=lang.PREAMBLE,
    chunk='<chunk id="{n}">{text}</chunk>',
    separator="",
    after_chunks="",
    question="Question: {question}",
    vanilla_preamble=lang.PLAIN_PREAMBLE,
    vanilla_question="Question: {question}",
    vanilla_separator="",
    target=1,
    cap=lang.LINE_MAX,
)
"""The prompts of the second step, with a plain one. Every line of its language is a chunk."""

PASS = "pass"
"""The key of the pass key; its value is a number."""

KINDS = ("find", "read", "first", "second", "read_first", "read_second", "missing")
"""Question types of the second step: a value, with its letters, of the first or second mention of
a key (with letters), and of a key that occurs nowhere."""

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


@dataclass(frozen=True)
class Question(lang.Question):
    """A question of the second step."""

    @property
    def ordinal(self) -> str | None:
        """Which mention it asks for."""
        return self.kind.removeprefix("read_") if self.kind[-5:] in ("first", "econd") else None

    @property
    def spelled(self) -> bool:
        """Whether it asks for the letters too."""
        return self.kind.startswith("read")

    @property
    def pieces(self) -> list[str]:
        """The text after ``Question:``, in pieces; its first piece has a space in the prompt."""
        ordinal = [f" {self.ordinal}"] if self.ordinal else []
        verb = " read" if self.spelled else " find"
        return [verb, *ordinal, f" {self.keys[0]}=", "?"]


def _pick(rng: np.random.Generator, options):
    return options[int(rng.integers(len(options)))]


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
            return lang._sentence(rng, pair)
        place = [
            f" {_pick(rng, lang.PREPS)}",
            f" {_pick(rng, lang.DETS)}",
            f" {_pick(rng, lang.NOUNS)}",
        ]
        tail = place if rng.random() < 0.5 else []
        fact = [f" {pair[0]}=", pair[1]]
        if family == "meeting":
            return ["Item", *fact, " owner", *tail, "."]
        if family == "code":
            return ["def", *fact, ";", " return", *tail, "."]
        verb = {"dialogue": " said", "people": _pick(rng, (" went", " took"))}[family]
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
        family = _pick(rng, TOPICS) if topic == "mixed" else topic
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
        values = lang._VALUE_TABLE[self.held_out, long, key % lang.HELD_OUT_EVERY]
        return _pick(self.rng, [value for value in values if value != but])

    def number(self) -> str:
        """A number for the pass key."""
        fits = [
            n for n in range(1, lang.MAX_ID + 1) if (n % lang.HELD_OUT_EVERY == 0) == self.held_out
        ]
        return f"{_pick(self.rng, fits)}"


REPEATED = {"repeats": 0.8, "mixed": 0.25}
LINKED = {"chains": 0.8, "people": 0.8, "mixed": 0.3}
"""Share of the facts that become mentions of one key, and links with what they lead to."""


def _filled_in(
    rng: np.random.Generator,
    topic: str,
    written: list[tuple[str, ...]],
    slots: list[tuple[int, str]],
    held_out: bool,
) -> Scene:
    """Gives every slot a key and a value."""
    pairs = _Pairs(rng, held_out)
    order = [int(i) for i in rng.permutation(len(slots))]
    facts: dict[str, Fact] = {}
    links: dict[str, Fact] = {}
    repeated: dict[str, tuple[Fact, Fact]] = {}
    pieces: dict[str, str] = {}

    def put(slot: int, key: str, value: str, link: bool = False) -> Fact:
        pieces[f" k{slot}="], pieces[f"v{slot}"] = f" {key}=", f" {value}=" if link else value
        return Fact(key, value, slots[slot][0])

    def group(size: int) -> list[int]:
        """Takes slots of different chunks; fewer if there are no more."""
        taken: list[int] = []
        for slot in order:
            if slots[slot][0] not in {slots[t][0] for t in taken} and len(taken) < size:
                taken.append(slot)
        for slot in taken:
            order.remove(slot)
        return taken

    if order and (topic == "needle" or (topic == "mixed" and rng.random() < 0.5)):
        (slot,) = group(1)
        if topic == "mixed" or rng.random() < 0.5:
            facts[PASS] = put(slot, PASS, pairs.number())
        else:
            order.append(slot)
    total = len(order)
    while len(order) > total * (1 - REPEATED.get(topic, 0.0)) and len(order) > 1:
        taken = sorted(group(2))
        if len(taken) < 2:
            order.extend(taken)
            break
        key = pairs.key()
        first = put(taken[0], lang.KEYS[key], pairs.value(key))
        second = put(taken[1], lang.KEYS[key], pairs.value(key, but=first.value))
        repeated[lang.KEYS[key]] = (first, second)
    total = len(order)
    while len(order) > total * (1 - LINKED.get(topic, 0.0)) and len(order) > 1:
        taken = group(2 if topic == "people" or rng.random() < 0.6 else 3)
        key = pairs.key()
        for slot in taken[:-1]:
            follower = pairs.key(after=key)
            link = put(slot, lang.KEYS[key], lang.KEYS[follower], link=True)
            links[lang.KEYS[key]] = link
            key = follower
        if taken:
            facts[lang.KEYS[key]] = put(taken[-1], lang.KEYS[key], pairs.value(key))
        if len(taken) < 2:
            break
    for slot in order:
        key = pairs.key()
        facts[lang.KEYS[key]] = put(slot, lang.KEYS[key], pairs.value(key))
    lines = tuple(tuple(pieces.get(piece, piece) for piece in line) for line in written)
    return Scene(lines, facts, topic, links, repeated)


def spellable(value: str) -> bool:
    """Whether the letters of a value may be asked for."""
    return lang.SPELL_MIN <= len(value) <= lang.SPELL_MAX and value.isalpha()


def ask(rng: np.random.Generator, scene: Scene, kind: str) -> lang.Question | None:
    """Draws a question of the type about the document; None if it has no fact for it."""
    if kind not in KINDS:
        return _ask_as_before(rng, scene, kind)
    if kind == "missing":
        while (key := _pick(rng, lang.KEYS)) in scene.keys:
            pass
        return Question(kind, (key,))
    question = Question(kind, ("",))
    if question.ordinal:
        ends = {key: pair[question.ordinal == "second"] for key, pair in scene.repeated.items()}
    else:
        starts = list(scene.links) if scene.links and rng.random() < 0.7 else list(scene.facts)
        ends = {key: scene.path(key)[-1] for key in starts}
    fits = [key for key, f in ends.items() if not question.spelled or spellable(f.value)]
    return Question(kind, (_pick(rng, fits),)) if fits else None


def _ask_as_before(rng: np.random.Generator, scene: Scene, kind: str) -> lang.Question | None:
    """A question of the first step, about the unique facts."""
    if kind == "absent":
        while (key := _pick(rng, lang.KEYS)) in scene.keys:
            pass
        return lang.Question(kind, (key,))
    if kind != "spell":
        return lang.ask(rng, scene, kind)
    fits = [key for key, f in scene.facts.items() if spellable(f.value)]
    return lang.Question(kind, (_pick(rng, fits),)) if fits else None


def path(scene: Scene, question: Question) -> list[Fact]:
    """The facts that the answer follows from, in the order of reading; none for ``missing``."""
    (key,) = question.keys
    if question.kind == "missing":
        return []
    if question.ordinal:
        return [scene.repeated[key][question.ordinal == "second"]]
    return scene.path(key)


def respond(
    document: lang.Document, question: lang.Question, first_id: int = 1, plain: bool = False
) -> list[Token]:
    """The one right response, token by token, up to and including the end of the turn.

    Args:
        document: what is asked about.
        question: of the first or the second step.
        first_id: number of the first chunk.
        plain: the prompt is the plain one.
    """
    if plain:
        return _plain_response(document, question)
    if not isinstance(question, Question):
        return lang.respond(document, question, first_id)
    assert isinstance(document, Scene)
    ordinal = [Token(f" {question.ordinal}")] if question.ordinal else []
    hops = path(document, question)
    tokens = list(ordinal)
    if not hops:
        tokens += [Token(f" {question.keys[0]}="), Token("none", role="id")]
    for hop, fact in enumerate(hops, 1):
        number = f"{fact.chunk + first_id - 1}"
        tokens += [Token(f" {fact.key}="), Token(number, role="id"), Token(lang.FOCUS)]
        at = ("focus", (fact.chunk,))
        value = fact.value if hop == len(hops) else f" {fact.value}="
        tokens += [Token(number), Token(lang.QUOTE, *at)]
        tokens += [Token(f" {fact.key}=", *at), Token(value, *at, "value")]
        tokens.append(Token(lang.FOCUS_END))
    tokens.append(Token(lang.LOCAL, "local"))
    tokens += _ending(question.spelled, [hops[-1].value if hops else "none"])
    return [*tokens, Token(lang.LOCAL_END), Token(lang.END)]


GIVEN = "given"
"""Role of a token that is not the model's choice."""


def misled(
    rng: np.random.Generator,
    document: lang.Document,
    question: lang.Question,
    tokens: list[Token],
    *,
    first_id: int,
    masked: bool,
) -> list[Token]:
    """The response once the last number in a focus tag has become that of a chunk without the key.

    A model that can answer at once, in the plain prompt, also knows the value when it writes the
    key under GLOBAL, and its own keys and values carry that into the focus. This teaches it to read
    what it sees: under the mask there is no such value, and with everything visible there is.
    """
    at = max((i for i, token in enumerate(tokens, 1) if token.piece == lang.FOCUS), default=0)
    seen = [token for token in tokens[at:] if token.focus]
    if not at or len(seen[0].focus) > 1:
        return tokens
    key, value = seen[1].piece, seen[2].piece
    text = [i for i, chunk in enumerate(document.chunks, 1) if key not in chunk]
    if not text:
        return tokens
    wrong = _pick(rng, text)
    out = [*tokens[:at], Token(f"{wrong + first_id - 1}", role=GIVEN)]
    for token in tokens[at + 1 :]:
        piece = "none" if masked and token.piece == value else token.piece
        focus = (wrong,) if token.focus else ()
        out.append(Token(piece, token.mode, focus, token.role))
        if masked and token.role == "value" and value.isalpha() and _spells(question):
            break  # there is nothing to spell
    return out


def _spells(question: lang.Question) -> bool:
    spelled = isinstance(question, Question) and question.spelled
    return spelled or question.kind == "spell"


def _ending(spelled: bool, values: list[str]) -> Iterator[Token]:
    if spelled:
        yield from lang._spelling(values[0])
    yield Token(" answer=", "local")
    for i, value in enumerate(values):
        if i:
            yield Token(",", "local")
        yield Token(value, "local")


def _plain_response(document: lang.Document, question: lang.Question) -> list[Token]:
    """The same look-ups and the same ending without declarations, all under GLOBAL."""
    if isinstance(question, Question):
        assert isinstance(document, Scene)
        tokens = [Token(f" {question.ordinal}")] if question.ordinal else []
        hops = path(document, question)
        for fact in hops[:-1]:  # the next key is what this one leads to
            tokens += [Token(f" {fact.key}=", role="value")]
        last = hops[-1] if hops else Fact(question.keys[0], "none", 0)
        tokens += [Token(f" {last.key}=", role="value" if hops[1:] else "")]
        tokens += [Token(last.value, role="value")]
        values, spelled = [last.value], question.spelled
    else:
        tokens, values = [], []
        for key in question.keys:
            fact = document.facts.get(key)
            values.append("none" if fact is None else fact.value)
            tokens += [Token(f" {key}="), Token(values[-1], role="value")]
        spelled = question.kind == "spell"
    ending = [Token(t.piece, role=t.role) for t in _ending(spelled, values)]
    return [*tokens, *ending, Token(lang.END)]
