"""The obvious backend: every entry of the table in one dense softmax. Slow; for checking others."""

import jax
import jax.numpy as jnp

from da_jax.kernels.chips import Target
from da_jax.kernels.paged_attention.mask import BlockMask
from da_jax.kernels.paged_attention.pool import KVPages, layout_of, read_pages


def attend(
    q: jax.Array,
    kv_pages: KVPages,
    mask: BlockMask,
    lengths: jax.Array,
    q_lens: jax.Array,
    *,
    scale: float,
    softcap: float | None,
    window: int | None,
    target: Target,
) -> tuple[jax.Array, jax.Array]:
    """Backend of `paged_attention`: the output `[B, T, HQ, D]` and the float32 lse `[B, T, HQ]`."""
    del target  # it runs alike everywhere
    form = layout_of(kv_pages, q.shape[3])
    seen = _seen(mask, lengths, q_lens, q.shape[1], form.page_size, window)
    wanted = seen.any(1)[:, :, None, :, None]  # [B, W, 1, PS, 1]

    def listed(side):
        x, scales = read_pages(kv_pages, form, mask.page, side)  # [B, W, HKV, PS, D]
        x = x.astype(jnp.float32) if scales is None else x.astype(jnp.float32) * scales[..., None]
        return jnp.repeat(jnp.where(wanted, x, 0), q.shape[2] // form.kv_heads, axis=2)

    keys, values = listed(0), listed(1)
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
