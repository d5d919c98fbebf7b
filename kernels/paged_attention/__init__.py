"""Attention over paged keys and values that reads only the pages a block mask shows."""

from da_jax.kernels.paged_attention.api import BackendError, backends, choose, paged_attention
from da_jax.kernels.paged_attention.mask import BlockMask, compact, stack, validate
from da_jax.kernels.paged_attention.pool import (
    KVPages,
    Layout,
    QuantizedPages,
    empty_pages,
    layout,
    layout_of,
)
from da_jax.kernels.paged_attention.support import Problem
from da_jax.kernels.paged_attention.write import write_kv

__all__ = [
    "BackendError",
    "BlockMask",
    "KVPages",
    "Layout",
    "Problem",
    "QuantizedPages",
    "backends",
    "choose",
    "compact",
    "empty_pages",
    "layout",
    "layout_of",
    "paged_attention",
    "stack",
    "validate",
    "write_kv",
]
