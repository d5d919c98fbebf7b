"""Mixtures of experts: tokens are sorted by expert, and each expert multiplies its own rows."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from da_jax.models import parallel
from da_jax.models.config import Experts
from da_jax.models.layers import (
    Activation,
    GatedMLP,
    Linear,
    Make,
    multiply,
    normalized,
    quantize,
    times,
)

Scales = tuple[jax.Array, jax.Array, jax.Array]
FEW = 128  # pairs of token and expert up to which a GPU reads the matrices of each
TILE = 64  # rows of one product of the loop over experts


class Matrices(NamedTuple):
    """The matrices of all experts.

    Attributes:
      gate, up: [X, E, F].
      down: [X, F, E].
      scales: float32 [X, F], [X, F], [X, E] of int8 matrices, None for others.
    """

    gate: jax.Array
    up: jax.Array
    down: jax.Array
    scales: Scales | None = None


def run_experts(
    x: jax.Array, idx: jax.Array, weights: jax.Array, matrices: Matrices, act: Activation
) -> jax.Array:
    """Sum over the chosen experts of weight * down(act(gate(x)) * up(x)).

    Args:
      x: [N, E] tokens.
      idx: int32 [N, K], the experts of each token.
      weights: [N, K].
      matrices: of all experts.
      act: activation of the gate.

    Returns:
      [N, E].
    """
    flat = idx.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    rows, experts = x[order // idx.shape[1]], flat[order]  # [N * K, E], grouped by expert
    # XLA has grouped products for TPU alone: elsewhere `ragged_dot` multiplies every row with every
    # expert. int8 it would convert as a whole, so that is read in tiles on a TPU too.
    best = {"tpu": by_groups if matrices.scales is None else by_tiles, "default": by_tiles}
    if len(flat) <= FEW:
        best["cuda"] = by_pairs
    forms = {platform: functools.partial(form, act=act) for platform, form in best.items()}
    out = jax.lax.platform_dependent(rows, experts, matrices, **forms)
    out = out[jnp.argsort(order)].reshape(*idx.shape, -1)
    return jnp.sum(out * weights[..., None].astype(out.dtype), axis=1)


def by_groups(
    rows: jax.Array, experts: jax.Array, matrices: Matrices, *, act: Activation
) -> jax.Array:
    """Each row [M, E] through its expert [M], ascending: XLA's grouped product."""
    sizes = jnp.bincount(experts, length=len(matrices.gate)).astype(jnp.int32)
    product = functools.partial(jax.lax.ragged_dot, group_sizes=sizes)
    hidden = act(product(rows, matrices.gate)) * product(rows, matrices.up)
    return product(hidden, matrices.down)


def by_pairs(
    rows: jax.Array, experts: jax.Array, matrices: Matrices, *, act: Activation
) -> jax.Array:
    """The same for few rows: one fused pass that reads the matrices of each."""

    def product(rows: jax.Array, weights: jax.Array, scale: jax.Array | None) -> jax.Array:
        # A sum of products, for XLA would copy the chosen matrices for a dot.
        chosen = weights[experts].astype(jnp.float32)
        out = jnp.sum(rows.astype(jnp.float32)[:, :, None] * chosen, axis=1)
        return (out if scale is None else out * scale[experts]).astype(rows.dtype)

    gate, up, down = matrices.scales or (None, None, None)
    hidden = act(product(rows, matrices.gate, gate)) * product(rows, matrices.up, up)
    return product(hidden, matrices.down, down)


