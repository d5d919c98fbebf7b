"""Log-probabilities without the engine: one forward pass over a whole sequence, under a dense mask.

It shares the model's layers and weights with the engine and nothing else: no pages, no block masks,
no attention backend, no steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from da_jax.cache.step import own_heads
from da_jax.engine.runner import Runner
from da_jax.kernels.paged_attention.pool import QUANTIZED, quantize
from da_jax.models import host_table, sharding
from da_jax.models.config import Attention
from da_jax.models.decoder import Decoder
from da_jax.train.cache import BLOCK, MaskedCache

_NARROW = ("bfloat16", "float16")


class Oracle:
    """Forward passes with the weights of an engine, on its devices.

    Args:
      runner: holds the weights; its process must be the only one.
      exact: compute in float32; else in the dtype of the model, with keys and values rounded as
        8-bit pages round them. Rounding to 8 bits is so coarse that passes which differ in the
        last bit before it are as far apart after many layers as from one that rounds nothing.
    """

    def __init__(self, runner: Runner, *, exact: bool):
        self._runner, self._exact = runner, exact
        self._precision = "highest" if exact else runner.precision
        self._run = jax.jit(self._on_devices())

    def logprobs(
        self, ids: np.ndarray, visible: Sequence[np.ndarray], which: np.ndarray, response: int
    ) -> np.ndarray:
        """Log-probabilities float32 [R] of the last R tokens of a sequence.

        Args:
          ids: int32 [T], prompt and response.
          visible: bool [T] masks; no query sees what comes after it.
          which: int32 [T], the mask that holds for full attention while a token is fed.
          response: R.
        """
        length, size = len(ids), padded_length(len(ids))
        spans = [_runs(mask) for mask in visible]
        inputs = {
            "tokens": np.zeros((1, size), np.int32),
            "view": np.zeros((1, size), np.int32),
            "spans": np.zeros((1, len(spans), max(map(len, spans)), 2), np.int32),
            "length": np.array([length], np.int32),
            "query": np.arange(length - response - 1, length - 1, dtype=np.int32),
            "target": np.asarray(ids[length - response :], np.int32),
        }
        inputs["tokens"][0, :length], inputs["view"][0, :length] = ids, which
        for i, runs in enumerate(spans):
            inputs["spans"][0, i, : len(runs)] = runs
        with jax.default_matmul_precision(self._precision):
            return np.asarray(self._run(self._runner.weights, inputs))

    def _on_devices(self) -> Any:
        """The program as the devices that share the model run it together."""
        everywhere, runner = jax.sharding.PartitionSpec(), self._runner
        if runner.mesh.size == 1:
            return self._program
        weights = [leaf.sharding.spec for leaf in runner.weights]
        return jax.shard_map(
            self._program, mesh=runner.mesh, in_specs=(weights, everywhere),
            out_specs=everywhere, check_vma=False,
        )  # fmt: skip

    def _program(self, weights: list[jax.Array], inputs: dict[str, jax.Array]) -> jax.Array:
        plan = self._runner.plan
        model = self._runner.model([_wide(w) for w in weights] if self._exact else weights)
        if self._exact:
            model.dtype = jnp.dtype(jnp.float32)
        cache = _Cache(
            sharding.part(model.config, plan.devices), inputs["view"], inputs["spans"],
            inputs["length"],
        )  # fmt: skip
        if not self._exact and plan.kv_dtype in QUANTIZED:
            cache.kv_dtype = plan.kv_dtype
        return _score(model, cache, inputs)


class _Cache(MaskedCache):
    """Masked attention over the heads of one device, with keys and values as pages keep them."""

    kv_dtype: str | None = None

    def attend(
        self, layer: int, q: jax.Array, k: jax.Array | None = None, v: jax.Array | None = None
    ) -> jax.Array:
        """As `MaskedCache.attend`."""
        mixer = self.config.layers[layer].mixer
        assert isinstance(mixer, Attention)
        if k is None or v is None:
            return super().attend(layer, q)
        k, v = (own_heads(x, mixer.num_kv_heads) for x in (k, v))
        if self.kv_dtype is not None:
            k, v = (_rounded(x, self.kv_dtype) for x in (k, v))
        return super().attend(layer, q, k, v)


def padded_length(length: int) -> int:
    """What `MaskedCache` takes in whole blocks."""
    return -(-length // 128) * 128 if length <= BLOCK else -(-length // BLOCK) * BLOCK


def _score(model: Decoder, cache: MaskedCache, inputs: dict[str, jax.Array]) -> jax.Array:
    tokens = inputs["tokens"]
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    hidden = model(tokens, positions, cache)[0, inputs["query"]]
    logits = model.logits(hidden)  # [R, V]
    chosen = jnp.take_along_axis(logits, inputs["target"][:, None], axis=1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=1)


def _wide(x: jax.Array) -> jax.Array:
    """Narrow floats in float32, but for a table that lies in host memory: its rows are cast."""
    if x.dtype.name not in _NARROW or host_table.on_host(x):
        return x
    return x.astype(jnp.float32)


def _rounded(x: jax.Array, dtype: str) -> jax.Array:
    """Keys or values [..., D] after 8 bits."""
    values, scale = quantize(x, dtype)
    return (values.astype(jnp.float32) * scale[..., None]).astype(x.dtype)


def _runs(mask: np.ndarray) -> np.ndarray:
    """int [N, 2], (start, end) of each run of True."""
    edges = np.diff(np.pad(mask.astype(np.int8), 1))
    return np.stack([np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)], axis=1)
