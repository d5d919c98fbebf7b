"""What `device_check` times: decode with the backends here, and the alternatives."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from da_jax.kernels.bench import median_ms
from da_jax.kernels.paged_attention import BlockMask, layout, paged_attention

Row = dict[str, Any]

_REPEATS = 5
_copied: dict[str, float] = {}


@dataclass(frozen=True)
class Decode:
    """One query a sequence through a layer in bfloat16.

    Attributes:
        head_dim, kv_heads, q_heads, page_size: of the layer.
        context: tokens of each sequence.
        batch: sequences.
        pool_tokens: room in the pool, at least `context * batch`.
        visible: fractions of the pages that are visible.
        calls: calls in one program, each with a mask of its own.
    """

    head_dim: int
    kv_heads: int
    context: int
    batch: int
    pool_tokens: int
    visible: tuple[float, ...] = (1.0, 0.5, 0.12, 0.06)
    calls: int = 16
    q_heads: int = 32
    page_size: int = 64

    @property
    def about(self) -> Row:
        """How the report names it."""
        return {"head_dim": self.head_dim, "context": self.context, "batch": self.batch}

    @property
    def blocks(self) -> int:
        """Pages of a sequence."""
        return self.context // self.page_size


def measure_copy(nbytes: int) -> list[Row]:
    """Measures bytes read and written a second by the better of two ways to copy an array."""
    x = jnp.ones(nbytes // 4, jnp.float32)
    ways = (jax.jit(jnp.copy), jax.jit(lambda x: x + 1))
    best = min(median_ms([partial(way, x) for way in ways], _REPEATS))
    _copied["rate"] = 2 * x.nbytes / (best / 1e3)
    return [{"copy_gb_per_s": round(_copied["rate"] / 1e9, 1)}]


def time_backend(decode: Decode, backend: str) -> list[Row]:
    """Times decode at every visibility."""
    rng = np.random.default_rng(0)
    kv = _pool(decode.pool_tokens, decode.kv_heads, decode.head_dim, decode.page_size)
    q = jnp.ones((decode.batch, 1, decode.q_heads, decode.head_dim), jnp.bfloat16)
    calls = decode.calls if backend != "xla" else 1  # it is slow, and a loop itself
    program = jax.jit(partial(steps, decode, backend, calls))
    masks = [_masks(rng, decode, fraction) for fraction in decode.visible]
    times = median_ms([partial(program, q, kv, mask) for mask in masks], _REPEATS)
    rows = []
    for fraction, mask, ms in zip(decode.visible, masks, times):
        size = int(mask.count[0].sum()) * kv.nbytes // kv.shape[0]
        rows.append(_row({"what": backend, **decode.about, "visible": fraction}, size, ms / calls))
    return rows


def steps(
    decode: Decode, backend: str, calls: int, q: jax.Array, kv: jax.Array, masks: BlockMask
) -> jax.Array:
    """Runs `calls` steps in one program, which spares the host; each has a mask of its own and
    takes the output of the one before as its queries."""
    lengths = jnp.full((decode.batch,), decode.context, jnp.int32)

    def call(i, q):
        mask = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), masks)
        return paged_attention(q, kv, mask, lengths, scale=decode.head_dim**-0.5, impl=backend)

    return lax.fori_loop(0, calls, call, q)


def time_dense(decode: Decode, name: str) -> list[Row]:
    """Times one of `ALTERNATIVES` over a dense cache; raises where it does not run."""
    size = 4 * decode.batch * decode.context * decode.kv_heads * decode.head_dim
    ms = ALTERNATIVES[name](decode)
    return [_row({"what": name, **decode.about, "visible": 1.0}, size, ms)]


def _row(what: Row, nbytes: int, ms: float) -> Row:
    rate = nbytes / (ms / 1e3)
    share = round(rate / _copied["rate"], 3) if _copied else None
    return what | {
        "us": round(1e3 * ms, 2),
        "mb": round(nbytes / 1e6, 1),
        "gb_per_s": round(rate / 1e9, 1),
        "share": share,
    }


@lru_cache(maxsize=1)
def _pool(tokens: int, kv_heads: int, head_dim: int, page_size: int) -> jax.Array:
    """Pages for all sequences. Keys and values repeat, which no time depends on."""
    shape = layout(tokens // page_size, kv_heads, page_size, head_dim, "bfloat16").shape
    few = jax.random.normal(jax.random.key(0), (min(64, shape[0]), *shape[1:]), jnp.bfloat16)
    return jnp.tile(few, (-(-shape[0] // len(few)), 1, 1, 1, 1))


def _masks(rng: np.random.Generator, decode: Decode, fraction: float) -> BlockMask:
    """A mask for each call of a program, `[calls, B, W]`, of pages from all over the pool: from the
    cache on the chip the same few pages would come faster than from memory."""
    size, batch = decode.page_size, decode.batch
    count = max(1, round(fraction * decode.blocks))
    page, span, block = np.zeros((3, decode.calls, batch, decode.blocks), np.int32)
    for call in range(decode.calls):
        drawn = rng.permutation(decode.pool_tokens // size)[: batch * count]
        page[call, :, :count] = drawn.reshape(batch, count)
        for b in range(batch):
            block[call, b, :count] = np.sort(rng.permutation(decode.blocks)[:count])
    span[..., :count] = size << 16
    counts = np.full((decode.calls, batch), count, np.int32)
    return BlockMask(*(jnp.asarray(x) for x in (page, span, block, counts)))


def _chained(decode: Decode, attend: Callable[..., jax.Array], q: jax.Array, *rest: Any) -> float:
    """Milliseconds of a call whose output is the next one's queries."""

    @jax.jit
    def program(q, *rest):
        return lax.fori_loop(0, decode.calls, lambda _, q: attend(q, *rest).astype(q.dtype), q)

    return median_ms([partial(program, q, *rest)], _REPEATS)[0] / decode.calls


