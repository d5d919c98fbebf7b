"""Spans to entries and back, against a token-by-token reading of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.paged_cases import runs

from da_jax.kernels.paged_attention import BlockMask, compact, stack, validate


@st.composite
def masks(draw):
    page_size = draw(st.integers(1, 9))
    blocks = draw(st.integers(1, 7))
    tokens = blocks * page_size
    shown = np.array(draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)))
    table = np.array(draw(st.permutations(range(100, 100 + blocks))))
    return page_size, table, shown


def tokens_of(row, page_size: int) -> list[tuple[int, int, int]]:
    """`(page, slot, position)` of every slot that the entries show, in order of position."""
    page, span, block, count = row
    found = [
        (int(page[e]), slot, int(block[e]) * page_size + slot)
        for e in range(count)
        for slot in range(span[e] & 0xFFFF, span[e] >> 16)
    ]
    return sorted(found, key=lambda token: token[2])


@given(masks())
def test_entries_show_exactly_the_tokens_of_the_spans(case):
    page_size, table, shown = case
    row = compact(table, runs(shown), page_size, len(shown))
    want = [(table[i // page_size], i % page_size, i) for i in np.flatnonzero(shown)]
    assert tokens_of(row, page_size) == want


@given(masks())
def test_one_entry_for_each_run_in_each_page(case):
    page_size, table, shown = case
    *_, count = compact(table, runs(shown), page_size, len(shown))
    assert count == sum(len(runs(page)) for page in shown.reshape(-1, page_size))


@given(masks(), st.data())
def test_touching_and_empty_spans_change_nothing(case, data):
    page_size, table, shown = case
    cut = []
    for start, end in runs(shown):
        middle = data.draw(st.integers(start, end))
        cut += [(start, middle), (middle, middle), (middle, end)]
    whole, pieces = (compact(table, spans, page_size, len(shown)) for spans in (runs(shown), cut))
    for a, b in zip(whole, pieces):
        np.testing.assert_array_equal(a, b)


def test_known_table():
    page, span, block, count = compact([7, 5, 9], [(1, 3), (4, 9)], page_size=4, width=5)
    assert count == 3
    assert page.tolist() == [7, 5, 9, 0, 0]
    assert [(x & 0xFFFF, x >> 16) for x in span[:3].tolist()] == [(1, 3), (0, 4), (0, 1)]
    assert block.tolist() == [0, 1, 2, 0, 0]
    assert {x.dtype for x in (page, span, block)} == {np.dtype(np.int32)}


def test_a_mask_that_does_not_fit_says_how_wide_it_must_be():
    with pytest.raises(ValueError, match=r"need 3 entries but the mask is 2 wide.*at least 3"):
        compact([0, 1, 2], [(0, 12)], page_size=4, width=2)


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(4, 6), (0, 2)], "sorted and disjoint"),
        ([(0, 4), (3, 6)], "sorted and disjoint"),
        ([(5, 2)], "sorted and disjoint"),
        ([(-1, 2)], "outside the 12 tokens"),
        ([(0, 13)], "outside the 12 tokens"),
    ],
)
def test_bad_spans_are_named(spans, message):
    with pytest.raises(ValueError, match=message):
        compact([0, 1, 2], spans, page_size=4, width=9)


@pytest.mark.parametrize("page_size", [0, 1 << 15])
def test_page_sizes_that_do_not_fit_are_refused(page_size):
    with pytest.raises(ValueError, match=f"page size {page_size}"):
        compact([0], [(0, 1)], page_size, 1)


def good() -> BlockMask:
    rows = [compact([3, 1, 2], [(0, 10)], 4, 4), compact([0], [], 4, 4)]
    return BlockMask(*(np.array(x) for x in stack(rows)))


def test_validate_accepts_what_compact_makes_and_ignores_unused_entries():
    mask = good()
    mask.page[0, 3] = mask.page[1, 0] = 99
    validate(mask, num_pages=4, page_size=4)


@pytest.mark.parametrize("page", [-1, 4])
def test_validate_names_a_page_outside_the_pool(page):
    mask = good()
    mask.page[0, 2] = page
    with pytest.raises(ValueError, match=rf"sequence 0, entry 2: page {page} .*0\.\.3"):
        validate(mask, num_pages=4, page_size=4)


def test_validate_names_a_span_outside_the_page():
    with pytest.raises(ValueError, match=r"entry 0: span .*lo <= hi <= 2"):
        validate(good(), num_pages=4, page_size=2)


def test_validate_names_counts_beyond_the_width():
    mask = good()._replace(count=np.array([5, 0]))
    with pytest.raises(ValueError, match=r"counts \[5, 0\] .*width 4"):
        validate(mask, num_pages=4, page_size=4)
