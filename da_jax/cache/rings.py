"""Rings: the pages of a sliding window, at places that follow from slot and position alone.

Logical block b of the sequence in slot s lives in page `s * blocks + b % blocks`. A block is
overwritten when it has left the window of every query that may still come. What a page still holds
of an older block lies beyond the sequence's end and is hidden as such.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from da_jax.kernels.paged_attention import BlockMask


def ring_blocks(window: int, longest_step: int, page_size: int) -> int:
    """Pages that hold a step of `longest_step` tokens and their windows, wherever they start."""
    return (window + longest_step - 2) // page_size + 2


def ring_pages(slot: jax.Array, positions: jax.Array, *, blocks: int, page_size: int) -> jax.Array:
    """int32 [B, T], the page of each of the `positions` [B, T] of the sequences in slots [B]."""
    return slot[:, None] * blocks + positions // page_size % blocks


def ring_mask(
    slot: jax.Array,
    position: jax.Array,
    q_lens: jax.Array,
    *,
    window: int,
    blocks: int,
    page_size: int,
) -> BlockMask:
    """The block mask of a step: the positions that its queries together may see.

    Each query's own window is left to the kernel.

    Args:
      slot: int32 [B].
      position: int32 [B], position of the first new token of each sequence.
      q_lens: int32 [B], new tokens, already in the ring; a row of none sees nothing.
      window: positions that a query sees back, itself included.
      blocks: pages of a ring.
      page_size: tokens a page.

    Returns:
      A mask of width `blocks`, its entries ascending by position.
    """
    start, end = jnp.maximum(position - window + 1, 0), position + q_lens
    first = start // page_size
    count = jnp.where(q_lens > 0, -(-end // page_size) - first, 0)
    block = first[:, None] + jnp.arange(blocks, dtype=jnp.int32)  # [B, blocks]
    used = jnp.arange(blocks) < count[:, None]
    page = slot[:, None] * blocks + block % blocks
    low = jnp.maximum(start[:, None] - block * page_size, 0)
    high = jnp.minimum(end[:, None] - block * page_size, page_size)
    return BlockMask(
        page=jnp.where(used, page, 0),
        span=jnp.where(used, low | high << 16, 0),
        block=jnp.where(used, block, 0),
        count=count,
    )
