"""The frame of every model: embedding, layers, last norm, logits."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from da_jax.models import parallel
from da_jax.models.config import ModelConfig
from da_jax.models.layers import Angles, Cache, Linear, Make, multiply, quantize

_PARTS = 32  # of an int8 embedding that is multiplied; a power of two


class Decoder(nnx.Module):
    """Tokens to hidden states, and hidden states to logits.

    Args:
      config: shapes and options.
      make: how the parameters are made.
    """

    layers: nnx.List
    norm: Any
    embed_scale: float = 1.0

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
        angles = Angles(positions)
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x, angles, cache)
        return self.norm(x)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Rows [B, T, E] of the embedding times `embed_scale`, rounded to the dtype first."""
        table = self.embedding[...]
        divided = len(table) != self.config.vocab_size
        ids, here = parallel.own_rows(tokens, len(table)) if divided else (tokens, None)
        rows = table[ids]
        if self.quantized:
            rows = rows * self.embedding_scale[...][ids][..., None]
        rows = rows.astype(self.dtype)
        if here is not None:
            rows = parallel.total(jnp.where(here[..., None], rows, 0))
        return rows * jnp.asarray(self.embed_scale, self.dtype) if self.embed_scale != 1 else rows

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32 logits [..., V] of hidden states [..., E]."""
        if self.config.tie_embeddings:
            logits = self._scores(hidden)
        else:
            kernel = self.head.kernel[...]
            if self.quantized:
                logits = multiply(hidden, kernel, self.head.kernel_scale[...])
            else:
                logits = jnp.matmul(hidden, kernel, preferred_element_type=jnp.float32)
        if logits.shape[-1] != self.config.vocab_size:
            logits = parallel.gathered(logits)
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

        def in_parts(table: jax.Array) -> jax.Array:
            parts = math.gcd(len(table), _PARTS)
            out = jax.lax.map(scores, table.reshape(parts, len(table) // parts, -1))
            return out.reshape(len(table), *hidden.shape[:-1])

        if self.quantized:
            # XLA converts an int8 matrix as a whole before it multiplies, except on a TPU.
            out = jax.lax.platform_dependent(self.embedding[...], tpu=scores, default=in_parts)
            return jnp.moveaxis(out, 0, -1) * self.embedding_scale[...]
        return jnp.moveaxis(scores(self.embedding[...]), 0, -1)
