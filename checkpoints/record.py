"""`da_jax.json`: what a conversion to Orbax wrote, and whether it finished. Needs no JAX."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from etils import epath

from da_jax.checkpoints.errors import CheckpointError
from da_jax.models import hf_config

PARAMS, RECORD = "params", "da_jax.json"
_FORMAT = 1
State = Literal["none", "incomplete", "complete"]


@dataclasses.dataclass(frozen=True)
class Record:
    """What `da_jax.json` says.

    Attributes:
      complete: False while a conversion is running, and after it was killed.
      dtype: of parameters that are not int8.
      quantize: `int8`, or None.
      checksums: {path: sha256}, see `streaming.checksum`; None when nothing was read back.
      metadata: {file name: sha256} of the files beside the weights; None when not noted.
    """

    complete: bool
    dtype: str
    quantize: str | None = None
    checksums: Mapping[str, str] | None = None
    metadata: Mapping[str, str] | None = None

    def write(self, folder: epath.Path) -> None:
        """Writes `folder/da_jax.json`."""
        value = {"format": _FORMAT, **dataclasses.asdict(self)}
        written = folder / f"{RECORD}.new"
        written.write_text(json.dumps(value, indent=1) + "\n")
        written.replace(folder / RECORD)

    @classmethod
    def read(cls, folder: epath.Path | Path) -> Record | None:
        """What a folder says; None for one that has no `da_jax.json`.

        Raises:
          ConfigError, CheckpointError: for a file that cannot be read.
        """
        if not (folder / RECORD).exists():
            return None
        value = hf_config.read_json(folder / RECORD)
        if value.pop("format", None) != _FORMAT:
            raise CheckpointError(
                f"{folder / RECORD} is of another format than {_FORMAT}; update da-jax"
            )
        try:
            record = cls(**value)
        except TypeError as error:
            raise CheckpointError(f"{folder / RECORD} is damaged: {error}") from error
        for name in ("checksums", "metadata"):
            if not isinstance(getattr(record, name), dict | None):
                raise CheckpointError(f"{folder / RECORD} is damaged: {name} is no JSON object")
        return record


def state(folder: epath.Path) -> State:
    """Whether a folder holds an Orbax checkpoint, or one whose conversion did not finish."""
    record = Record.read(folder)
    if record is None:
        return "complete" if (folder / PARAMS).is_dir() else "none"
    return "complete" if record.complete else "incomplete"


def is_orbax(folder: epath.Path | Path) -> bool:
    """Whether a folder holds an Orbax checkpoint, complete or not."""
    return (folder / RECORD).exists() or (folder / PARAMS).is_dir()


def completed(folder: epath.Path | Path) -> Record:
    """The record of a folder; one that says little for a folder without.

    Raises:
      CheckpointError: when the conversion that wrote the folder did not finish.
    """
    record = Record.read(folder)
    if record is not None and not record.complete:
        raise CheckpointError(
            f"{folder} is incomplete: its conversion was interrupted. Run it again, it starts over"
        )
    return record or Record(complete=True, dtype="unknown")
