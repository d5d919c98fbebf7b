"""What each mode sees, against masks of booleans."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from da_jax.protocol.modes import Arm, Mode
from da_jax.protocol.prompt import PromptMap
from da_jax.protocol.visibility import merge_spans, visible_spans


def prompt(pieces, width=1, numbers=()):
    """A prompt of (characters, whether a chunk) pieces; a token holds `width` characters.

    A token is part of whatever one of its characters is part of.
    """
    ends = np.cumsum([size for size, _ in pieces]).tolist()
    spans = [
        ((end - size) // width, -(-end // width), is_chunk)
        for (size, is_chunk), end in zip(pieces, ends)
        if size
    ]
    chunks = tuple((a, b) for a, b, is_chunk in spans if is_chunk)
    return PromptMap(
        ids=np.zeros(-(-ends[-1] // width), np.int32),
        chunks=chunks,
        scaffold=tuple((a, b) for a, b, is_chunk in spans if not is_chunk),
        text="",
        chunk_chars=chunks,
        chunk_texts=("",) * len(chunks),
        labels=(None,) * len(chunks),
        arm=Arm.DA,
        numbers=numbers,
    )


# What stands before, groups of chunks that follow each other, what follows each group.
turns = st.lists(
    st.tuples(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.integers(1, 30)),
    min_size=1,
    max_size=4,
)


def mask_of(spans, size):
    mask = np.zeros(size, bool)
    for a, b in spans:
        mask[a:b] = True
    return mask


@given(st.integers(0, 30), turns, st.integers(1, 3), st.data())
def test_modes_against_the_owner_of_each_character(head, turns, width, data):
    pieces = [(head, False)]
    for chunks, text in turns:
        pieces += [*((size, True) for size in chunks), (text, False)]
    count = sum(is_chunk for _, is_chunk in pieces)
    numbers = tuple(data.draw(st.permutations(range(3, 3 + 2 * count, 2))))
    p = prompt(pieces, width, numbers)
    mode = data.draw(st.sampled_from(Mode))
    scaffold = data.draw(st.sampled_from(["all", "paper"]))
    sink = data.draw(st.integers(0, 40))
    focus = data.draw(st.lists(st.sampled_from(numbers), min_size=1))
    spans = visible_spans(p, mode, focus, scaffold, sink)

    names = iter(numbers)
    owners = [n for size, is_chunk in pieces for n in [next(names) if is_chunk else 0] * size]
    last = max(at for at, owner in enumerate(owners) if owner)
    expected = []
    for token in range(len(p)):
        own = range(token * width, min((token + 1) * width, len(owners)))
        seen = mode is Mode.GLOBAL or (mode is Mode.FOCUS and any(owners[c] in focus for c in own))
        if scaffold == "all":
            seen |= any(not owners[c] for c in own)
        else:
            seen |= token < sink or any(c > last for c in own)
        expected.append(seen)
    assert mask_of(spans, len(p)).tolist() == expected
    assert all(a < b for a, b in spans)
    assert all(b < c for (_, b), (c, _) in itertools.pairwise(spans))  # sorted, disjoint, merged


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50))))
def test_merging(spans):
    merged = merge_spans(spans)
    assert (mask_of(merged, 60) == mask_of(spans, 60)).all()
    assert all(b < c for (_, b), (c, _) in itertools.pairwise(merged))


def test_a_straddling_token_is_visible_from_both_sides():
    # tokens 10, 20 and 30 straddle
    p = prompt([(21, False), (20, True), (20, True), (19, False)], width=2)
    assert visible_spans(p, Mode.LOCAL) == ((0, 11), (30, 40))
    assert visible_spans(p, Mode.FOCUS, [1]) == ((0, 21), (30, 40))
    assert visible_spans(p, Mode.FOCUS, [2]) == ((0, 11), (20, 40))


def test_paper_scaffold_is_sink_and_question():
    p = prompt([(100, False), (20, True), (20, True), (10, False)])
    assert visible_spans(p, Mode.LOCAL, scaffold="paper") == ((0, 16), (140, 150))
    assert visible_spans(p, Mode.FOCUS, (2,), "paper", sink=4) == ((0, 4), (120, 150))


def test_turns_between_chunks_are_visible_but_for_the_paper_scaffold():
    p = prompt([(20, False), (10, True), (30, False), (10, True), (5, False)], numbers=(900, 7))
    assert visible_spans(p, Mode.LOCAL) == ((0, 20), (30, 60), (70, 75))
    assert visible_spans(p, Mode.FOCUS, (7,)) == ((0, 20), (30, 75))
    assert visible_spans(p, Mode.FOCUS, (900,), "paper") == ((0, 16), (20, 30), (70, 75))


def test_a_vanilla_prompt_is_all_visible():
    p = prompt([(9, False)])
    assert visible_spans(p, Mode.LOCAL) == ((0, 9),)
    assert visible_spans(p, Mode.LOCAL, scaffold="paper") == ((0, 9),)


@pytest.mark.parametrize("focus", [(), (0,), (3,), (1, 7)])
def test_focus_must_name_chunks_of_the_prompt(focus):
    with pytest.raises(ValueError, match="the prompt has chunks 1 to 2"):
        visible_spans(prompt([(5, False), (5, True), (5, True), (5, False)]), Mode.FOCUS, focus)


def test_chunks_and_numbers_must_agree():
    with pytest.raises(ValueError, match="1 chunks have 2 numbers"):
        prompt([(5, False), (5, True), (5, False)], numbers=(1, 2))


def test_unknown_scaffold():
    with pytest.raises(ValueError, match="'none'"):
        visible_spans(prompt([(5, False), (5, True), (9, False)]), Mode.GLOBAL, scaffold="none")
