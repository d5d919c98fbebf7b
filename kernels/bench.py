"""Times `paged_attention` at decode: one query a sequence, random visible pages."""

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from da_jax.kernels.chips import current_target
from da_jax.kernels.paged_attention import (
    BackendError,
    BlockMask,
    KVPages,
    choose,
    compact,
    empty_pages,
    layout,
    paged_attention,
    stack,
    tuning,
    write_kv,
)
from da_jax.kernels.paged_attention.api import kernel_module
from da_jax.kernels.paged_attention.support import KERNELS, Problem

_TIMED_SECONDS = 0.02  # calls are sent in batches of about this length, so that the wait for the
_MOST_CALLS = 200  # host is shared by many; on CPU, where calls would run side by side, one by one


@dataclass(frozen=True)
class Shape:
    """Heads and pages of the layer that is timed.

    Attributes:
        q_heads, kv_heads, head_dim: of the layer.
        page_size: tokens a page.
        dtype: of the queries.
        kv_dtype: of the pages, by default that of the queries.
    """

    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 64
    dtype: str = "float32"
    kv_dtype: str | None = None


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
        Rows `backend, context, batch, visible, ms, bytes, gb_per_s, roof_share, ratio`: `ms` is the
        median time of a call, `bytes` the visible pages as the pool holds them (padding and scales
        included), `gb_per_s` their rate, `roof_share` that rate as a share of the chip's peak (None
        where it is unknown), and `ratio` the time relative to the first of `visible`.

    Raises:
        ValueError: a fraction outside (0, 1], or an unknown backend.
        BackendError: a backend that cannot run here.
    """
    outside = [fraction for fraction in visible if not 0 < fraction <= 1]
    if outside:
        raise ValueError(f"visible fractions {outside}: give numbers above 0 and at most 1")
    shape = shape or Shape()
    cases = [(context, batch) for context in contexts for batch in batches]
    chosen = {
        case: [choose(name, _problem(*case, shape)).name for name in backends] for case in cases
    }
    return [
        row
        for (context, batch), names in chosen.items()
        for row in _case(context, batch, visible, names, shape, repeats, seed)
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
    page_bytes = layout(1, *_heads(shape)).page_bytes
    chip = current_target().chip
    rows = []
    for name in names:
        attend = _program(name, shape)
        calls = [partial(attend, q, kv_pages, mask, lengths) for mask in masks]
        times = median_ms(calls, repeats)
        for fraction, mask, ms in zip(visible, masks, times):
            size = int(mask.count.sum()) * page_bytes
            rate = size / (ms / 1e3)
            rows.append(
                {
                    "backend": name,
                    "context": context,
                    "batch": batch,
                    "visible": fraction,
                    "ms": round(ms, 4),
                    "bytes": size,
                    "gb_per_s": round(rate / 1e9, 2),
                    "roof_share": round(rate / chip.bandwidth, 3) if chip else None,
                    "ratio": round(ms / times[0], 4),
                }
            )
    return rows


def tune(
    context: int = 32768,
    batch: int = 1,
    backend: str | None = None,
    shape: Shape | None = None,
    repeats: int = 7,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Times every setting that a kernel proposes, with all pages visible, and stores the best.

    Args:
        context, batch, shape, repeats, seed: as for `attention_rows`.
        backend: a Pallas backend; None is the preferred one.

    Returns:
        Rows `backend, config, ms, stored, error`; the setting with `stored` is used from now on for
        this kind of device and problem.

    Raises:
        ValueError: the backend has no settings, or they cannot be stored.
        BackendError: the backend cannot run here, or no setting did.
    """
    shape, target = shape or Shape(), current_target()
    problem = _problem(context, batch, shape)
    chosen = choose(backend, problem)
    if not chosen.tunable:
        raise ValueError(
            f"backend {chosen.name!r} has no settings to measure here: tuning is for "
            f"{', '.join(KERNELS)}, each on its own device (see `da-jax env`)"
        )
    file = tuning.path()
    if file is None:
        raise ValueError("DA_JAX_TUNING is off: unset it, or let it name a file")
    file.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(file.parent, os.W_OK):
        raise ValueError(f"{file} cannot be written: let DA_JAX_TUNING name another file")
    rng = np.random.default_rng(seed)
    q, kv_pages = _arrays(rng, context, batch, shape)
    mask, lengths = _mask(rng, context, batch, 1.0, shape), jnp.full((batch,), context, jnp.int32)
    module, rows = kernel_module(chosen.name), []
    for config in module.candidates(problem, target):
        attend = jax.jit(
            partial(
                module.attend, scale=shape.head_dim**-0.5, softcap=None, window=None,
                target=target, config=config, interpret=False,
            )
        )  # fmt: skip
        row: dict[str, Any] = {"backend": chosen.name, "config": asdict(config)}
        call = partial(attend, q, kv_pages, mask, lengths, jnp.ones_like(lengths))
        try:
            [ms] = median_ms([call], repeats)
        except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            rows.append(row | {"ms": None, "stored": False, "error": reason})
        else:
            rows.append(row | {"ms": round(ms, 4), "stored": False, "error": None})
    timed = [row for row in rows if row["ms"] is not None]
    if not timed:
        errors = [row["error"] for row in rows]
        raise BackendError(f"no setting of {chosen.name} ran on {target.kind}: {errors}")
    best = min(timed, key=lambda row: row["ms"])
    best["stored"] = True
    tuning.store(chosen.name, target, problem, best["config"])
    return rows


def _problem(context: int, batch: int, shape: Shape) -> Problem:
    """What a case asks for, without making its arrays."""
    blocks = -(-context // shape.page_size)
    form = layout(batch * blocks, *_heads(shape))
    return Problem(batch, 1, shape.q_heads, blocks, shape.dtype, form)


def _heads(shape: Shape) -> tuple[int, int, int, str]:
    return shape.kv_heads, shape.page_size, shape.head_dim, shape.kv_dtype or shape.dtype


def _arrays(
    rng: np.random.Generator, context: int, batch: int, shape: Shape
) -> tuple[jax.Array, KVPages]:
    """Random queries, and a pool of random pages in the layout that backends take."""
    pages = batch * -(-context // shape.page_size)
    keys = jax.random.split(jax.random.key(rng.integers(2**31)), 3)
    q = jax.random.normal(keys[0], (batch, 1, shape.q_heads, shape.head_dim), shape.dtype)
    size = (pages, shape.page_size, shape.kv_heads, shape.head_dim)
    k, v = (jax.random.normal(key, size, shape.dtype) for key in keys[1:])
    page, slot = np.indices(size[:2], np.int32)
    return q, write_kv(empty_pages(layout(pages, *_heads(shape))), k, v, page, slot)


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


def median_ms(calls: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """Runs the calls in turn, `repeats` times after one warm-up; the median of each, in ms."""
    sent = []
    for call in calls:
        jax.block_until_ready(call())
        start = time.perf_counter()
        jax.block_until_ready(call())
        once = time.perf_counter() - start
        most = 1 if jax.default_backend() == "cpu" else _MOST_CALLS
        sent.append(int(np.clip(_TIMED_SECONDS / once, 1, most)))
    taken = np.zeros((repeats, len(calls)))
    for turn in taken:
        for i, call in enumerate(calls):
            start = time.perf_counter()
            for _ in range(sent[i]):
                last = call()
            jax.block_until_ready(last)
            turn[i] = (time.perf_counter() - start) / sent[i]
    return (1e3 * np.median(taken, axis=0)).tolist()
