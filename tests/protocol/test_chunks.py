"""Segmentation: lossless, near the target, never over the cap, at the coarsest border."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from da_jax.protocol import chunks as chunks_lib
from da_jax.protocol.chunks import Chunk, split

PIECES = st.sampled_from(
    ["word", " ", "\n", "\n\n", "\r\n", ". ", "! ", ", ", "。", "、", "x" * 7, "é", "e\u0301",
     "👩‍👩‍👧", "🇩🇪", "각", "\u2028", "...", '."', "  \n \n"]
)  # fmt: skip


def tokens(text: str) -> int:
    """With one token a character."""
    return len(text)


def cut(text: str, target: int, cap: int) -> list[str]:
    return split(text, np.arange(len(text)), target, cap)


@given(st.lists(PIECES, max_size=60), st.integers(1, 20), st.integers(0, 10), st.randoms())
def test_lossless_and_never_over_the_cap(pieces, target, extra, random):
    text, cap = "".join(pieces), target + extra
    starts = sorted(random.choices(range(len(text)), k=len(text))) if text else []
    chunks = split(text, starts, target, cap)
    assert "".join(chunks) == text
    assert all(chunks)
    ends = list(itertools.accumulate(map(len, chunks)))
    for a, b in zip([0, *ends], ends):
        inside = [sum(s == p for s in starts) for p in range(a, b)]
        assert sum(inside) <= cap or b - a == 1  # a code point is never cut


@given(st.lists(PIECES, max_size=60), st.integers(1, 20), st.integers(0, 10))
def test_no_two_neighbours_would_fit_the_target_together(pieces, target, extra):
    chunks = cut("".join(pieces), target, target + extra)
    assert all(tokens(a) + tokens(b) > target for a, b in itertools.pairwise(chunks))


def test_empty_and_small_documents():
    assert split("", [], 10, 12) == []
    assert cut("twelve chars", 5, 12) == ["twelve chars"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two\nb.\n\nThree, c. Four", ["One. Two\nb.\n\n", "Three, c. Four"]),
        ("One. Two, b.\nThree, c. Four", ["One. Two, b.\n", "Three, c. Four"]),
        ("One two, b. Three, c d four", ["One two, b. ", "Three, c d four"]),
        ("One two b, Three c d four", ["One two b, ", "Three c d four"]),
        ("One two bb Three c d four", ["One two bb ", "Three c d four"]),
        ("一二三、四五六七八。九十、一二三四五六", ["一二三、四五六七八。", "九十、一二三四五六"]),
        ("一二三四五六七八九、十一二三四五六", ["一二三四五六七八九、", "十一二三四五六"]),
        ('"One two." b, c dd eeee f', ['"One two." ', "b, c dd eeee f"]),
        ("一二「三四五六。」七、八九十一二三四五", ["一二「三四五六。」", "七、八九十一二三四五"]),
        ("一二三四五六七八．九十、一二三四五六", ["一二三四五六七八．", "九十、一二三四五六"]),
        ("一二三四五６．７八九十、一二三四五六", ["一二三四五６．７八九十、", "一二三四五六"]),
        ("一二三四五六七……九十、一二三四五六", ["一二三四五六七……", "九十、一二三四五六"]),
        ("aaaaaaaaa. \r\n \r\nbbbbbbbbb", ["aaaaaaaaa. \r\n \r\n", "bbbbbbbbb"]),
    ],
)
def test_the_coarsest_border_wins(text, expected):
    assert cut(text, 12, 16) == expected


def test_only_units_over_the_cap_are_split():
    paragraph = "One. Two. Three.\n\n"  # 18, over the target and within the cap
    assert cut(paragraph * 3, 10, 18) == [paragraph] * 3


def test_a_chunk_comes_as_near_to_the_target_as_its_borders_allow():
    assert cut("aaaa bbbb cccc dddd eeee ", 11, 13) == ["aaaa bbbb ", "cccc dddd ", "eeee "]
    assert cut("aaaa bbbb cccc dddd eeee ", 13, 15) == ["aaaa bbbb cccc ", "dddd eeee "]


@pytest.mark.parametrize(
    "grapheme", ["e\u0301\u0308", "👩‍👩‍👧", "🇩🇪", "\r\n", "각", "क्षि", "👋🏽", "กำ"]
)
def test_graphemes_stay_whole(grapheme):
    chunks = cut(grapheme * 40, 11, 12)
    assert len(chunks) > 1
    assert all(chunk == grapheme * (len(chunk) // len(grapheme)) for chunk in chunks)


def test_one_grapheme_over_the_cap_is_cut():
    assert max(map(len, cut("e" + "\u0301" * 50, 10, 12))) <= 12


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="target=5, cap=4"):
        split("x", [0], 5, 4)


def test_own_chunks():
    assert chunks_lib.as_chunks(["a", Chunk("b", "name")]) == (Chunk("a"), Chunk("b", "name"))
    with pytest.raises(ValueError, match="chunk 2 is a int"):
        chunks_lib.as_chunks(["a", 3])


def test_chunks_are_numbered_from_one_unless_they_have_ids():
    assert chunks_lib.numbers([Chunk("a"), Chunk("b")]) == (1, 2)
    assert chunks_lib.numbers([Chunk("a", id=70), Chunk("b", "x", 3)]) == (70, 3)
    assert chunks_lib.numbers([]) == ()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([7, None], "chunk 2 has no id, but chunk 1 has 7; give every chunk .* an id, or none"),
        ([None, 7], "chunk 1 has no id, but chunk 2 has 7"),
        ([7, 8, 7], "chunks 1 and 3 both have the id 7"),
        ([0], "the id of chunk 1 is 0; give a whole number from 1 to 999999999"),
        ([3, -3], "the id of chunk 2 is -3"),
        (["3"], "the id of chunk 1 is '3'"),
        ([3.0], "the id of chunk 1 is 3.0"),
        ([True], "the id of chunk 1 is True"),
        ([10**9], "the id of chunk 1 is 1000000000"),
    ],
)
def test_ids_that_cannot_be_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        chunks_lib.numbers([Chunk("x", id=id_) for id_ in given])


def test_millions_of_characters_of_every_shape():
    for text in ("x", ".", "\n", "e\u0301", "🇩🇪", "\n" + " " * 9, '."', "a, "):
        text *= 300_000 // len(text)
        assert "".join(cut(text, 2048, 2560)) == text
