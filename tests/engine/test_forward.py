"""Prefill in chunks and decode through the caches, against transformers.

All caches begin full of NaN: nothing that was not written by the sequence itself may matter, be it
pages and rings of others, or the state that another sequence left in the slot.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import references

from da_jax.cache import pools, states
from da_jax.checkpoints import hf
from da_jax.engine.rows import Rows
from da_jax.engine.runner import forward
from da_jax.engine.sampling import SamplingRows
from da_jax.kernels.paged_attention import BlockMask, compact, stack

LENGTH, ROWS, SEATS = references.LENGTH, 2, 4
SLOTS = np.array([2, 0], np.int32)
NO_SAMPLING = SamplingRows(*[np.zeros(0)] * 6)
HOLE = ((0, references.HIDDEN[0]), (references.HIDDEN[1], LENGTH))


class Program:
    """The engine's forward pass of one model, and the sizes of its caches."""

    def __init__(self, model, page_size=16, step=24):
        self.step, self.page_size, self.blocks = step, page_size, -(-LENGTH // page_size)
        self.plan = pools.plan(
            model.config, page_size=page_size, max_tokens=LENGTH, sequences=SEATS,
            longest_step=step, dtype=jnp.float32, budget_bytes=2**40,
        )  # fmt: skip
        self.config = model.config

        # Compiling is what takes time here.
        @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
        def run(caches, tokens, position, q_lens, rows):
            held = states.take(caches, rows.slot, position)
            out = forward(model, self.plan, held, tokens, position, q_lens, rows, impl=None)
            return model.logits(out[0]), states.put(caches, out[1], rows.slot)

        self.run = run

    def begin(self, fill=np.nan):
        """Caches full of a number, and nothing fed yet."""
        return Paged(self, jax.tree.map(lambda x: x + fill, pools.allocate(self.plan)))


class Paged:
    """Two sequences in scattered pages and slots; feeds tokens and collects logits."""

    def __init__(self, program, caches):
        self.program, self.caches = program, caches
        order = np.random.default_rng(1).permutation(program.plan.num_pages).astype(np.int32)
        self.tables = order[: ROWS * program.blocks].reshape(ROWS, -1)
        self.at = np.zeros(ROWS, np.int32)
        self.logits = np.full((ROWS, LENGTH, references.VOCAB), np.nan, np.float32)

    def feed(self, ids, q_lens, spans=((0, LENGTH),)):
        """Feeds each row its next tokens, right-padded; `spans` is what full attention sees."""
        width = 1 if max(q_lens) <= 1 else self.program.step
        tokens = np.full((ROWS, width), 499, np.int32)
        for row, size in enumerate(q_lens):
            tokens[row, :size] = ids[row, self.at[row] : self.at[row] + size]
        mask = stack(
            [
                compact(t, spans, self.program.page_size, self.program.blocks + 4)
                for t in self.tables
            ]
        )
        q_lens = np.asarray(q_lens, np.int32)
        rows = Rows(self.tables, mask, SLOTS, NO_SAMPLING)
        out, self.caches = self.program.run(self.caches, tokens, self.at, q_lens, rows)
        for row, size in enumerate(q_lens):
            self.logits[row, self.at[row] : self.at[row] + size] = out[row, :size]
        self.at = self.at + q_lens

    def feed_all(self, ids, sizes, spans=((0, LENGTH),)):
        for q_lens in sizes:
            self.feed(ids, q_lens, spans)
        return self


# Those that differ in their caches; the others differ in what a layer computes from them.
DIFFERENT = ("qwen3", "llama", "qwen3_5", "gemma3_1b", "gemma4_31b", "gemma4_e2b")


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """(folder, model) of a case."""

    @functools.cache
    def folder_and_model(name):
        folder = references.write_folder(name, tmp_path_factory.mktemp(name))
        return folder, hf.load(folder, dtype=np.float32)

    return folder_and_model


@pytest.fixture(scope="module")
def program(load):
    """The program of a case."""
    return functools.cache(lambda name: Program(load(name)[1]))


@pytest.fixture(
    params=[
        name if name in DIFFERENT else pytest.param(name, marks=pytest.mark.slow)
        for name in references.MODELS
    ]
)
def case(request, load, program):
    return request.param, load(request.param)[0], program(request.param)


def assert_equal(paged, name, folder, masked=False):
    expected = references.expected(name, folder, masked=masked)
    assert paged.at.tolist() == [LENGTH] * ROWS
    assert expected.error(paged.logits) < references.tolerance(name)


def test_ragged_chunks_then_single_steps_equal_the_whole_forward(case):
    name, folder, program = case
    chunks = ((24, 5), (0, 24), (17, 1), (24, 24), (5, 16))  # 70 tokens each
    steps = ((1, 0), (1, 1), (0, 1), *[(1, 1)] * 8)  # one waits for the other now and then
    paged = program.begin().feed_all(references.token_ids(), (*chunks, *steps))
    assert_equal(paged, name, folder)


def test_a_declaration_on_the_way_equals_the_four_dimensional_mask(case):
    name, folder, program = case
    ids = references.token_ids()
    paged = program.begin().feed_all(ids, ((24, 24), (24, 24), (12, 12)))
    assert_equal(paged.feed_all(ids, [(1, 1)] * 20, HOLE), name, folder, masked=True)


@pytest.mark.parametrize(
    ("name", "page_size", "step"),
    [("qwen3_5", 64, 72), ("gemma4_e2b", 4, 72), ("gemma3_1b", 1, 9)],
)
def test_page_sizes_and_steps_longer_than_windows_and_chunks(name, page_size, step, load):
    """Steps of up to 72 tokens: the window is 8, and Gated DeltaNet works in chunks of 64."""
    folder, model = load(name)
    sizes, left = [], np.array([LENGTH] * ROWS)
    for first in [(step, 2), (2, step)] * LENGTH:
        size = np.minimum(first, left)
        sizes += [tuple(size.tolist())] if size.any() else []
        left = left - size
    paged = Program(model, page_size, step).begin().feed_all(references.token_ids(), sizes)
    assert_equal(paged, name, folder)


CACHES = ("qwen3", "gemma4_e2b", "qwen3_5")  # pages; rings and donors; states


@pytest.fixture(params=CACHES)
def kinds(request, program):
    return program(request.param)


def hidden_slots(paged, spans):
    """What the next single step of both rows may not see: bool [P, PS] of pages and of rings."""
    plan, size = paged.program.plan, paged.program.page_size
    pages = np.ones((plan.num_pages, size), bool)
    rings = {layer: np.ones((form.num_pages, size), bool) for layer, form in plan.rings.items()}
    for row, at in enumerate(paged.at.tolist()):
        for position in (p for start, end in spans for p in range(start, min(end, at))):
            pages[paged.tables[row, position // size], position % size] = False
        for layer, hidden in rings.items():
            blocks, window = (
                plan.ring_blocks(layer),
                paged.program.config.layers[layer].mixer.window,
            )
            for position in range(max(at - window + 1, 0), at):
                page = SLOTS[row] * blocks + position // size % blocks
                hidden[page, position % size] = False
    return pages, rings


def test_hidden_and_stale_slots_full_of_nan_change_no_bit(kinds):
    """Before each step all that it may not see becomes NaN, also what has left a ring's window."""
    ids = references.token_ids()
    clean, dirty = (kinds.begin(fill).feed_all(ids, [(24, 20), (24, 24)]) for fill in (0, np.nan))
    for q_lens in ((1, 1), (0, 1), *[(1, 1)] * 12):
        clean.feed(ids, q_lens, HOLE)
        pages, rings = hidden_slots(dirty, HOLE)
        caches = dirty.caches
        spoil = lambda hidden, x: jnp.where(hidden[:, None, None, :, None], np.nan, x)
        dirty.caches = caches._replace(
            pages={layer: spoil(pages, x) for layer, x in caches.pages.items()},
            rings={layer: spoil(rings[layer], x) for layer, x in caches.rings.items()},
        )
        dirty.feed(ids, q_lens, HOLE)
    assert all(np.isfinite(dirty.logits[row, :at]).all() for row, at in enumerate(dirty.at))
    np.testing.assert_array_equal(dirty.logits, clean.logits)


def test_rows_without_tokens_change_no_bit_of_any_cache(kinds):
    ids = references.token_ids()
    paged = kinds.begin().feed_all(ids, [(24, 7)])
    before = jax.tree.map(np.asarray, paged.caches)
    paged.feed(ids, (0, 0))
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, paged.caches))


def test_rows_of_no_sequence_leave_no_trace(kinds):
    """What warm-up runs: tokens, but no page and no slot for them."""
    paged, plan = kinds.begin().feed_all(references.token_ids(), [(24, 7)]), kinds.plan
    before = jax.tree.map(np.asarray, paged.caches)
    table = np.zeros((ROWS, kinds.blocks + 4), np.int32)
    mask = BlockMask(table, table, table, np.zeros(ROWS, np.int32))
    nowhere = np.full_like(paged.tables, plan.num_pages)
    rows = Rows(nowhere, mask, np.full(ROWS, plan.num_slots, np.int32), NO_SAMPLING)
    tokens, q_lens = np.zeros((ROWS, 24), np.int32), np.full(ROWS, 24, np.int32)
    logits, after = kinds.run(paged.caches, tokens, np.array([0, 30], np.int32), q_lens, rows)
    assert np.isfinite(logits).all()
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, after))
