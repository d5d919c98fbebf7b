"""Folders, local or remote (`gs://`), and the files beside the weights."""

from __future__ import annotations

import atexit
import fnmatch
import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from etils import epath

from da_jax.checkpoints.errors import CheckpointError

METADATA = (
    "*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "NOTICE*", "additional_chat_templates/*",
)  # fmt: skip
_NO_METADATA = ("*.index.json", "da_jax.json")


def absolute(path: str | os.PathLike[str]) -> epath.Path:
    """A path that does not depend on the working directory; one with `://` is remote.

    Raises:
      ValueError: for remote storage that is not Google's, or that cannot be read for want of a
        package.
    """
    text = os.fspath(path)
    if not is_remote(text):
        return epath.Path(Path(text).expanduser().absolute())
    _require_remote(text)
    return epath.Path(text)


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path is not on this machine."""
    return "://" in os.fspath(path)


def _require_remote(path: str) -> None:
    """Refuses what epath could not read; it goes through TensorFlow where that is installed."""
    if not path.startswith("gs://"):
        raise ValueError(f"{path!r}: of remote folders only gs://bucket/folder is supported")
    if importlib.util.find_spec("tensorflow") is not None:
        return
    import fsspec

    try:
        fsspec.get_filesystem_class("gcs")
    except ImportError as error:
        raise ValueError(
            f"{path!r} needs gcsfs to be read or written ({error}): pip install 'da-jax[gcs]'"
        ) from error


def same(left: epath.Path, right: epath.Path) -> bool:
    """Whether two absolute paths are the same folder; links are followed."""
    if is_remote(left) or is_remote(right):
        return os.fspath(left).rstrip("/") == os.fspath(right).rstrip("/")
    return os.path.realpath(left) == os.path.realpath(right)


def has_tokenizer(folder: epath.Path) -> bool:
    """Whether a tokenizer stands beside the weights."""
    return any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model"))


def copy_metadata(source: epath.Path, destination: epath.Path) -> dict[str, str]:
    """Copies what belongs to a checkpoint but its weights: configuration, tokenizer, templates.

    Returns:
      {file name: sha256} of what was copied.

    Raises:
      CheckpointError: for a file that cannot be read.
      OSError: for one that cannot be written.
    """
    digests = {}
    for name in _metadata(source):
        try:
            data = (source / name).read_bytes()
        except OSError as error:
            raise CheckpointError(f"cannot read {source / name}: {error}") from error
        (destination / name).parent.mkdir(parents=True, exist_ok=True)
        (destination / name).write_bytes(data)
        digests[name] = hashlib.sha256(data).hexdigest()
    return digests


def add_metadata(folder: epath.Path, name: str, text: str) -> dict[str, str]:
    """Writes a file of metadata; returns {its name: sha256}."""
    data = text.encode()
    (folder / name).write_bytes(data)
    return {name: hashlib.sha256(data).hexdigest()}


def local_metadata(folder: str | os.PathLike[str]) -> Path:
    """A local folder with the metadata of a checkpoint: itself, or a copy of a remote one's.

    A copy is removed when the process ends.
    """
    if not is_remote(folder):
        return Path(folder)
    copy = Path(tempfile.mkdtemp(prefix="da_jax-"))
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    copy_metadata(absolute(folder), epath.Path(copy))
    return copy


def _metadata(folder: epath.Path) -> Iterator[str]:
    names = [child.name for child in folder.iterdir() if child.is_file()]
    templates = folder / "additional_chat_templates"
    if templates.is_dir():
        names += [f"{templates.name}/{child.name}" for child in templates.iterdir()]
    for name in sorted(names):
        matches = any(fnmatch.fnmatch(name, pattern) for pattern in METADATA)
        if matches and not any(fnmatch.fnmatch(name, pattern) for pattern in _NO_METADATA):
            yield name
