"""Folders, local or remote (`gs://`), and the files beside the weights."""

from __future__ import annotations

import fnmatch
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from etils import epath

METADATA = (
    "*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "NOTICE*", "additional_chat_templates/*",
)  # fmt: skip
_NO_METADATA = ("*.index.json", "da_jax.json")


def absolute(path: str | os.PathLike[str]) -> epath.Path:
    """A path that does not depend on the working directory; one with `://` is remote."""
    text = os.fspath(path)
    return epath.Path(text) if "://" in text else epath.Path(Path(text).expanduser().absolute())


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path is not on this machine."""
    return "://" in os.fspath(path)


def copy_metadata(source: epath.Path, destination: epath.Path) -> None:
    """Copies what belongs to a checkpoint but its weights: configuration, tokenizer, templates."""
    if source == destination:
        return
    for name in _metadata(source):
        (destination / name).parent.mkdir(parents=True, exist_ok=True)
        (destination / name).write_bytes((source / name).read_bytes())


def local_metadata(folder: str | os.PathLike[str]) -> Path:
    """A local folder with the metadata of a checkpoint: itself, or a copy of a remote one's."""
    if not is_remote(folder):
        return Path(folder)
    copy = Path(tempfile.mkdtemp(prefix="da_jax-"))
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
