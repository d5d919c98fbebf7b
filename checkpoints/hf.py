"""Hugging Face folders: safetensors to Flax NNX, and back, without torch.

Loading is strict. Every tensor of the files and every parameter of the model is accounted for; what
is unmapped, missing or of a wrong shape is one error that lists all of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (teaches NumPy bfloat16, which safetensors needs)
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from da_jax.checkpoints.mapping_qwen import ignored, tensor_names
from da_jax.models import registry
from da_jax.models.config import ModelConfig, read_json
from da_jax.models.qwen import Qwen3


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded as it is; the message lists every fault."""


def flat_parameters(model: nnx.Module) -> dict[str, nnx.Variable]:
    """The parameters of a model by dotted path, for example `layers.0.attention.q.kernel`."""
    state = nnx.state(model, nnx.Param)
    return {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, through the index where there is one.

    Raises:
      CheckpointError: when there are none, or the index names a file that is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict):
            raise CheckpointError(f"{index} has no weight_map; download it again")
        files = [folder / name for name in sorted(set(names.values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{folder} holds no *.safetensors file. PyTorch .bin files are not read; "
            "save the model with safe_serialization=True"
        )
    if missing := [file.name for file in files if not file.exists()]:
        raise CheckpointError(f"{index.name} names files that are missing from {folder}: {missing}")
    return files


def load(folder: Path, *, dtype: jnp.dtype) -> Qwen3:
    """Loads a Hugging Face folder (`config.json` and safetensors).

    Args:
      folder: the local folder.
      dtype: dtype of the parameters in memory, whatever it is in the file.

    Raises:
      ConfigError: for a configuration that is not computed here.
      CheckpointError: listing every unmapped, missing, misshapen or non-float tensor.
    """
    config = ModelConfig.from_folder(folder)
    model = registry.abstract(config, dtype=dtype)
    parameters = flat_parameters(model)
    names = tensor_names(config)
    with ExitStack() as stack:
        stored: dict[str, safe_open] = {}
        faults = []
        for name, handle in _open(weight_files(folder), stack):
            if name in stored:
                faults.append(f"twice: {name} stands in more than one file")
            stored[name] = handle
        faults += _faults(parameters, names, stored, config)
        if faults:
            raise CheckpointError(
                f"{folder} does not fit {config.model_type}; {len(faults)} faults:\n  "
                + "\n  ".join(faults)
            )
        values = {}
        for path in parameters:
            value = stored[names[path]].get_tensor(names[path]).astype(dtype)
            values[path] = jnp.asarray(value.T if path.endswith("kernel") else value)
    assign(model, values)
    return model


def assign(model: nnx.Module, values: dict[str, jax.Array]) -> None:
    """Sets the parameters of a model from {dotted path: array}."""
    parameters = flat_parameters(model)
    for path, value in values.items():
        parameters[path].set_value(value)
    keys = (tuple(int(k) if k.isdigit() else k for k in path.split(".")) for path in parameters)
    nnx.update(model, nnx.from_flat_state(list(zip(keys, parameters.values()))))


def save(model: Qwen3, config_json: dict, folder: Path) -> None:
    """Writes `config.json` and `model.safetensors` that transformers can load.

    Args:
      model: the model.
      config_json: the Hugging Face configuration to write.
      folder: an existing folder.
    """
    names = tensor_names(model.config)
    tensors = {}
    for path, parameter in flat_parameters(model).items():
        value = np.asarray(parameter[...])
        tensors[names[path]] = np.ascontiguousarray(value.T if path.endswith("kernel") else value)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_json, indent=1) + "\n", encoding="utf-8")


def _open(files: list[Path], stack: ExitStack) -> Iterator[tuple[str, safe_open]]:
    for file in files:
        try:
            handle = stack.enter_context(safe_open(file, framework="numpy"))
        except SafetensorError as error:
            raise CheckpointError(
                f"{file} is no readable safetensors file ({error}); download it again"
            ) from error
        yield from ((name, handle) for name in handle.keys())


def _faults(
    parameters: dict[str, nnx.Variable],
    names: dict[str, str],
    stored: dict[str, safe_open],
    config: ModelConfig,
) -> list[str]:
    faults = []
    for path, parameter in parameters.items():
        name = names[path]
        if name not in stored:
            faults.append(f"missing: {name} (for {path})")
            continue
        view = stored[name].get_slice(name)
        shape, expected = tuple(view.get_shape()), parameter.get_value().shape
        expected = expected[::-1] if path.endswith("kernel") else expected
        if shape != expected:
            faults.append(f"shape: {name} is {shape}, expected {expected}")
        if view.get_dtype() not in ("F32", "F16", "BF16"):
            faults.append(f"dtype: {name} is {view.get_dtype()}, expected F32, F16 or BF16")
    known = set(names.values())
    faults += [
        f"unmapped: {name} (the model has no parameter for it)"
        for name in sorted(stored)
        if name not in known and not ignored(name, config)
    ]
    return faults
