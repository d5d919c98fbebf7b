import dataclasses

import jax
import jax.numpy as jnp
import pytest
from support.references import CASES

from da_jax.cache import pools
from da_jax.models import catalog, sizes
from da_jax.models.hf_config import parse

PAGE_BYTES = 3 * 2 * 128 * 16 * 4  # qwen3: 3 layers, 2 KV heads up to 64 share rows of 128 lanes


def plan(case="qwen3", **changes):
    base = dict(
        page_size=16, max_tokens=100, sequences=3, longest_step=24, dtype=jnp.float32,
        budget_bytes=2**30,
    )  # fmt: skip
    return pools.plan(parse(CASES[case]), **base | changes)


def test_the_pool_holds_every_sequence_at_its_longest():
    full = plan()
    assert (full.num_pages, full.bytes, full.page_bytes) == (21, 21 * PAGE_BYTES, 21 * PAGE_BYTES)


def test_a_budget_limits_the_pool_and_too_small_a_one_is_refused():
    assert plan(budget_bytes=10 * PAGE_BYTES + 1).num_pages == 10
    with pytest.raises(
        pools.PlanError, match=r"one sequence of 100 tokens .*; max_model_len=96 fits"
    ):
        plan(budget_bytes=6 * PAGE_BYTES)


@pytest.mark.parametrize("snapshots", [0, 2])
@pytest.mark.parametrize("case", ["qwen3", "gemma4_31b", "gemma4_e2b", "qwen3_5"])
def test_a_refusal_says_the_smallest_budget_that_is_not_refused(case, snapshots):
    with pytest.raises(pools.PlanError) as refused:
        plan(case, budget_bytes=0, snapshots=snapshots)
    least = refused.value.least_bytes
    assert plan(case, budget_bytes=least, snapshots=snapshots).bytes == least
    with pytest.raises(pools.PlanError):
        plan(case, budget_bytes=least - 1, snapshots=snapshots)


@pytest.mark.parametrize("kv_dtype", [None, "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("case", ["qwen3", "gemma4_31b", "gemma4_e2b", "qwen3_5"])
def test_caches_are_zeroed_buffers_of_the_planned_size(case, kv_dtype):
    planned = plan(case, kv_dtype=kv_dtype, snapshots=1)
    caches = pools.allocate(planned)
    assert sum(x.nbytes for x in jax.tree.leaves(caches)) == planned.bytes
    assert not any(x.any() for x in jax.tree.leaves(caches))
    for kind, bytes_ in zip(caches, (planned.page_bytes, planned.ring_bytes, planned.state_bytes)):
        assert sum(x.nbytes for x in jax.tree.leaves(kind)) == bytes_


def test_each_layer_has_the_cache_of_its_kind_and_layers_with_a_donor_none():
    caches = pools.allocate(plan("gemma4_e2b"))  # 5 of 10 layers read the keys of a donor
    assert (sorted(caches.pages), sorted(caches.rings), caches.states) == ([4], [0, 1, 2, 3], {})
    assert caches.pages[4].shape == (21, 1, 1, 16, 128)
    assert {x.shape for x in caches.rings.values()} == {(3 * 3, 1, 1, 16, 128)}
    caches = pools.allocate(plan("qwen3_5"))
    assert (sorted(caches.pages), caches.rings, sorted(caches.states)) == ([3], {}, [0, 1, 2])
    conv, memory = caches.states[0]
    assert conv.shape == (3, 3, 2 * 2 * 16 + 6 * 16) and memory.shape == (3, 6, 16, 16)


def test_full_layers_have_their_own_number_of_heads():
    caches = pools.allocate(plan("gemma4_31b"))  # full layers have 1 KV head, sliding ones 2
    assert caches.pages[5].shape[2] == 1 and caches.rings[0].shape[2] == 2


def test_recurrent_memory_is_float32_whatever_the_model_is():
    states = plan("qwen3_5", dtype=jnp.bfloat16).states
    assert {x.conv.dtype.name for x in states.values()} == {"bfloat16"}
    assert {x.memory.dtype.name for x in states.values()} == {"float32"}


def test_a_ring_is_no_longer_than_the_longest_sequence():
    assert plan("gemma3_text", max_tokens=20, longest_step=512).ring_blocks(0) == 2
    assert plan("gemma3_text", max_tokens=9999, longest_step=512).ring_blocks(0) == 34


@pytest.mark.parametrize("case", ["gemma3_text", "qwen3_5"])
def test_pages_take_what_rings_and_states_of_all_sequences_leave(case):
    large = plan(case)
    kept, page = large.ring_bytes + large.state_bytes, large.page_bytes // large.num_pages
    small = plan(case, budget_bytes=kept + 8 * page)
    assert (small.num_pages, small.bytes) == (8, kept + 8 * page)
    with pytest.raises(ValueError, match=r"3 sequences at once keep .*; max_num_seqs=2 fits$"):
        plan(case, budget_bytes=kept + 7 * page - 1)
    with pytest.raises(ValueError, match=r"3 sequences at once keep .*; max_\w+=\d+ fits"):
        plan(case, budget_bytes=kept - 1)
    with pytest.raises(ValueError, match="not even a page fits"):
        plan(case, budget_bytes=1)


@pytest.mark.parametrize("case", ["gemma3_text", "qwen3_5"])
def test_snapshots_are_slots_of_their_own(case):
    with_copies, without = plan(case, sequences=3, snapshots=2), plan(case, sequences=5)
    assert dataclasses.replace(with_copies, snapshots=0) == without
    assert (with_copies.num_slots, with_copies.sequences) == (5, 3)
    assert with_copies.snapshot_bytes == (without.ring_bytes + without.state_bytes) // 5 * 2
    kept = with_copies.bytes - with_copies.page_bytes
    one = 7 * with_copies.page_bytes // with_copies.num_pages
    with pytest.raises(
        ValueError, match=r"3 sequences at once and 2 snapshots keep .*; prefix_snapshots=1 fits"
    ):
        plan(case, sequences=3, snapshots=2, budget_bytes=kept + one - 1)


def test_a_pool_of_8_bits_holds_scales_and_more_tokens():
    pool = plan(kv_dtype="int8", budget_bytes=11 * PAGE_BYTES)
    assert pool.num_pages == 21 and pool.bytes == 21 * 3 * 2 * (16 * 128 + 2 * 4 * 128)
    assert sum(x.nbytes for x in jax.tree.leaves(pools.allocate(pool))) == pool.bytes


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen3.6-27B", "gemma-3-27b", "gemma-4-E2B"])
def test_published_models_take_what_their_sizes_say(name):
    config = parse(catalog.hf_config(name))
    use = sizes.Use(batch=4, context=20_000, page_size=64, prefill_chunk=512, dtype="bfloat16")
    planned = pools.plan(
        config, page_size=64, max_tokens=20_000, sequences=4, longest_step=512, dtype="bfloat16",
        budget_bytes=2**60,
    )  # fmt: skip
    said = sizes.memory(config, use)
    assert (said.pages, said.rings, said.states) == (
        planned.page_bytes, planned.ring_bytes, planned.state_bytes,
    )  # fmt: skip
