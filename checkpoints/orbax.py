"""Orbax checkpoints: a folder that holds all that a model needs, local or on `gs://`.

folder/config.json  tokenizer.json  generation_config.json  ...   as the source had them
folder/da_jax.json   what was written, and a checksum of every array; the last file that is written
folder/params/       an Orbax checkpoint of the flat dictionary {dotted path: array}
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from orbax.checkpoint import v1 as ocp

from da_jax.checkpoints import paths, streaming
from da_jax.checkpoints.errors import CheckpointError
from da_jax.checkpoints.parameters import (
    Shardings,
    assign,
    flat_parameters,
    one_device,
    wanted,
)
from da_jax.checkpoints.record import PARAMS, RECORD, Record, completed, is_orbax, state
from da_jax.checkpoints.sources import Cast, Reported, Source, blocks, narrower, to_jax
from da_jax.models import hf_config, registry
from da_jax.models.config import ModelConfig
from da_jax.models.decoder import Decoder

__all__ = [
    "PARAMS", "RECORD", "Record", "completed", "discard", "is_orbax", "load", "others", "sources",
    "state", "store", "write_params",
]  # fmt: skip
_TEMPORARY = f"{PARAMS}.orbax-checkpoint-tmp*"  # Orbax renames it to `params` at the end


def others(folder: epath.Path) -> list[str]:
    """Names in a folder that no conversion writes before it has finished with the parameters."""
    ours = {PARAMS, RECORD, f"{RECORD}.new"}
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return [name for name in names if name not in ours and not fnmatch.fnmatch(name, _TEMPORARY)]


def discard(folder: epath.Path) -> None:
    """Removes what an unfinished conversion left in a folder, and the folder if that was all.

    Else the record stays and says `incomplete`, so that a conversion may start over.

    Raises:
      OSError: for what cannot be removed; then the record is still there too.
    """
    for path in [folder / PARAMS, *folder.glob(_TEMPORARY)]:
        _remove(path)
    if others(folder):
        return
    for name in (RECORD, f"{RECORD}.new"):
        (folder / name).unlink(missing_ok=True)
    if folder.is_dir():
        folder.rmdir()


def _remove(path: epath.Path) -> None:
    for last in (False, True):
        try:
            if path.exists():
                path.rmtree()
            return
        except FileNotFoundError:  # somebody else removes it too
            continue
        except OSError:
            if last:
                raise


def write_params(
    folder: epath.Path, sources: Mapping[str, Source], progress: streaming.Progress
) -> None:
    """Writes `folder/params`; it appears at once, when it is complete."""
    streaming.write(folder / PARAMS, sources, progress)
    # Orbax notes the absolute path in it, which is nobody's business once the folder is moved.
    (folder / PARAMS / "commit_success.txt").write_text("Checkpoint commit was successful")


def store(folder: epath.Path) -> streaming.Store:
    """The parameters of a checkpoint, read in parts."""
    return streaming.Store(folder / PARAMS)


def load(
    folder: epath.Path | Path,
    *,
    dtype: jnp.dtype,
    quantized: bool = False,
    shardings: Shardings = one_device,
    as_stored: Collection[str] = (),
) -> Decoder:
    """Restores a model.

    Args:
      folder: the checkpoint folder.
      dtype: dtype of the parameters in memory; Orbax casts while it reads.
      quantized: whether matrices become int8. Those of an int8 checkpoint are in any case.
      shardings: where the parameter of a path and shape goes.
      as_stored: paths of parameters that keep the dtype of the file.

    Raises:
      CheckpointError: listing every parameter that is missing, left over or of a wrong shape; for a
        number beyond the range of `dtype`; or when the conversion that wrote the folder did not
        finish.
    """
    folder = paths.absolute(folder)
    int8 = completed(folder).quantize is not None
    config = hf_config.read(folder)
    model = registry.abstract(config, dtype=dtype, quantized=quantized or int8)
    metadata = _metadata(folder)
    _check(folder, metadata, config, int8)
    parameters = flat_parameters(model)
    if quantized and not int8:
        found = wanted(_sources(folder, metadata), parameters, as_stored)
        values: Mapping[str, jax.Array] = {
            path: to_jax(source, shardings(path, source.shape)) for path, source in found.items()
        }
    else:
        leaves = {
            path: jax.ShapeDtypeStruct(metadata[path].shape, metadata[path].dtype)
            if path in as_stored
            else leaf.get_value()
            for path, leaf in parameters.items()
        }
        values = _restore(folder / PARAMS, leaves, shardings)
        _check_range(folder, metadata, values)
    assign(model, values)
    return model


@contextlib.contextmanager
def sources(folder: epath.Path, config: ModelConfig) -> Iterator[dict[str, Source]]:
    """The parameters of a checkpoint by path, as they are stored; nothing is read yet.

    Raises:
      CheckpointError: as `load`, and for an int8 checkpoint.
    """
    if completed(folder).quantize is not None:
        raise CheckpointError(
            f"{folder} is int8 already, and cannot be converted; take what it was made from"
        )
    found = _metadata(folder)
    _check(folder, found, config, int8=False)
    yield _sources(folder, found)


def _sources(folder: epath.Path, names: Iterable[str]) -> dict[str, Source]:
    opened = store(folder)
    return {name: Reported(opened.open(name), name, folder) for name in names}


def _metadata(folder: epath.Path) -> Mapping[str, Any]:
    """{path: shape and dtype} of what is stored."""
    advice = "is no readable Orbax checkpoint: "
    try:
        found = ocp.metadata(folder / PARAMS).metadata
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:  # Orbax's parser
        raise CheckpointError(f"{folder / PARAMS} {advice}{error}; convert it again") from error
    if not isinstance(found, Mapping):
        raise CheckpointError(
            f"{folder / PARAMS} {advice}it lists {found!r} instead of arrays; convert it again"
        )
    strange = [
        name for name, leaf in found.items() if not (hasattr(leaf, "shape") and _is_dtype(leaf))
    ]
    if strange:
        raise CheckpointError(
            f"{folder / PARAMS} {advice}{strange} are no arrays; convert it again"
        )
    return found


def _is_dtype(leaf: Any) -> bool:
    try:
        return jnp.dtype(leaf.dtype) is not None
    except (AttributeError, TypeError):
        return False


def _check(folder: epath.Path, stored: Mapping[str, Any], config: ModelConfig, int8: bool) -> None:
    expected = {
        path: leaf.get_value()
        for path, leaf in flat_parameters(
            registry.abstract(config, dtype=jnp.dtype(jnp.float32), quantized=int8)
        ).items()
    }
    faults = [f"missing: {name}" for name in sorted(expected.keys() - stored.keys())]
    faults += [f"unmapped: {name}" for name in sorted(stored.keys() - expected.keys())]
    for name, leaf in expected.items():
        if name not in stored:
            continue
        shape, dtype = tuple(stored[name].shape), stored[name].dtype
        if shape != leaf.shape:
            faults.append(f"shape: {name} is {shape}, expected {leaf.shape}")
        fits = dtype == jnp.int8 if leaf.dtype == jnp.int8 else jnp.issubdtype(dtype, jnp.floating)
        if not fits:
            faults.append(f"dtype: {name} is {dtype}, expected {leaf.dtype}")
    if faults:
        raise CheckpointError(f"{folder / PARAMS}: {len(faults)} faults:\n  " + "\n  ".join(faults))


def _restore(
    path: epath.Path, leaves: Mapping[str, jax.ShapeDtypeStruct], shardings: Shardings
) -> Mapping[str, jax.Array]:
    context = ocp.Context()
    largest = max(leaf.size * leaf.dtype.itemsize for leaf in leaves.values())
    context.memory.read_concurrent_bytes = 2 * largest + 2**30  # on the host, beside the arrays
    asked = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings(name, leaf.shape))
        for name, leaf in leaves.items()
    }
    try:
        with context:
            return ocp.load(path, asked)
    except (MemoryError, RuntimeError):  # of the device too
        raise
    except Exception as error:  # Orbax raises no narrower one for an array that it cannot read
        reason = str(error.__cause__ or error)
        raise CheckpointError(f"{path} cannot be read: {reason}; convert it again") from error


def _check_range(
    folder: epath.Path, metadata: Mapping[str, Any], values: Mapping[str, jax.Array]
) -> None:
    """Refuses numbers that became infinite as Orbax cast them, as `Cast` does.

    One pass over the devices' memory, and none where no dtype has become narrower; only a parameter
    with infinite numbers is read again, which may be infinite in the checkpoint too.
    """
    opened = store(folder)
    for name, value in values.items():
        if value.dtype == jnp.int8 or not narrower(value.dtype, metadata[name].dtype):
            continue
        if not _finite(value):
            cast = Cast(opened.open(name), value.dtype, name=name)
            for block in blocks(cast):
                cast.read(block)


@jax.jit
def _finite(value: jax.Array) -> jax.Array:
    return jnp.isfinite(value).all()
