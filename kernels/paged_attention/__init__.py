"""Attention over paged keys and values that reads only the pages a block mask shows."""

from da_jax.kernels.paged_attention.api import backends, choose, paged_attention
from da_jax.kernels.paged_attention.mask import BlockMask, compact, stack, validate
from da_jax.kernels.paged_attention.write import write_kv

__all__ = [
    "BlockMask",
    "backends",
    "choose",
    "compact",
    "paged_attention",
    "stack",
    "validate",
    "write_kv",
]
