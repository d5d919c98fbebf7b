"""Device pools of K and V pages, one buffer a layer, and the plan of their size.

One donated buffer a layer is updated in place; a single stacked buffer would be copied by a scan.
"""

from __future__ import annotations

import dataclasses

from jax.typing import DTypeLike

from da_jax.kernels.paged_attention import KVPages, Layout, empty_pages, layout
from da_jax.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class PoolPlan:
    """How many pages fit, and what they cost.

    Attributes:
      form: layout of the pages of a layer; every layer has its own buffer of this many.
      layers: layers that have pages.
    """

    form: Layout
    layers: int

    @property
    def num_pages(self) -> int:
        """Pages in the pool."""
        return self.form.num_pages

    @property
    def bytes(self) -> int:
        """Device bytes of all layers together."""
        return self.layers * self.num_pages * self.form.page_bytes


def plan(
    config: ModelConfig,
    *,
    page_size: int,
    max_tokens: int,
    sequences: int,
    dtype: DTypeLike,
    budget_bytes: int,
) -> PoolPlan:
    """Pages for `sequences` sequences of `max_tokens`, or as many as the budget holds.

    Raises:
      ValueError: when not even one sequence of `max_tokens` fits.
    """
    form = layout(1, config.num_kv_heads, page_size, config.head_dim, dtype)
    page_bytes = config.num_layers * form.page_bytes
    per_sequence = -(-max_tokens // page_size)
    num_pages = min(per_sequence * sequences, budget_bytes // page_bytes)
    if num_pages < per_sequence:
        raise ValueError(
            f"one sequence of {max_tokens} tokens needs {per_sequence * page_bytes / 2**20:.0f} "
            f"MiB of KV cache, the budget is {budget_bytes / 2**20:.0f} MiB; lower max_model_len "
            "or raise kv_cache_bytes"
        )
    return PoolPlan(dataclasses.replace(form, num_pages=num_pages), config.num_layers)


def allocate(pool: PoolPlan) -> list[KVPages]:
    """Zeroed pages for each layer."""
    return [empty_pages(pool.form) for _ in range(pool.layers)]
