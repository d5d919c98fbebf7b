"""Compiled programs: how many this process made, and where they are kept for the next."""

from __future__ import annotations

import os
import threading
from collections import Counter
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

_COMPILED = "/jax/core/compile/backend_compile_duration"  # also when the cache on disk has it
_CACHED = "/jax/compilation_cache/cache_hits"
_VARIABLE = "DA_JAX_PROGRAMS"
_OFF = "off"
_count = 0
_made: Counter[int] = Counter()  # by thread


def count() -> int:
    """Programs compiled since this module was imported, without those read from a cache on disk."""
    return _count


def made_here() -> int:
    """Programs that this thread compiled or read from a cache on disk: neither was there before.

    Where that cache is warm `count` does not see a program that nobody had prepared.
    """
    return _made[threading.get_ident()]


def keep() -> Path | None:
    """Keeps compiled programs on disk from now on, so that a second start compiles nothing.

    They go to `~/.cache/da-jax/programs`, or to the folder that the environment variable
    `DA_JAX_PROGRAMS` names; it may also be `off`. Where JAX has a folder already, that one and its
    settings stay.

    Returns:
      The folder, None where nothing is kept.
    """
    if theirs := jax.config.values["jax_compilation_cache_dir"]:
        return Path(theirs)
    given = os.environ.get(_VARIABLE)
    if given is not None and given.lower() == _OFF:
        return None
    folder = Path(given) if given else Path.home() / ".cache" / "da-jax" / "programs"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # the small ones too
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # JAX decides at the first program whether it has a cache
    return folder


def _on_duration(event: str, duration_secs: float, **_: str | int) -> None:
    global _count
    if event == _COMPILED:
        _count += 1
        _made[threading.get_ident()] += 1


def _on_event(event: str, **_: str | int) -> None:
    global _count
    _count -= event == _CACHED


jax.monitoring.register_event_duration_secs_listener(_on_duration)
jax.monitoring.register_event_listener(_on_event)
