"""Questions that every line of the document bears on: declarations are not expected to help."""

from __future__ import annotations

from da_jax.evals.offline import scoring, words
from da_jax.evals.offline.draft import Draft, Generated
from da_jax.evals.offline.stream import Stream
from da_jax.evals.task import Example, Group, Score

_REGIONS = ("north", "south", "east", "west", "centre", "coast", "islands", "highlands")
_SYLLABLES = tuple(consonant + vowel for consonant in "bdhjlmnprstvz" for vowel in "aeiou")


class _Control(Generated):
    """A control: its evidence is the whole document."""

    group = Group.CONTROL

    def whole(self, document: str, question: str, expected: tuple[str, ...]) -> Draft:
        return Draft(document, question, expected, ((0, len(document)),))


class CommonWords(_Control):
    """RULER's common words extraction: the words of a list that come most often.

    A unit is a rare word, which comes twice. The common ones come eight times in the shortest
    lists and 30 times in long ones. Scored by F1.
    """

    name = "common_words"
    description = "The ten made-up words that come most often in a list."
    smallest = 10
    _common = 10

    def draft(self, stream: Stream, units: int) -> Draft:
        often = min(30, 7 + units // 10)
        every = _coined(stream, self._common + units)
        expected, rare = every[: self._common], every[self._common :]
        drawn = stream.shuffled(expected * often + rare * 2)
        document = "".join(f"{i}. {word}\n" for i, word in enumerate(drawn, 1)).rstrip()
        question = (
            f"Which {self._common} words come most often in the numbered list? "
            'Give the answer as "Answer:" followed by the words.'
        )
        return self.whole(document, question, tuple(sorted(expected)))

    def score(self, example: Example, answer: str) -> Score:
        known = example.text.split()[1::2]  # each after its number
        return scoring.overlap(scoring.among(known), answer, example.expected)


class FrequentWords(_Control):
    """RULER's frequent words extraction: the three most frequent made-up words.

    A unit is a word of the text. The k-th word of the vocabulary comes as often as 1 / k².
    Scored by F1.
    """

    name = "frequent_words"
    description = "The three most frequent of made-up words, whose frequencies follow a power law."
    smallest = 40
    _vocabulary = 60

    def draft(self, stream: Stream, units: int) -> Draft:
        coded: dict[str, None] = {}
        while len(coded) < self._vocabulary:
            coded[stream.letters(6, "abcdefghijklmnopqrstuvwxyz")] = None
        vocabulary = list(coded)
        total = sum(k**-2 for k in range(1, self._vocabulary + 1))
        drawn: list[str] = []
        for k, word in enumerate(vocabulary, 1):
            drawn += [word] * int(units / (total * k**2) + 0.5)
        drawn = stream.shuffled(drawn)
        rows = [" ".join(drawn[i : i + 12]) for i in range(0, len(drawn), 12)]
        question = (
            "Which three words come most often in the coded text? "
            'Give the answer as "Answer:" followed by the three words.'
        )
        return self.whole("\n".join(rows), question, tuple(sorted(vocabulary[:3])))

    def score(self, example: Example, answer: str) -> Score:
        return scoring.overlap(scoring.among(example.text.split()), answer, example.expected)


class StructuredData(_Control):
    """Which region has the greatest sum over all rows of a table. A unit is a row."""

    name = "structured_data"
    description = "The region with the greatest sum over all rows of a table."
    smallest = 8

    def draft(self, stream: Stream, units: int) -> Draft:
        regions = [stream.pick(_REGIONS) for _ in range(units)]
        sold = [1 + stream.below(99) for _ in range(units)]
        sums = dict.fromkeys(_REGIONS, 0)
        for region, amount in zip(regions, sold):
            sums[region] += amount
        winner = max(_REGIONS, key=sums.__getitem__)
        if sorted(sums.values())[-2] == sums[winner]:
            sold[regions.index(winner)] += 1
        table = ["region,product,sold"]
        for region, amount in zip(regions, sold):
            product = f"{stream.pick(words.QUALITIES)} {stream.pick(words.THINGS)}"
            table.append(f"{region},{product},{amount}")
        question = (
            "Which region sold most in all, by the sum of the column sold over all rows of the "
            'table? Give the answer as "Answer:" followed by the region.'
        )
        return self.whole("\n".join(table), question, (winner,))

    def score(self, example: Example, answer: str) -> Score:
        return scoring.exact(scoring.listed(_REGIONS), answer, example.expected)


def _coined(stream: Stream, n: int) -> list[str]:
    """`n` made-up words of three syllables, no two the same."""
    size = len(_SYLLABLES)
    return [
        _SYLLABLES[i // size**2] + _SYLLABLES[i // size % size] + _SYLLABLES[i % size]
        for i in stream.distinct(n, size**3)
    ]
