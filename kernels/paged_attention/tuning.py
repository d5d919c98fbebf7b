"""Settings of kernels that were measured on a device and kept on disk.

Without an entry a kernel takes the defaults that its module works out. `da-jax bench attention
--tune` measures and stores. The environment variable `DA_JAX_TUNING` names the file, or is `off`.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

from da_jax.kernels.chips import Target
from da_jax.kernels.paged_attention.support import Problem

_OFF = "off"


def path() -> Path | None:
    """The file of measured settings, None where they are turned off."""
    given = os.environ.get("DA_JAX_TUNING")
    if given == _OFF:
        return None
    return Path(given) if given else Path.home() / ".cache" / "da-jax" / "attention.json"


def key(backend: str, target: Target, problem: Problem) -> str:
    """Names the entry of a problem: device kind, shape of the heads and pages, and dtypes."""
    form = problem.form
    return (
        f"{backend}|{target.kind}|b{problem.batch}t{problem.queries}"
        f"|h{problem.q_heads}/{form.kv_heads}d{form.head_dim}|p{form.page_size}"
        f"|{problem.q_dtype}/{form.dtype}"
    )


def stored(backend: str, target: Target, problem: Problem) -> dict[str, Any] | None:
    """The settings measured for a problem on a device, or None."""
    file = path()
    if file is None or not file.exists():
        return None
    return _read(file, file.stat().st_mtime_ns).get(key(backend, target, problem))


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
def _read(file: Path, changed: int) -> dict[str, dict[str, Any]]:
    del changed  # part of the key of the cache
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(
            f"{file} is not the JSON that tuning writes ({error}): delete it, or set "
            "DA_JAX_TUNING=off"
        ) from error
