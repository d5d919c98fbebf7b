"""Rotary position embeddings. Angles are computed in float32 whatever the model's dtype.

Recipes: transformers `modeling_rope_utils.py`; YaRN is arXiv:2309.00071.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from da_jax.models.config import RopeConfig


def inverse_frequencies(config: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Angle per position for each pair of dimensions that rotates.

    Returns:
      (float32 [R / 2] radians per position, factor on cos and sin); R is `head_dim` or, with a
      `partial` embedding, the first part of it that rotates.
    """
    if config.kind == "proportional":  # Gemma 4: the first pairs rotate, the others stay
        pairs = int(config.partial * head_dim // 2)
        exponents = np.arange(0, 2 * pairs, 2, dtype=np.float64) / head_dim
        still = np.zeros(head_dim // 2 - pairs)
        inv = 1.0 / config.theta**exponents / config.factor
        return np.concatenate([inv, still]).astype(np.float32), 1.0
    head_dim = int(head_dim * config.partial)
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    inv = 1.0 / config.theta**exponents
    scale = 1.0
    if config.kind == "linear":
        inv = inv / config.factor
    elif config.kind == "yarn":
        inv, scale = _yarn(config, head_dim, inv)
    elif config.kind == "llama3":
        inv = _llama3(config, inv)
    return inv.astype(np.float32), scale


def cos_sin(config: RopeConfig, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [..., R / 2], of int32 `positions` [...]; R dimensions rotate."""
    inv, scale = inverse_frequencies(config, head_dim)
    angles = positions.astype(jnp.float32)[..., None] * inv
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the pairs (j, j + R/2) of x [B, T, H, D], R of D dims; cos and sin [B, T, R/2]."""
    cos, sin = cos[:, :, None].astype(x.dtype), sin[:, :, None].astype(x.dtype)
    half = cos.shape[-1]
    first, second, rest = jnp.split(x, (half, 2 * half), axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def _original_positions(config: RopeConfig) -> int:
    if not config.original_max_positions:
        raise ValueError(f"rope_type {config.kind!r} needs original_max_position_embeddings")
    return config.original_max_positions


def _yarn(config: RopeConfig, head_dim: int, inv: np.ndarray) -> tuple[np.ndarray, float]:
    original = _original_positions(config)

    def dimension(rotations: float) -> float:
        """The dimension whose wavelength makes `rotations` turns in the original context."""
        turns = original / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (np.arange(head_dim // 2) - low) / max(high - low, 0.001)
    keep = 1.0 - np.clip(ramp, 0.0, 1.0)  # 1: extrapolate (fast dims), 0: interpolate

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0

    if config.attention_factor is not None:
        scale = config.attention_factor
    elif config.mscale and config.mscale_all_dim:
        scale = mscale(config.mscale) / mscale(config.mscale_all_dim)
    else:
        scale = mscale(1.0)
    return inv / config.factor * (1 - keep) + inv * keep, scale


def _llama3(config: RopeConfig, inv: np.ndarray) -> np.ndarray:
    original = _original_positions(config)
    turns = original * inv / (2 * math.pi)  # turns that each pair makes in the original context
    low, high = config.low_freq_factor, config.high_freq_factor
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return inv / config.factor * (1 - keep) + inv * keep
