"""Numbers of chunks, and what tags make of them, against sets."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from da_jax.protocol import ids
from da_jax.protocol.tags import Kind, Reason, TagScanner

some_ids = st.sets(st.integers(1, 12) | st.integers(1, ids.MAX_ID))

few_ids = st.sets(st.integers(1, 9) | st.sampled_from([40, 41, 42, 10**6, 999_999_999]))
items = st.lists(st.tuples(st.integers(1, 10), st.integers(0, 3)), min_size=1, max_size=5)


@given(some_ids, st.integers(1, 13), st.integers(1, 13))
def test_a_range_is_known_if_each_of_its_numbers_is(chunks, low, high):
    known = ids.known_ids(chunks)
    found = ids.positions(known, low, high)
    if low > high:
        return
    wanted = set(range(low, high + 1))
    assert (found is not None) == (wanted <= chunks)
    if found is not None:
        assert [known[place] for place in found] == sorted(wanted)


def test_a_count_stands_for_one_to_so_many():
    assert list(ids.known_ids(3)) == [1, 2, 3] and list(ids.known_ids(0)) == []
    assert ids.known_ids([7, 3]) == (3, 7)


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        (-1, "chunks is -1"),
        ([0], "an id of a chunk is 0; give a whole number from 1 to 999999999"),
        ([10**9], "is 1000000000"),
        ([True], "is True"),
        (["3"], "is '3'"),
        ([3, 5, 3], "the id 3 is given twice"),
    ],
)
def test_ids_that_cannot_be_are_refused(chunks, message):
    with pytest.raises(ValueError, match=message):
        ids.known_ids(chunks)


def test_numbers_in_a_text():
    assert ids.parse("x", "3, 7,012") == (3, 7, 12)
    for text in ("", "3,", "a", "3-5", "-1", "³", "1234567890"):
        with pytest.raises(ValueError, match=r"x is .*; give chunk numbers of up to nine digits"):
            ids.parse("x", text)
    with pytest.raises(ValueError, match="a number of x is 0"):
        ids.parse("x", "0")


def test_what_is_missing_is_named_beside_what_is_there():
    ids.check_known("x", (2, 3), range(1, 4))
    with pytest.raises(ValueError, match="x names 4, 9, but the prompt has chunks 1 to 3"):
        ids.check_known("x", (4, 2, 9), (3, 1, 2))
    with pytest.raises(ValueError, match=r"has chunks 2, 4, 6, 8, 10, 12, 14, 16, \.\.\."):
        ids.check_known("x", (1,), range(2, 22, 2))
    with pytest.raises(ValueError, match="has no chunks"):
        ids.check_known("x", (1,), ())


@given(few_ids, items)
def test_a_focus_is_honoured_if_every_id_that_it_names_exists(known, items):
    wanted = {low + n for low, more in items for n in range(more + 1)}
    spelled = ", ".join(f"{low}-{low + more}" if more else f"{low}" for low, more in items)
    (event,) = TagScanner(known).feed(f'<focus magic_chunks="{spelled}">')
    if wanted <= known:
        assert (event.kind, event.ids) == (Kind.OPEN, tuple(sorted(wanted)))
    else:
        assert (event.kind, event.reason) == (Kind.DECLINED, Reason.UNKNOWN_CHUNK)


def test_a_range_over_a_gap_is_refused_before_its_numbers_are_listed():
    scanner = TagScanner([1, 999_999_999])
    tracemalloc.start()
    (event,) = scanner.feed('<focus magic_chunks="1-999999999">')
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert event.reason is Reason.UNKNOWN_CHUNK and peak < 100_000


def test_the_longest_tag_follows_from_the_ids():
    known = range(999_999_000, 999_999_100)
    spelled = ", ".join(f"{i}-{i}" for i in known)
    (event,) = TagScanner(known).feed(f'<focus magic_chunks="{spelled}">')
    assert event.ids == tuple(known)
    scanner = TagScanner([7, 12_345])
    scanner.feed("<focus ")
    assert scanner.room == 128 + 2 * len("12345-12345, ") - len("<focus ")
    limited = TagScanner([7, 12_345], max_ids=1)
    limited.feed("<focus ")
    assert limited.room == scanner.room - len("12345-12345, ")
