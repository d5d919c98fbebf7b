"""The obvious backend: every entry of the table in one dense softmax. Slow; for checking others."""

import jax
import jax.numpy as jnp

from da_jax.kernels.paged_attention.mask import BlockMask


def attend(
    q: jax.Array,
    kv_pages: jax.Array,
    mask: BlockMask,
    lengths: jax.Array,
    q_lens: jax.Array,
    *,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> tuple[jax.Array, jax.Array]:
    """Backend of `paged_attention`: the output `[B, T, HQ, D]` and the float32 lse `[B, T, HQ]`."""
    hq, (_, _, hkv, page_size, _) = q.shape[2], kv_pages.shape
    seen = _seen(mask, lengths, q_lens, q.shape[1], page_size, window)
    listed = kv_pages.astype(jnp.float32)[mask.page]  # [B, W, 2, HKV, PS, D]
    listed = jnp.where(seen.any(1)[:, :, None, None, :, None], listed, 0)
    keys, values = (jnp.repeat(listed[:, :, side], hq // hkv, axis=2) for side in (0, 1))
    with jax.default_matmul_precision("highest"):
        scores = scale * jnp.einsum("bthd,bwhsd->bthws", q.astype(jnp.float32), keys)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(seen[:, :, None], scores, -jnp.inf)
        lse = jax.nn.logsumexp(scores, axis=(-2, -1))
        base = jnp.where(jnp.isfinite(lse), lse, 0)
        out = jnp.einsum("bthws,bwhsd->bthd", jnp.exp(scores - base[..., None, None]), values)
    return out.astype(q.dtype), lse


def _seen(
    mask: BlockMask,
    lengths: jax.Array,
    q_lens: jax.Array,
    t: int,
    page_size: int,
    window: int | None,
) -> jax.Array:
    """Which query sees which slot of which entry: bool `[B, T, W, PS]`."""
    page, span, block, count = mask
    step, slot = jnp.arange(t), jnp.arange(page_size)
    used = jnp.arange(page.shape[1]) < count[:, None]
    lo, hi = (span & 0xFFFF)[..., None], (span >> 16)[..., None]
    shown = used[..., None] & (lo <= slot) & (slot < hi)  # [B, W, PS]
    key = (block[..., None] * page_size + slot)[:, None]  # [B, 1, W, PS]
    query = ((lengths - q_lens)[:, None] + step)[:, :, None, None]  # [B, T, 1, 1]
    seen = shown[:, None] & (key <= query) & (step < q_lens[:, None])[:, :, None, None]
    return seen if window is None else seen & (key > query - window)
