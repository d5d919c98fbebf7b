"""Times `paged_attention` at decode: one query a sequence, random visible pages."""

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from da_jax.kernels.paged_attention import BlockMask, choose, compact, paged_attention, stack


@dataclass(frozen=True)
class Shape:
    """Heads and pages of the layer that is timed."""

    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 64
    dtype: str = "float32"


def machine() -> dict[str, str]:
    """Says where and with what rows are measured."""
    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "cores": f"{os.cpu_count()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("jax", "jaxlib", "numpy")},
    }


def attention_rows(
    contexts: Sequence[int] = (32768,),
    batches: Sequence[int] = (1,),
    visible: Sequence[float] = (1.0, 0.5, 0.12, 0.06),
    backends: Sequence[str | None] = (None,),
    shape: Shape | None = None,
    repeats: int = 7,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Times one decode step of attention of one layer.

    The fractions of one context and batch run through one program and one pool of pages, turn by
    turn in each repeat, so that their ratios hold on a busy machine. Compilation is not timed.

    Args:
        contexts: tokens of each sequence.
        batches: sequences decoded together.
        visible: fractions of the pages that are visible, drawn at random; at least one page is.
        backends: names of backends; None is the preferred one.
        shape: heads, head dim, page size and dtype.
        repeats: timed calls, of which the median counts.
        seed: of keys, values, page order and visible pages.

    Returns:
        Rows `backend, context, batch, visible, ms, bytes, ratio`: `ms` is the median time of a
        call, `bytes` the keys and values of its visible pages, and `ratio` the time relative to the
        first of `visible`.

    Raises:
        ValueError: a fraction outside (0, 1], or an unknown backend.
        RuntimeError: a backend that cannot run here.
    """
    outside = [fraction for fraction in visible if not 0 < fraction <= 1]
    if outside:
        raise ValueError(f"visible fractions {outside}: give numbers above 0 and at most 1")
    names = [choose(name).name for name in backends]
    return [
        row
        for context in contexts
        for batch in batches
        for row in _case(context, batch, visible, names, shape or Shape(), repeats, seed)
    ]


def _case(
    context: int,
    batch: int,
    visible: Sequence[float],
    names: Sequence[str],
    shape: Shape,
    repeats: int,
    seed: int,
) -> list[dict[str, Any]]:
    """Times one context and batch: a pool, a mask for each fraction, and a program per backend."""
    rng = np.random.default_rng(seed)
    q, kv_pages = _arrays(rng, context, batch, shape)
    masks = [_mask(rng, context, batch, fraction, shape) for fraction in visible]
    lengths = jnp.full((batch,), context, jnp.int32)
    page_bytes = kv_pages.nbytes // kv_pages.shape[0]
    rows = []
    for name in names:
        attend = _program(name, shape)
        calls = [partial(attend, q, kv_pages, mask, lengths) for mask in masks]
        times = _median_ms(calls, repeats)
        for fraction, mask, ms in zip(visible, masks, times):
            rows.append(
                {
                    "backend": name,
                    "context": context,
                    "batch": batch,
                    "visible": fraction,
                    "ms": round(ms, 3),
                    "bytes": int(mask.count.sum()) * page_bytes,
                    "ratio": round(ms / times[0], 4),
                }
            )
    return rows


def _arrays(
    rng: np.random.Generator, context: int, batch: int, shape: Shape
) -> tuple[jax.Array, jax.Array]:
    pages = batch * -(-context // shape.page_size)
    kv = (pages, 2, shape.kv_heads, shape.page_size, shape.head_dim)
    q = (batch, 1, shape.q_heads, shape.head_dim)
    dtype = jnp.dtype(shape.dtype)
    draw = lambda size: jnp.asarray(rng.standard_normal(size, np.float32), dtype)
    return draw(q), draw(kv)


def _mask(
    rng: np.random.Generator, context: int, batch: int, fraction: float, shape: Shape
) -> BlockMask:
    size, blocks = shape.page_size, -(-context // shape.page_size)
    tables = rng.permutation(batch * blocks).reshape(batch, blocks)
    count = max(1, round(fraction * blocks))
    rows = []
    for table in tables:
        shown = np.sort(rng.choice(blocks, count, replace=False))
        spans = [(i * size, min((i + 1) * size, context)) for i in shown.tolist()]
        rows.append(compact(table, spans, size, blocks))
    return jax.tree.map(jnp.asarray, stack(rows))


def _program(name: str, shape: Shape) -> Callable[..., jax.Array]:
    scale = shape.head_dim**-0.5
    return jax.jit(
        lambda q, kv, mask, lengths: paged_attention(q, kv, mask, lengths, scale=scale, impl=name)
    )


def _median_ms(calls: Sequence[Callable[[], jax.Array]], repeats: int) -> list[float]:
    """Runs the calls in turn, `repeats` times after one warm-up; the median of each, in ms."""
    taken = np.zeros((repeats + 1, len(calls)))
    for turn in taken:
        for i, call in enumerate(calls):
            start = time.perf_counter()
            jax.block_until_ready(call())
            turn[i] = time.perf_counter() - start
    return (1e3 * np.median(taken[1:], axis=0)).tolist()
