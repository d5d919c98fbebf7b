"""The prefix cache gives back what was written for exactly these tokens, or nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from da_jax.cache.pages import PagePool
from da_jax.cache.prefix import PrefixCache, page_names

PAGE = 4


def names(tokens, root=b"model", page_size=PAGE):
    return page_names(root, np.asarray(tokens, np.int32), page_size)


def test_a_name_stands_for_all_tokens_before_it_the_model_and_the_page_size():
    assert len(names(range(11))) == 2
    assert names(range(11)) == names(range(8))
    seen = {names(range(8))[1], names([9, *range(1, 8)])[1], names(range(8), b"other")[1]}
    seen |= {names(range(8), page_size=8)[0], names(range(4, 8))[0], names(range(8))[0]}
    assert len(seen) == 6


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(0, 2)), min_size=1, max_size=60
    )
)
def test_a_hit_holds_the_tokens_asked_for_and_nothing_leaks(actions):
    """A dictionary of what each page holds is the oracle."""
    pool = PagePool(12)
    cache = PrefixCache(pool, b"model")
    content, running = {}, []
    documents = [list(range(n)) * 3 for n in (5, 7, 11)]  # prompts share beginnings
    for kind, length, which in actions:
        if kind < 3:
            tokens = tuple(documents[which][:length])
            wanted = names(tokens)
            pages, slot = cache.match(wanted)
            assert slot is None
            for index, page in enumerate(pages):
                assert content[page] == tokens[: (index + 1) * PAGE]
            missing = -(-len(tokens) // PAGE) - len(pages)
            if missing > pool.num_free - pool.taken_by(pages):
                continue
            pool.hold(pages)
            pages = pages + pool.allocate(missing)
            for index, page in enumerate(pages):
                if pool.holders(page) == 1 and page not in pages[:index]:
                    content[page] = tokens[: (index + 1) * PAGE]
            for page, name in zip(pages, wanted):
                pool.name(page, name)
            running.append(pages)
        elif running:
            pool.free(running.pop(which % len(running)))
        held = {page for pages in running for page in pages}
        assert pool.num_free == 12 - len(held)
        assert all(pool.holders(p) == sum(p in pages for pages in running) for p in range(12))
    for pages in running:
        pool.free(pages)
    assert pool.num_free == 12


def test_the_page_let_go_of_longest_ago_is_forgotten_first_and_a_prefix_from_its_end():
    pool = PagePool(4)
    cache = PrefixCache(pool, b"")
    old, new = names([1] * 8), names([2] * 8)
    for wanted in (old, new):
        pages = pool.allocate(2)
        for page, name in zip(pages, wanted):
            pool.name(page, name)
        pool.free(pages)
    assert pool.num_idle == pool.num_free == 4
    taken = pool.allocate(1)
    assert len(cache.match(old)[0]) == 1 and len(cache.match(new)[0]) == 2
    taken += pool.allocate(1)
    assert cache.match(old) == ([], None) and len(cache.match(new)[0]) == 2
    pool.free(taken)


def test_a_model_with_states_hits_only_where_a_copy_is_kept():
    pool = PagePool(9)
    cache = PrefixCache(pool, b"", snapshots=[5, 6])
    wanted = names(range(16))
    pages = pool.allocate(4)
    for page, name in zip(pages, wanted):
        pool.name(page, name)
    assert cache.match(wanted) == ([], None)
    slot = cache.slot_for(wanted[1])
    assert slot in (5, 6) and cache.match(wanted) == ([], None)  # until the copy is made
    cache.keep(wanted[1], slot)
    assert cache.match(wanted) == (pages[:2], slot)
    assert cache.match(wanted, known=1) == (pages[1:2], slot)
    assert cache.match(wanted, known=2) == ([], None)
    assert cache.slot_for(wanted[1]) is None
    other = cache.slot_for(wanted[3])
    cache.keep(wanted[3], other)
    assert {slot, other} == {5, 6} and cache.match(wanted) == (pages, other)
    cache.used(wanted[1])
    third = names([7] * 4)[0]
    assert cache.slot_for(third) == other  # the one not used longest
    assert cache.match(wanted) == (pages[:2], slot)
    pool.free(pages)


def test_no_slots_for_copies_means_no_hits():
    cache = PrefixCache(PagePool(2), b"", snapshots=[])
    assert not cache.keeps_copies and cache.slot_for(b"x") is None


def test_only_pages_in_use_can_be_named():
    pool = PagePool(1)
    with pytest.raises(ValueError, match="page 0 is not in use"):
        pool.name(0, b"x")
