"""Attention over one contiguous sequence with an explicit mask: the plainest `Attend`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


class DenseAttend:
    """Masked softmax attention; `mask` is bool [T, T], True where the query (row) sees the key."""

    def __init__(self, mask: np.ndarray):
        self.mask = mask

    def __call__(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        groups = q.shape[2] // k.shape[2]
        k, v = (jnp.repeat(x, groups, axis=2).astype(jnp.float32) for x in (k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q.astype(jnp.float32), k) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(self.mask, scores, -1e30), axis=-1)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v).astype(q.dtype)


def dense_logits(model, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """float32 [B, T, V] logits of one forward pass with a bool [T, T] mask."""
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)

    @jax.jit
    def run(tokens, positions):
        return model.logits(model(tokens, positions, DenseAttend(mask)))

    return np.asarray(run(tokens.astype(np.int32), positions))
