"""A model's cache for training: whole sequences, and the mask of each token from its view."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from da_jax.models.config import Attention, GatedDelta, ModelConfig
from da_jax.models.decoder import Decoder
from da_jax.models.layers import Angles, DeltaState
from da_jax.train.data import Batch

BLOCK = 512
"""Queries whose scores are in memory at once."""

KV = tuple[jax.Array, jax.Array]


class MaskedCache:
    """Attention over the tokens of one step under their views; recurrent states from zero.

    Layers of full attention see what the views say, sliding layers their window, as in the engine.
    The mask is made block by block of queries, and again in the backward pass: memory grows with
    T, not with its square.

    Args:
      config: the model's configuration.
      view: int32 [B, T], see `views.Views`.
      spans: int32 [B, V, S, 2].
      length: int32 [B], tokens of each row; what follows is padding.
      given: keys and values of layers that others read, by layer.

    Attributes:
      valid: bool [B, T].
      written: keys and values by layer.
    """

    def __init__(
        self,
        config: ModelConfig,
        view: jax.Array,
        spans: jax.Array,
        length: jax.Array,
        given: dict[int, KV] | None = None,
    ):
        self.config, self.written = config, dict(given or {})
        self._inputs = view, spans, length
        self._view = view
        at = jnp.arange(view.shape[1])
        self.valid = at < length[:, None]
        inside = (at >= spans[..., :1]) & (at < spans[..., 1:])  # [B, V, S, T]
        self._visible = inside.any(2)

    def inside(self, given: dict[int, KV]) -> MaskedCache:
        """The same for one layer, with the keys and values that it reads of another."""
        return MaskedCache(self.config, *self._inputs, given)

    def attend(
        self, layer: int, q: jax.Array, k: jax.Array | None = None, v: jax.Array | None = None
    ) -> jax.Array:
        """Attends with q [B, T, HQ, D]; without k and v, to those of the layer's donor."""
        mixer = self.config.layers[layer].mixer
        assert isinstance(mixer, Attention)
        if k is not None and v is not None:
            self.written[layer] = k, v
        k, v = self.written[layer if mixer.donor is None else mixer.donor]
        count, length = q.shape[:2]
        size = min(BLOCK, length)
        padded = jnp.pad(q, ((0, 0), (0, -length % size), (0, 0), (0, 0)))
        view = jnp.pad(self._view, ((0, 0), (0, -length % size)))
        starts = jnp.arange(0, padded.shape[1], size)

        @jax.checkpoint
        def block(start: jax.Array) -> jax.Array:
            cut = lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, 1)
            return _attend(
                cut(padded), k, v, self._mask(start + jnp.arange(size), cut(view), mixer), mixer
            )

        out = jax.lax.map(block, starts)  # [N, B, size, HQ, D]
        return jnp.moveaxis(out, 0, 1).reshape(count, -1, *out.shape[3:])[:, :length]

    def _mask(self, at: jax.Array, view: jax.Array, mixer: Attention) -> jax.Array:
        """bool [B, N, T] of the queries at positions `at` [N] with views [B, N]."""
        key = jnp.arange(self._view.shape[1])
        causal = key <= at[:, None]
        if mixer.window is not None:
            return (causal & (at[:, None] - key < mixer.window))[None]
        seen = jnp.take_along_axis(self._visible, view[..., None], axis=1)
        # Padding has no view of its own; itself it sees, for a softmax over nothing is no number.
        return (seen & causal) | (key == at[:, None])

    def recall(self, layer: int) -> DeltaState:
        """The state before position 0."""
        mixer, rows = self.config.layers[layer].mixer, self._view.shape[0]
        assert isinstance(mixer, GatedDelta)
        return DeltaState(
            jnp.zeros((rows, mixer.conv_width - 1, mixer.channels)),
            jnp.zeros((rows, mixer.value_heads, mixer.key_dim, mixer.value_dim)),
        )

    def remember(self, layer: int, state: DeltaState) -> None:
        """Nothing comes after the sequence."""


def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, mixer: Attention
) -> jax.Array:
    """[B, N, HQ, D] of q [B, N, HQ, D], k and v [B, T, HKV, D] and mask [B or 1, N, T]."""
    heads = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = jnp.einsum("bnhgd,bthd->bhgnt", heads, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, None], scores * mixer.scale, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bhgnt,bthd->bnhgd", weights, v, preferred_element_type=jnp.float32)
    return out.reshape(q.shape).astype(q.dtype)


class _Recomputed:
    """A decoder layer that keeps only its input for the backward pass, and is computed again there.

    Args:
      block: the layer.
      donor: the layer whose keys and values it reads, if any.
      positions: int32 [B, T].
    """

    def __init__(self, block: nnx.Module, donor: int | None, positions: jax.Array):
        self.graph, self.weights = nnx.split(block)
        self.donor, self.positions = donor, positions

    def __call__(self, *inputs):  # ..., angles, cache; as the layer takes them
        *arrays, _, cache = inputs

        @jax.checkpoint
        def run(weights, arrays, given):
            inside = cache.inside(given)
            block = nnx.merge(self.graph, weights)
            # Angles keep what they have computed, which must not leave this function.
            out = block(*arrays, Angles(self.positions), inside)
            return out, {i: kv for i, kv in inside.written.items() if i not in given}

        given = {} if self.donor is None else {self.donor: cache.written[self.donor]}
        out, written = run(self.weights, arrays, given)
        cache.written |= written
        return out


def hidden_states(model: Decoder, batch: Batch, *, recompute: bool = False) -> jax.Array:
    """Hidden states [B, T, E] of whole sequences under the mask of their views.

    Args:
      model: any model, with all its weights on each device.
      batch: the sequences.
      recompute: keep only the input of each layer for the backward pass.
    """
    tokens, length, view, spans = (
        jnp.asarray(x) for x in (batch.tokens, batch.length, batch.view, batch.spans)
    )
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    cache = MaskedCache(model.config, view, spans, length)
    if not recompute:
        return model(tokens, positions, cache)
    layers = model.layers
    donors = [getattr(layer.mixer, "donor", None) for layer in model.config.layers]
    recomputed: Any = tuple(
        _Recomputed(block, donor, positions) for block, donor in zip(layers, donors)
    )
    model.layers = recomputed
    try:
        return model(tokens, positions, cache)
    finally:
        model.layers = layers
