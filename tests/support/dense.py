"""The plainest cache of a model: whole sequences from position 0, and an explicit mask."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from da_jax.models.config import ModelConfig
from da_jax.models.layers import DeltaState


class DenseCache:
    """Masked softmax attention over the tokens of one step, and recurrent states from zero.

    Args:
      config: the model's configuration.
      mask: bool [T, T], True where the query (row) sees the key in layers of full attention.
        Sliding layers see their window, whatever the mask.
      valid: bool [B, T], False on right padding.
      kv_dtype: 8-bit dtype that each key and value of a head is rounded to, with a scale; None for
        what the model computes in.

    Attributes:
      states: the recurrent state that each layer left.
    """

    def __init__(
        self,
        config: ModelConfig,
        mask: jax.Array,
        valid: jax.Array,
        kv_dtype: str | None = None,
    ):
        self.config, self.valid, self._mask, self._kv_dtype = config, valid, mask, kv_dtype
        self._kv: dict[int, tuple[jax.Array, jax.Array]] = {}
        self.states: dict[int, DeltaState] = {}

    def attend(
        self, layer: int, q: jax.Array, k: jax.Array | None = None, v: jax.Array | None = None
    ) -> jax.Array:
        """Attends with q [B, T, HQ, D]; without k and v, to those of the layer's donor."""
        mixer = self.config.layers[layer].mixer
        assert (k is None) == (v is None) == (mixer.donor is not None), f"layer {layer}"
        if k is not None:
            assert layer not in self._kv, f"layer {layer} wrote its keys twice"
            self._kv[layer] = tuple(rounded(x, self._kv_dtype) for x in (k, v))
        k, v = self._kv[layer if mixer.donor is None else mixer.donor]
        assert q.shape[2:] == (mixer.num_heads, mixer.head_dim), f"layer {layer}: q {q.shape}"
        assert k.shape[2:] == (mixer.num_kv_heads, mixer.head_dim), f"layer {layer}: k {k.shape}"
        mask = self._mask
        if mixer.window is not None:
            i, j = np.arange(q.shape[1])[:, None], np.arange(q.shape[1])[None]
            mask = (j <= i) & (i - j < mixer.window)
        groups = q.shape[2] // k.shape[2]
        k, v = (jnp.repeat(x, groups, axis=2).astype(jnp.float32) for x in (k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q.astype(jnp.float32), k) * mixer.scale
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v).astype(q.dtype)

    def recall(self, layer: int) -> DeltaState:
        """The state before position 0."""
        mixer, rows = self.config.layers[layer].mixer, self.valid.shape[0]
        return DeltaState(
            jnp.zeros((rows, mixer.conv_width - 1, mixer.channels)),
            jnp.zeros((rows, mixer.value_heads, mixer.key_dim, mixer.value_dim)),
        )

    def remember(self, layer: int, state: DeltaState) -> None:
        """Keeps the state for the test to look at."""
        assert layer not in self.states, f"layer {layer} left its state twice"
        self.states[layer] = state


def rounded(x: jax.Array, dtype: str | None) -> jax.Array:
    """[..., D] as 8 bits can tell it: each row is scaled so that its largest number is the largest
    of the dtype, and back."""
    if dtype is None:
        return x
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / {"int8": 127, "float8_e4m3fn": 448}[dtype]
    small = x / jnp.where(scale == 0, 1, scale)
    kept = jnp.rint(small) if dtype == "int8" else small.astype(dtype).astype(jnp.float32)
    return kept * scale


class Forward(NamedTuple):
    """One forward pass: what it gave and what it passed through."""

    logits: np.ndarray  # float32 [B, T, V]
    layers: list[np.ndarray]  # [B, T, E] after each layer
    states: dict[int, DeltaState]  # of the recurrent layers, after the last valid token


@contextmanager
def _recorded(model) -> Iterator[list[jax.Array]]:
    """Collects what the blocks of a model return, in order, while the context is open."""
    outputs: list[jax.Array] = []
    originals = {kind: kind.__call__ for kind in {type(block) for block in model.layers}}

    def wrap(original):
        def call(block, *args, **kwargs):
            out = original(block, *args, **kwargs)
            outputs.append(out)
            return out

        return call

    for kind, original in originals.items():
        kind.__call__ = wrap(original)
    try:
        yield outputs
    finally:
        for kind, original in originals.items():
            kind.__call__ = original


# To compile takes longer than to run, all the more when XLA does its best.
@functools.partial(
    jax.jit, static_argnums=(0, 6), compiler_options={"xla_backend_optimization_level": 0}
)
def _run(graph, parameters, tokens, positions, valid, mask, kv_dtype):
    """Compiled once for a model and a shape, whatever the mask."""
    model = nnx.merge(graph, parameters)
    cache = DenseCache(model.config, mask, valid, kv_dtype)
    with _recorded(model) as layers:
        logits = model.logits(model(tokens, positions, cache))
    return logits, layers, cache.states


def dense_forward(
    model,
    tokens: np.ndarray,
    mask: np.ndarray,
    lengths: np.ndarray | None = None,
    kv_dtype: str | None = None,
) -> Forward:
    """One forward pass over [B, T] tokens with a bool [T, T] mask.

    Args:
      model: the model.
      tokens: the token ids, right-padded.
      mask: which keys (columns) a query (row) sees in layers of full attention.
      lengths: int [B] valid tokens of each row; by default all.
      kv_dtype: as for `DenseCache`.
    """
    steps = np.arange(tokens.shape[1], dtype=np.int32)
    lengths = np.full(len(tokens), len(steps)) if lengths is None else lengths
    positions, valid = np.broadcast_to(steps, tokens.shape), steps < lengths[:, None]
    graph, parameters = nnx.split(model)
    with jax.default_matmul_precision("highest"):
        out = _run(graph, parameters, tokens.astype(np.int32), positions, valid, mask, kv_dtype)
    return Forward(*jax.tree.map(np.asarray, out))


def dense_logits(
    model, tokens: np.ndarray, mask: np.ndarray, kv_dtype: str | None = None
) -> np.ndarray:
    """float32 [B, T, V] logits of one forward pass with a bool [T, T] mask."""
    return dense_forward(model, tokens, mask, kv_dtype=kv_dtype).logits
