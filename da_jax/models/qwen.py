"""Qwen 3 dense, and Llama-type models, which differ only in lacking the q/k norm.

x = x + o(attend(rope(norm(q)), rope(norm(k)), v))      on input_norm(x)
x = x + down(silu(gate) * up)                           on post_norm(x)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from da_jax.models.config import ModelConfig
from da_jax.models.layers import Attend, GatedMLP, Linear, RMSNorm
from da_jax.models.rope import cos_sin, rotate


class Attention(nnx.Module):
    """Grouped-query attention around an `Attend`."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = config
        self.layer, self.head_dim = layer, c.head_dim
        self.q = Linear(c.hidden_size, c.num_heads * c.head_dim, dtype=dtype, rngs=rngs)
        self.k = Linear(c.hidden_size, c.num_kv_heads * c.head_dim, dtype=dtype, rngs=rngs)
        self.v = Linear(c.hidden_size, c.num_kv_heads * c.head_dim, dtype=dtype, rngs=rngs)
        self.o = Linear(c.num_heads * c.head_dim, c.hidden_size, dtype=dtype, rngs=rngs)
        self.qk_norm = c.qk_norm
        if c.qk_norm:
            self.q_norm = RMSNorm(c.head_dim, eps=c.rms_eps, dtype=dtype)
            self.k_norm = RMSNorm(c.head_dim, eps=c.rms_eps, dtype=dtype)

    def __call__(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array, attend: Attend
    ) -> jax.Array:  # [B, T, E]
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k, v = self.q(x).reshape(heads), self.k(x).reshape(heads), self.v(x).reshape(heads)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        out = attend(self.layer, rotate(q, cos, sin), rotate(k, cos, sin), v)  # [B, T, HQ, D]
        return self.o(out.reshape(*x.shape[:2], -1))


class Block(nnx.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = config
        self.input_norm = RMSNorm(c.hidden_size, eps=c.rms_eps, dtype=dtype)
        self.attention = Attention(c, layer, dtype=dtype, rngs=rngs)
        self.post_norm = RMSNorm(c.hidden_size, eps=c.rms_eps, dtype=dtype)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array, attend: Attend
    ) -> jax.Array:  # [B, T, E]
        x = x + self.attention(self.input_norm(x), cos, sin, attend)
        return x + self.mlp(self.post_norm(x))


class Qwen3(nnx.Module):
    """The decoder: tokens to hidden states, and hidden states to logits.

    Args:
      config: shapes and options.
      dtype: dtype of parameters and activations.
      rngs: source of the random initial weights.
    """

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        embedding = jax.random.normal(rngs.params(), shape, jnp.float32) * 0.02
        self.embedding = nnx.Param(embedding.astype(dtype))
        self.layers = nnx.List(
            [Block(config, i, dtype=dtype, rngs=rngs) for i in range(config.num_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_eps, dtype=dtype)
        if not config.tie_embeddings:
            self.head = Linear(config.hidden_size, config.vocab_size, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        """Hidden states [B, T, E] of int32 tokens [B, T] at absolute int32 positions [B, T]."""
        cos, sin = cos_sin(self.config.rope, self.config.head_dim, positions)
        x = self.embedding[...][tokens]
        for block in self.layers:
            x = block(x, cos, sin, attend)
        return self.norm(x)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32 logits [..., V] of hidden states [..., E]."""
        if not self.config.tie_embeddings:
            return jnp.matmul(hidden, self.head.kernel[...], preferred_element_type=jnp.float32)
        # The embedding comes first: for one row, XLA on a CPU is five times slower with h @ E.T.
        contract = (((1,), (hidden.ndim - 1,)), ((), ()))
        logits = jax.lax.dot_general(
            self.embedding[...], hidden, contract, preferred_element_type=jnp.float32
        )  # [V, ...]
        return jnp.moveaxis(logits, 0, -1)
