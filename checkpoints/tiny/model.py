"""The tiny model as plain JAX: Qwen 3's decoder block, and a structured start.

Parameters are a dict: ``embed`` [V, D], ``norm`` [D] and ``layers``, a list of dicts of matrices in
``[in, out]`` order. Computation is float32.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from da_jax.checkpoints.tiny.batches import Batch

Params = dict[str, Any]


@dataclass(frozen=True)
class Config:
    """Sizes of the model, with the names of the Qwen 3 configuration."""

    vocab_size: int
    num_hidden_layers: int = 4
    hidden_size: int = 128
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 256
    rope_theta: float = 1e5
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 8192


EMBED_STD = 0.04
FINAL_NORM = 0.075 / EMBED_STD


def init(key: jax.Array, config: Config) -> Params:
    """Draws parameters in which the circuits of look-up by key roughly exist.

    A tiny model finds induction by chance only after very long training. So layer 0 starts with
    heads that attend to the previous token, later layers with heads that match equal tokens or,
    composed with layer 0, the token after an equal one, and every value path starts as a copy.
    """
    d, hd = config.hidden_size, config.head_dim
    hq, hkv, ff = config.num_attention_heads, config.num_key_value_heads, config.intermediate_size
    keys = iter(jax.random.split(key, 8 * config.num_hidden_layers + 1))
    normal = lambda rows, columns, scale: jax.random.normal(next(keys), (rows, columns)) * scale
    depth = (2 * config.num_hidden_layers) ** -0.5
    embed = normal(config.vocab_size, d, EMBED_STD)
    layers = []
    for _ in range(config.num_hidden_layers):
        layer = {
            "input_norm": jnp.ones(d),
            "post_norm": jnp.ones(d),
            "q_norm": jnp.full(hd, 1.5),
            "k_norm": jnp.full(hd, 1.5),
            "q": normal(d, hq * hd, d**-0.5),
            "k": normal(d, hkv * hd, d**-0.5),
            "v": normal(d, hkv * hd, d**-0.5),
            "o": normal(hq * hd, d, (hq * hd) ** -0.5 * depth),
            "gate": normal(d, ff, d**-0.5),
            "up": normal(d, ff, d**-0.5),
            "down": normal(ff, d, ff**-0.5 * depth),
        }
        layers.append(layer)
    _previous_token_heads(layers[0], config)
    for index, layer in enumerate(layers):
        _matching_heads(index, layer, layers[0], config)
    # A constant feature: with it, queries and keys can depend on position alone.
    embed = embed.at[:, 0].set(3 * EMBED_STD)
    return {"embed": embed, "norm": jnp.full(d, FINAL_NORM), "layers": layers}


def _previous_token_heads(layer: Params, config: Config) -> None:
    """Points the heads of KV head 0 at the previous token: constant features, one step of RoPE."""
    hd, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    half = hd // 2
    frequency = config.rope_theta ** (-np.arange(half) / half)
    fast = (np.arange(half) < 3).astype(np.float32)
    here = jnp.asarray(np.concatenate([fast, 0 * fast]))
    before = jnp.asarray(np.concatenate([fast * np.cos(frequency), fast * np.sin(frequency)]))
    layer["q_norm"] = layer["k_norm"] = jnp.full(hd, 2.0)
    for head in range(group):
        columns = np.s_[head * hd : (head + 1) * hd]
        layer["q"] = layer["q"].at[:, columns].multiply(0.05).at[0, columns].set(here)
    layer["k"] = layer["k"].at[:, :hd].multiply(0.05).at[0, :hd].set(before)


def _matching_heads(index: int, layer: Params, first: Params, config: Config) -> None:
    """Ties queries to keys, and output to value projections, so that heads match and copy."""
    hd, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    for head in range(config.num_attention_heads):
        kv = head // group
        q, k = np.s_[head * hd : (head + 1) * hd], np.s_[kv * hd : (kv + 1) * hd]
        if kv == 0 and index in (1, 2):  # matches what layer 0 wrote one place later
            moved = first["v"][:, :hd] @ first["o"][:hd]
            layer["q"] = layer["q"].at[:, q].set(moved @ layer["k"][:, k] * 3)
        elif index > 0 or kv > 0:
            layer["q"] = layer["q"].at[:, q].set(layer["k"][:, k])
        layer["o"] = layer["o"].at[q].set(0.5 * layer["v"][:, k].T)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float = 1e-6) -> jax.Array:
    """Qwen 3's RMSNorm over the last axis."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * weight


