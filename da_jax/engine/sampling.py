"""Choosing tokens, row by row: nothing that a row samples depends on its neighbours."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class SamplingRows(NamedTuple):
    """Sampling parameters of a batch; see `SamplingParams`. B rows.

    Attributes:
      temperature, top_p, presence_penalty: float32 [B].
      top_k: int32 [B], 0 for no limit.
      key: uint32 [B, 2] raw key of the request.
      generated: int32 [B], how many response tokens come before the one to choose.
    """

    temperature: np.ndarray | jax.Array
    top_p: np.ndarray | jax.Array
    presence_penalty: np.ndarray | jax.Array
    top_k: np.ndarray | jax.Array
    key: np.ndarray | jax.Array
    generated: np.ndarray | jax.Array


def choose(logits: jax.Array, seen: jax.Array, rows: SamplingRows) -> jax.Array:
    """The next token of each row.

    Args:
      logits: float32 [B, V]; -inf for ids that must not be chosen.
      seen: bool [B, V], tokens that the response already has.
      rows: sampling parameters.

    Returns:
      int32 [B].
    """
    logits = logits - rows.presence_penalty[:, None] * seen
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    sampled = jax.lax.cond(  # greedy batches skip the sort over the vocabulary
        jnp.any(rows.temperature > 0), lambda: jax.vmap(_sample)(logits, rows), lambda: greedy
    )
    return jnp.where(rows.temperature > 0, sampled, greedy)


def _sample(logits: jax.Array, row: SamplingRows) -> jax.Array:
    """One token of logits [V], by the Gumbel trick over the tokens that top-k and top-p keep."""
    # Subtracting the maximum first keeps a temperature of 1e-6 finite; a greedy row in a batch
    # that samples divides by 1.
    scaled = (logits - jnp.max(logits)) / jnp.where(row.temperature > 0, row.temperature, 1.0)
    order = jnp.argsort(-scaled)
    ranked = scaled[order]
    probabilities = jax.nn.softmax(ranked)
    before = jnp.cumsum(probabilities) - probabilities
    rank = jnp.arange(ranked.shape[0])
    keep = (before < row.top_p) & ((row.top_k == 0) | (rank < row.top_k))
    key = jax.random.fold_in(
        jax.random.wrap_key_data(jnp.asarray(row.key), impl="threefry2x32"), row.generated
    )
    noisy = jnp.where(keep, ranked + jax.random.gumbel(key, ranked.shape), -jnp.inf)
    return order[jnp.argmax(noisy)].astype(jnp.int32)


def key_of(seed: int) -> np.ndarray:
    """uint32 [2] raw key of a request's seed (any Python integer)."""
    return np.array([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)
