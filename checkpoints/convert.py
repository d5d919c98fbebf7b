"""Finding and loading a checkpoint of either kind, converting one to Orbax, and checking it."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Literal

import jax.numpy as jnp
from etils import epath

from da_jax.checkpoints import hf, orbax, paths, streaming
from da_jax.checkpoints.errors import CheckpointError
from da_jax.checkpoints.hub import TINY, resolve
from da_jax.checkpoints.parameters import Shardings, flat_parameters, one_device, wanted
from da_jax.checkpoints.sources import Source
from da_jax.models import hf_config, registry
from da_jax.models.config import ModelConfig
from da_jax.models.decoder import Decoder

__all__ = ["TINY", "convert", "load", "resolve", "verify"]
Folder = str | os.PathLike[str]
Progress = Callable[[str, int, int], None]  # (stage, bytes done, bytes in all)


def load(
    folder: Folder,
    *,
    dtype: jnp.dtype,
    quantized: bool = False,
    shardings: Shardings | None = None,
    as_stored: Collection[str] = (),
) -> Decoder:
    """Loads an Orbax or a Hugging Face folder, whichever `folder` is.

    Args:
      folder: the folder; an Orbax folder may be on `gs://`.
      dtype: dtype of the parameters in memory.
      quantized: whether matrices become int8 with float32 scales; those of an int8 checkpoint are
        in any case.
      shardings: a function (path, shape) -> `jax.sharding.Sharding`, such as
        `lambda path, shape: NamedSharding(mesh, P())`. None puts everything on the first device.
      as_stored: paths of parameters that keep the dtype of the checkpoint.

    Raises:
      ConfigError: for a configuration that is not computed here.
      CheckpointError: listing all that does not fit.
    """
    where = paths.absolute(folder)
    kind = orbax if orbax.is_orbax(where) else hf
    return kind.load(
        where, dtype=dtype, quantized=quantized, shardings=shardings or one_device,
        as_stored=as_stored,
    )  # fmt: skip


def convert(
    source: Folder,
    destination: Folder,
    *,
    dtype: jnp.dtype,
    quantize: Literal["int8"] | None = None,
    progress: Progress = lambda stage, done, total: None,
    verify: bool = True,
) -> int:
    """Writes a checkpoint as an Orbax checkpoint.

    Weights are streamed: memory holds a few blocks of them, whatever their size. The destination
    does not load before everything is written. After an interruption, run it again: it starts over.

    Args:
      source: a Hugging Face folder, or an Orbax folder.
      destination: folder to write, may be on `gs://`; created.
      dtype: dtype on disk. A few small parameters of some models are float32 all the same.
      quantize: `int8` stores matrices as int8 with float32 scales.
      progress: called with (stage, bytes done, bytes in all) from another thread; the stages are
        `starting over`, after an interruption, `converting` and `verifying`.
      verify: whether to read everything back, compare it with the source, and note checksums.

    Returns:
      Bytes of the parameters, before compression.

    Raises:
      FileExistsError: when there is a checkpoint in `destination` already, before any work.
      ConfigError, CheckpointError: what is wrong with `source`.
      OSError: when the destination cannot be written, such as a full disk.
    """
    origin, target = paths.absolute(source), paths.absolute(destination)
    if quantize not in (None, "int8"):
        raise ValueError(f"quantize is {quantize!r}; it must be 'int8' or None")
    found = orbax.state(target)
    if found == "complete":
        raise FileExistsError(f"{target} already holds an Orbax checkpoint; remove it first")
    orbax.completed(origin)
    config = hf_config.read(origin)
    model = registry.abstract(config, dtype=dtype, quantized=quantize is not None)
    with _sources(origin, config) as stored:
        sources = wanted(stored, flat_parameters(model))
        total = sum(map(streaming.nbytes, sources.values()))
        if found == "incomplete":
            progress("starting over", 0, total)
        orbax.discard(target)
        target.mkdir(parents=True, exist_ok=True)
        record = orbax.Record(False, jnp.dtype(dtype).name, quantize)
        record.write(target)
        with _explained(target, total):
            orbax.write_params(target, sources, _counter(progress, "converting", total))
            paths.copy_metadata(origin, target)
        checksums = _compared(target, sources, _counter(progress, "verifying", total), verify)
        dataclasses.replace(record, complete=True, checksums=checksums).write(target)
    return total


def verify(
    folder: Folder, progress: Progress = lambda stage, done, total: None
) -> Mapping[str, str]:
    """Reads a converted checkpoint and compares it with its checksums.

    Args:
      folder: an Orbax folder that `convert` wrote, may be on `gs://`.
      progress: called with (`verifying`, bytes done, bytes in all).

    Returns:
      The checksums, {path: sha256}.

    Raises:
      CheckpointError: listing every parameter that differs or cannot be read, or when the folder
        has no checksums.
    """
    where = paths.absolute(folder)
    record = orbax.Record.read(where)
    if record is None or not record.complete or record.checksums is None:
        what = "is incomplete" if record and not record.complete else "has no checksums"
        raise CheckpointError(f"{where} {what}; convert it again, with verification")
    opened = {name: orbax.stored(where, name) for name in record.checksums}
    total = sum(map(streaming.nbytes, opened.values()))
    count = _counter(progress, "verifying", total)
    faults = []
    for name, expected in record.checksums.items():
        try:
            found, _ = streaming.checksum(opened[name], None, count)
        except ValueError as error:
            found = f"unreadable: {error}"
        if found != expected:
            faults.append(f"{name}: {found}, expected {expected}")
    if faults:
        raise CheckpointError(
            f"{where} is damaged; {len(faults)} parameters differ from their checksums:\n  "
            + "\n  ".join(faults)
        )
    return record.checksums


@contextlib.contextmanager
def _sources(folder: epath.Path, config: ModelConfig) -> Iterator[Mapping[str, Source]]:
    with (orbax if orbax.is_orbax(folder) else hf).sources(folder, config) as found:
        yield found


def _compared(
    target: epath.Path,
    sources: Mapping[str, Source],
    count: streaming.Progress,
    verify: bool,
) -> Mapping[str, str] | None:
    """The checksums of what was written, None unless asked."""
    if not verify:
        return None
    checksums, faults = {}, []
    for name, source in sources.items():
        checksums[name], same = streaming.checksum(orbax.stored(target, name), source, count)
        if not same:
            faults.append(name)
    if faults:
        orbax.discard(target)
        raise CheckpointError(
            f"{target}: what was written differs from the source in {faults}; storage is at fault"
        )
    return checksums


def _counter(progress: Progress, stage: str, total: int) -> streaming.Progress:
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        progress(stage, done, total)

    progress(stage, 0, total)
    return count


@contextlib.contextmanager
def _explained(target: epath.Path, total: int) -> Iterator[None]:
    """Removes what was written when writing fails, and says where it failed."""
    try:
        yield
    except (OSError, ValueError) as error:
        orbax.discard(target)
        if isinstance(error, CheckpointError):
            raise
        full = "RESOURCE_EXHAUSTED" in str(error) or getattr(error, "errno", 0) == errno.ENOSPC
        advice = f"It takes up to {total / 1e9:.2f} GB; free space" if full else "Check it"
        raise OSError(f"cannot write {target}: {error}\n{advice}, and run it again") from error
