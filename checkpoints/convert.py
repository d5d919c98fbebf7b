"""Finding and loading a checkpoint of either kind, converting one to Orbax, and checking it."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Literal

import jax.numpy as jnp
from etils import epath

from da_jax.checkpoints import hf, orbax, paths, record, streaming
from da_jax.checkpoints.errors import CheckpointError
from da_jax.checkpoints.hub import TINY, resolve
from da_jax.checkpoints.parameters import Shardings, flat_parameters, one_device, wanted
from da_jax.checkpoints.sources import Source
from da_jax.models import hf_config, registry
from da_jax.models.config import ModelConfig
from da_jax.models.decoder import Decoder
from da_jax.protocol.styles import STYLE_FILE, Style

__all__ = ["TINY", "check_destination", "convert", "is_int8", "load", "resolve", "verify"]
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


def is_int8(folder: Folder) -> bool:
    """Whether a folder holds int8 weights: an Orbax checkpoint may, a Hugging Face folder does not.

    Raises:
      CheckpointError: when the conversion that wrote the folder did not finish.
    """
    return record.completed(paths.absolute(folder)).quantize is not None


def convert(
    source: Folder,
    destination: Folder,
    *,
    dtype: jnp.dtype,
    quantize: Literal["int8"] | None = None,
    style: Style | None = None,
    progress: Progress = lambda stage, done, total: None,
    verify: bool = True,
) -> int:
    """Writes a checkpoint as an Orbax checkpoint.

    Weights are streamed: memory holds a few blocks of them, whatever their size. The destination
    does not load before everything is written. After an interruption, run it again: it starts over.

    Args:
      source: a Hugging Face folder, or an Orbax folder.
      destination: folder to write, may be on `gs://`; created. It may be there if it is empty, or
        holds an unfinished conversion.
      dtype: dtype on disk. A few small parameters of some models are float32 all the same.
      quantize: `int8` stores matrices as int8 with float32 scales.
      style: the prompt style to put beside the weights, unless the source carries its own.
      progress: called with (stage, bytes done, bytes in all) from another thread; the stages are
        `checking the source`, of an Orbax folder that has checksums, `starting over`, after an
        interruption, `converting` and `verifying`.
      verify: whether to read everything back, compare it with the source, and note checksums.

    Returns:
      Bytes of the parameters, before compression.

    Raises:
      FileExistsError: when `destination` holds a checkpoint or other files, before any work.
      NotADirectoryError: when `destination` is a file, or below one.
      ValueError: when it is the source, or on `gs://` without the package for it.
      ConfigError, CheckpointError: what is wrong with `source`, such as a number that `dtype`
        cannot hold.
      OSError: when the destination cannot be written, such as a full disk.
    """
    origin, target = paths.absolute(source), paths.absolute(destination)
    if quantize not in (None, "int8"):
        raise ValueError(f"quantize is {quantize!r}; it must be 'int8' or None")
    if paths.same(origin, target):
        raise ValueError(f"{target} is the source; name another folder to write")
    found = check_destination(target)
    checksums = record.completed(origin).checksums  # of an Orbax folder that was verified
    config = hf_config.read(origin)
    model = registry.abstract(config, dtype=dtype, quantized=quantize is not None)
    with _sources(origin, config) as stored:
        if checksums is not None:
            _raise(origin, _changed_parameters(origin, checksums, progress, "checking the source"))
        sources = wanted(stored, flat_parameters(model))
        total = sum(map(streaming.nbytes, sources.values()))
        if found == "incomplete":
            progress("starting over", 0, total)
        orbax.discard(target)
        written = record.Record(False, jnp.dtype(dtype).name, quantize)
        with _explained(target, total):
            target.mkdir(parents=True, exist_ok=True)
            written.write(target)
            orbax.write_params(target, sources, _counter(progress, "converting", total))
            if verify:
                count = _counter(progress, "verifying", total)
                written = dataclasses.replace(written, checksums=_compared(target, sources, count))
            metadata = paths.copy_metadata(origin, target)
            if style is not None and STYLE_FILE not in metadata:
                metadata |= paths.add_metadata(target, STYLE_FILE, style.to_json() + "\n")
            if verify:
                written = dataclasses.replace(written, metadata=metadata)
            dataclasses.replace(written, complete=True).write(target)
    return total


def check_destination(destination: Folder) -> record.State:
    """What a folder to be written holds: nothing, or an unfinished conversion.

    Raises:
      FileExistsError, NotADirectoryError, ValueError: as `convert`.
    """
    target = paths.absolute(destination)
    above = () if paths.is_remote(target) else target.parents
    for path in (target, *above):
        if path.exists() and not path.is_dir():
            below = "" if path == target else f", and {target} would be below it"
            raise NotADirectoryError(f"{path} is a file{below}; name another folder to write")
    found = record.state(target)
    if found == "complete":
        raise FileExistsError(f"{target} already holds an Orbax checkpoint; remove it first")
    if found == "none" and (others := orbax.others(target)):
        raise FileExistsError(
            f"{target} holds other files ({', '.join(others[:3])}{', ...' * (len(others) > 3)}), "
            "some of which would be overwritten; name a new or an empty folder"
        )
    return found


def verify(
    folder: Folder, progress: Progress = lambda stage, done, total: None
) -> Mapping[str, str]:
    """Reads a converted checkpoint and compares it with its checksums.

    Args:
      folder: an Orbax folder that `convert` wrote, may be on `gs://`.
      progress: called with (`verifying`, bytes done, bytes in all).

    Returns:
      The checksums of the parameters, {path: sha256}.

    Raises:
      FileNotFoundError: when there is no such folder.
      CheckpointError: listing every parameter and file that differs or cannot be read, or when
        the folder has no checksums.
    """
    where = paths.absolute(folder)
    if not where.exists():
        raise FileNotFoundError(f"{where} does not exist")
    if not record.is_orbax(where):
        raise CheckpointError(f"{where} is no Orbax checkpoint; convert it first")
    checksums = record.completed(where).checksums
    if checksums is None:
        raise CheckpointError(f"{where} has no checksums; convert it again, with verification")
    faults = _changed_files(where) + _changed_parameters(where, checksums, progress, "verifying")
    _raise(where, faults)
    return checksums


def _changed_parameters(
    folder: epath.Path, checksums: Mapping[str, str], progress: Progress, stage: str
) -> list[str]:
    store, opened, faults = orbax.store(folder), {}, []
    for name in checksums:
        try:
            opened[name] = store.open(name)
        except CheckpointError as error:
            faults.append(str(error))
    count = _counter(progress, stage, sum(map(streaming.nbytes, opened.values())))
    for name, array in opened.items():
        try:
            found, _ = streaming.checksum(array, None, count)
        except ValueError as error:
            found = f"unreadable: {error}"
        if found != checksums[name]:
            faults.append(f"{name}: {found}, expected {checksums[name]}")
    return faults


def _changed_files(folder: epath.Path) -> list[str]:
    """What is wrong with the files beside the weights."""
    expected = dict(record.completed(folder).metadata or {})
    expected.setdefault("config.json", "")
    faults = []
    for name, digest in expected.items():
        path = folder / name
        if not path.exists():
            faults.append(f"{name} is missing")
        elif digest and hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            faults.append(f"{name} was changed")
    return faults


def _raise(folder: epath.Path, faults: list[str]) -> None:
    if faults:
        raise CheckpointError(
            f"{folder} is damaged; {len(faults)} parameters or files are not as they were "
            "written:\n  " + "\n  ".join(faults)
        )


@contextlib.contextmanager
def _sources(folder: epath.Path, config: ModelConfig) -> Iterator[Mapping[str, Source]]:
    with (orbax if orbax.is_orbax(folder) else hf).sources(folder, config) as found:
        yield found


def _compared(
    target: epath.Path, sources: Mapping[str, Source], count: streaming.Progress
) -> Mapping[str, str]:
    """The checksums of what was written."""
    store, checksums, faults = orbax.store(target), {}, []
    for name, source in sources.items():
        checksums[name], same = streaming.checksum(store.open(name), source, count)
        if not same:
            faults.append(name)
    if faults:
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
        rest = ""
        try:
            orbax.discard(target)
        except OSError as left:  # it does not load, and the next conversion removes it
            rest = f"\nWhat was written could not be removed: {left}"
        if isinstance(error, CheckpointError):
            raise
        full = "RESOURCE_EXHAUSTED" in str(error) or getattr(error, "errno", 0) == errno.ENOSPC
        advice = f"It takes up to {total / 1e9:.2f} GB; free space" if full else "Check it"
        raise OSError(
            f"cannot write {target}: {error}\n{advice}, and run it again{rest}"
        ) from error
