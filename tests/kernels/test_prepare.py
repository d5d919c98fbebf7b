"""What the Pallas kernels are given, against plain loops in NumPy."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from da_jax.kernels.paged_attention import BlockMask, prepare

SIZE, PAGES, WIDTH = 4, 9, 6


@cache
def program(window):
    sizes = {"num_pages": PAGES, "page_size": SIZE, "tile": 3, "tiles": 3}
    return jax.jit(partial(prepare.tables, window=window, **sizes))


@st.composite
def masks(draw):
    """A batch of two masks, lengths and numbers of queries, and a window."""
    entry = st.tuples(
        st.integers(-2, PAGES + 2), st.integers(0, SIZE), st.integers(0, SIZE), st.integers(0, 5)
    )
    rows = [draw(st.lists(entry, min_size=WIDTH, max_size=WIDTH)) for _ in range(2)]
    page, lo, hi, block = np.moveaxis(np.array(rows, np.int32), 2, 0)
    count = np.array([draw(st.integers(0, WIDTH)) for _ in range(2)], np.int32)
    lengths = np.array([draw(st.integers(0, 5 * SIZE)) for _ in range(2)], np.int32)
    q_lens = np.array([draw(st.integers(0, min(7, n))) for n in lengths], np.int32)
    mask = BlockMask(page, np.minimum(lo, hi) | np.maximum(lo, hi) << 16, block, count)
    return mask, lengths, q_lens, draw(st.none() | st.integers(1, 9))


def shown(mask, b, length, q_len, window):
    """Pairs (page, position) that some query of sequence `b` may see."""
    found = []
    for page, span, block in list(zip(*(x[b] for x in mask[:3])))[: mask.count[b]]:
        for slot in range(span & 0xFFFF, span >> 16):
            position = block * SIZE + slot
            if position < length and (window is None or position > length - q_len - window):
                found.append((int(np.clip(page, 0, PAGES - 1)), int(position)))
    return sorted(found)


@settings(max_examples=200, deadline=None)
@given(masks())
def test_tables_list_exactly_the_slots_that_some_query_sees(case):
    mask, lengths, q_lens, window = case
    tables = program(window)(mask, lengths, q_lens)
    table = BlockMask(*(np.asarray(x) for x in tables[:3]), np.asarray(tables.count[:, 0]))
    assert (table.page >= 0).all() and (table.page < PAGES).all()
    np.testing.assert_array_equal(tables.first, lengths - q_lens)
    for b in range(2):
        walked = [int(tables.count[b, i]) for i in range(3)]
        asked = [3 * i < q_lens[b] for i in range(3)]
        assert [n for n, yes in zip(walked, asked) if not yes] == [0] * asked.count(False)
        assert len({n for n, yes in zip(walked, asked) if yes}) <= 1
        if q_lens[b]:
            want = shown(mask, b, lengths[b], q_lens[b], window)
            assert shown(table, b, 10**6, 0, None) == want
            if window is not None:  # entries outside the window are not walked at all
                spans = table.span[b, : walked[0]]
                assert ((spans & 0xFFFF) < spans >> 16).all()
    empty = np.arange(WIDTH) >= np.asarray(tables.count.max(1))[:, None]
    assert not np.asarray(tables.span)[empty & (q_lens > 0)[:, None]].any()


@pytest.mark.parametrize(
    ("queries", "tile", "kv_heads", "group"),
    [(1, 1, 2, 3), (1, 4, 1, 1), (7, 3, 2, 2), (6, 3, 3, 1), (5, 8, 1, 5)],
)
def test_rows_are_grouped_by_kv_head_and_come_back(queries, tile, kv_heads, group):
    shape = (2, queries, kv_heads * group, 5)
    q = np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)
    rows = tile * group + 2
    grouped = prepare.group_rows(jnp.asarray(q), kv_heads, tile, rows)
    tiles = -(-queries // tile)
    assert grouped.shape == (2, kv_heads, tiles, rows, 5)
    for b, h, i, r in np.ndindex(2, kv_heads, tiles, rows):
        t, g = i * tile + r // group, r % group
        real = r < tile * group and t < queries
        want = q[b, t, h * group + g] if real else np.zeros(5)
        np.testing.assert_array_equal(grouped[b, h, i, r], want)
    np.testing.assert_array_equal(prepare.ungroup_rows(grouped, queries, tile, group), q)


def test_splits_join_to_one_softmax_and_empty_ones_do_not_count():
    rng = np.random.default_rng(0)
    scores, values = rng.normal(size=(3, 4, 8)) * 30, rng.normal(size=(3, 4, 8, 5))
    total_seen = np.array([[8, 8, 0, 0], [3, 0, 0, 0], [0, 8, 2, 0]])  # keys of each part and row
    live = np.arange(8) < total_seen[..., None]
    high = np.where(live, scores, -1e30).max(-1)
    weight = np.exp(np.where(live, scores - high[..., None], -np.inf))
    out = (weight[..., None] * values).sum(2)
    out[total_seen == 0] = np.nan  # what a part without keys leaves behind does not matter
    joined, lse = prepare.join_splits(*map(jnp.float32, (out, high, weight.sum(-1))), axis=0)
    for row in range(4):
        s = np.concatenate([scores[i, row, :n] for i, n in enumerate(total_seen[:, row])])
        v = np.concatenate([values[i, row, :n] for i, n in enumerate(total_seen[:, row])])
        if not len(s):
            assert not joined[row].any() and np.isneginf(lse[row])
            continue
        w = np.exp(s - s.max())
        np.testing.assert_allclose(joined[row], w @ v / w.sum(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(lse[row], s.max() + np.log(w.sum()), rtol=1e-5)
