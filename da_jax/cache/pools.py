"""Device pools of K and V pages, one buffer a layer, and the plan of their size.

One donated buffer a layer is updated in place; a single stacked buffer would be copied by a scan.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from da_jax.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class PoolPlan:
    """How many pages fit, and what they cost.

    Attributes:
      page_size: tokens a page.
      num_pages: pages in the pool (every layer has its own buffer of this many).
      bytes: device bytes of all layers together.
    """

    page_size: int
    num_pages: int
    bytes: int


def plan(
    config: ModelConfig,
    *,
    page_size: int,
    max_tokens: int,
    sequences: int,
    dtype: jnp.dtype,
    budget_bytes: int,
) -> PoolPlan:
    """Pages for `sequences` sequences of `max_tokens`, or as many as the budget holds.

    Raises:
      ValueError: when not even one sequence of `max_tokens` fits.
    """
    page_bytes = config.kv_elements_per_token * page_size * jnp.dtype(dtype).itemsize
    per_sequence = -(-max_tokens // page_size)
    num_pages = min(per_sequence * sequences, budget_bytes // page_bytes)
    if num_pages < per_sequence:
        raise ValueError(
            f"one sequence of {max_tokens} tokens needs {per_sequence * page_bytes / 2**20:.0f} "
            f"MiB of KV cache, the budget is {budget_bytes / 2**20:.0f} MiB; lower max_model_len "
            "or raise kv_cache_bytes"
        )
    return PoolPlan(page_size, num_pages, num_pages * page_bytes)


def allocate(config: ModelConfig, pool: PoolPlan, dtype: jnp.dtype) -> list[jax.Array]:
    """Zeroed pages [P, 2, HKV, PS, D] for each layer; index 0 of axis 1 is K, index 1 is V."""
    shape = (pool.num_pages, 2, config.num_kv_heads, pool.page_size, config.head_dim)
    return [jnp.zeros(shape, dtype) for _ in range(config.num_layers)]
