import jax.numpy as jnp
import pytest
from support.references import CASES

from da_jax.cache import pools
from da_jax.models.config import ModelConfig

CONFIG = ModelConfig.from_hf(CASES["qwen3"])  # 3 layers, 2 KV heads of 32
PAGE_BYTES = 3 * 2 * 2 * 32 * 16 * 4


def plan(**changes):
    base = dict(page_size=16, max_tokens=100, sequences=3, dtype=jnp.float32, budget_bytes=2**30)
    return pools.plan(CONFIG, **base | changes)


def test_the_pool_holds_every_sequence_at_its_longest():
    assert plan() == pools.PoolPlan(16, 3 * 7, 21 * PAGE_BYTES)


def test_a_budget_limits_the_pool_and_too_small_a_one_is_refused():
    assert plan(budget_bytes=10 * PAGE_BYTES + 1).num_pages == 10
    with pytest.raises(ValueError, match="lower max_model_len or raise kv_cache_bytes"):
        plan(budget_bytes=6 * PAGE_BYTES)


def test_pages_are_zeroed_buffers_of_the_planned_size():
    pool = plan()
    buffers = pools.allocate(CONFIG, pool, jnp.float32)
    assert [b.shape for b in buffers] == [(21, 2, 2, 16, 32)] * 3
    assert sum(b.nbytes for b in buffers) == pool.bytes
    assert not any(b.any() for b in buffers)
