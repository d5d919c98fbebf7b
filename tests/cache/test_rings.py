"""Rings against a brute-force account of which token lies where."""

import itertools

import jax
import numpy as np
import pytest

from da_jax.cache.rings import ring_blocks, ring_mask, ring_pages

SLOTS, STEPS = np.array([3, 0, 1], np.int32), 12


def seen(mask, row, page_size):
    """{(page, slot in it): position} of the entries in use."""
    out = {}
    for entry in range(mask.count[row]):
        low, high = mask.span[row, entry] & 0xFFFF, mask.span[row, entry] >> 16
        assert 0 <= low < high <= page_size
        for slot in range(low, high):
            position = int(mask.block[row, entry]) * page_size + slot
            out[int(mask.page[row, entry]), slot] = position
    return out


@pytest.mark.parametrize(
    ("window", "page_size", "longest"),
    list(itertools.product([1, 5, 8, 17], [1, 4, 16], [1, 3, 24])),
)
def test_a_step_finds_every_position_of_its_windows_where_it_was_written(
    window, page_size, longest
):
    blocks = ring_blocks(window, longest, page_size)
    rng = np.random.default_rng([window, page_size, longest])
    sizes = [0, 1, longest, longest // 2]  # tokens that each of three sequences gains in a step
    q_lens = rng.choice(sizes, (STEPS, 3)).astype(np.int32)
    position = (np.cumsum(q_lens, axis=0) - q_lens).astype(np.int32)
    positions = position[..., None] + np.arange(longest, dtype=np.int32)

    @jax.jit
    def all_steps(slot, positions, position, q_lens):
        shape = dict(blocks=blocks, page_size=page_size)
        mask = ring_mask(slot, position, q_lens, window=window, **shape)
        return ring_pages(slot, positions, **shape), mask

    flat = (np.tile(SLOTS, STEPS), positions.reshape(-1, longest), position.ravel(), q_lens.ravel())
    pages, mask = jax.tree.map(np.asarray, all_steps(*flat))
    assert mask.page.shape == (3 * STEPS, blocks)
    memory: dict[tuple[int, int], tuple[int, int]] = {}  # what each slot of each page holds
    for index, (step, row) in enumerate(np.ndindex(STEPS, 3)):
        start = int(position[step, row])
        end = start + int(q_lens[step, row])
        for at in range(start, end):
            page = int(pages[index, at - start])
            assert page // blocks == SLOTS[row]
            memory[page, at % page_size] = (row, at)
        found = seen(mask, index, page_size)
        wanted = range(max(start - window + 1, 0), end) if end > start else []
        assert sorted(found.values()) == list(wanted)
        assert all(memory[place] == (row, at) for place, at in found.items())


@pytest.mark.parametrize(("window", "longest", "page_size"), [(8, 24, 4), (16, 1, 16), (5, 9, 1)])
def test_a_ring_is_at_most_a_page_longer_than_it_must_be(window, longest, page_size):
    span = window + longest - 1
    worst = max((at + span - 1) // page_size - at // page_size + 1 for at in range(page_size))
    assert worst <= ring_blocks(window, longest, page_size) <= worst + 1


def test_entries_ascend_by_position_over_the_end_of_the_ring():
    """Position 40 with a window of 8, in pages of 4 and a ring of 5: blocks 8 to 10."""
    slot, position, q_lens = (np.array([x], np.int32) for x in (2, 40, 3))
    mask = ring_mask(slot, position, q_lens, window=8, blocks=5, page_size=4)
    assert mask.count.tolist() == [3]
    assert mask.block[0].tolist() == [8, 9, 10, 0, 0]
    assert mask.page[0].tolist() == [13, 14, 10, 0, 0]
    assert mask.span[0].tolist() == [1 | 4 << 16, 0 | 4 << 16, 0 | 3 << 16, 0, 0]
