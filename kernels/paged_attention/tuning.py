"""Settings of kernels that were measured on a device and kept on disk.

Without an entry a kernel takes the defaults that its module works out. `da-jax bench attention
--tune` measures and stores. The environment variable `DA_JAX_TUNING` names the file instead of
`~/.cache/da-jax/attention.json`, or is `off`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from da_jax.kernels.chips import Target
from da_jax.kernels.paged_attention.support import Problem

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
_OFF = "off"


def path() -> Path | None:
    """The file of measured settings, None where they are turned off."""
    given = os.environ.get("DA_JAX_TUNING")
    if given is not None and given.lower() == _OFF:
        return None
    return Path(given) if given else Path.home() / ".cache" / "da-jax" / "attention.json"


def key(backend: str, target: Target, problem: Problem) -> str:
    """Names the entry of a problem: device kind, shape of the heads and pages, and dtypes.

    The width of the mask counts by powers of two.
    """
    form = problem.form
    return (
        f"{backend}|{target.kind}|b{problem.batch}t{problem.queries}"
        f"w{1 << (problem.width - 1).bit_length()}{'s' if problem.windowed else ''}"
        f"|h{problem.q_heads}/{form.kv_heads}d{form.head_dim}{'k' if form.packed else ''}"
        f"|p{form.page_size}|{problem.q_dtype}/{form.dtype}"
    )


def stored(backend: str, target: Target, problem: Problem, config: type[T]) -> T | None:
    """The settings measured for a problem on a device, or None.

    Args:
        backend, target, problem: what is asked.
        config: the dataclass of the settings, all of them numbers.

    Raises:
        ValueError: the file, or the entry, is not what `store` writes for these settings.
    """
    file = path()
    if file is None or not file.exists():
        return None
    name = key(backend, target, problem)
    entry = _read(file, file.stat().st_mtime_ns).get(name)
    if entry is None:
        return None
    names = {field.name for field in dataclasses.fields(config)}
    if not isinstance(entry, dict) or entry.keys() != names:
        raise ValueError(
            f"{file}: the settings {entry} of {name} are not {sorted(names)}: they are of another "
            "version; delete the file and tune again, or set DA_JAX_TUNING=off"
        )
    return config(**entry)


def store(backend: str, target: Target, problem: Problem, settings: dict[str, Any]) -> Path | None:
    """Keeps settings for later runs; returns the file, or None where tuning is turned off."""
    file = path()
    if file is None:
        return None
    known = _read(file, file.stat().st_mtime_ns) if file.exists() else {}
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_suffix(f".{os.getpid()}.tmp")
    entries = known | {key(backend, target, problem): settings}
    fresh.write_text(json.dumps(entries, indent=1, sort_keys=True))
    fresh.replace(file)
    return file


@functools.lru_cache(maxsize=4)
def _read(file: Path, changed: int) -> dict[str, Any]:
    del changed  # part of the key of the cache
    try:
        entries = json.loads(file.read_text())
    except ValueError as error:
        entries = error
    if not isinstance(entries, dict):
        raise ValueError(
            f"{file} is not what tuning writes ({entries}): delete it, or set DA_JAX_TUNING=off"
        )
    return entries
