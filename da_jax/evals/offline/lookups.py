"""Look-ups in one place of a longer record: a conversation, minutes, code."""

from __future__ import annotations

from da_jax.evals.offline import scoring, words
from da_jax.evals.offline.draft import Draft, Evidence, Generated, drawn_depths, join, scatter
from da_jax.evals.offline.stream import Stream
from da_jax.evals.task import Example, Group, Score

_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz23456789"
_KINDS = ("poem", "riddle", "letter", "speech", "song", "fable", "diary entry", "short story")
_LINES = (
    "The {0} sleeps under the {1}.",
    "Nobody has seen the {0} or the {1} since.",
    "Bring me the {0}, and leave the {1}.",
    "At noon the {0} sang to the {1}.",
    "Once the {0} was worth more than the {1}.",
    "I traded the {0} for the {1}.",
    "Who would hide the {0} behind the {1}?",
    "The rain fell on the {0} and on the {1}.",
    "Between the {0} and the {1} there is a door.",
    "We will remember the {0}, not the {1}.",
)


class Mrcr2(Generated):
    """Two equal requests in a conversation, and which answer belongs to which; as in OpenAI's MRCR.

    A unit is a request with its answer. No other request is for the same kind of text about the
    same topic. The first line is to be repeated, not the text as the original has it: it has at
    most 12 words, which is the most that a response copies while it focuses. A wrong line is
    alike too: it scores 0.41 on average.
    """

    name = "mrcr_2"
    group = Group.SINGLE
    description = "First line of the first or second of two texts alike, word for word."

    def draft(self, stream: Stream, units: int) -> Draft:
        at = drawn_depths(stream, 2)
        asked = (stream.pick(_KINDS), stream.pick(words.TOPICS))
        which = stream.below(2)
        prefix = stream.letters(10, _LETTERS)
        needles = [self._turn(asked, self._text(stream)) for _ in range(2)]
        expected = needles[which].split("Assistant:\n")[1].split("\n")[0]
        needles[which] = Evidence(needles[which])
        hay = []
        for _ in range(units):
            other = asked
            while other == asked:
                other = (stream.pick(_KINDS), stream.pick(words.TOPICS))
            hay.append(self._turn(other, self._text(stream)))
        document, evidence = join(scatter(hay, needles, at))
        question = (
            f"In the conversation the user asks twice for a {asked[0]} about {asked[1]}. Repeat "
            f"the first line of the {('first', 'second')[which]} {asked[0]} about {asked[1]} word "
            f"for word. Give the answer as {prefix} directly followed by that line."
        )
        details = {"prefix": prefix, "which": which + 1}
        return Draft(document, question, (expected,), evidence, details)

    def score(self, example: Example, answer: str) -> Score:
        return scoring.likeness(answer, example.details["prefix"], example.expected[0])

    @staticmethod
    def _turn(asked: tuple[str, str], text: str) -> str:
        return f"User: Write a {asked[0]} about {asked[1]}.\nAssistant:\n{text}\n\n"

    @staticmethod
    def _text(stream: Stream) -> str:
        def thing() -> str:
            return f"{stream.pick(words.MATTERS)} {stream.pick(words.THINGS)}"

        return "\n".join(line.format(thing(), thing()) for line in stream.some(4, _LINES))


class MeetingQa(Generated):
    """Minutes of a meeting: who takes on a project, what it costs, or when it is due.

    A unit is an item of the agenda, each about another project.
    """

    name = "meeting_qa"
    group = Group.SINGLE
    description = "Who takes on a project, for how much or until when, in minutes of a meeting."
    _asked = (
        ("owner", "Who takes on the {0}?", "the person's full name"),
        ("amount", "How many euros are granted to the {0}?", "the number"),
        ("due", "By what date is the {0} due?", "day and month"),
    )
    _find = {  # noqa: RUF012
        "owner": scoring.listed(words.PEOPLE),
        "amount": scoring.numbers(5),
        "due": scoring.dates,
    }

    def draft(self, stream: Stream, units: int) -> Draft:
        (depth,) = drawn_depths(stream, 1)
        kind, asked, form = stream.pick(self._asked)
        projects = words.names(stream, 1 + units)
        needle, facts = self._item(stream, projects[0])
        hay = [self._item(stream, project)[0] for project in projects[1:]]
        items = scatter(hay, [Evidence(needle)], [depth])
        document, evidence = join(["Minutes of the meeting\n\n", *items])
        return Draft(
            document,
            f"The text is the minutes of a meeting. {asked.format(f'{projects[0]} project')} "
            f'Give the answer as "Answer:" followed by {form}.',
            (facts[kind],),
            evidence,
            {"kind": kind},
        )

    def score(self, example: Example, answer: str) -> Score:
        return scoring.exact(self._find[example.details["kind"]], answer, example.expected)

    @staticmethod
    def _item(stream: Stream, project: str) -> tuple[str, dict[str, str]]:
        proposer, owner, opponent = stream.some(3, words.PEOPLE)
        amount, asked = stream.number(5), stream.number(5)
        due = f"{1 + stream.below(28)} {stream.pick(words.MONTHS)}"
        text = (
            f"The {project} project\n"
            f"{proposer} asked for {asked} euros. {opponent} had doubts. "
            f"Granted: {amount} euros. {owner} takes it on, due by {due}.\n\n"
        )
        return text, {"owner": owner, "amount": amount, "due": due}


class CodeLookup(Generated):
    """What a function of a module returns for an argument. A unit is a function."""

    name = "code_lookup"
    group = Group.SINGLE
    description = "What a function of a long Python module returns for an argument."

    def draft(self, stream: Stream, units: int) -> Draft:
        (depth,) = drawn_depths(stream, 1)
        digits = max(4, len(str(4 * units)))
        functions = stream.distinct(1 + units, 9 * 10 ** (digits - 1))
        names = [f"f_{10 ** (digits - 1) + number}" for number in functions]
        needle, values = self._function(stream, names[0])
        argument = stream.pick(sorted(values))
        hay = [self._function(stream, name)[0] for name in names[1:]]
        document, evidence = join(scatter(hay, [Evidence(needle)], [depth]))
        question = (
            f'What does `{names[0]}("{argument}")` return? '
            'Give the answer as "Answer:" followed by the number, which has 6 digits.'
        )
        return Draft(document, question, (values[argument],), evidence)

    def score(self, example: Example, answer: str) -> Score:
        return scoring.exact(scoring.numbers(6), answer, example.expected)

    @staticmethod
    def _function(stream: Stream, name: str) -> tuple[str, dict[str, str]]:
        thing = f"{stream.pick(words.QUALITIES)} {stream.pick(words.THINGS)}"
        arguments = stream.some(2, words.MATTERS)
        values = [stream.number(6) for _ in range(3)]
        text = (
            f"def {name}(kind):\n"
            f'    """Weight of the {thing}."""\n'
            f'    if kind == "{arguments[0]}":\n'
            f"        return {values[0]}\n"
            f'    if kind == "{arguments[1]}":\n'
            f"        return {values[1]}\n"
            f"    return {values[2]}\n\n\n"
        )
        return text, dict(zip(arguments, values))
