import jax.numpy as jnp
import pytest
from support.references import CASES

from da_jax.cache import pools
from da_jax.models.config import ModelConfig

CONFIG = ModelConfig.from_hf(CASES["qwen3"])  # 3 layers, 2 KV heads of 32
PAGE_BYTES = 3 * 2 * 128 * 16 * 4  # heads up to 64 share rows of 128 lanes


def plan(**changes):
    base = dict(page_size=16, max_tokens=100, sequences=3, dtype=jnp.float32, budget_bytes=2**30)
    return pools.plan(CONFIG, **base | changes)


def test_the_pool_holds_every_sequence_at_its_longest():
    assert (plan().num_pages, plan().bytes) == (3 * 7, 21 * PAGE_BYTES)


def test_a_budget_limits_the_pool_and_too_small_a_one_is_refused():
    assert plan(budget_bytes=10 * PAGE_BYTES + 1).num_pages == 10
    with pytest.raises(ValueError, match="lower max_model_len or raise kv_cache_bytes"):
        plan(budget_bytes=6 * PAGE_BYTES)


def test_pages_are_zeroed_buffers_of_the_planned_size():
    pool = plan()
    buffers = pools.allocate(pool)
    assert [b.shape for b in buffers] == [(21, 1, 2, 16, 128)] * 3
    assert sum(b.nbytes for b in buffers) == pool.bytes
    assert not any(b.any() for b in buffers)


def test_a_pool_of_8_bits_holds_scales_and_more_tokens():
    pool = plan(dtype=jnp.int8, budget_bytes=11 * PAGE_BYTES)
    assert pool.num_pages == 21 and pool.bytes == 21 * 3 * 2 * (16 * 128 + 2 * 4 * 128)
    assert sum(x.nbytes for layer in pools.allocate(pool) for x in layer) == pool.bytes
