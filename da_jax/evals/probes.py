"""Poison in one visible slot at a time: what a program should see must reach what it says.

Each time the program runs for one step, in one full-attention layer one slot is poisoned, and then
all is as it was. So a run of the engine goes on as if nothing had happened.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from da_jax.cache.pools import Caches
from da_jax.engine.engine import Engine
from da_jax.engine.rows import Choice, DecodeRows, Rows
from da_jax.evals import poison
from da_jax.evals.poison import in_place, instead
from da_jax.kernels.paged_attention import KVPages, QuantizedPages

MOST = 32
"""Runs of visible slots within a page that are probed at one step; of more, some are drawn."""


class Probe(NamedTuple):
    """One run of a program with one poisoned slot.

    Attributes:
      program: `decode` or `prefill`.
      fed: position of the first token that was fed.
      slot: position of the token whose slot was poisoned.
      layer: where.
      noticed: whether the log-probability of what follows changed.
    """

    program: str
    fed: int
    slot: int
    layer: int
    noticed: bool


@contextlib.contextmanager
def probing(
    engine: Engine, visible: Callable[[str, int, int], np.ndarray | None], seed: int = 0
) -> Iterator[list[Probe]]:
    """Probes programs before they run.

    Of each page, for each run of visible slots in it, the first one, the last one and one between
    are poisoned, each in another layer.

    Args:
      engine: one that answers one request meanwhile, and whose process is the only one.
      visible: (program, position of the first token that is fed, and of the last) to bool [N], the
        earlier positions that full attention must see; None leaves a program alone.
      seed: draws the slots.

    Yields:
      A list that grows by the probes that were made.
    """
    runner, found, rng = engine.runner, list[Probe](), np.random.default_rng(seed)
    prefill, decode, page_size = runner.prefill, runner.decode, runner.plan.page_size

    def probe(name: str, program: Callable[[], Choice], rows: Rows, fed: int, last: int) -> None:
        seen = visible(name, fed, last)
        if seen is None:
            return
        kept = _take_slot(runner.caches, rows.slot[0], runner.plan.num_slots)

        def said() -> float:
            logprob = float(jax.device_get(program().logprob)[0, 0])
            runner.caches = _put_slot(runner.caches, kept, rows.slot[0])
            return logprob

        clean = said()
        for position in _places(np.asarray(seen[:fed]), page_size, rng):
            layers = sorted(runner.caches.pages)
            layer, page = layers[len(found) % len(layers)], rows.block_table[0]
            at = page[position // page_size], np.int32(position % page_size)
            with _poisoned(engine, layer, *at):
                dirty = said()
            # NaN is equal to nothing, itself included.
            found.append(Probe(name, fed, position, layer, dirty != clean))

    def prefill_probed(tokens: np.ndarray, position: int, rows: Rows, **options: Any) -> Choice:
        program = lambda: prefill(tokens, position, rows, **options)
        probe("prefill", program, rows, position, position + len(tokens) - 1)
        return program()

    def decode_probed(rows: Rows, what: DecodeRows) -> Choice:
        once = what._replace(steps=np.minimum(what.steps, 1))
        fed = int(what.position[0])
        probe("decode", lambda: decode(rows, once), rows, fed, fed)
        return decode(rows, what)

    with instead(runner, prefill=prefill_probed, decode=decode_probed):
        yield found


def _places(seen: np.ndarray, page_size: int, rng: np.random.Generator) -> list[int]:
    """Positions to probe among those that are `seen` [N]."""
    edge = seen.copy()  # where a run starts, or goes on in another page
    edge[1:] &= ~seen[:-1]
    edge[::page_size] |= seen[::page_size]
    starts = np.flatnonzero(edge)
    if len(starts) > MOST:
        starts = np.sort(rng.choice(starts, MOST, replace=False))
    places = list[int]()
    for start in starts.tolist():
        page_end = min((start // page_size + 1) * page_size, len(seen))
        hidden = np.flatnonzero(~seen[start:page_end])
        end = start + int(hidden[0]) if len(hidden) else page_end
        places += sorted({start, end - 1, int(rng.integers(start, end))})
    return places


@contextlib.contextmanager
def _poisoned(engine: Engine, layer: int, page: np.int32, slot: np.int32) -> Iterator[None]:
    """Poison in one slot of one layer."""
    pages = lambda: engine.runner.caches.pages
    kept = _content(pages()[layer], page, slot)
    bad = _bad(kept)
    pages()[layer] = in_place(_with_content, pages()[layer])(pages()[layer], page, slot, bad)
    yield
    pages()[layer] = in_place(_with_content, pages()[layer])(pages()[layer], page, slot, kept)


@jax.jit
def _content(pages: KVPages, page: jax.Array, slot: jax.Array) -> KVPages:
    """Keys and values of one slot, with their scales."""
    return jax.tree.map(lambda x: x[page, :, :, slot], pages)


def _with_content(pages: KVPages, page: jax.Array, slot: jax.Array, new: KVPages) -> KVPages:
    return jax.tree.map(lambda x, y: x.at[page, :, :, slot].set(y), pages, new)


@jax.jit
def _bad(kept: KVPages) -> KVPages:
    """Poison instead of the content of a slot.

    Of 8-bit pages only the value gets the large scale: a huge score could be a negative one, which
    hides the slot.
    """
    if isinstance(kept, QuantizedPages):
        values = jnp.full_like(kept.values, poison.bad_value(kept.values.dtype))
        return QuantizedPages(values, jnp.asarray(kept.scales).at[1].set(poison.SCALE))
    return jnp.full_like(kept, jnp.nan)


def _take_slot(caches: Caches, slot: np.int32, num_slots: int) -> Any:
    """Rings and states of a slot of the engine; what pages hold is kept otherwise."""
    return _taken((caches.rings, caches.states), slot, num_slots)


def _put_slot(caches: Caches, kept: Any, slot: np.int32) -> Caches:
    held = caches.rings, caches.states
    if not jax.tree.leaves(held):
        return caches
    rings, states = in_place(_put, held)(held, kept, slot)
    return caches._replace(rings=rings, states=states)


@functools.partial(jax.jit, static_argnames="num_slots")
def _taken(held: Any, slot: jax.Array, num_slots: int) -> Any:
    def one(x: jax.Array) -> jax.Array:
        size = x.shape[0] // num_slots  # pages of a ring, or one state
        return jax.lax.dynamic_slice_in_dim(x, slot * size, size)

    return jax.tree.map(one, held)


def _put(held: Any, kept: Any, slot: jax.Array) -> Any:
    """Rings and states with those of one slot as they were."""
    put = lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, slot * y.shape[0], axis=0)
    return jax.tree.map(put, held, kept)
