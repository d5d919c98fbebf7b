"""Layers that every family shares, and the cache as a model sees it.

Kernels are stored [in, out]: on a CPU the product of a few rows with an [in, out] matrix is 1.3 to
2.5 times faster than with its transpose, and an accelerator does not care.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from da_jax.models import parallel
from da_jax.models.config import Attention, RopeConfig
from da_jax.models.rope import cos_sin, rotate

Activation = Callable[[jax.Array], jax.Array]


def gelu(x: jax.Array) -> jax.Array:
    """The tanh approximation, as Gemma uses it."""
    return jax.nn.gelu(x, approximate=True)


class DeltaState(NamedTuple):
    """What a Gated DeltaNet layer keeps of a sequence.

    Attributes:
      conv: [B, conv_width - 1, C] in the model's dtype, the last inputs of the convolution, the
        oldest first.
      memory: float32 [B, value_heads, key_dim, value_dim].
    """

    conv: jax.Array
    memory: jax.Array


class Cache(Protocol):
    """What sequences keep between steps, as the layers of a model see it.

    Attributes:
      valid: bool [B, T], False for the padding on the right of a row.
    """

    valid: jax.Array

    def attend(
        self, layer: int, q: jax.Array, k: jax.Array | None = None, v: jax.Array | None = None
    ) -> jax.Array:
        """Writes a layer's new keys and values, and attends to what the layer may see.

        Args:
          layer: index of the layer; scale, window and donor are in its configuration.
          q: rotated queries [B, T, HQ, D].
          k, v: [B, T, HKV, D], keys rotated; None for a layer that reads those of its donor.

        Returns:
          [B, T, HQ, D].
        """
        ...

    def recall(self, layer: int) -> DeltaState:
        """The state of a recurrent layer before these tokens; zeros at the start of a sequence."""
        ...

    def remember(self, layer: int, state: DeltaState) -> None:
        """Keeps the state of a recurrent layer after the last valid token of each row."""
        ...


class Make(NamedTuple):
    """How the parameters of a model are made.

    Attributes:
      dtype: dtype of parameters and activations.
      rngs: source of the random initial weights.
      quantized: int8 weights with a float32 scale for each output.
    """

    dtype: jnp.dtype
    rngs: nnx.Rngs
    quantized: bool = False

    def normal(self, shape: tuple[int, ...], std: float) -> jax.Array:
        """Random float32 weights."""
        return jax.random.normal(self.rngs.params(), shape, jnp.float32) * std


class Linear(nnx.Module):
    """y = x W, without bias. int8 weights have a scale for each output.

    Where devices share a model, see `parallel`, one that has some of the outputs gives those, and
    one that has some of the inputs gives the sum over all devices.
    """

    def __init__(self, in_features: int, out_features: int, make: Make):
        self.in_features = in_features
        weights = make.normal((in_features, out_features), in_features**-0.5)
        self.quantized = make.quantized
        if make.quantized:
            values, scale = quantize(weights)
            self.kernel, self.kernel_scale = nnx.Param(values), nnx.Param(scale)
        else:
            self.kernel = nnx.Param(weights.astype(make.dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.kernel[...]
        if self.quantized:
            out = multiply(x, kernel, self.kernel_scale[...]).astype(x.dtype)
        else:
            out = x @ kernel
        return out if kernel.shape[0] == self.in_features else parallel.total(out)


def multiply(x: jax.Array, weights: jax.Array, scale: jax.Array) -> jax.Array:
    """float32 product of x [..., in] with int8 weights [in, out] and their scale [out].

    Without the scale it leaves the range of float16, so that comes before rounding.
    """
    product = jnp.matmul(x, weights.astype(x.dtype), preferred_element_type=jnp.float32)
    return product * scale


def to_heads(x: jax.Array, head_dim: int) -> jax.Array:
    """[B, T, H * D] to [B, T, H, D].

    The barrier keeps XLA for TPU from carrying the layout that attention wants back to the weights:
    a program of many decode steps would begin with a transposed copy of every projection.
    """
    x = jax.lax.optimization_barrier(x)
    return x.reshape(*x.shape[:-1], -1, head_dim)


def quantize(weights: jax.Array, axis: int = -2) -> tuple[jax.Array, jax.Array]:
    """int8 and float32 scales such that values * scale is `weights`; `axis` is summed over."""
    largest = jnp.max(jnp.abs(weights.astype(jnp.float32)), axis=axis, keepdims=True)
    scale = jnp.where(largest > 0, largest / 127, 1.0)
    return jnp.round(weights / scale).astype(jnp.int8), jnp.squeeze(scale, axis)


def times(x: jax.Array, factor: float) -> jax.Array:
    """x times a factor, which x * factor would round to the dtype of x first."""
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


def normalized(x: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) along the last axis, in float32."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)


class RMSNorm(nnx.Module):
    """x / rms(x) * w: the mean in float32, the weight in the model's dtype (Qwen 3, Llama)."""

    def __init__(self, features: int, *, eps: float, make: Make):
        self.scale = nnx.Param(jnp.ones((features,), make.dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return normalized(x, self.eps).astype(x.dtype) * self.scale[...]


class WideRMSNorm(nnx.Module):
    """x / rms(x) * (offset + w), all in float32 (Gemma 4; Gemma 3 and Qwen 3.5 with offset 1)."""

    def __init__(self, features: int, *, eps: float, make: Make, offset: float = 0.0):
        self.scale = nnx.Param(jnp.full((features,), 1 - offset, make.dtype))
        self.eps, self.offset = eps, offset

    def __call__(self, x: jax.Array) -> jax.Array:
        weight = self.offset + self.scale[...].astype(jnp.float32)
        return (normalized(x, self.eps) * weight).astype(x.dtype)


class GatedMLP(nnx.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, features: int, hidden: int, make: Make, *, act: Activation = jax.nn.silu):
        self.gate = Linear(features, hidden, make)
        self.up = Linear(features, hidden, make)
        self.down = Linear(hidden, features, make)
        self.act = act

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Angles:
    """cos and sin of the positions of a step, computed once for all layers with the same RoPE.

    Args:
      positions: int32 [B, T].
    """

    def __init__(self, positions: jax.Array):
        self._positions = positions
        self._known: dict[tuple[RopeConfig, int], tuple[jax.Array, jax.Array]] = {}

    def rotate(self, x: jax.Array, mixer: Attention) -> jax.Array:
        """Rotates queries or keys [B, T, H, D] of a layer."""
        key = mixer.rope, mixer.head_dim
        if key not in self._known:
            self._known[key] = cos_sin(mixer.rope, mixer.head_dim, self._positions)
        return rotate(x, *self._known[key])