def by_tiles(
    rows: jax.Array, experts: jax.Array, matrices: Matrices, *, act: Activation
) -> jax.Array:
    """The same in a loop over tiles of rows that have one expert."""
    size = min(TILE, max(8, len(rows) // 8))
    sizes = jnp.bincount(experts, length=len(matrices.gate))
    tiles = -(-sizes // size)
    last = jnp.cumsum(tiles)
    padded = jnp.pad(rows, ((0, size), (0, 0)))

    def one(index: jax.Array, out: jax.Array) -> jax.Array:
        expert = jnp.searchsorted(last, index, side="right")
        start = jnp.sum(jnp.where(jnp.arange(len(sizes)) < expert, sizes, 0))
        start = start + (index - last[expert] + tiles[expert]) * size
        here = Matrices(*jax.tree.map(lambda x: x[expert], matrices))
        tile = jax.lax.dynamic_slice_in_dim(padded, start, size)
        # Rows beyond the group are those of later experts, whose tiles overwrite them.
        return jax.lax.dynamic_update_slice_in_dim(out, _one_expert(tile, here, act), start, 0)

    return jax.lax.fori_loop(0, last[-1], one, jnp.zeros_like(padded))[: len(rows)]


def _one_expert(rows: jax.Array, matrices: Matrices, act: Activation) -> jax.Array:
    def product(rows: jax.Array, weights: jax.Array, scale: jax.Array | None) -> jax.Array:
        if scale is None:
            return rows @ weights
        return multiply(rows, weights, scale).astype(rows.dtype)

    gate, up, down = matrices.scales or (None, None, None)
    hidden = act(product(rows, matrices.gate, gate)) * product(rows, matrices.up, up)
    return product(hidden, matrices.down, down)


def top_experts(scores: jax.Array, count: int, *, normalize: bool) -> tuple[jax.Array, jax.Array]:
    """The `count` likeliest experts of router scores [N, X]: (weights float32, int32 idx)."""
    weights, idx = jax.lax.top_k(jax.nn.softmax(scores.astype(jnp.float32), axis=-1), count)
    if normalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, idx


class ExpertWeights(nnx.Module):
    """The matrices of all experts, stacked: gate and up [X, E, F], down [X, F, E]."""

    def __init__(self, config: Experts, features: int, make: Make, *, act: Activation):
        self.experts, self.act, self.quantized = config, act, make.quantized
        wide = make.normal((2, config.count, features, config.hidden), features**-0.5)
        narrow = make.normal((config.count, config.hidden, features), config.hidden**-0.5)
        matrices = (wide[0], wide[1], narrow)
        if make.quantized:
            (gate, gate_scale), (up, up_scale), (down, down_scale) = map(quantize, matrices)
            self.gate_scale, self.up_scale = nnx.Param(gate_scale), nnx.Param(up_scale)
            self.down_scale = nnx.Param(down_scale)
        else:
            gate, up, down = (x.astype(make.dtype) for x in matrices)
        self.gate, self.up, self.down = nnx.Param(gate), nnx.Param(up), nnx.Param(down)

    def run(self, x: jax.Array, idx: jax.Array, weights: jax.Array) -> jax.Array:
        """Runs tokens [N, E] through their experts."""
        matrices = Matrices(self.gate[...], self.up[...], self.down[...])
        if self.quantized:
            scales = (self.gate_scale[...], self.up_scale[...], self.down_scale[...])
            matrices = matrices._replace(scales=scales)
        out = run_experts(x, idx, weights, matrices, self.act)
        # Devices that share a model have a part of the width of every expert.
        return out if matrices.gate.shape[-1] == self.experts.hidden else parallel.total(out)


class SparseMLP(ExpertWeights):
    """Qwen's mixture: routed experts, and in some models one that every token has."""

    def __init__(self, config: Experts, features: int, make: Make):
        super().__init__(config, features, make, act=jax.nn.silu)
        plain = make._replace(quantized=False)
        self.router = Linear(features, config.count, plain)
        if config.shared:
            self.shared = GatedMLP(features, config.shared, make)
            self.shared_gate = Linear(features, 1, plain)

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, T, E]
        rows = x.reshape(-1, x.shape[-1])
        c = self.experts
        weights, idx = top_experts(self.router(rows), c.top_k, normalize=c.normalize)
        out = self.run(rows, idx, weights.astype(x.dtype))
        if c.shared:
            out = out + jax.nn.sigmoid(self.shared_gate(rows)) * self.shared(rows)
        return out.reshape(x.shape)


class GemmaExperts(ExpertWeights):
    """Gemma 4's mixture: its router has a norm without weight and scales of its own."""

    def __init__(self, config: Experts, features: int, make: Make, *, act: Activation, eps: float):
        super().__init__(config, features, make, act=act)
        self.eps = eps
        self.router = Linear(features, config.count, make._replace(quantized=False))
        self.router_scale = nnx.Param(jnp.ones((features,), make.dtype))
        self.expert_scale = nnx.Param(jnp.ones((config.count,), make.dtype))

    def __call__(self, x: jax.Array, routed_by: jax.Array) -> jax.Array:
        """Runs x [B, T, E] through the experts that `routed_by` [B, T, E] chooses."""
        rows, by = (y.reshape(-1, y.shape[-1]) for y in (x, routed_by))
        by = normalized(by, self.eps).astype(by.dtype) * self.router_scale[...]
        scores = self.router(times(by, by.shape[-1] ** -0.5))
        weights, idx = top_experts(scores, self.experts.top_k, normalize=True)
        weights = weights * self.expert_scale[...].astype(jnp.float32)[idx]
        return self.run(rows, idx, weights.astype(x.dtype)).reshape(x.shape)
