"""Gemma 3: five sliding layers to one full, norms before and after each part, weights 1 + w.

x = x + post_attention_norm(o(attend(rope(norm(q)), rope(norm(k)), v)))     on input_norm(x)
x = x + post_mlp_norm(down(gelu(gate) * up))                                on pre_mlp_norm(x)
"""

from __future__ import annotations

import jax
from flax import nnx

from da_jax.models.config import Attention as AttentionConfig
from da_jax.models.config import ModelConfig
from da_jax.models.decoder import Decoder
from da_jax.models.layers import Angles, Cache, GatedMLP, Linear, Make, WideRMSNorm, gelu, to_heads


def _norm(features: int, config: ModelConfig, make: Make) -> WideRMSNorm:
    return WideRMSNorm(features, eps=config.rms_eps, make=make, offset=1.0)


class Attention(nnx.Module):
    """Grouped-query attention, full or sliding."""

    def __init__(self, config: ModelConfig, layer: int, make: Make):
        mixer = config.layers[layer].mixer
        assert isinstance(mixer, AttentionConfig)
        self.mixer, self.layer = mixer, layer
        queries, keys = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
        self.q = Linear(config.hidden_size, queries, make)
        self.k = Linear(config.hidden_size, keys, make)
        self.v = Linear(config.hidden_size, keys, make)
        self.o = Linear(queries, config.hidden_size, make)
        self.q_norm = _norm(mixer.head_dim, config, make)
        self.k_norm = _norm(mixer.head_dim, config, make)

    def __call__(self, x: jax.Array, angles: Angles, cache: Cache) -> jax.Array:  # [B, T, E]
        q, k, v = (to_heads(y(x), self.mixer.head_dim) for y in (self.q, self.k, self.v))
        q = angles.rotate(self.q_norm(q), self.mixer)
        k = angles.rotate(self.k_norm(k), self.mixer)
        return self.o(cache.attend(self.layer, q, k, v).reshape(*x.shape[:2], -1))


class Block(nnx.Module):
    """One decoder layer."""

    def __init__(self, config: ModelConfig, layer: int, make: Make):
        c = config
        self.input_norm = _norm(c.hidden_size, c, make)
        self.attention = Attention(c, layer, make)
        self.post_attention_norm = _norm(c.hidden_size, c, make)
        self.pre_mlp_norm = _norm(c.hidden_size, c, make)
        self.mlp = GatedMLP(c.hidden_size, c.layers[layer].mlp, make, act=gelu)
        self.post_mlp_norm = _norm(c.hidden_size, c, make)

    def __call__(self, x: jax.Array, angles: Angles, cache: Cache) -> jax.Array:  # [B, T, E]
        x = x + self.post_attention_norm(self.attention(self.input_norm(x), angles, cache))
        return x + self.post_mlp_norm(self.mlp(self.pre_mlp_norm(x)))


class Gemma3(Decoder):
    """Gemma 3, the text part."""

    def __init__(self, config: ModelConfig, make: Make):
        super().__init__(config, make)
        self.embed_scale = config.hidden_size**0.5
        self.layers = nnx.List([Block(config, i, make) for i in range(len(config.layers))])
        self.norm = _norm(config.hidden_size, config, make)
