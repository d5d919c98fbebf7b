"""Orbax checkpoints: a folder with the Hugging Face metadata and the parameters under `params/`.

folder/config.json  tokenizer.json  tokenizer_config.json  generation_config.json  ...
folder/params/      an Orbax checkpoint of the flat dictionary {dotted path: array}
"""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from da_jax.checkpoints import hf
from da_jax.models import registry
from da_jax.models.config import ModelConfig
from da_jax.models.qwen import Qwen3

PARAMS = "params"
METADATA_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "da_style.json",
)


def is_orbax(folder: Path) -> bool:
    """Whether `folder` was written by `save`."""
    return (folder / PARAMS).is_dir()


def save(model: Qwen3, source: Path, folder: Path, *, dtype: jnp.dtype | None = None) -> None:
    """Writes an Orbax checkpoint.

    Args:
      model: the model to save.
      source: the folder whose metadata (configuration, tokenizer, style) goes with it.
      folder: destination; created. An existing checkpoint there is an error.
      dtype: dtype on disk; None keeps the model's.

    Raises:
      FileExistsError: when there is a checkpoint in `folder` already.
    """
    if is_orbax(folder):
        raise FileExistsError(f"{folder} already holds an Orbax checkpoint; remove it first")
    folder.mkdir(parents=True, exist_ok=True)
    for name in METADATA_FILES:
        if (source / name).exists() and source != folder:
            shutil.copy(source / name, folder / name)
    parameters = {path: leaf.get_value() for path, leaf in hf.flat_parameters(model).items()}
    if dtype is not None:
        parameters = {path: value.astype(dtype) for path, value in parameters.items()}
    ocp.save(folder.absolute() / PARAMS, parameters)
    # Orbax notes the absolute path in it, which is nobody's business once the folder is moved.
    (folder / PARAMS / "commit_success.txt").unlink(missing_ok=True)


def load(folder: Path, *, dtype: jnp.dtype) -> Qwen3:
    """Restores a model that `save` wrote.

    Args:
      folder: the checkpoint folder.
      dtype: dtype of the parameters in memory; Orbax casts while it reads.

    Raises:
      CheckpointError: listing every parameter that is missing, left over or of a wrong shape.
    """
    model = registry.abstract(ModelConfig.from_folder(folder), dtype=dtype)
    path = folder.absolute() / PARAMS
    parameters = hf.flat_parameters(model)
    try:
        stored = ocp.metadata(path).metadata
    except ValueError as error:
        raise hf.CheckpointError(f"{path} is no readable Orbax checkpoint: {error}") from error
    faults = [f"missing: {name}" for name in sorted(parameters.keys() - stored.keys())]
    faults += [f"unmapped: {name}" for name in sorted(stored.keys() - parameters.keys())]
    faults += [
        f"shape: {name} is {tuple(stored[name].shape)}, expected {leaf.get_value().shape}"
        for name, leaf in parameters.items()
        if name in stored and tuple(stored[name].shape) != leaf.get_value().shape
    ]
    if faults:
        raise hf.CheckpointError(f"{path}: {len(faults)} faults:\n  " + "\n  ".join(faults))
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {
        name: jax.ShapeDtypeStruct(leaf.get_value().shape, dtype, sharding=sharding)
        for name, leaf in parameters.items()
    }
    hf.assign(model, ocp.load(path, wanted))
    return model
