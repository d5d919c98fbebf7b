"""Small problems for `device_check`, and the float64 answer to each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from da_jax.kernels.paged_attention import (
    KVPages,
    QuantizedPages,
    compact,
    layout,
    paged_attention,
    stack,
)
from da_jax.kernels.paged_attention.api import BackendError
from da_jax.kernels.paged_attention.pool import QUANTIZED, VALUE_LANE, Layout, quantize

_OUT_TOLERANCE = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 2e-2}
_LSE_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Case:
    """A small problem with holes, partial pages, shared lengths and NaN in every hidden slot."""

    name: str
    head_dim: int = 128
    kv_heads: int = 2
    group: int = 4
    page_size: int = 64
    queries: int = 1
    dtype: str = "bfloat16"
    kv_dtype: str = ""
    window: int | None = None
    softcap: float | None = None


CASES = (
    Case("decode"),
    Case("chunk", queries=40),
    Case("window", window=100),
    Case("softcap, chunk", queries=20, softcap=5.0),
    Case("head dim 64", head_dim=64),
    Case("head dim 256", head_dim=256, queries=3),
    Case("head dim 512", head_dim=512, kv_heads=1, group=8),
    Case("group 5, page 16", group=5, page_size=16, queries=2),
    Case("float16", dtype="float16"),
    Case("float32", dtype="float32", queries=2),
    Case("int8", kv_dtype="int8"),
    Case("float8", kv_dtype="float8_e4m3fn", queries=9),
)


def check_case(case: Case, backend: str) -> list[dict[str, Any]]:
    """Runs a case and compares output and lse with float64."""
    row = {"backend": backend, "case": case.name}
    q, kv, mask, lengths, q_lens, want, want_lse = _problem(case)
    options = {"scale": case.head_dim**-0.5, "softcap": case.softcap, "window": case.window}
    attend = jax.jit(partial(paged_attention, **options, return_lse=True, impl=backend))
    try:
        out, lse = attend(q, kv, mask, lengths, q_lens)
    except BackendError as refusal:
        return [row | {"result": "refused", "detail": str(refusal)}]
    blank = np.isneginf(want_lse)
    out, lse = np.asarray(out, np.float64), np.asarray(lse, np.float64)
    error = float(np.abs(out - want).max())
    lse_error = float(np.abs(np.where(blank, 0, lse) - np.where(blank, 0, want_lse)).max())
    fine = (
        error <= _OUT_TOLERANCE[case.dtype]
        and lse_error <= _LSE_TOLERANCE
        and np.isneginf(lse[blank]).all()
        and not out[blank].any()
    )
    return [row | {"result": "ok" if fine else "FAIL", "error": error, "lse_error": lse_error}]


def _problem(case: Case) -> tuple[Any, ...]:
    """Arguments of `paged_attention` and the answer; the pool is NaN where nobody may look."""
    rng = np.random.default_rng(0)
    size, t, hkv = case.page_size, case.queries, case.kv_heads
    tokens = 5 * size - 7
    blocks = -(-tokens // size)
    spans = [
        [(0, tokens)],
        [(3, size + 2), (2 * size, 2 * size + 1), (3 * size - 1, tokens)],
        [],
        [(0, tokens)],
    ]
    lengths = np.array([tokens, tokens, tokens, 2 * size + t], np.int32)
    q_lens = np.array([t, -(-t // 2), t, t], np.int32)
    tables = rng.permutation(4 * blocks + 1)[: 4 * blocks].reshape(4, blocks)
    width = blocks + 4
    mask = stack([compact(table, spans[b], size, width) for b, table in enumerate(tables)])
    form = layout(4 * blocks + 1, hkv, size, case.head_dim, case.kv_dtype or case.dtype)
    codes, scales, heads = _tokens(rng, (4, tokens, hkv, case.head_dim), form)
    q = jnp.asarray(rng.standard_normal((4, t, hkv * case.group, case.head_dim)), case.dtype)
    seen = _seen(spans, lengths, q_lens, t, tokens, case.window)
    want, want_lse = _answer(np.asarray(q, np.float64), heads, seen, case)
    kv = _pool(form, codes, scales, np.any(seen, axis=1), tables)
    return q, kv, mask, lengths, q_lens, want, want_lse


def _tokens(rng: np.random.Generator, shape: tuple[int, ...], form: Layout) -> tuple[Any, Any, Any]:
    """Keys and values `[2, B, L, HKV, D]` as the pool holds them, their scales, and their product
    in float64."""
    drawn = jnp.asarray(rng.standard_normal((2, *shape)), jnp.float32)
    if form.dtype in QUANTIZED:
        codes, scales = quantize(drawn, form.dtype)
    else:
        codes, scales = drawn.astype(form.dtype), jnp.ones(drawn.shape[:-1])
    codes, scales = (np.asarray(x.astype(jnp.float32), np.float64) for x in (codes, scales))
    return codes, scales, codes * scales[..., None]


def _seen(
    spans: list[list[tuple[int, int]]],
    lengths: np.ndarray,
    q_lens: np.ndarray,
    queries: int,
    tokens: int,
    window: int | None,
) -> np.ndarray:
    """Which tokens each query sees: `[B, T, L]` bool."""
    shown = np.zeros((len(spans), tokens), bool)
    for b, ranges in enumerate(spans):
        for start, end in ranges:
            shown[b, start:end] = True
    t, x = np.arange(queries)[:, None], np.arange(tokens)
    p = (lengths - q_lens)[:, None, None] + t
    seen = shown[:, None] & (x <= p) & (t < q_lens[:, None, None])
    return seen if window is None else seen & (x > p - window)


def _answer(
    q: np.ndarray, heads: np.ndarray, seen: np.ndarray, case: Case
) -> tuple[np.ndarray, np.ndarray]:
    """Dense attention in float64: `[B, T, HQ, D]` and the lse `[B, T, HQ]`."""
    k, v = np.repeat(heads, case.group, axis=3)
    scores = np.einsum("bthd,blhd->bthl", q, k) * case.head_dim**-0.5
    if case.softcap is not None:
        scores = case.softcap * np.tanh(scores / case.softcap)
    weights = np.where(seen[:, :, None], np.exp(scores), 0)
    total = weights.sum(-1)
    out = np.einsum("bthl,blhd->bthd", weights, v) / np.where(total > 0, total, 1)[..., None]
    return out, np.log(total, where=total > 0, out=np.full_like(total, -np.inf))


def _pool(
    form: Layout, codes: np.ndarray, scales: np.ndarray, wanted: np.ndarray, tables: np.ndarray
) -> KVPages:
    """Puts the wanted tokens into a pool of NaN; int8 has none and gets it in its scales."""
    b, x = np.nonzero(wanted)
    page, slot = tables[b, x // form.page_size], x % form.page_size
    pool = np.full(form.shape, np.nan if form.dtype != "int8" else 77.0)
    pool[page, :, :, slot] = 0
    held = np.full(form.scales_shape, np.nan)
    for side in (0, 1):
        at, lane = (0, VALUE_LANE * side) if form.packed else (side, 0)
        pool[page, at, :, slot, lane : lane + form.head_dim] = codes[side, b, x]
        held[page, side, : form.kv_heads, slot] = scales[side, b, x]
    values = jnp.asarray(pool, jnp.float32).astype(form.dtype)
    return QuantizedPages(values, jnp.asarray(held, jnp.float32)) if form.quantized else values
