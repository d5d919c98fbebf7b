"""Hugging Face folders: safetensors to Flax NNX, and back, without torch.

Loading is strict. Every tensor of the files and every parameter of the model is accounted for; what
is unmapped, missing or of a wrong shape is one error that lists all of it. Weights are read as they
are needed, and of each no more than its device holds.

Orbax can load safetensors too, but only as arrays on devices under the names and in the layout of
the file. Parameters here are transposed, taken apart and stacked on the way, which would take a
second copy on the device, and a conversion would hold each tensor whole.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from da_jax.checkpoints import mapping
from da_jax.checkpoints.errors import CheckpointError
from da_jax.checkpoints.parameters import (
    Shardings,
    assign,
    flat_parameters,
    one_device,
    wanted,
)
from da_jax.checkpoints.sources import Reported, Source, Stack, Tensor, blocks, to_jax
from da_jax.models import hf_config, registry
from da_jax.models.config import ModelConfig
from da_jax.models.decoder import Decoder

__all__ = ["CheckpointError", "assign", "flat_parameters", "load", "save", "sources"]
_HEAD = "lm_head.weight"
_DTYPES = {"F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, through the index where there is one.

    Raises:
      CheckpointError: when there are none, or the index names a file that is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = hf_config.read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise CheckpointError(f"{index} has no weight_map; download it again")
        if strange := [name for name in names.values() if not isinstance(name, str)]:
            raise CheckpointError(f"{index} names {strange} as files; download it again")
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


def load(
    folder: Path,
    *,
    dtype: jnp.dtype,
    quantized: bool = False,
    shardings: Shardings = one_device,
    as_stored: Collection[str] = (),
) -> Decoder:
    """Loads a Hugging Face folder (`config.json` and safetensors).

    Args:
      folder: the local folder.
      dtype: dtype of the parameters in memory, whatever it is in the file.
      quantized: whether matrices become int8 with float32 scales.
      shardings: where the parameter of a path and shape goes.
      as_stored: paths of parameters that keep the dtype of the file.

    Raises:
      ConfigError: for a configuration that is not computed here.
      CheckpointError: listing every unmapped, missing, misshapen or non-float tensor.
    """
    config = hf_config.read(folder)
    model = registry.abstract(config, dtype=dtype, quantized=quantized)
    with sources(folder, config) as stored:
        found = wanted(stored, flat_parameters(model), as_stored)
        values = {
            path: to_jax(source, shardings(path, source.shape)) for path, source in found.items()
        }
    assign(model, values)
    return model


@contextlib.contextmanager
def sources(folder: Path, config: ModelConfig) -> Iterator[dict[str, Source]]:
    """The parameters of a folder by path, in the dtype of the file; they are not read yet.

    Raises:
      CheckpointError: listing every unmapped, missing, misshapen or non-float tensor, or for a
        head that is not the embedding though the configuration says so.
    """
    parameters = flat_parameters(registry.abstract(config, dtype=jnp.dtype(jnp.float32)))
    shapes = {path: leaf.get_value().shape for path, leaf in parameters.items()}
    with ExitStack() as stack:
        files = _Files(weight_files(folder), stack)
        recipes = {
            path: max(ways, key=lambda way: sum(part.name in files.names for part in way.parts))
            for path, ways in mapping.recipes(config).items()
        }
        if faults := files.faults + _faults(files, recipes, shapes, config):
            raise CheckpointError(
                f"{folder} does not fit {config.family}; {len(faults)} faults:\n  "
                + "\n  ".join(faults)
            )
        found: dict[str, Source] = {
            path: Reported(files.source(recipes[path], shape), path, folder)
            for path, shape in shapes.items()
        }
        if config.tie_embeddings and _HEAD in files.names:
            _check_head(folder, files.view(_HEAD), found["embedding"])
        yield found


def save(model: Decoder, config_json: dict, folder: Path) -> None:
    """Writes `config.json` and `model.safetensors` that transformers can load.

    Args:
      model: the model, not quantised.
      config_json: the Hugging Face configuration to write.
      folder: an existing folder.
    """
    recipes = mapping.recipes(model.config)
    prefix = "model.language_model." if "text_config" in config_json else "model."
    tensors: dict[str, np.ndarray] = {}
    for path, parameter in flat_parameters(model).items():
        recipe, value = recipes[path][0], np.asarray(parameter.get_value())
        for part, piece in zip(recipe.parts, value if recipe.stacked else [value]):
            name = part.name if part.name.startswith("lm_head") else prefix + part.name
            shape = part.file_shape(piece.shape)
            tensor = tensors.setdefault(name, np.empty(shape, piece.dtype))
            tensor[part.index()] = piece.swapaxes(-1, -2) if part.transpose else piece
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_json, indent=1) + "\n", encoding="utf-8")


def _check_head(folder: Path, head: Any, embedding: Source) -> None:
    """A tied head may stand in the file as well, but only as a copy of the embedding."""
    same = head.get_dtype() in _DTYPES and tuple(head.get_shape()) == embedding.shape
    same = same and all(
        np.array_equal(
            head[block].astype(np.float32),
            embedding.read(block).astype(np.float32),
            equal_nan=True,
        )
        for block in blocks(embedding)
    )
    if not same:
        raise CheckpointError(
            f"{folder}: {_HEAD} differs from the embedding, but tie_word_embeddings is true (its "
            "default in some families). Set it to false in config.json to use the head, or remove "
            "the tensor"
        )


class _Files:
    """The tensors of some files by their names without prefix.

    Attributes:
      names: {name without prefix: name in the file}.
      faults: tensors that stand there twice.
    """

    def __init__(self, files: list[Path], stack: ExitStack):
        self.names: dict[str, str] = {}
        self.faults: list[str] = []
        self._views: dict[str, Any] = {}
        for file in files:
            try:
                handle = stack.enter_context(safe_open(file, framework="numpy"))
            except SafetensorError as error:
                raise CheckpointError(
                    f"{file} is cut short or no safetensors file ({error}); download it again"
                ) from error
            for full in handle.keys():
                name = mapping.strip(full)
                if name in self.names:
                    both = {full, self.names[name]}
                    where = "in more than one file" if len(both) == 1 else f"as {sorted(both)}"
                    self.faults.append(f"twice: {full} stands {where}")
                self.names[name] = full
                self._views[name] = (handle, full)
        inner = self.names.get("embed_tokens.weight", "model.embed_tokens.weight")
        self._prefix = inner.removesuffix("embed_tokens.weight")

    def view(self, name: str) -> Any:
        """The slices of a tensor."""
        handle, full = self._views[name]
        return handle.get_slice(full)

    def full(self, name: str) -> str:
        """The name in the file, or what it would be there."""
        outside = name.startswith("lm_head")
        return self.names.get(name, name if outside else self._prefix + name)

    def source(self, recipe: mapping.Recipe, shape: tuple[int, ...]) -> Source:
        """A parameter of this shape."""
        inner = shape[1:] if recipe.stacked else shape
        parts = []
        for part in recipe.parts:
            view = self.view(part.name)
            dtype = np.dtype(_DTYPES[view.get_dtype()])
            parts.append(
                Tensor(
                    view,
                    part.file_shape(inner),
                    dtype,
                    rows=part.rows,
                    axis=part.axis,
                    transpose=part.transpose,
                )
            )
        return Stack(parts) if recipe.stacked else parts[0]


def _faults(
    files: _Files,
    recipes: dict[str, mapping.Recipe],
    shapes: dict[str, tuple[int, ...]],
    config: ModelConfig,
) -> list[str]:
    missing: dict[str, str] = {}
    other: dict[tuple[str, int], str] = {}
    known: set[str] = set()
    for path, shape in shapes.items():
        recipe = recipes[path]
        for part in recipe.parts:
            known.add(part.name)
            full = files.full(part.name)
            if part.name not in files.names:
                missing.setdefault(full, f"missing: {full} (for {path})")
                continue
            view = files.view(part.name)
            found = tuple(view.get_shape())
            expected = part.file_shape(shape[1:] if recipe.stacked else shape)
            if found != expected:
                other[full, 0] = f"shape: {full} is {found}, expected {expected}"
            if view.get_dtype() not in _DTYPES:
                dtypes = ", ".join(_DTYPES)
                other[full, 1] = f"dtype: {full} is {view.get_dtype()}, expected one of {dtypes}"
    unmapped = [
        f"unmapped: {full} (the model has no parameter for it)"
        for name, full in sorted(files.names.items())
        if name not in known and not mapping.ignored(name, config)
    ]
    return [*missing.values(), *other.values(), *unmapped]
