"""Choosing a backend and calling it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from da_jax.kernels.paged_attention import reference, xla
from da_jax.kernels.paged_attention.mask import Array, BlockMask


@dataclass(frozen=True)
class Backend:
    """One way to compute `paged_attention`.

    Attributes:
        name: what `impl` calls it.
        attend: `(q, kv_pages, mask, lengths, q_lens, *, scale, softcap, window) -> (out, lse)`.
        obstacle: says why it cannot run here, or None where it can.
    """

    name: str
    attend: Callable[..., tuple[jax.Array, jax.Array]]
    obstacle: Callable[[], str | None]


class BackendRow(NamedTuple):
    """A line of `backends()`; `reason` is empty where the backend is available."""

    name: str
    available: bool
    reason: str


_BACKENDS = [
    Backend("xla", xla.attend, lambda: None),
    Backend("reference", reference.attend, lambda: None),
]
"""In order of preference: `impl=None` takes the first that can run."""


def backends() -> list[BackendRow]:
    """Lists the attention backends, the preferred one first, and why any cannot run here."""
    found = ((backend.name, backend.obstacle()) for backend in _BACKENDS)
    return [BackendRow(name, reason is None, reason or "") for name, reason in found]


def choose(impl: str | None = None) -> Backend:
    """Returns the named backend, or the preferred one.

    Raises:
        ValueError: no backend has that name.
        RuntimeError: the backend cannot run here; the message says why.
    """
    rows = backends()
    if impl is None:
        impl = next(row.name for row in rows if row.available)
    for backend, row in zip(_BACKENDS, rows):
        if row.name == impl and row.available:
            return backend
        if row.name == impl:
            raise RuntimeError(f"attention backend {impl!r} cannot run here: {row.reason}")
    names = ", ".join(row.name for row in rows)
    raise ValueError(f"unknown attention backend {impl!r}: choose one of {names}")


def paged_attention(
    q: Array,
    kv_pages: Array,
    mask: BlockMask,
    lengths: Array,
    q_lens: Array | None = None,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    return_lse: bool = False,
    impl: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attends to the visible slots of paged keys and values.

    Query `t` of sequence `b` sits at position `p = lengths[b] - q_lens[b] + t` and sees slot `s` of
    entry `e` where `e < count[b]`, `lo <= s < hi`, and the position `x = block * PS + s` of the
    slot has `p - window < x <= p`. What hidden slots and unused pages hold does not matter, not
    even NaN. Entries may reach past `lengths`, into slots reserved for tokens to come.

    Args:
        q: `[B, T, HQ, D]` queries, already rotated.
        kv_pages: `[P, 2, HKV, PS, D]` keys (index 0) and values (1); `HQ` is a multiple of `HKV`.
        mask: the visible slots. Its page ids are trusted: see `validate`.
        lengths: `[B]` int32 tokens of each sequence so far, the queries included.
        q_lens: `[B]` int32 queries of each sequence; all `T` by default.
        scale: factor on the scores.
        softcap: bounds the scaled scores to `softcap * tanh(score / softcap)`.
        window: how many positions back a query sees, itself included.
        return_lse: also return the log of the sum of exponentials.
        impl: name of the backend; the best that can run here by default.

    Returns:
        `[B, T, HQ, D]` in the dtype of `q`, and with `return_lse` also float32 `[B, T, HQ]`. Rows
        at `t >= q_lens[b]` and rows that see nothing are 0, their lse -inf.

    Raises:
        ValueError: shapes that do not belong together, or an unknown `impl`.
        RuntimeError: `impl` cannot run here.
    """
    _check(q, kv_pages, mask, softcap, window)
    backend = choose(impl)
    lengths = _per_sequence("lengths", lengths, q.shape[0])
    q_lens = jnp.full_like(lengths, q.shape[1]) if q_lens is None else q_lens
    q_lens = _per_sequence("q_lens", q_lens, q.shape[0])
    q, kv_pages, mask = jax.tree.map(jnp.asarray, (q, kv_pages, mask))
    out, lse = backend.attend(
        q, kv_pages, mask, lengths, q_lens, scale=scale, softcap=softcap, window=window
    )
    return (out, lse) if return_lse else out


def _per_sequence(name: str, values: Array, batch: int) -> jax.Array:
    values = jnp.asarray(values)
    if values.shape != (batch,) or not jnp.issubdtype(values.dtype, jnp.integer):
        raise ValueError(
            f"{name} is {values.dtype} {values.shape}; it must be integer, one for each of the "
            f"{batch} sequences"
        )
    return values.astype(jnp.int32)


def _check(
    q: Array, kv_pages: Array, mask: BlockMask, softcap: float | None, window: int | None
) -> None:
    if q.ndim != 4 or kv_pages.ndim != 5 or kv_pages.shape[1] != 2:
        raise ValueError(
            f"q {q.shape} must be [B, T, HQ, D] and kv_pages {kv_pages.shape} [P, 2, HKV, PS, D]"
        )
    if q.shape[3] != kv_pages.shape[4] or q.shape[2] % kv_pages.shape[2]:
        raise ValueError(
            f"q {q.shape} does not fit kv_pages {kv_pages.shape}: head dims must be equal and the "
            "query heads a multiple of the KV heads"
        )
    if mask.page.ndim != 2 or mask.page.shape[0] != q.shape[0]:
        raise ValueError(f"mask for {mask.page.shape} does not fit a batch of {q.shape[0]}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap {softcap}: give a positive number, or None for no cap")
    if window is not None and window < 1:
        raise ValueError(f"window {window}: give at least 1 (the query itself), or None")
