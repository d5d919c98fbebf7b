"""Writing new keys and values into the pages."""

import jax
import jax.numpy as jnp


def write_kv(
    kv_pages: jax.Array, k: jax.Array, v: jax.Array, pages: jax.Array, slots: jax.Array
) -> jax.Array:
    """Scatters new keys and values into their slots; in place where the buffer is donated.

    Args:
        kv_pages: `[P, 2, HKV, PS, D]` pool of pages, keys at index 0 and values at 1.
        k: `[B, T, HKV, D]` keys, cast to the dtype of the pool.
        v: `[B, T, HKV, D]` values.
        pages: `[B, T]` int32 physical page of each token. A token whose page is `P` is dropped.
        slots: `[B, T]` int32 slot in the page.

    Returns:
        The pool with the tokens written.

    Raises:
        ValueError: shapes that do not belong together.
    """
    num_pages, _, hkv, _, d = kv_pages.shape
    want = (*pages.shape, hkv, d)
    if k.shape != want or v.shape != want or slots.shape != pages.shape:
        raise ValueError(
            f"k {k.shape}, v {v.shape}, pages {pages.shape}, slots {slots.shape} do not fit the "
            f"pool {kv_pages.shape}: k and v must be {want}"
        )
    new = jnp.stack([k, v], axis=2).astype(kv_pages.dtype)
    # Negative indices would count from the end and overwrite somebody's tokens.
    pages = jnp.where(pages < 0, num_pages, pages)
    return kv_pages.at[pages, :, :, slots].set(new, mode="drop")
