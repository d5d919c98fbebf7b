"""Model types by their name in `config.json`."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from da_jax.models.config import ModelConfig
from da_jax.models.qwen import Qwen3

MODELS = {"qwen3": Qwen3, "llama": Qwen3}


def build(config: ModelConfig, *, dtype: jnp.dtype, seed: int = 0) -> Qwen3:
    """A model with random weights. Wrap it in `nnx.eval_shape` to get the shapes alone."""
    return MODELS[config.model_type](config, dtype=dtype, rngs=nnx.Rngs(params=seed))


def abstract(config: ModelConfig, *, dtype: jnp.dtype) -> Qwen3:
    """The model with `jax.ShapeDtypeStruct` in place of every array; nothing is computed."""
    return nnx.eval_shape(lambda: build(config, dtype=dtype))
