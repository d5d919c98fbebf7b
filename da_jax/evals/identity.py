"""What tells one checkpoint from another without reading all of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from etils import epath

from da_jax.checkpoints import paths, record

_WHOLE = 4 * 2**20  # bytes of a file that is read from end to end
_SAMPLES, _SAMPLE = 64, 2**16  # of a longer one: how many places, and bytes of each
_TOKENIZER = ("tokenizer*", "*.jinja", "*.model", "vocab.json", "merges.txt", "*tokens*.json",
              "additional_chat_templates/*")  # fmt: skip


def checkpoint(folder: Path | epath.Path) -> dict[str, str]:
    """Fingerprints of a checkpoint's configuration and weights.

    Weights of a verified conversion are known by the checksums in its record. Of others the names
    and sizes count, and the contents: whole files up to 4 MiB, of longer ones 64 places.

    Returns:
      `config` and `weights`, each a sha256.

    Raises:
      FileNotFoundError: the folder has no `config.json`.
      CheckpointError: the conversion that wrote it did not finish.
    """
    where = paths.absolute(folder)
    written = record.completed(where)
    if written.checksums is not None:
        weights = _digest(json.dumps(dict(written.checksums), sort_keys=True).encode())
    else:
        weights = _sampled(where, _weight_files(where))
    return {"config": _digest((where / "config.json").read_bytes()), "weights": weights}


def tokenizer(folder: Path) -> str:
    """Fingerprint of a checkpoint's tokenizer and chat template, a sha256."""
    files = {path for pattern in _TOKENIZER for path in folder.glob(pattern) if path.is_file()}
    total = hashlib.sha256()
    for path in sorted(files):
        total.update(f"{path.relative_to(folder)}\n{_digest(path.read_bytes())}\n".encode())
    return total.hexdigest()


def _weight_files(folder: epath.Path) -> list[epath.Path]:
    if record.is_orbax(folder):
        found = list(_files(folder / record.PARAMS))
    else:
        found = [path for path in folder.iterdir() if path.name.endswith(".safetensors")]
    return sorted(found)


def _files(folder: epath.Path) -> Iterator[epath.Path]:
    for path in folder.iterdir():
        if path.is_dir():
            yield from _files(path)
        else:
            yield path


def _sampled(folder: epath.Path, files: list[epath.Path]) -> str:
    total = hashlib.sha256()
    for path in files:
        size = path.stat().length
        total.update(f"{path.relative_to(folder)} {size}\n".encode())
        with path.open("rb") as file:
            if size <= _WHOLE:
                total.update(file.read())
                continue
            for place in range(_SAMPLES):
                file.seek((size - _SAMPLE) * place // (_SAMPLES - 1))
                total.update(file.read(_SAMPLE))
    return total.hexdigest()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
