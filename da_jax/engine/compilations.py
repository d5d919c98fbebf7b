"""Counts the programs that XLA compiles in this process."""

from __future__ import annotations

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"  # also when the cache on disk has it
_CACHED = "/jax/compilation_cache/cache_hits"
_count = 0


def count() -> int:
    """Programs compiled since this module was imported, without those read from a cache on disk."""
    return _count


def _on_duration(event: str, duration_secs: float, **_: str | int) -> None:
    global _count
    _count += event == _COMPILED


def _on_event(event: str, **_: str | int) -> None:
    global _count
    _count -= event == _CACHED


jax.monitoring.register_event_duration_secs_listener(_on_duration)
jax.monitoring.register_event_listener(_on_event)
