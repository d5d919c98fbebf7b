"""Saves of a training that is not finished, from which the same job goes on."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from orbax.checkpoint import v1 as ocp

from da_jax.train.step import Trainer

FOLDER = "training"
"""Of the saves, inside the folder that the model is written to."""


class Saves:
    """The newest save of a job; an older one is removed when the next is complete.

    Use `opened`.
    """

    def __init__(self, checkpointer: ocp.training.Checkpointer):
        self._checkpointer = checkpointer

    @property
    def step(self) -> int:
        """Steps that are saved."""
        latest = self._checkpointer.latest
        return 0 if latest is None else latest.step

    def save(self, step: int, trainer: Trainer) -> None:
        """Saves weights and the state of the optimizer after so many steps."""
        self._checkpointer.save(step, trainer.state)

    def restore(self, trainer: Trainer) -> None:
        """Sets a trainer to what was saved."""

        trainer.replace(lambda like: self._checkpointer.load(self.step, like))


@contextlib.contextmanager
def opened(out: Path, job: Mapping[str, Any]) -> Iterator[Saves]:
    """Opens the saves of a job; when nothing was saved in the end, nothing is left of them.

    Args:
      out: folder that the model is written to; made if it is not there.
      job: what decides the weights, as JSON has it.

    Raises:
      ValueError: the folder holds something else than saves, or those of another job.
      OSError: it cannot be written.
    """
    folder = out / FOLDER
    steps = folder.is_dir() and any(path.name.isdigit() for path in folder.iterdir())
    if not steps and out.exists() and (not out.is_dir() or any(p != folder for p in out.iterdir())):
        raise ValueError(f"{out} is not empty; name a new folder to write the model to")
    if not steps:  # killed before its first save
        shutil.rmtree(folder, ignore_errors=True)
    with ocp.training.Checkpointer(
        os.path.abspath(folder),
        preservation_policy=ocp.training.preservation_policies.LatestN(1),
        custom_metadata=dict(job),
        cleanup_tmp_directories=True,
    ) as checkpointer:
        try:
            before: Mapping[str, Any] = checkpointer.root_metadata().custom_metadata or {}
            for name, value in job.items():
                if before.get(name) != value:
                    raise ValueError(
                        f"{out} holds an unfinished training with {name} {before.get(name)!r}, and "
                        f"now {name} is {value!r}; name a new folder, or ask for the same"
                    )
            yield Saves(checkpointer)
        finally:
            if checkpointer.latest is None:
                shutil.rmtree(folder)
                if not any(out.iterdir()):
                    out.rmdir()


def remove(out: Path) -> None:
    """Removes the saves, once the model is written."""
    shutil.rmtree(out / FOLDER, ignore_errors=True)


def digest(path: str | Path) -> str:
    """SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