def _pallas(decode: Decode) -> float:
    """JAX's own paged attention for GPUs, in the better of two settings."""
    from jax.experimental.pallas.ops.gpu import paged_attention as other

    pages = (decode.kv_heads, decode.batch * decode.blocks, decode.page_size, decode.head_dim)
    k, v = jnp.ones((2, *pages), jnp.bfloat16)
    table = jnp.arange(pages[1], dtype=jnp.int32).reshape(decode.batch, -1)
    q = jnp.ones((decode.batch, decode.q_heads, decode.head_dim), jnp.bfloat16)
    lengths = jnp.full((decode.batch,), decode.context, jnp.int32)
    found, errors = [], []
    for at_once in (1, 2):
        attend = partial(
            other.paged_attention,
            pages_per_compute_block=at_once,
            k_splits=min(16, decode.blocks // 2),
            interpret=jax.default_backend() == "cpu",
        )
        try:
            found.append(_chained(decode, attend, q, k, v, table, lengths))
        except jax.errors.JaxRuntimeError as error:  # too much shared memory
            errors.append(error)
    if not found:
        raise errors[0]
    return min(found)


def _cudnn(decode: Decode) -> float:
    """`jax.nn.dot_product_attention` with cuDNN."""
    cache = (decode.batch, decode.context, decode.kv_heads, decode.head_dim)
    k, v = jnp.ones((2, *cache), jnp.bfloat16)
    q = jnp.ones((decode.batch, 1, decode.q_heads, decode.head_dim), jnp.bfloat16)
    return _chained(decode, partial(jax.nn.dot_product_attention, implementation="cudnn"), q, k, v)


def _torch(decode: Decode) -> float:
    """PyTorch's attention."""
    import torch

    device = "cpu" if jax.default_backend() == "cpu" else "cuda"
    make = lambda *shape: torch.ones(shape, dtype=torch.bfloat16, device=device)
    k, v = (make(decode.batch, decode.kv_heads, decode.context, decode.head_dim) for _ in range(2))
    q = make(decode.batch, decode.q_heads, 1, decode.head_dim)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    for _ in range(1 + _REPEATS):
        wait()
        start = time.perf_counter()
        for _ in range(4 * decode.calls):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        wait()
        times.append((time.perf_counter() - start) / (4 * decode.calls))
    return 1e3 * float(np.median(times[1:]))


ALTERNATIVES: dict[str, Callable[[Decode], float]] = {
    "jax pallas paged_attention": _pallas,
    "jax.nn cudnn": _cudnn,
    "torch sdpa": _torch,
}
"""Milliseconds of a call of other implementations, all tokens visible."""
