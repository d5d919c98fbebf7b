"""Gemma 4: 31B and 12B dense, 26B-A4B with experts, E2B and E4B with per-layer embeddings.

x = x + post_attention_norm(o(attend(rope(norm(q)), rope(norm(k)), rms(v))))   on input_norm(x)
h = mlp(pre_mlp_norm(x))
h = post_dense_norm(h) + post_moe_norm(experts(pre_moe_norm(x), router(x)))    26B-A4B
x = x + post_mlp_norm(h)
x = x + norm(out(gelu(gate(x)) * per_layer_input))                             E2B, E4B
x = x * scalar

Full layers of the large models project keys and values once (`k_eq_v`): v = rms(kr) and
k = rope(norm(kr)) differ all the same. The last layers of E2B and E4B read the keys and values of
an earlier layer.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from da_jax.models import host_table, parallel
from da_jax.models.config import Attention as AttentionConfig
from da_jax.models.config import ModelConfig
from da_jax.models.decoder import Decoder
from da_jax.models.layers import (
    Angles,
    Cache,
    GatedMLP,
    Linear,
    Make,
    WideRMSNorm,
    gelu,
    normalized,
    times,
    to_heads,
)
from da_jax.models.moe import GemmaExperts


def _norm(features: int, config: ModelConfig, make: Make) -> WideRMSNorm:
    return WideRMSNorm(features, eps=config.rms_eps, make=make)


class Attention(nnx.Module):
    """Grouped-query attention: full or sliding, with own or borrowed keys and values."""

    def __init__(self, config: ModelConfig, layer: int, make: Make):
        mixer = config.layers[layer].mixer
        assert isinstance(mixer, AttentionConfig)
        self.mixer, self.layer, self.eps = mixer, layer, config.rms_eps
        queries, keys = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
        self.q = Linear(config.hidden_size, queries, make)
        self.o = Linear(queries, config.hidden_size, make)
        self.q_norm = _norm(mixer.head_dim, config, make)
        if mixer.donor is None:
            self.k = Linear(config.hidden_size, keys, make)
            if not mixer.k_eq_v:
                self.v = Linear(config.hidden_size, keys, make)
            self.k_norm = _norm(mixer.head_dim, config, make)

    def __call__(self, x: jax.Array, angles: Angles, cache: Cache) -> jax.Array:  # [B, T, E]
        dim = self.mixer.head_dim
        q = angles.rotate(self.q_norm(to_heads(self.q(x), dim)), self.mixer)
        if self.mixer.donor is not None:
            out = cache.attend(self.layer, q)
        else:
            k = to_heads(self.k(x), dim)
            v = k if self.mixer.k_eq_v else to_heads(self.v(x), dim)
            k = angles.rotate(self.k_norm(k), self.mixer)
            out = cache.attend(self.layer, q, k, normalized(v, self.eps).astype(v.dtype))
        return self.o(out.reshape(*x.shape[:2], -1))


class Block(nnx.Module):
    """One decoder layer."""

    def __init__(self, config: ModelConfig, layer: int, make: Make):
        c, experts = config, config.layers[layer].experts
        self.input_norm = _norm(c.hidden_size, c, make)
        self.attention = Attention(c, layer, make)
        self.post_attention_norm = _norm(c.hidden_size, c, make)
        self.pre_mlp_norm = _norm(c.hidden_size, c, make)
        self.mlp = GatedMLP(c.hidden_size, c.layers[layer].mlp, make, act=gelu)
        self.post_mlp_norm = _norm(c.hidden_size, c, make)
        self.sparse = experts is not None
        if experts is not None:
            self.post_dense_norm = _norm(c.hidden_size, c, make)
            self.pre_moe_norm = _norm(c.hidden_size, c, make)
            self.moe = GemmaExperts(experts, c.hidden_size, make, act=gelu, eps=c.rms_eps)
            self.post_moe_norm = _norm(c.hidden_size, c, make)
        if c.per_layer_inputs is not None:
            self.per_layer_gate = Linear(c.hidden_size, c.per_layer_inputs.size, make)
            self.per_layer_out = Linear(c.per_layer_inputs.size, c.hidden_size, make)
            self.per_layer_norm = _norm(c.hidden_size, c, make)
        self.scalar = nnx.Param(jnp.ones((1,), make.dtype))

    def __call__(
        self, x: jax.Array, per_layer: jax.Array | None, angles: Angles, cache: Cache
    ) -> jax.Array:  # [B, T, E], per_layer [B, T, P]
        x = x + self.post_attention_norm(self.attention(self.input_norm(x), angles, cache))
        h = self.mlp(self.pre_mlp_norm(x))
        if self.sparse:
            routed = self.moe(self.pre_moe_norm(x), x)
            h = self.post_dense_norm(h) + self.post_moe_norm(routed)
        x = x + self.post_mlp_norm(h)
        if per_layer is not None:
            h = gelu(self.per_layer_gate(x)) * per_layer
            x = x + self.per_layer_norm(self.per_layer_out(h))
        return x * self.scalar[...]


class Gemma4(Decoder):
    """Gemma 4, the text part."""

    def __init__(self, config: ModelConfig, make: Make):
        super().__init__(config, make)
        self.embed_scale = config.hidden_size**0.5
        if config.per_layer_inputs is not None:
            size = config.per_layer_inputs.size
            width = len(config.layers) * size
            rows = make.normal((config.per_layer_inputs.vocab_size, width), 0.02)
            self.per_layer_embedding = nnx.Param(rows.astype(make.dtype))
            self.per_layer_projection = Linear(config.hidden_size, width, make)
            self.per_layer_norm = _norm(size, config, make)
        self.layers = nnx.List([Block(config, i, make) for i in range(len(config.layers))])
        self.norm = _norm(config.hidden_size, config, make)

    def __call__(self, tokens: jax.Array, positions: jax.Array, cache: Cache) -> jax.Array:
        angles = Angles(positions)
        x = self.embed(tokens)
        per_layer = self._per_layer_inputs(tokens, x)
        for i, block in enumerate(self.layers):
            x = block(x, None if per_layer is None else per_layer[:, :, i], angles, cache)
        return self.norm(x)

    def _per_layer_inputs(self, tokens: jax.Array, x: jax.Array) -> jax.Array | None:
        """What each layer adds about its token: [B, T, L, P], None for models without."""
        if self.config.per_layer_inputs is None:
            return None
        size = self.config.per_layer_inputs.size
        shape = (*tokens.shape, len(self.config.layers), size)
        rows = self._per_layer_rows(tokens).astype(self.dtype)
        rows = rows * jnp.asarray(size**0.5, self.dtype)
        context = times(self.per_layer_projection(x), x.shape[-1] ** -0.5)
        context = self.per_layer_norm(context.reshape(shape))
        return times(context + rows.reshape(shape), 2**-0.5)

    def _per_layer_rows(self, tokens: jax.Array) -> jax.Array:
        """Rows of the table, which may lie in host memory, and in a narrower dtype than ours."""
        assert self.config.per_layer_inputs is not None
        table, size = self.per_layer_embedding[...], self.config.per_layer_inputs.vocab_size
        if len(table) == size:
            return host_table.rows(table, tokens)
        ids, here = parallel.own_rows(jnp.clip(tokens, 0, size - 1), len(table))
        return parallel.total(jnp.where(here[..., None], host_table.rows(table, ids), 0))
