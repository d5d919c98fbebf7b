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

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from da_jax.checkpoints.tiny import language as lang
from da_jax.checkpoints.tiny.language import Fact, Token, pick
from da_jax.checkpoints.tiny.scenes import Scene
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

KINDS = ("find", "read", "first", "second", "read_first", "read_second", "missing")
"""Question types of the second step: a value, with its letters, of the first or second mention of
a key (with letters), and of a key that occurs nowhere."""


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


def spellable(value: str) -> bool:
    """Whether the letters of a value may be asked for."""
    return lang.SPELL_MIN <= len(value) <= lang.SPELL_MAX and value.isalpha()


def ask(rng: np.random.Generator, scene: Scene, kind: str) -> lang.Question | None:
    """Draws a question of the type about the document; None if it has no fact for it."""
    if kind not in KINDS:
        return _ask_as_before(rng, scene, kind)
    if kind == "missing":
        while (key := pick(rng, lang.KEYS)) in scene.keys:
            pass
        return Question(kind, (key,))
    question = Question(kind, ("",))
    if question.ordinal:
        ends = {key: pair[question.ordinal == "second"] for key, pair in scene.repeated.items()}
    else:
        starts = list(scene.links) if scene.links and rng.random() < 0.7 else list(scene.facts)
        ends = {key: scene.path(key)[-1] for key in starts}
    fits = [key for key, f in ends.items() if not question.spelled or spellable(f.value)]
    return Question(kind, (pick(rng, fits),)) if fits else None


def _ask_as_before(rng: np.random.Generator, scene: Scene, kind: str) -> lang.Question | None:
    """A question of the first step, about the unique facts."""
    if kind == "absent":
        while (key := pick(rng, lang.KEYS)) in scene.keys:
            pass
        return lang.Question(kind, (key,))
    if kind != "spell":
        return lang.ask(rng, scene, kind)
    fits = [key for key, f in scene.facts.items() if spellable(f.value)]
    return lang.Question(kind, (pick(rng, fits),)) if fits else None


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
    wrong = pick(rng, text)
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
        yield from lang.spelling(values[0])
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
