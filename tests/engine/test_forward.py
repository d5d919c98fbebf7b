"""Prefill in chunks and decode through the paged cache, against transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import references

from da_jax.cache import pools
from da_jax.checkpoints import hf
from da_jax.engine.runner import Rows, forward
from da_jax.engine.sampling import SamplingRows
from da_jax.kernels.paged_attention import compact, layout, stack

PAGE = 16
BLOCKS = -(-references.LENGTH // PAGE) + 1
NO_SAMPLING = SamplingRows(*[np.zeros(0)] * 6)


class Paged:
    """Two sequences in scattered pages; feeds tokens and collects logits."""

    def __init__(self, model, program):
        self._step = program
        order = np.random.default_rng(1).permutation(2 * BLOCKS).astype(np.int32)
        self.tables = order.reshape(2, BLOCKS)
        config = model.config
        form = layout(2 * BLOCKS, config.num_kv_heads, PAGE, config.head_dim, jnp.float32)
        self.pages = pools.allocate(pools.PoolPlan(form, config.num_layers))
        self.logits = np.full((2, references.LENGTH, references.VOCAB), np.nan, np.float32)

    def feed(self, tokens, position, q_lens, spans=((0, BLOCKS * PAGE),)):
        """Feeds [2, T] right-padded tokens; `spans` is what both rows see."""
        mask = stack([compact(table, spans, PAGE, BLOCKS + 4) for table in self.tables])
        rows = Rows(self.tables, mask, NO_SAMPLING)
        position, q_lens = np.asarray(position, np.int32), np.asarray(q_lens, np.int32)
        out, self.pages = self._step(
            self.pages, np.asarray(tokens, np.int32), position, q_lens, rows
        )
        for b in range(2):
            self.logits[b, position[b] : position[b] + q_lens[b]] = out[b, : q_lens[b]]

    def prefill(self, ids):
        """Feeds [2, N] tokens from position 0 in chunks of 24, the last one padded."""
        for start in range(0, ids.shape[1], 24):
            piece = ids[:, start : start + 24]
            padded = np.pad(piece, ((0, 0), (0, 24 - piece.shape[1])))
            self.feed(padded, [start] * 2, [piece.shape[1]] * 2)


@pytest.fixture(scope="module", params=references.CASES)
def case(request, tmp_path_factory):
    folder = references.write_folder(request.param, tmp_path_factory.mktemp(request.param))
    model = hf.load(folder, dtype=np.float32)

    @jax.jit
    def program(pages, tokens, position, q_lens, rows):
        hidden, pages, _ = forward(model, pages, tokens, position, q_lens, rows, impl=None)
        return model.logits(hidden), pages

    return request.param, folder, lambda: Paged(model, program)


def assert_equal(paged, name, folder, masked):
    positions, expected = references.expected(name, folder, masked=masked)
    assert np.abs(paged.logits[:, positions] - expected).max() < 1e-4


def test_chunks_then_single_steps_equal_the_whole_forward(case):
    name, folder, new_cache = case
    ids, paged = references.token_ids(), new_cache()
    paged.prefill(ids[:, :70])
    for at in range(70, references.LENGTH):
        paged.feed(ids[:, at : at + 1], [at] * 2, [1] * 2)
    assert_equal(paged, name, folder, masked=False)


def test_ragged_rows_with_right_padding_equal_the_whole_forward(case):
    name, folder, new_cache = case
    ids, paged, at = references.token_ids(), new_cache(), np.zeros(2, np.int64)
    for sizes in ((24, 5), (0, 24), (17, 1), (24, 24), (15, 24), (0, 2)):
        padded = np.full((2, 24), 499)
        for b, size in enumerate(sizes):
            padded[b, :size] = ids[b, at[b] : at[b] + size]
        paged.feed(padded, at, sizes)
        at += sizes
    assert at.tolist() == [references.LENGTH] * 2
    assert_equal(paged, name, folder, masked=False)


def test_a_declaration_on_the_way_equals_the_four_dimensional_mask(case):
    name, folder, new_cache = case
    ids, paged, start = references.token_ids(), new_cache(), references.MASK_FROM
    paged.prefill(ids[:, :start])
    hole = ((0, references.HIDDEN[0]), (references.HIDDEN[1], BLOCKS * PAGE))
    for at in range(start, references.LENGTH):
        paged.feed(ids[:, at : at + 1], [at] * 2, [1] * 2, hole)
    assert_equal(paged, name, folder, masked=True)
