"""Needles in haystacks: one value to look up, in one place."""

from __future__ import annotations

from da_jax.evals.offline import filler, scoring, words
from da_jax.evals.offline.draft import Draft, Evidence, Generated, drawn_depths, join, scatter
from da_jax.evals.offline.stream import Stream
from da_jax.evals.task import Example, Group, Score

_DIGITS = 7


class _Needle(Generated):
    """RULER's needle tasks: a sentence says the value of a key.

    Attributes:
      haystack: "noise", "prose", or "needles" of other keys.
      uuid_keys, uuid_values: whether keys and values are UUIDs, or else names and numbers.
    """

    group = Group.SINGLE
    haystack = "prose"
    uuid_keys = False
    uuid_values = False

    def draft(self, stream: Stream, units: int) -> Draft:
        (depth,) = drawn_depths(stream, 1)
        end = " " if self.haystack == "prose" else "\n"
        kind = "UUID" if self.uuid_values else "number"
        others = units if self.haystack == "needles" else 0
        keys = self._keys(stream, 1 + others)
        sentences = []
        for key in keys:
            value = stream.uuid() if self.uuid_values else stream.number(_DIGITS)
            sentences.append((value, f"The magic {kind} of {key} is {value}.{end}"))
        value, needle = sentences[0]
        if self.haystack == "needles":
            hay = [sentence for _, sentence in sentences[1:]]
        else:
            hay = (filler.noise if self.haystack == "noise" else filler.prose)(stream, units)
        document, evidence = join(scatter(hay, [Evidence(needle)], [depth]))
        form = "the UUID" if self.uuid_values else f"the number, which has {_DIGITS} digits"
        question = (
            f"What is the magic {kind} of {keys[0]} that the text mentions? "
            f'Give the answer as "Answer:" followed by {form}.'
        )
        return Draft(document, question, (value,), evidence, {"key": keys[0]})

    def _keys(self, stream: Stream, n: int) -> list[str]:
        return [stream.uuid() for _ in range(n)] if self.uuid_keys else words.names(stream, n)

    def score(self, example: Example, answer: str) -> Score:
        find = scoring.uuids if self.uuid_values else scoring.numbers(_DIGITS)
        return scoring.exact(find, answer, example.expected, named=[example.details["key"]])


class NiahSingleNoise(_Needle):
    """One name with a number, in sentences that say nothing."""

    name = "niah_single_noise"
    description = "The number of a named thing, in sentences that say nothing."
    haystack = "noise"


class NiahSingleProse(_Needle):
    """One name with a number, in real prose."""

    name = "niah_single_prose"
    description = "The number of a named thing, in real prose."


class NiahSingleUuid(_Needle):
    """One name with a UUID, in real prose."""

    name = "niah_single_uuid"
    description = "The UUID of a named thing, in real prose."
    uuid_values = True


class NiahMultikey2(_Needle):
    """Names with numbers, and nothing else."""

    name = "niah_multikey_2"
    description = "The number of a named thing, among numbers of others."
    haystack = "needles"


class NiahMultikey3(_Needle):
    """UUIDs with UUIDs, and nothing else."""

    name = "niah_multikey_3"
    description = "The UUID of a UUID, among UUIDs of others."
    haystack = "needles"
    uuid_keys = uuid_values = True


class KvRetrieval(Generated):
    """One value of a JSON object of UUIDs, as in InfiniteBench."""

    name = "kv_retrieval"
    group = Group.SINGLE
    description = "The value of a key in a JSON object of UUIDs."
    smallest = 1

    def draft(self, stream: Stream, units: int) -> Draft:
        (depth,) = drawn_depths(stream, 1)
        place = int(depth * units)
        key, value = stream.uuid(), stream.uuid()
        pairs = [f'"{stream.uuid()}": "{stream.uuid()}"' for _ in range(units - 1)]
        pairs.insert(place, f'"{key}": "{value}"')
        pieces = ["{\n"]
        for i, pair in enumerate(pairs):
            pieces += [" ", Evidence(pair) if i == place else pair]
            pieces.append("\n" if i == units - 1 else ",\n")
        document, evidence = join([*pieces, "}\n"])
        question = (
            f'What is the value of the key "{key}" in the JSON object? '
            'Give the answer as "Answer:" followed by the value.'
        )
        return Draft(document, question, (value,), evidence, {"key": key})

    def score(self, example: Example, answer: str) -> Score:
        named = [example.details["key"]]
        return scoring.exact(scoring.uuids, answer, example.expected, named=named)


class Passkey(Generated):
    """The pass key that a text tells to remember, as in InfiniteBench."""

    name = "passkey"
    group = Group.SINGLE
    description = "The pass key that a text of no content tells to remember."

    def draft(self, stream: Stream, units: int) -> Draft:
        (depth,) = drawn_depths(stream, 1)
        key = stream.number(5)
        needle = f"The pass key is {key}. Remember it. {key} is the pass key.\n"
        hay = filler.noise(stream, units)
        document, evidence = join(scatter(hay, [Evidence(needle)], [depth]))
        question = (
            "What is the pass key that the text tells to remember? "
            'Give the answer as "Answer:" followed by its 5 digits.'
        )
        return Draft(document, question, (key,), evidence)

    def score(self, example: Example, answer: str) -> Score:
        return scoring.exact(scoring.numbers(5), answer, example.expected)
