"""Declarative Attention in JAX.

A language model writes `<global>`, `<focus magic_chunks="3,7">` and `<local>` while it thinks, and
the engine reads only the KV pages that it declared.

    >>> from da_jax import LLM
    >>> llm = LLM.from_pretrained()           # the checkpoint that ships with the package
    >>> llm.generate(document, question).answer

Importing this package loads nothing; names are loaded when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from da_jax.engine.config import EngineConfig
    from da_jax.engine.engine import RequestError
    from da_jax.engine.llm import LLM
    from da_jax.engine.request import (
        Decline,
        Done,
        ModeChange,
        PrefillProgress,
        Response,
        SamplingParams,
        TextDelta,
    )
    from da_jax.protocol.chunks import Chunk
    from da_jax.protocol.modes import Arm, Declaration, Mode
    from da_jax.protocol.styles import Style

_HOMES = {
    "da_jax.engine.config": ("EngineConfig",),
    "da_jax.engine.engine": ("RequestError",),
    "da_jax.engine.llm": ("LLM",),
    "da_jax.engine.request": (
        "Decline",
        "Done",
        "ModeChange",
        "PrefillProgress",
        "Response",
        "SamplingParams",
        "TextDelta",
    ),
    "da_jax.protocol.chunks": ("Chunk",),
    "da_jax.protocol.modes": ("Arm", "Declaration", "Mode"),
    "da_jax.protocol.styles": ("Style",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [  # noqa: RUF022
    "EngineConfig", "RequestError", "LLM", "Arm", "Declaration", "Decline", "Done", "ModeChange",
    "PrefillProgress", "Response", "SamplingParams", "TextDelta", "Chunk", "Mode", "Style",
    "__version__",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'da_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
