"""What the offline tasks are made of: draws, sizes that fit, pieces put together, and scores."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from da_jax.evals.offline import filler, scoring, words
from da_jax.evals.offline.draft import Draft, Evidence, fit, join, scatter
from da_jax.evals.offline.stream import Stream

keys = st.text("abc/0123", max_size=8)


# Draws


@given(keys, st.integers(0, 40), st.integers(40, 200))
def test_distinct_draws_are_distinct_and_in_range(key, n, bound):
    found = Stream(key).distinct(n, bound)
    assert len(set(found)) == len(found) == n
    assert all(0 <= value < bound for value in found)


@given(keys, st.lists(st.integers(), max_size=30))
def test_shuffled_is_a_permutation_and_keeps_the_original(key, items):
    before = list(items)
    assert sorted(Stream(key).shuffled(items)) == sorted(items)
    assert items == before


def test_more_distinct_draws_than_there_are_values_are_refused():
    with pytest.raises(ValueError, match="3 values, so no 4"):
        Stream("").distinct(4, 3)


def test_every_permutation_is_as_likely():
    stream = Stream("permutations")
    found = [tuple(stream.shuffled("abc")) for _ in range(6000)]
    counts = [found.count(order) for order in itertools.permutations("abc")]
    assert sum(counts) == 6000
    assert all(abs(n - 1000) < 150 for n in counts)  # five standard deviations


@given(keys, st.integers(1, 9))
def test_numbers_have_their_digits(key, digits):
    number = Stream(key).number(digits)
    assert re.fullmatch(rf"[1-9]\d{{{digits - 1}}}", number)


@given(keys)
def test_uuids_have_the_form_of_one(key):
    assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", Stream(key).uuid())


@given(st.integers(0, words.NAMES - 1), st.integers(0, words.NAMES - 1))
def test_names_are_distinct(a, b):
    assert (words.name(a) == words.name(b)) == (a == b)


@pytest.mark.parametrize(
    "of",
    [words.QUALITIES, words.MATTERS, words.THINGS, words.FIRST_NAMES, words.PEOPLE, words.ROOMS,
     words.CITIES, words.TOPICS, words.MONTHS],
)  # fmt: skip
def test_no_word_is_there_twice(of):
    assert len(set(of)) == len(of)


# Filler


@pytest.mark.parametrize("make", [filler.noise, filler.prose])
@given(key=keys, n=st.integers(0, 300))
def test_filler_has_its_size_and_no_digits(make, key, n):
    found = make(Stream(key), n)
    assert len(found) == n
    assert not re.search(r"\d", "".join(found))
    assert all(piece.endswith(("\n", " ")) for piece in found)


def test_prose_holds_every_paragraph_before_it_repeats_one():
    sentences = filler.prose(Stream("x"), 20_000)
    paragraphs = "".join(sentences).split("\n\n")
    first = paragraphs[:483]
    assert len(set(first)) == len(set(paragraphs[:-1])) == 483
    assert sum(map(len, first)) > 240_000


# Pieces


@given(st.lists(st.tuples(st.text("ab \n", max_size=5), st.booleans()), max_size=12))
def test_joined_pieces_are_found_at_their_spans(pieces):
    given_pieces = [Evidence(f"x{text}") if marked else text for text, marked in pieces]
    document, spans = join(given_pieces)
    assert document == "".join(given_pieces).rstrip()
    marked = [piece.rstrip() for piece in given_pieces if isinstance(piece, Evidence)]
    assert [document[start:end] for start, end in spans] == marked


@given(
    st.lists(st.integers(), max_size=20),
    st.lists(st.floats(0, 1, exclude_max=True), max_size=5).map(sorted),
)
def test_scattered_items_keep_all_and_lie_at_their_depths(hay, at):
    hay = [str(number) for number in hay]
    items = [f"item {i}" for i in range(len(at))]
    out = scatter(hay, items, at)
    assert [piece for piece in out if piece in items] == items
    assert [piece for piece in out if piece not in items] == hay
    for i, (item, depth) in enumerate(zip(items, at)):
        assert out.index(item) - i == int(depth * (len(hay) + 1))


# Sizes that fit


@given(st.integers(1, 50), st.integers(1, 30), st.integers(0, 20), st.integers(60, 5000), st.data())
def test_the_size_fills_the_length_or_is_the_greatest_that_fits(head, unit, smallest, length, data):
    calls = []

    def build(size):
        calls.append(size)
        return Draft("x" * (head + unit * size), "q" * 5, (), ())

    def used(size):
        return head + unit * size + 5

    if used(smallest) > length:
        with pytest.raises(ValueError, match=f"at least {used(smallest)} tokens.*got {length}"):
            fit(build, smallest, length, len)
        return
    size = (len(fit(build, smallest, length, len).document) - head) // unit
    assert used(size) <= length
    assert used(size) >= 0.99 * length or used(size + 1) > length
    assert len(calls) <= 6


@given(st.lists(st.integers(1, 400), min_size=300, max_size=300), st.integers(50, 20_000))
def test_units_of_uneven_length_fit_too(units, length):
    ends = list(itertools.accumulate(units, initial=5))
    calls = []

    def build(size):
        calls.append(size)
        return Draft("x" * (ends[size] if size < len(ends) else 10**6), "", (), ())

    size = ends.index(len(fit(build, 0, length, len).document))
    assert ends[size] <= length
    assert ends[size] >= 0.99 * length or size + 1 == len(ends) or ends[size + 1] > length
    assert len(calls) <= 20


# Scores


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("42", "42"),
        ("Answer: 42", " 42"),
        ("answer : 1. No. ANSWER: 2", " 2"),
        ("**Answer**: 3", " 3"),
        ("**Answer:** 3", "** 3"),
        ("__Answer__: 3", " 3"),
        ("_Answer: 3_", " 3_"),
        ("The answer is 4", "The answer is 4"),
        ("Answers: 5", "Answers: 5"),
        ("", ""),
    ],
)
def test_what_follows_the_last_answer_counts(answer, found):
    assert scoring.final(answer) == found


@pytest.mark.parametrize(
    ("find", "text", "found"),
    [
        (scoring.numbers(7), "1234567, 12345678 and 123456", ["1234567"]),
        (scoring.numbers(7), "It is 1,234,567.", ["1234567"]),
        (scoring.numbers(7), "It is 1,234,567, as the text says.", ["1234567"]),
        (scoring.numbers(5), "12,345 or 1,234,567", ["12345"]),
        (scoring.integers, "three of 1,200 and 07", ["3", "1200", "7"]),
        (scoring.integers, "none of twenty-one; someone", []),
        (scoring.uuids, "A0A0A0A0-1111-2222-3333-444444444444.",
         ["a0a0a0a0-1111-2222-3333-444444444444"]),
        (scoring.uuids, "0a0a0a0a0-1111-2222-3333-444444444444", []),
        (scoring.dates, "3 May, June 14th, the 2nd of july, August 9", 
         ["3 May", "14 June", "2 July", "9 August"]),
        (scoring.dates, "May I? 31 people", []),
        (scoring.listed(["Ann Lee", "Ann"]), "ann\nlee, ANN and Annabel", ["Ann Lee", "Ann"]),
        (scoring.integers, "7. No one else counts.", ["7"]),
        (scoring.integers, "seven, and no one else", ["7"]),
        (scoring.integers, "7.0, or 7.50, or 07", ["7", "7.50", "7"]),
        (scoring.integers, "just one. One!", ["1", "1"]),
        (scoring.integers, "_seven_ **8** __nine__", ["7", "8", "9"]),
        (scoring.dates, "__3 May__ _June 4th_ 13 Mayor x3 May", ["3 May", "4 June"]),
        (scoring.listed(["Wendy Hargrove"]), "_Wendy Hargrove_ or __Wendy  Hargrove__", 
         ["Wendy Hargrove", "Wendy Hargrove"]),
        (scoring.listed(["Ann"]), "Ann-Marie, Anna, 2Ann", []),
        (scoring.matches(r"[A-Z]{5}"), "VAR ABCDE, _FGHIJ_ aABCDE", ["ABCDE", "FGHIJ"]),
        (scoring.among(["abcdef", "Xyzzyx"]), "the common _abcdef_, Abcdef; xyzzyx abcdefg", 
         ["abcdef", "abcdef", "Xyzzyx"]),
    ],
)  # fmt: skip
def test_values_are_found_in_their_normal_form(find, text, found):
    assert list(find(text)) == found


def test_a_score_tells_what_is_missing_and_what_is_too_much():
    score = scoring.exact(scoring.integers, "3 or 4", ["4", "5"])
    assert score.value == 0
    assert score.details == {"found": ["3", "4"], "missing": ["5"], "extra": ["3"]}


def test_what_the_question_names_may_be_repeated():
    assert scoring.exact(scoring.integers, "7 is 9", ["9"], named=["7"]).value == 1
    assert scoring.exact(scoring.integers, "7", ["7"], named=["7"]).value == 1
    assert scoring.exact(scoring.integers, "7", ["9"], named=["7"]).value == 0
    assert scoring.overlap(scoring.integers, "of 7: 8 and 9", ["8", "9"], named=["7"]).value == 1
    assert scoring.overlap(scoring.integers, "7 and 8", ["7", "8"], named=["7"]).value == 1


def test_details_list_a_few_of_many_values():
    score = scoring.exact(scoring.integers, " ".join(map(str, range(100))), ["1"])
    assert len(score.details["extra"]) == 20
