"""The frame of every model: embedding, layers, last norm, logits."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from da_jax.models.config import ModelConfig
from da_jax.models.layers import Cache, Linear, Make, quantize

_PARTS = 32  # of an int8 embedding that is multiplied; a power of two


class Decoder(nnx.Module):
    """Tokens to hidden states, and hidden states to logits.

    Args:
      config: shapes and options.
      make: how the parameters are made.
    """

    layers: nnx.List
    norm: Any

    def __init__(self, config: ModelConfig, make: Make):
        self.config, self.dtype, self.quantized = config, jnp.dtype(make.dtype), make.quantized
        weights = make.normal((config.vocab_size, config.hidden_size), 0.02)
        if make.quantized:
            values, scale = quantize(weights, axis=-1)
            self.embedding, self.embedding_scale = nnx.Param(values), nnx.Param(scale)
        else:
            self.embedding = nnx.Param(weights.astype(make.dtype))
        if not config.tie_embeddings:
            self.head = Linear(config.hidden_size, config.vocab_size, make)

    def __call__(self, tokens: jax.Array, positions: jax.Array, cache: Cache) -> jax.Array:
        """Hidden states [B, T, E] of int32 tokens [B, T] at absolute int32 positions [B, T]."""
        raise NotImplementedError

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Rows [B, T, E] of the embedding."""
        rows = self.embedding[...][tokens]
        if self.quantized:
            rows = rows * self.embedding_scale[...][tokens][..., None]
        return rows.astype(self.dtype)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32 logits [..., V] of hidden states [..., E]."""
        scale = None
        if self.config.tie_embeddings:
            logits = self._scores(hidden)
            scale = self.embedding_scale[...] if self.quantized else None
        else:
            kernel = self.head.kernel[...].astype(self.dtype)
            logits = jnp.matmul(hidden, kernel, preferred_element_type=jnp.float32)
            scale = self.head.kernel_scale[...] if self.quantized else None
        if scale is not None:
            logits = logits * scale
        if cap := self.config.softcap:
            logits = cap * jnp.tanh(logits / cap)
        return logits

    def _scores(self, hidden: jax.Array) -> jax.Array:
        """float32 products [..., V] of hidden states with each row of the embedding."""

        def scores(table: jax.Array) -> jax.Array:
            # The table comes first: for one row, XLA on a CPU is five times slower with h @ E.T.
            contract = (((1,), (hidden.ndim - 1,)), ((), ()))
            return jax.lax.dot_general(
                table.astype(self.dtype), hidden, contract, preferred_element_type=jnp.float32
            )

        table = self.embedding[...]
        rows = len(table)
        if not self.quantized:
            return jnp.moveaxis(scores(table), 0, -1)
        # XLA may convert all of what it multiplies first: so only a part at a time.
        parts = math.gcd(rows, _PARTS)
        out = jax.lax.map(scores, table.reshape(parts, rows // parts, -1))
        return jnp.moveaxis(out.reshape(rows, *hidden.shape[:-1]), 0, -1)
