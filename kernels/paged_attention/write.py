"""Writing new keys and values into the pages."""

from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from da_jax.kernels.chips import current_target
from da_jax.kernels.paged_attention.pool import (
    PACKED_LANES,
    VALUE_LANE,
    KVPages,
    QuantizedPages,
    layout_of,
    quantize,
)


def write_kv(
    kv_pages: KVPages, k: jax.Array, v: jax.Array, pages: jax.Array, slots: jax.Array
) -> KVPages:
    """Scatters new keys and values into their slots; in place where the buffer is donated.

    Args:
        kv_pages: pool of pages in any layout.
        k: `[B, T, HKV, D]` keys, cast to the dtype of the pool, or rounded to 8 bits with a scale.
        v: `[B, T, HKV, D]` values.
        pages: `[B, T]` int32 physical page of each token. A token whose page is `P` is dropped.
        slots: `[B, T]` int32 slot in the page. A slot outside the page drops the token, and no two
            tokens of a call may have the same page and slot.

    Returns:
        The pool with the tokens written.

    Raises:
        ValueError: shapes that do not belong together.
    """
    form = layout_of(kv_pages, k.shape[-1])
    kv_pages = jax.tree.map(jnp.asarray, kv_pages)
    want = (*pages.shape, form.kv_heads, form.head_dim)
    if pages.ndim != 2 or k.shape != want or v.shape != want or slots.shape != pages.shape:
        raise ValueError(
            f"k {k.shape}, v {v.shape}, pages {pages.shape}, slots {slots.shape} do not fit the "
            f"pool {form.shape}: k and v must be {want}"
        )
    if pages.size == 1 and current_target().platform == "cpu":
        # XLA turns a scatter of one token into another operation, for which it copies the pool.
        k, v = (jnp.concatenate([x, x]) for x in (k, v))
        pages = jnp.concatenate([pages, pages])
        slots = jnp.concatenate([slots, jnp.full_like(slots, -1)])  # the second one is dropped
    # Negative indices would count from the end, and rows of scales are longer than a page.
    inside = (pages >= 0) & (slots >= 0) & (slots < form.page_size)
    pages = jnp.where(inside, pages, form.num_pages)

    def put(array, new):
        # Indices for every axis but the lanes: with slices XLA on TPU copies the pool.
        at = pages[..., None, None], *np.indices(array.shape[1:3]), slots[..., None, None]
        return array.at[at].set(new.astype(array.dtype), mode="drop")

    if not isinstance(kv_pages, QuantizedPages):
        return put(kv_pages, _rows(k, v, form.packed))
    (k, k_scale), (v, v_scale) = (quantize(x, form.dtype) for x in (k, v))
    values, scales = (cast(jax.Array, x) for x in kv_pages)
    new_scales = jnp.stack([k_scale, v_scale], axis=2)  # [B, T, 2, HKV]
    return QuantizedPages(
        put(values, _rows(k, v, form.packed)), _put_scales(scales, new_scales, pages, slots)
    )


def _put_scales(scales: jax.Array, new: jax.Array, pages: jax.Array, slots: jax.Array) -> jax.Array:
    """Writes scales `[B, T, 2, HKV]` as products and sums of whole rows.

    XLA on TPU would copy the array to scatter single numbers. Tokens of one call may share a row,
    so rows cannot simply be replaced.
    """
    at = pages[..., None, None], *np.indices(new.shape[2:])
    here = slots[..., None, None, None] == np.arange(scales.shape[-1])
    scales = scales.at[at].multiply(jnp.where(here, 0.0, 1.0), mode="drop")
    return scales.at[at].add(jnp.where(here, new[..., None], 0.0), mode="drop")


def _rows(k: jax.Array, v: jax.Array, packed: bool) -> jax.Array:
    """Keys and values as the pool has them: `[B, T, 2, HKV, D]` or packed `[B, T, 1, HKV, 128]`."""
    if not packed:
        return jnp.stack([k, v], axis=2)
    pad = [(0, 0)] * (k.ndim - 1)
    k = jnp.pad(k, [*pad, (0, VALUE_LANE - k.shape[-1])])
    v = jnp.pad(v, [*pad, (0, PACKED_LANES - VALUE_LANE - v.shape[-1])])
    return jnp.concatenate([k, v], axis=-1)[:, :, None]
