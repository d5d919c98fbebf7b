"""What the Pallas backends share: tables of what is visible, rows by KV head, joined splits."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from da_jax.kernels.paged_attention.mask import BlockMask


class Tables(NamedTuple):
    """The entries that a kernel walks; int32.

    Attributes:
        page: `[B, W]` physical page, always inside the pool.
        span: `[B, W]` slots that some query of the sequence sees, `lo | hi << 16`; empty beyond
            the count. Slots after the last query and before the window of the first are cut off.
        block: `[B, W]` logical block, for the positions of the slots.
        count: `[B, tiles]` entries to walk for a tile of queries, 0 for one without any.
        first: `[B]` position of the first query.
        q_lens: `[B]` queries.
    """

    page: jax.Array
    span: jax.Array
    block: jax.Array
    count: jax.Array  # type: ignore[assignment]  # hides tuple.count, which nobody needs
    first: jax.Array
    q_lens: jax.Array


def tables(
    mask: BlockMask,
    lengths: jax.Array,
    q_lens: jax.Array,
    *,
    num_pages: int,
    page_size: int,
    window: int | None,
    tile: int,
    tiles: int,
) -> Tables:
    """Cuts a block mask to what the queries can see.

    These are a few operations on `[B, W]` integers, the same for all layers that share the
    arguments: XLA computes them once a step.

    Args:
        mask: the block mask.
        lengths: `[B]` tokens, queries included.
        q_lens: `[B]` queries.
        num_pages: pages in the pool.
        page_size: tokens a page.
        window: sliding window; entries before it are dropped from the table, not just hidden.
        tile: queries a tile.
        tiles: tiles a sequence.
    """
    page, span, block, count = (jnp.asarray(x) for x in mask)
    count = jnp.clip(count, 0, page.shape[1])  # a kernel would wait for ever for what is not there
    first = lengths - q_lens
    start = block * page_size
    lo, hi = span & 0xFFFF, span >> 16
    hi = jnp.minimum(hi, lengths[:, None] - start)
    if window is not None:
        lo = jnp.maximum(lo, first[:, None] - window + 1 - start)
    live = (jnp.arange(page.shape[1]) < count[:, None]) & (lo < hi)
    span = jnp.where(live, lo | hi << 16, 0)
    # Kernels do not check bounds, so an id from nowhere must not become an address.
    page = jnp.where(live, jnp.clip(page, 0, num_pages - 1), 0)
    if window is not None:
        order = jnp.argsort(~live, axis=1, stable=True)
        page, span, block = (jnp.take_along_axis(x, order, axis=1) for x in (page, span, block))
        count = live.sum(1, dtype=jnp.int32)
    asked = jnp.arange(tiles) * tile < q_lens[:, None]
    return Tables(page, span, block, jnp.where(asked, count[:, None], 0), first, q_lens)


def group_rows(q: jax.Array, kv_heads: int, tile: int, rows: int) -> jax.Array:
    """Sorts queries `[B, T, HQ, D]` into tiles by KV head: `[B, HKV, tiles, rows, D]`.

    Row `r` of a tile holds query `r // G` of the tile and head `r % G` of the group; rows from
    `tile * G` on are zero.
    """
    b, t, hq, d = q.shape
    group = hq // kv_heads
    tiles = -(-t // tile)
    q = jnp.pad(q, ((0, 0), (0, tiles * tile - t), (0, 0), (0, 0)))
    q = q.reshape(b, tiles, tile, kv_heads, group, d).transpose(0, 3, 1, 2, 4, 5)
    q = q.reshape(b, kv_heads, tiles, tile * group, d)
    return jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, rows - tile * group), (0, 0)))


def ungroup_rows(x: jax.Array, queries: int, tile: int, group: int) -> jax.Array:
    """Undoes `group_rows` for `[B, HKV, tiles, rows, ...]`: `[B, T, HQ, ...]`."""
    b, hkv, tiles, _, *rest = x.shape
    x = x[:, :, :, : tile * group].reshape(b, hkv, tiles, tile, group, *rest)
    x = jnp.moveaxis(x, 1, 3).reshape(b, tiles * tile, hkv * group, *rest)
    return x[:, :queries]


def join_splits(
    out: jax.Array, high: jax.Array, total: jax.Array, axis: int
) -> tuple[jax.Array, jax.Array]:
    """Joins softmaxes over parts of the keys.

    Args:
        out: `[..., D]` float32 sums of `exp(score - high) * value` of each part.
        high: `[...]` float32 the highest score of each part, finite also where it saw nothing.
        total: `[...]` float32 sums of `exp(score - high)`, 0 where a part saw nothing.
        axis: which axis of `high` the parts lie along.

    Returns:
        The normalised output and the lse without that axis; 0 and -inf where nothing was seen.
    """
    seen = total > 0
    best = jnp.max(jnp.where(seen, high, jnp.finfo(jnp.float32).min), axis=axis, keepdims=True)
    weight = jnp.where(seen, jnp.exp(high - best), 0)
    total = (total * weight).sum(axis)
    out = jnp.where(seen[..., None], out * weight[..., None], 0).sum(axis)
    some = total > 0
    safe = jnp.where(some, total, 1)
    lse = jnp.where(some, best.squeeze(axis) + jnp.log(safe), -jnp.inf)
    return jnp.where(some[..., None], out / safe[..., None], 0), lse
