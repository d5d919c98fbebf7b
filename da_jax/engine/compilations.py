"""Counts the programs that XLA compiles in this process."""

from __future__ import annotations

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_count = 0


def count() -> int:
    """Programs compiled since this module was imported."""
    return _count


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    global _count
    _count += event == _EVENT


jax.monitoring.register_event_duration_secs_listener(_listen)
