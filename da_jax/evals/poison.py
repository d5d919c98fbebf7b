"""Poison in the hidden places of the KV pages: what a program does not see must not matter.

It is put there and taken away on the device, a layer at a time; of the pages only those whose
content somebody needs later are copied. 8-bit integers have no NaN, and scales must be finite (see
`kernels.paged_attention`): there the poison is a large number under a scale of `SCALE`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from da_jax.cache.pools import CachePlan
from da_jax.engine.engine import Engine
from da_jax.engine.rows import Choice, Rows
from da_jax.kernels.paged_attention import KVPages, QuantizedPages

SCALE = 1e30
"""The scale of a poisoned slot of 8-bit pages."""
INT8 = 99

Shown = Callable[[Rows, int, int], np.ndarray]
"""(rows, row, position of the first token fed) to bool [P, PS]: the slots that a row may see."""


def seen_by_mask(plan: CachePlan) -> Shown:
    """What the mask of a program shows: poison then proves that the operation heeds its mask."""

    def shown(rows: Rows, row: int, position: int) -> np.ndarray:
        mask, slots = rows.mask, np.zeros((plan.num_pages, plan.page_size), bool)
        for entry in range(mask.count[row]):
            lo, hi = mask.span[row, entry] & 0xFFFF, mask.span[row, entry] >> 16
            slots[mask.page[row, entry], lo:hi] = True
        return slots

    return shown


@contextlib.contextmanager
def poisoned(engine: Engine, shown: Shown | None = None) -> Iterator[list[int]]:
    """Poisons what no row of a program may see before it runs, and restores it afterwards.

    Args:
      engine: one whose process is the only one.
      shown: what a row may see; by default what its mask shows.

    Yields:
      A list that grows by the number of poisoned slots of a layer with each program that runs.

    Raises:
      ValueError: several processes share the model.
    """
    if jax.process_count() > 1:
        raise ValueError(f"{jax.process_count()} processes share the model; poison needs it alone")
    runner, counts = engine.runner, list[int]()
    plan = runner.plan
    shown = shown or seen_by_mask(plan)

    def around(program: Callable[[], Choice], rows: Rows, used: dict[int, int]) -> Choice:
        hidden = np.ones((plan.num_pages, plan.page_size), bool)
        for row, position in used.items():
            hidden &= ~shown(rows, row, position)
        counts.append(int(hidden.sum()))
        needed = [page for page in engine.scheduler.prefix.pool.filled if hidden[page].any()]
        at = np.full(1 << max(len(needed) - 1, 0).bit_length(), plan.num_pages, np.int32)
        at[: len(needed)] = needed
        saved = {}
        for layer, pages in runner.caches.pages.items():
            saved[layer] = _take(pages, at)
            runner.caches.pages[layer] = in_place(_spoil, pages)(pages, hidden)
        choice = program()
        for layer, pages in runner.caches.pages.items():
            restore = in_place(_restore, pages)
            runner.caches.pages[layer] = restore(pages, hidden, at, saved[layer])
        return choice

    prefill, decode = runner.prefill, runner.decode

    def prefill_poisoned(tokens: np.ndarray, position: int, rows: Rows, **options: Any) -> Choice:
        program = lambda: prefill(tokens, position, rows, **options)
        return around(program, rows, {0: position})

    def decode_poisoned(rows: Rows, what: Any) -> Choice:
        used = {row: int(what.position[row]) for row in np.flatnonzero(what.steps).tolist()}
        return around(lambda: decode(rows, what), rows, used)

    with instead(runner, prefill=prefill_poisoned, decode=decode_poisoned):
        yield counts


def cleanse(engine: Engine) -> None:
    """Makes every number of the caches that is not finite zero: after poison that was seen."""
    runner = engine.runner
    runner.caches = in_place(_clean, runner.caches)(runner.caches)


@contextlib.contextmanager
def instead(owner: object, **attributes: Any) -> Iterator[None]:
    """Methods or attributes of one object replaced for a while."""
    before = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del vars(owner)[name]
        vars(owner).update(before)


def in_place(function: Callable[..., Any], tree: Any) -> Callable[..., Any]:
    """A function compiled for a tree, its first argument, that it replaces where it lies."""
    leaves, structure = jax.tree.flatten(tree)
    return _compiled(function, structure, tuple(leaf.sharding for leaf in leaves))


@functools.cache
def _compiled(
    function: Callable[..., Any], structure: Any, shardings: tuple[jax.sharding.Sharding, ...]
) -> Callable[..., Any]:
    where = jax.tree.unflatten(structure, shardings)
    return jax.jit(function, donate_argnums=0, out_shardings=where)


@jax.jit
def _take(pages: KVPages, at: jax.Array) -> KVPages:
    """The pages [N]; those beyond the pool are zero."""
    return jax.tree.map(lambda x: x.at[at].get(mode="fill", fill_value=0), pages)


def _clean(caches: Any) -> Any:
    """A tree of caches with zeros for what poison reached."""

    def clean(x: jax.Array) -> jax.Array:
        if x.dtype.itemsize == 1:  # whatever it is, it is finite under a scale that is
            return x
        # A quantized row that poison reached has a scale beyond any that a model gives.
        return jnp.where(jnp.abs(x.astype(jnp.float32)) < SCALE / 2, x, 0)

    return jax.tree.map(clean, caches)


def _spoil(pages: KVPages, hidden: jax.Array) -> KVPages:
    """The pool with poison in the slots `hidden` [P, PS]."""
    if isinstance(pages, QuantizedPages):
        values, scales = pages
        bad = bad_value(values.dtype)
        return QuantizedPages(
            jnp.where(_over(values, hidden), jnp.asarray(bad, values.dtype), values),
            jnp.where(_over(scales, hidden), SCALE, scales),
        )
    return jnp.where(_over(pages, hidden), jnp.nan, pages)


def _restore(pages: KVPages, hidden: jax.Array, at: jax.Array, saved: KVPages) -> KVPages:
    """The pool with the hidden slots of the pages `at` as they were, and all others zero."""

    def one(x: jax.Array, old: jax.Array) -> jax.Array:
        mask = _over(x, hidden)
        x = jnp.where(mask, jnp.zeros((), x.dtype), x)
        rows = x.at[at].get(mode="fill", fill_value=0)
        there = mask.at[at].get(mode="fill", fill_value=False)
        return x.at[at].set(jnp.where(there, old, rows), mode="drop")

    return jax.tree.map(one, pages, saved)


def bad_value(dtype: jax.typing.DTypeLike) -> float:
    """Poison of a dtype of pages; where it is a number, the scale makes it huge."""
    return INT8 if dtype == jnp.int8 else jnp.nan


def _over(x: jax.Array, hidden: jax.Array) -> jax.Array:
    """Hidden slots [P, PS] as they lie in pages [P, S, H, PS, D] or scales [P, 2, H, padded]."""
    if x.ndim == 5:
        return hidden[:, None, None, :, None]
    return jnp.pad(hidden, ((0, 0), (0, x.shape[-1] - hidden.shape[1])))[:, None, None, :]
