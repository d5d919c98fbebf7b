"""Qwen 3.5, 3.6 and 3.8, dense and MoE, and Qwen3-Next: Gated DeltaNet with attention in between.

x = x + mix(norm(x))               mix: Gated DeltaNet, or attention with a gate on its output:
                                   o(attend(rope(norm(q)), rope(norm(k)), v) * sigmoid(gate))
x = x + feed(post_norm(x))         feed: down(silu(gate) * up), or experts and a shared one
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from da_jax.models.config import GatedDelta, ModelConfig
from da_jax.models.decoder import Decoder
from da_jax.models.gated_delta import GatedDeltaNet
from da_jax.models.layers import Angles, Cache, Linear, Make, WideRMSNorm, to_heads
from da_jax.models.qwen import feed_forward


def _norm(features: int, config: ModelConfig, make: Make) -> WideRMSNorm:
    return WideRMSNorm(features, eps=config.rms_eps, make=make, offset=1.0)


class GatedAttention(nnx.Module):
    """Grouped-query attention whose query projection also gives a gate on the output."""

    def __init__(self, config: ModelConfig, layer: int, make: Make):
        mixer = config.layers[layer].mixer
        assert not isinstance(mixer, GatedDelta)
        self.mixer, self.layer = mixer, layer
        queries, keys = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
        self.q = Linear(config.hidden_size, 2 * queries, make)  # of each head [q | gate]
        self.k = Linear(config.hidden_size, keys, make)
        self.v = Linear(config.hidden_size, keys, make)
        self.o = Linear(queries, config.hidden_size, make)
        self.q_norm = _norm(mixer.head_dim, config, make)
        self.k_norm = _norm(mixer.head_dim, config, make)

    def __call__(self, x: jax.Array, angles: Angles, cache: Cache) -> jax.Array:  # [B, T, E]
        q, gate = jnp.split(to_heads(self.q(x), 2 * self.mixer.head_dim), 2, axis=-1)
        k, v = (to_heads(y(x), self.mixer.head_dim) for y in (self.k, self.v))
        q = angles.rotate(self.q_norm(q), self.mixer)
        k = angles.rotate(self.k_norm(k), self.mixer)
        out = cache.attend(self.layer, q, k, v) * jax.nn.sigmoid(gate)
        return self.o(out.reshape(*x.shape[:2], -1))


class Block(nnx.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: ModelConfig, layer: int, make: Make):
        c = config
        mixer = c.layers[layer].mixer
        self.input_norm = _norm(c.hidden_size, c, make)
        self.recurrent = isinstance(mixer, GatedDelta)
        if isinstance(mixer, GatedDelta):
            self.delta = GatedDeltaNet(mixer, c.hidden_size, layer, make, eps=c.rms_eps)
        else:
            self.attention = GatedAttention(c, layer, make)
        self.post_norm = _norm(c.hidden_size, c, make)
        self.sparse = c.layers[layer].experts is not None
        if self.sparse:
            self.moe = feed_forward(c.layers[layer], c.hidden_size, make)
        else:
            self.mlp = feed_forward(c.layers[layer], c.hidden_size, make)

    def __call__(self, x: jax.Array, angles: Angles, cache: Cache) -> jax.Array:  # [B, T, E]
        h = self.input_norm(x)
        x = x + (self.delta(h, cache) if self.recurrent else self.attention(h, angles, cache))
        feed = self.moe if self.sparse else self.mlp
        return x + feed(self.post_norm(x))


class QwenNext(Decoder):
    """Qwen 3.5 / 3.6 / 3.8 and Qwen3-Next."""

    def __init__(self, config: ModelConfig, make: Make):
        super().__init__(config, make)
        self.layers = nnx.List([Block(config, i, make) for i in range(len(config.layers))])
        self.norm = _norm(config.hidden_size, config, make)