def rope(x: jax.Array, position: jax.Array, theta: float) -> jax.Array:
    """Rotates ``x`` [..., H, D] by ``position`` [...], halves paired."""
    half = x.shape[-1] // 2
    angle = position[..., None, None] * theta ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _project(layer: Params, x: jax.Array, position: jax.Array, config: Config):
    """Queries [..., HKV, G, D], already scaled, and keys and values [..., HKV, D]."""
    lead, hd, kv = x.shape[:-1], config.head_dim, config.num_key_value_heads
    h = rms_norm(x, layer["input_norm"])
    q = (h @ layer["q"]).reshape(*lead, config.num_attention_heads, hd)
    k = (h @ layer["k"]).reshape(*lead, kv, hd)
    v = (h @ layer["v"]).reshape(*lead, kv, hd)
    q = rope(rms_norm(q, layer["q_norm"]), position, config.rope_theta) * hd**-0.5
    k = rope(rms_norm(k, layer["k_norm"]), position, config.rope_theta)
    return q.reshape(*lead, kv, -1, hd), k, v


def _mlp(layer: Params, x: jax.Array) -> jax.Array:
    h = rms_norm(x, layer["post_norm"])
    return x + (jax.nn.silu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"]


_MASKED = -1e30
_QUERY_BLOCK = 512


def _causal(q: jax.Array, k: jax.Array, v: jax.Array, valid: jax.Array) -> jax.Array:
    """Causal attention of the context, in blocks of queries that are recomputed backwards."""
    length = k.shape[1]
    size = min(length, _QUERY_BLOCK)

    def block(start, q, k, v, valid):
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k)
        seen = jnp.arange(size)[:, None] + start >= jnp.arange(start + size)
        mask = seen & valid[:, None, None, None, :]
        weights = jax.nn.softmax(jnp.where(mask, scores, _MASKED), -1)
        return jnp.einsum("bhgqk,bkhd->bqhgd", weights, v)

    out = []
    for start in range(0, length, size):
        stop = start + size
        one = functools.partial(block, start)
        run = jax.checkpoint(one) if length > size else one
        out.append(run(q[:, start:stop], k[:, :stop], v[:, :stop], valid[:, :stop]))
    return jnp.concatenate(out, 1)


def forward(params: Params, config: Config, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Runs a packed batch.

    Returns:
        Logits [B, R, T, V] of the rows, and log-probabilities [B, L, V] that the context's hidden
        states after the second layer give, read with the same head (for deep supervision).
    """
    chunk = batch.chunk[:, None, None, :]
    chosen = (chunk[..., None] == batch.focus[..., None, :]).any(-1)
    to_context = (chunk == 0) | chosen | (batch.everything[..., None] & (chunk > 0))  # [B, R, T, L]
    segment, steps = batch.segment, jnp.arange(batch.rows.shape[2])
    to_row = (segment[..., :, None] == segment[..., None, :]) & (steps[:, None] >= steps)
    mask = jnp.concatenate([to_context, to_row], -1)[:, :, :, None, None, :]
    length = batch.context.shape[1]

    def block(layer, x, y, last):
        q, k, v = _project(layer, x, batch.position, config)
        qr, kr, vr = _project(layer, y, batch.row_position, config)
        scores = jnp.concatenate(
            [
                jnp.einsum("brthgd,bkhd->brthgk", qr, k),
                jnp.einsum("brthgd,brkhd->brthgk", qr, kr),
            ],
            -1,
        )
        weights = jax.nn.softmax(jnp.where(mask, scores, _MASKED), -1)
        out = jnp.einsum("brthgk,bkhd->brthgd", weights[..., :length], v)
        out += jnp.einsum("brthgk,brkhd->brthgd", weights[..., length:], vr)
        y = _mlp(layer, y + out.reshape(*y.shape[:3], -1) @ layer["o"])
        if not last:
            out = _causal(q, k, v, batch.chunk >= 0)
            x = _mlp(layer, x + out.reshape(*x.shape[:2], -1) @ layer["o"])
        return x, y

    x, y = params["embed"][batch.context], params["embed"][batch.rows]
    probe = x
    for index, layer in enumerate(params["layers"]):
        one = functools.partial(block, last=index == len(params["layers"]) - 1)
        run = jax.checkpoint(one) if length > 1024 else one
        x, y = run(layer, x, y)
        if index == 1:
            probe = x
    read = lambda h: rms_norm(h, params["norm"]) @ params["embed"].T
    return read(y), jax.nn.log_softmax(read(probe))
