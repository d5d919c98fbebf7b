"""Choosing a backend and calling it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from da_jax.kernels.chips import Target, current_target
from da_jax.kernels.paged_attention import reference, support, tuning, xla
from da_jax.kernels.paged_attention.mask import Array, BlockMask, validate
from da_jax.kernels.paged_attention.pool import KVPages
from da_jax.kernels.paged_attention.support import Problem, problem_of

INTERPRET = ":interpret"
"""Suffix of `impl` that runs a Pallas kernel in its interpreter: slow, exact, on any machine."""


_LONGEST = 1 << 30


class BackendError(RuntimeError):
    """The backend that was asked for cannot run here, or not this problem; says why."""


@dataclass(frozen=True)
class Backend:
    """One way to compute `paged_attention`.

    Attributes:
        name: what `impl` calls it.
        attend: `(q, kv_pages, mask, lengths, q_lens, *, scale, softcap, window, target)` to
            `(out, lse)`.
        obstacle: says why it cannot run on a device, or None where it can.
        refuses: says why it does not take a problem on a device, or None where it does.
        target: the device that an interpreter stands for; None for the device at hand.
        tunable: whether its module has settings that can be measured.
    """

    name: str
    attend: Callable[..., tuple[jax.Array, jax.Array]]
    obstacle: Callable[[Target], str | None]
    refuses: Callable[[Problem, Target], str | None]
    target: Target | None = None
    tunable: bool = False


class BackendRow(NamedTuple):
    """A line of `backends()`.

    Attributes:
        name: of the backend.
        available: whether it runs on the device at hand.
        reason: why not, empty where it does.
        pages: dtypes of the pages it takes there.
    """

    name: str
    available: bool
    reason: str
    pages: tuple[str, ...]


def kernel_module(name: str) -> ModuleType:
    """Imports a Pallas backend; what it needs of JAX is loaded only then."""
    return importlib.import_module(f"da_jax.kernels.paged_attention.{name}")


def _pallas(name: str, *, interpret: bool = False) -> Backend:
    """A backend whose module is imported when it is first asked for something."""

    def attend(q, kv_pages, mask, lengths, q_lens, *, scale, softcap, window, target):
        module = kernel_module(name)
        problem = problem_of(q, kv_pages, mask, window)
        config = None if interpret else tuning.stored(name, target, problem, module.Config)
        return module.attend(
            q, kv_pages, mask, lengths, q_lens, scale=scale, softcap=softcap, window=window,
            target=target, config=config, interpret=interpret,
        )  # fmt: skip

    def refuses(problem: Problem, target: Target) -> str | None:
        reason = support.refuses_dtype(name, problem, target)
        return reason or kernel_module(name).refuses(problem, target)

    if interpret:
        obstacle = lambda target: support.interpreter_obstacle(name)
        target = support.KERNELS[name].interpreted_as
        return Backend(name + INTERPRET, attend, obstacle, refuses, target)
    here = lambda target: support.obstacle(name, target)
    return Backend(name, attend, here, refuses, tunable=True)


def _portable(name: str, attend: Callable[..., tuple[jax.Array, jax.Array]]) -> Backend:
    refuses = lambda problem, target: support.refuses_dtype(name, problem, target)
    return Backend(name, attend, lambda target: None, refuses)


_BACKENDS = [
    *map(_pallas, support.KERNELS),
    _portable("xla", xla.attend),
    _portable("reference", reference.attend),
]
"""In order of preference: `impl=None` takes the first that can run what is asked."""

_INTERPRETED = [_pallas(name, interpret=True) for name in support.KERNELS]


def backends() -> list[BackendRow]:
    """Lists the attention backends, the preferred one first, and why any cannot run here."""
    target = current_target()
    rows = []
    for backend in _BACKENDS:
        reason = backend.obstacle(target)
        pages = () if reason else support.page_dtypes(backend.name, target)
        rows.append(BackendRow(backend.name, reason is None, reason or "", pages))
    return rows


def choose(impl: str | None = None, problem: Problem | None = None) -> Backend:
    """Returns the named backend, or the preferred one that can run here.

    Args:
        impl: name of a backend, with `:interpret` after it for its interpreter.
        problem: what it must be able to compute; None asks for the device alone.

    Raises:
        ValueError: no backend has that name.
        BackendError: the backend cannot run here, or not this problem; the message says why.
    """
    here = current_target()
    if impl is None:
        return next(backend for backend in _BACKENDS if _reason(backend, problem, here) is None)
    for backend in [*_BACKENDS, *_INTERPRETED]:
        if backend.name == impl:
            reason = _reason(backend, problem, here)
            if reason is None:
                return backend
            raise BackendError(f"attention backend {impl!r} cannot run this here: {reason}")
    names = ", ".join(backend.name for backend in [*_BACKENDS, *_INTERPRETED])
    raise ValueError(f"unknown attention backend {impl!r}: choose one of {names}")


def _reason(backend: Backend, problem: Problem | None, here: Target) -> str | None:
    target = backend.target or here
    reason = backend.obstacle(target)
    return reason if reason or problem is None else backend.refuses(problem, target)


def paged_attention(
    q: Array,
    kv_pages: KVPages,
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
        kv_pages: `[P, 2, HKV, PS, D]` keys (index 0) and values (1), or another layout of `pool`:
            packed for a head dim up to 64, `QuantizedPages` for 8 bits. `HQ` is a multiple of
            `HKV`.
        mask: the visible slots. Masks on the host are checked here; inside a jitted function page
            ids are trusted: see `validate`.
        lengths: `[B]` int32 tokens of each sequence so far, the queries included.
        q_lens: `[B]` int32 queries of each sequence, at most `T`; all `T` by default.
        scale: factor on the scores.
        softcap: bounds the scaled scores to `softcap * tanh(score / softcap)`.
        window: how many positions back a query sees, itself included.
        return_lse: also return the log of the sum of exponentials.
        impl: name of the backend, with `:interpret` after a Pallas one for its interpreter; the
            best that can run this here by default.

    Inside `jax.shard_map` over KV heads the Pallas kernels need `check_vma=False`.

    Returns:
        `[B, T, HQ, D]` in the dtype of `q`, and with `return_lse` also float32 `[B, T, HQ]`. Rows
        at `t >= q_lens[b]` and rows that see nothing are 0, their lse -inf.

    Raises:
        ValueError: shapes that do not belong together, or an unknown `impl`.
        BackendError: `impl` cannot run this here.
    """
    problem = problem_of(q, kv_pages, mask, window)
    _check(q, problem, mask, softcap, window)
    backend = choose(impl, problem)
    window = None if window is None else min(window, _LONGEST)  # positions are int32
    lengths = _per_sequence("lengths", lengths, q.shape[0])
    q_lens = jnp.full_like(lengths, q.shape[1]) if q_lens is None else q_lens
    q_lens = _per_sequence("q_lens", q_lens, q.shape[0])
    q, kv_pages, mask = jax.tree.map(jnp.asarray, (q, kv_pages, mask))
    if 0 in (problem.batch, problem.queries, problem.width):
        out, lse = jnp.zeros_like(q), jnp.full(q.shape[:3], -jnp.inf, jnp.float32)
        return (out, lse) if return_lse else out
    out, lse = backend.attend(
        q, kv_pages, mask, lengths, q_lens, scale=scale, softcap=softcap, window=window,
        target=backend.target or current_target(),
    )  # fmt: skip
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
    q: Array, problem: Problem, mask: BlockMask, softcap: float | None, window: int | None
) -> None:
    form = problem.form
    if q.shape[2] % form.kv_heads:
        raise ValueError(
            f"q {q.shape} does not fit kv_pages {form.shape}: the query heads must be a multiple "
            f"of the {form.kv_heads} KV heads"
        )
    if mask.page.shape[0] != q.shape[0]:
        raise ValueError(f"mask for {mask.page.shape} does not fit a batch of {q.shape[0]}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap {softcap}: give a positive number, or None for no cap")
    if window is not None and window < 1:
        raise ValueError(f"window {window}: give at least 1 (the query itself), or None")
    if all(isinstance(x, np.ndarray) for x in mask):
        validate(mask, form.num_pages, form.page_size)
