"""Models by family."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from da_jax.models.config import Family, ModelConfig
from da_jax.models.decoder import Decoder
from da_jax.models.gemma3 import Gemma3
from da_jax.models.gemma4 import Gemma4
from da_jax.models.layers import Make
from da_jax.models.qwen import Qwen3
from da_jax.models.qwen_next import QwenNext

MODELS: dict[Family, type[Decoder]] = {
    "llama": Qwen3,
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3,
    "qwen3_next": QwenNext,
    "qwen3_5": QwenNext,
    "qwen3_5_moe": QwenNext,
    "gemma3": Gemma3,
    "gemma4": Gemma4,
}


def build(
    config: ModelConfig, *, dtype: jnp.dtype, seed: int = 0, quantized: bool = False
) -> Decoder:
    """A model with random weights. Wrap it in `nnx.eval_shape` to get the shapes alone."""
    model = MODELS[config.family]
    return model(config, Make(dtype, nnx.Rngs(params=seed), quantized))


def abstract(config: ModelConfig, *, dtype: jnp.dtype, quantized: bool = False) -> Decoder:
    """The model with `jax.ShapeDtypeStruct` in place of every array; nothing is computed."""
    return nnx.eval_shape(lambda: build(config, dtype=dtype, quantized=quantized))
