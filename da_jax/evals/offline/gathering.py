"""Several places that count together, or complete each other."""

from __future__ import annotations

from da_jax.evals.offline import scoring, words
from da_jax.evals.offline.draft import Draft, Evidence, Generated, drawn_depths, join, scatter
from da_jax.evals.offline.stream import Stream
from da_jax.evals.task import Example, Group, Score

_LABELS = ("question", "complaint", "request", "praise", "apology", "reminder")
_ABOUT = (
    "has not arrived yet",
    "came with a scratch",
    "is better than the last one",
    "should be sent back",
    "costs less elsewhere",
    "was left at the station",
)
_TALK = (
    "Did you sleep well?",
    "I still have to write to the bank.",
    "We should meet again before summer.",
    "That was a long day.",
    "Have you seen the new bakery?",
    "I will call you when I am home.",
    "My neighbour plays the piano all night.",
    "It has been years since I was there.",
    "Let us talk about it tomorrow.",
    "I can never find my glasses.",
)


class Counting(Generated):
    """How many lines of one user carry one label, as in Oolong. A unit is a line of another user.

    The user that is asked about wrote 2 to 9 lines with the label, and 2 to 5 with other labels.
    """

    name = "counting"
    group = Group.MULTI
    description = "How many messages of one user carry one label, in a list of messages."

    def draft(self, stream: Stream, units: int) -> Draft:
        user, *others = stream.shuffled(words.FIRST_NAMES)
        label, *wrong = stream.shuffled(_LABELS)
        right, rest = 2 + stream.below(8), 2 + stream.below(4)
        labels = stream.shuffled([label] * right + [stream.pick(wrong) for _ in range(rest)])
        at = drawn_depths(stream, len(labels))
        lines = [self._line(stream, user, found) for found in labels]
        asked = [Evidence(line) if found == label else line for line, found in zip(lines, labels)]
        hay = [self._line(stream, stream.pick(others), stream.pick(_LABELS)) for _ in range(units)]
        document, evidence = join(scatter(hay, asked, at))
        question = (
            "Each line of the text is a message with its date, user and label. How many messages "
            f'of the user {user} have the label "{label}"? '
            'Give the answer as "Answer:" followed by the number.'
        )
        return Draft(document, question, (str(right),), evidence)

    def score(self, example: Example, answer: str) -> Score:
        return scoring.exact(scoring.integers, answer, example.expected)

    @staticmethod
    def _line(stream: Stream, user: str, label: str) -> str:
        date = f"{1 + stream.below(28)} {stream.pick(words.MONTHS)}"
        thing = f"{stream.pick(words.MATTERS)} {stream.pick(words.THINGS)}"
        return f"{date} | {user} | {label} | The {thing} {stream.pick(_ABOUT)}.\n"


class DialogueCloze(Generated):
    """Who now has a thing: one turn says where it was bought, a later one who got what came
    from there.

    A unit is a turn. Everybody bought one thing in each city at most, so that the two mentions are
    the only way to the answer. Up to half of the filler, but at most 479 turns of each, are
    purchases and gifts of others.
    """

    name = "dialogue_cloze"
    group = Group.MULTI
    description = "A name left out in a sentence about a dialogue, from two turns far apart."

    def draft(self, stream: Stream, units: int) -> Draft:
        at = drawn_depths(stream, 2)
        speaker, receiver = stream.some(2, words.FIRST_NAMES)
        city = stream.pick(words.CITIES)
        things = words.names(stream, 1 + units)
        asked = [
            Evidence(self._bought(speaker, city, things[0])),
            Evidence(self._given(speaker, city, receiver)),
        ]
        hay: list[str] = []
        bought = {(speaker, city)}
        given = {(speaker, city)}
        for thing in things[1:]:
            who, other = stream.some(2, words.FIRST_NAMES)
            place, kind = stream.pick(words.CITIES), stream.below(4)
            if kind == 0 and (who, place) not in bought:
                bought.add((who, place))
                hay.append(self._bought(who, place, thing))
            elif kind == 1 and (who, place) not in given:
                given.add((who, place))
                hay.append(self._given(who, place, other))
            else:
                hay.append(f"{who}: {' '.join(stream.some(2, _TALK))}\n\n")
        document, evidence = join(scatter(hay, asked, at))
        question = (
            "Fill in the name that is left out in this sentence about the dialogue: "
            f'"____ was given the {things[0]}." '
            'Give the answer as "Answer:" followed by the name alone.'
        )
        return Draft(document, question, (receiver,), evidence)

    def score(self, example: Example, answer: str) -> Score:
        return scoring.exact(scoring.listed(words.FIRST_NAMES), answer, example.expected)

    @staticmethod
    def _bought(who: str, city: str, thing: str) -> str:
        return f"{who}: When I was in {city} I bought the {thing}.\n\n"

    @staticmethod
    def _given(who: str, city: str, receiver: str) -> str:
        return f"{who}: What I brought from {city} I have given to {receiver}.\n\n"
