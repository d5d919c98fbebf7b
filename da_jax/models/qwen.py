"""Qwen 3 dense and MoE, and Llama-type models, which differ only in lacking the q/k norm.

x = x + o(attend(rope(norm(q)), rope(norm(k)), v))      on input_norm(x)
x = x + down(silu(gate) * up), or the experts           on post_norm(x)
"""

from __future__ import annotations

import jax
from flax import nnx

from da_jax.models.config import Attention as AttentionConfig
from da_jax.models.config import Layer, ModelConfig
from da_jax.models.decoder import Decoder
from da_jax.models.layers import Angles, Cache, GatedMLP, Linear, Make, RMSNorm, to_heads
from da_jax.models.moe import SparseMLP


class Attention(nnx.Module):
    """Grouped-query attention."""

    def __init__(self, config: ModelConfig, layer: int, make: Make):
        mixer = config.layers[layer].mixer
        assert isinstance(mixer, AttentionConfig)
        self.mixer, self.layer = mixer, layer
        queries, keys = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
        self.q = Linear(config.hidden_size, queries, make)
        self.k = Linear(config.hidden_size, keys, make)
        self.v = Linear(config.hidden_size, keys, make)
        self.o = Linear(queries, config.hidden_size, make)
        self.qk_norm = config.family != "llama"
        if self.qk_norm:
            self.q_norm = RMSNorm(mixer.head_dim, eps=config.rms_eps, make=make)
            self.k_norm = RMSNorm(mixer.head_dim, eps=config.rms_eps, make=make)

    def __call__(self, x: jax.Array, angles: Angles, cache: Cache) -> jax.Array:  # [B, T, E]
        q, k, v = (to_heads(y(x), self.mixer.head_dim) for y in (self.q, self.k, self.v))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = angles.rotate(q, self.mixer), angles.rotate(k, self.mixer)
        return self.o(cache.attend(self.layer, q, k, v).reshape(*x.shape[:2], -1))


class Block(nnx.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: ModelConfig, layer: int, make: Make):
        c = config
        self.input_norm = RMSNorm(c.hidden_size, eps=c.rms_eps, make=make)
        self.attention = Attention(c, layer, make)
        self.post_norm = RMSNorm(c.hidden_size, eps=c.rms_eps, make=make)
        self.sparse = c.layers[layer].experts is not None
        if self.sparse:
            self.moe = feed_forward(c.layers[layer], c.hidden_size, make)
        else:
            self.mlp = feed_forward(c.layers[layer], c.hidden_size, make)

    def __call__(self, x: jax.Array, angles: Angles, cache: Cache) -> jax.Array:  # [B, T, E]
        x = x + self.attention(self.input_norm(x), angles, cache)
        feed = self.moe if self.sparse else self.mlp
        return x + feed(self.post_norm(x))


def feed_forward(layer: Layer, features: int, make: Make) -> SparseMLP | GatedMLP:
    """The experts of a layer, or its dense MLP."""
    if layer.experts is not None:
        return SparseMLP(layer.experts, features, make)
    return GatedMLP(features, layer.mlp, make)


class Qwen3(Decoder):
    """Qwen 3, Qwen 3 MoE, Llama."""

    def __init__(self, config: ModelConfig, make: Make):
        super().__init__(config, make)
        self.layers = nnx.List([Block(config, i, make) for i in range(len(config.layers))])
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_eps, make=make)
