"""Finding and loading a checkpoint of either kind, and converting one to Orbax."""

from __future__ import annotations

import re
from pathlib import Path

import jax.numpy as jnp

from da_jax.checkpoints import hf, orbax
from da_jax.models.qwen import Qwen3

TINY = Path(__file__).parent / "tiny" / "checkpoint"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", f"{orbax.PARAMS}/**")


def resolve(path_or_id: str | Path, *, revision: str | None = None) -> Path:
    """The local folder of a checkpoint.

    Args:
      path_or_id: a folder, `tiny` (the checkpoint that ships with the package), or a Hugging Face
        hub id such as `Qwen/Qwen3-0.6B`, which is downloaded into the hub's cache.
      revision: branch, tag or commit on the hub.

    Raises:
      FileNotFoundError: for a name that is neither, or a hub id that cannot be had.
    """
    if str(path_or_id) == "tiny":
        return TINY
    folder = Path(path_or_id).expanduser()
    if folder.is_dir():
        return folder
    if not _HUB_ID.fullmatch(str(path_or_id)):
        raise FileNotFoundError(
            f"{str(path_or_id)!r} is no folder, nor a hub id of the form owner/name, nor 'tiny'"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        name = str(path_or_id)
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(_HUB_FILES)))
    except (HfHubHTTPError, LocalEntryNotFoundError, ConnectionError) as error:
        raise FileNotFoundError(
            f"cannot get {str(path_or_id)!r} from the Hugging Face hub: {error}\n"
            "Check the name and the network; for a gated model run `hf auth login`."
        ) from error


def load(folder: Path, *, dtype: jnp.dtype) -> Qwen3:
    """Loads an Orbax or a Hugging Face folder, whichever `folder` is."""
    return (orbax if orbax.is_orbax(folder) else hf).load(folder, dtype=dtype)


def convert(source: Path, destination: Path, *, dtype: jnp.dtype) -> None:
    """Writes the checkpoint in `source` as an Orbax checkpoint in `destination`.

    Raises:
      FileExistsError: when there is a checkpoint in `destination` already, before `source` is read.
      ConfigError, CheckpointError: what is wrong with `source`.
    """
    if orbax.is_orbax(destination):
        raise FileExistsError(f"{destination} already holds an Orbax checkpoint; remove it first")
    orbax.save(load(source, dtype=dtype), source, destination)
