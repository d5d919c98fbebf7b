"""What each mode sees, against masks of booleans."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from da_jax.protocol.modes import Arm, Mode
from da_jax.protocol.prompt import PromptMap
from da_jax.protocol.visibility import merge_spans, visible_spans


def prompt(borders, straddling, end):
    """Chunks between the borders; with `straddling`, neighbours share one token."""
    chunks = tuple((a, b + straddling) for a, b in itertools.pairwise(borders))
    scaffold = ((0, borders[0] + straddling), (borders[-1], end)) if chunks else ((0, end),)
    return PromptMap(
        ids=np.zeros(end, np.int32),
        chunks=chunks,
        scaffold=tuple((a, b) for a, b in scaffold if a < b),
        text="",
        chunk_chars=chunks,
        chunk_texts=("",) * len(chunks),
        labels=(None,) * len(chunks),
        arm=Arm.DA,
    )


@st.composite
def prompts(draw):
    sizes = draw(st.lists(st.integers(1, 20), min_size=1, max_size=8))
    borders = np.cumsum([draw(st.integers(0, 30)), *sizes]).tolist()
    straddling = draw(st.integers(0, 1))
    return prompt(borders, straddling, borders[-1] + straddling + draw(st.integers(1, 9)))


def mask_of(spans, size):
    mask = np.zeros(size, bool)
    for a, b in spans:
        mask[a:b] = True
    return mask


@given(prompts(), st.data())
def test_modes_against_boolean_masks(p, data):
    mode = data.draw(st.sampled_from(Mode))
    scaffold = data.draw(st.sampled_from(["all", "paper"]))
    sink = data.draw(st.integers(0, 40))
    focus = data.draw(st.lists(st.integers(1, len(p.chunks)), min_size=1))
    spans = visible_spans(p, mode, focus, scaffold, sink)

    chunk_count = np.zeros(len(p), int)
    for a, b in p.chunks:
        chunk_count[a:b] += 1
    outside = np.zeros(len(p), bool)
    outside[: p.chunks[0][0]] = outside[p.chunks[-1][1] :] = True
    outside |= mask_of(p.scaffold, len(p))  # straddling tokens at the outer borders
    if scaffold == "paper":
        outside[: p.chunks[-1][0]] = False
        outside &= np.arange(len(p)) >= p.scaffold[-1][0]
        outside[:sink] = True
    expected = outside
    if mode is Mode.GLOBAL:
        expected = np.ones(len(p), bool)
    elif mode is Mode.FOCUS:
        expected = outside | mask_of([p.chunks[n - 1] for n in focus], len(p))

    assert (mask_of(spans, len(p)) == expected).all()
    assert all(a < b for a, b in spans)
    assert all(b < c for (_, b), (c, _) in itertools.pairwise(spans))  # sorted, disjoint, merged


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50))))
def test_merging(spans):
    merged = merge_spans(spans)
    assert (mask_of(merged, 60) == mask_of(spans, 60)).all()
    assert all(b < c for (_, b), (c, _) in itertools.pairwise(merged))


def test_a_straddling_token_is_visible_from_both_sides():
    p = prompt([10, 20, 30], straddling=1, end=40)  # tokens 10, 20 and 30 straddle
    assert visible_spans(p, Mode.LOCAL) == ((0, 11), (30, 40))
    assert visible_spans(p, Mode.FOCUS, [1]) == ((0, 21), (30, 40))
    assert visible_spans(p, Mode.FOCUS, [2]) == ((0, 11), (20, 40))


def test_paper_scaffold_is_sink_and_question():
    p = prompt([100, 120, 140], straddling=0, end=150)
    assert visible_spans(p, Mode.LOCAL, scaffold="paper") == ((0, 16), (140, 150))
    assert visible_spans(p, Mode.FOCUS, (2,), "paper", sink=4) == ((0, 4), (120, 150))


def test_a_vanilla_prompt_is_all_visible():
    p = prompt([0], straddling=0, end=9)
    assert visible_spans(p, Mode.LOCAL) == ((0, 9),)
    assert visible_spans(p, Mode.LOCAL, scaffold="paper") == ((0, 9),)


@pytest.mark.parametrize("focus", [(), (0,), (3,), (1, 7)])
def test_focus_must_name_chunks_of_the_prompt(focus):
    with pytest.raises(ValueError, match="from 1 to 2"):
        visible_spans(prompt([5, 10, 15], 0, 20), Mode.FOCUS, focus)


def test_unknown_scaffold():
    with pytest.raises(ValueError, match="'none'"):
        visible_spans(prompt([5, 10], 0, 20), Mode.GLOBAL, scaffold="none")
