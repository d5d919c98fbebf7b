"""Gated DeltaNet (arXiv:2412.06464): linear attention with a state that forgets and corrects.

For each head, with the state S [key_dim, value_dim], decay g <= 0 and strength beta:

    S = exp(g) S;    S = S + k (beta (v - S^T k))^T;    out = S^T q

`delta_rule` does this for one token, or for many in chunks: within a chunk all corrections follow
from one unit triangular system, and only the state passes from chunk to chunk.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from da_jax.models.config import GatedDelta
from da_jax.models.layers import Cache, DeltaState, Linear, Make, RMSNorm

CHUNK = 64


def causal_conv(
    x: jax.Array, weight: jax.Array, past: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Depthwise causal convolution over the sequence.

    Args:
      x: [B, T, C].
      weight: [C, 1, K]; the last column multiplies the present token.
      past: [B, K - 1, C], the inputs before x.
      lengths: int32 [B], valid tokens of each row.

    Returns:
      ([B, T, C], the inputs [B, K - 1, C] before the first token after the valid ones).
    """
    width = weight.shape[-1]
    taps = weight[:, 0].astype(jnp.float32)
    row = jnp.concatenate([past.astype(x.dtype), x], axis=1)
    out = sum(row[:, j : j + x.shape[1]].astype(jnp.float32) * taps[:, j] for j in range(width))
    last = lengths[:, None] + jnp.arange(width - 1)
    return jnp.asarray(out).astype(x.dtype), jnp.take_along_axis(row, last[..., None], axis=1)


@jax.custom_jvp
def unit_inverse(lower: jax.Array) -> jax.Array:
    """The inverse of I + lower, block by block: two inverses of half the size make one.

    Products only, in place of `jax.lax.linalg.triangular_solve`, two of which in one program never
    end with jax 0.10 on a CPU of two cores; no less exact.

    Args:
      lower: [..., N, N], zero on and above the diagonal; N is a power of two.
    """
    *lead, count, _ = lower.shape
    inverse = jnp.ones((*lead, count, 1, 1), lower.dtype)  # of each block on the diagonal
    size = 1
    while size < count:
        number = count // (2 * size)
        blocks = lower.reshape(*lead, number, 2 * size, number, 2 * size)
        blocks = jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)
        pairs = inverse.reshape(*lead, number, 2, size, size)
        above, below = pairs[..., 0, :, :], pairs[..., 1, :, :]
        left = -below @ (blocks[..., size:, :size] @ above)
        inverse = jnp.block([[above, jnp.zeros_like(above)], [left, below]])
        size *= 2
    return inverse[..., 0, :, :]


@unit_inverse.defjvp
def _unit_inverse_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    inverse = unit_inverse(*primals)
    return inverse, -inverse @ tangents[0] @ inverse


def delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    memory: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The gated delta rule over T tokens, in float32.

    Args:
      q, k: [B, T, H, DK]; q is scaled.
      v: [B, T, H, DV].
      g: [B, T, H], logarithm of the decay.
      beta: [B, T, H]. A token with g = beta = 0 leaves the state alone.
      memory: [B, H, DK, DV], the state before.

    Returns:
      (out [B, T, H, DV], the state after).
    """
    q, k, v, g, beta = (x.astype(jnp.float32) for x in (q, k, v, g, beta))
    with jax.default_matmul_precision("highest"):
        if q.shape[1] == 1:
            out, memory = _one(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], memory)
            return out[:, None], memory
        return _chunked(q, k, v, g, beta, memory)


def _one(q, k, v, g, beta, memory):
    """One token: q, k [B, H, DK], v [B, H, DV], g, beta [B, H]."""
    memory = memory * jnp.exp(g)[..., None, None]
    error = v - jnp.einsum("bhkv,bhk->bhv", memory, k)
    memory = memory + k[..., :, None] * (error * beta[..., None])[..., None, :]
    return jnp.einsum("bhkv,bhk->bhv", memory, q), memory


def _chunked(q, k, v, g, beta, memory):
    length = q.shape[1]
    size = min(CHUNK, 1 << (length - 1).bit_length())

    def cut(x):  # [B, T, H, ...] -> [N, B, H, size, ...], padded with tokens that do nothing
        x = jnp.pad(x, ((0, 0), (0, -length % size), *((0, 0),) * (x.ndim - 2)))
        x = x.reshape(x.shape[0], -1, size, *x.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 2, 3)

    q, k, v, g, beta = (cut(x) for x in (q, k, v, g, beta))
    total = jnp.cumsum(g, axis=-1)  # [N, B, H, size]
    i, j = jnp.arange(size)[:, None], jnp.arange(size)[None]
    # exp only where i >= j: above the diagonal it may overflow.
    decay = jnp.exp(jnp.where(i >= j, total[..., :, None] - total[..., None, :], -jnp.inf))
    strong = k * beta[..., None]
    system = jnp.where(i > j, (strong @ k.mT) * decay, 0.0)
    rhs = jnp.concatenate([v * beta[..., None], strong * jnp.exp(total)[..., None]], axis=-1)
    solved = unit_inverse(system) @ rhs
    fresh, faded = jnp.split(solved, (v.shape[-1],), axis=-1)
    inside = (q @ k.mT) * decay

    def step(memory, chunk):
        q, k, total, fresh, faded, inside = chunk
        new = fresh - faded @ memory  # [B, H, size, DV], what each token adds
        out = (q * jnp.exp(total)[..., None]) @ memory + inside @ new
        end = total[..., -1:]
        kept = k * jnp.exp(end - total)[..., None]
        return memory * jnp.exp(end)[..., None] + kept.mT @ new, out

    memory, out = jax.lax.scan(step, memory, (q, k, total, fresh, faded, inside))
    out = jnp.moveaxis(jnp.moveaxis(out, 3, 2), 0, 1)  # [B, N, size, H, DV]
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, :length], memory


class GatedDeltaNet(nnx.Module):
    """The layer around `delta_rule`: projections, convolution, gates and output norm.

    Its channels are grouped by key head, [q | k | v of the value heads that it serves], so that
    devices can each have some heads.

    Args:
      config: shape of the layer.
      features: width of the residual stream.
      layer: index of the layer.
      make: how the parameters are made.
      eps: epsilon of the output norm.
    """

    def __init__(
        self,
        config: GatedDelta,
        features: int,
        layer: int,
        make: Make,
        *,
        eps: float,
    ):
        c = self.config = config
        self.layer = layer
        values = c.value_heads * c.value_dim
        self.qkv_by_head = Linear(features, c.channels, make)
        self.z = Linear(features, values, make)
        self.b = Linear(features, c.value_heads, make._replace(quantized=False))
        self.a = Linear(features, c.value_heads, make._replace(quantized=False))
        taps = make.normal((c.channels, 1, c.conv_width), c.conv_width**-0.5)
        self.conv = nnx.Param(taps.astype(make.dtype))
        self.a_log = nnx.Param(jnp.zeros((c.value_heads,), jnp.float32))
        self.dt_bias = nnx.Param(jnp.ones((c.value_heads,), jnp.float32))
        self.norm = RMSNorm(c.value_dim, eps=eps, make=make)
        self.out = Linear(values, features, make)

    def __call__(self, x: jax.Array, cache: Cache) -> jax.Array:  # [B, T, E]
        c, valid = self.config, cache.valid
        before = cache.recall(self.layer)
        mixed, conv = causal_conv(
            self.qkv_by_head(x), self.conv[...], before.conv,
            jnp.sum(valid, axis=1, dtype=jnp.int32),
        )  # fmt: skip
        mixed = jax.nn.silu(mixed).reshape(*x.shape[:2], -1, c.channels // c.key_heads)
        q, k, v = jnp.split(mixed, (c.key_dim, 2 * c.key_dim), axis=-1)
        q, k = (self._heads(y) for y in (q, k))  # [B, T, value heads, DK]
        v = v.reshape(*q.shape[:3], c.value_dim)
        decay = -jnp.exp(self.a_log[...]) * jax.nn.softplus(
            self.a(x).astype(jnp.float32) + self.dt_bias[...]
        )
        beta = jax.nn.sigmoid(self.b(x)).astype(jnp.float32)
        decay, beta = (jnp.where(valid[..., None], y, 0.0) for y in (decay, beta))
        out, memory = delta_rule(q * c.key_dim**-0.5, k, v, decay, beta, before.memory)
        cache.remember(self.layer, DeltaState(conv, memory))
        gate = jax.nn.silu(self.z(x).astype(jnp.float32)).reshape(out.shape)
        out = (self.norm(out.astype(x.dtype)) * gate).astype(x.dtype)
        return self.out(out.reshape(*x.shape[:2], -1))

    def _heads(self, x: jax.Array) -> jax.Array:
        """Heads of length 1, float32, each repeated for the value heads that it serves."""
        c, x = self.config, x.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
        return jnp.repeat(x, c.value_heads // c.key_heads, axis=2)
