"""The portable backend: a loop over the visible pages, in plain XLA.

The trip count is data, so the cost follows the visible pages and not the width of the mask. A
gather of the whole table would copy every entry, used or not, before the first product. Sequences
run one after the other, so the cost is the sum of their visible pages and not the longest of them
times the batch. Any head dim goes: nothing is padded.

Products are in float32 whatever the pool holds. On CPU keep bfloat16 out of the pool before jax
0.12: the XLA of jax 0.10 converts the whole pool to float32 on each call, here and in `write_kv`.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from da_jax.kernels.chips import Target
from da_jax.kernels.paged_attention.mask import BlockMask
from da_jax.kernels.paged_attention.pool import (
    PACKED_LANES,
    VALUE_LANE,
    KVPages,
    Layout,
    layout_of,
    read_pages,
)

_NOWHERE = jnp.iinfo(jnp.int32).max
_FEW_ROWS = 48  # measured on CPU: with more rows per KV head one large product is faster
# On CPU what a trip copies should still be in the cores' caches when it is used. The products of a
# few rows are so short that a trip needs more of them to be worth a second core. Elsewhere a trip
# should be long against the launch of its kernels.
_CHUNK_BYTES = 400 << 10
_CHUNK_BYTES_FEW_ROWS = 1600 << 10
_CHUNK_BYTES_ELSEWHERE = 1 << 25
_REST = 8  # what long trips leave over is taken by trips of this part of their length


class _Chunk(NamedTuple):
    """Entries that one trip of a loop takes: `tiles` batched products over `pages` each."""

    tiles: int
    pages: int

    @property
    def entries(self) -> int:
        """Entries of a trip."""
        return self.tiles * self.pages


class _State(NamedTuple):
    """Online softmax of the rows `[HKV, R]` so far."""

    high: jax.Array  # [HKV, R] highest score, finite
    total: jax.Array  # [HKV, R] sum of exp(score - high)
    out: jax.Array  # [HKV, R, D] sum of exp(score - high) * value


def attend(
    q: jax.Array,
    kv_pages: KVPages,
    mask: BlockMask,
    lengths: jax.Array,
    q_lens: jax.Array,
    *,
    scale: float,
    softcap: float | None,
    window: int | None,
    target: Target,
) -> tuple[jax.Array, jax.Array]:
    """Backend of `paged_attention`: the output `[B, T, HQ, D]` and the float32 lse `[B, T, HQ]`."""
    _, t, hq, d = q.shape
    form = layout_of(kv_pages, d)
    hkv, page_size, width = form.kv_heads, form.page_size, mask.page.shape[1]
    few = _few(t * hq, form)
    chunks = _chunks(t * hq, form, width, target)
    whole = few and _takes_whole_rows(form, target)
    longest = chunks[0].entries
    padded = [jnp.pad(x, ((0, 0), (0, -width % longest))) for x in mask[:3]]
    # A float32 model wants float32 products; on accelerators the default would be less.
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else lax.Precision.DEFAULT

    def sequence(args):
        q, page, span, block, count, length, q_len = args
        rows = q.reshape(t, hkv, -1, d).swapaxes(0, 1).reshape(hkv, -1, d)
        rows = scale * rows.astype(jnp.float32)
        row = jnp.arange(rows.shape[1]) // (hq // hkv)
        query = jnp.where(row < q_len, length - q_len + row, -1)
        if whole:
            rows = jnp.pad(rows, ((0, 0), (0, 0), (0, PACKED_LANES - d)))

        def trip(chunk, first, i, state):
            start = first + i * chunk.entries
            entry = [lax.dynamic_slice_in_dim(x, start, chunk.entries) for x in (page, span, block)]
            live = start + jnp.arange(chunk.entries) < count
            position = _positions(entry[1], entry[2], live, page_size).reshape(chunk.tiles, -1)
            seen = _within(position[:, None], query[:, None], query[:, None], window)
            wanted = _within(position, length - q_len, length - 1, window)
            k, v = _fetch(kv_pages, form, entry[0], wanted, chunk, whole)
            scores = _products(rows, k, precision, keys_first=few)
            if softcap is not None:
                scores = softcap * jnp.tanh(scores / softcap)
            return _fold(state, jnp.where(seen[:, None], scores, -jnp.inf), v, precision)

        state = _sweep(trip, chunks, count, _nothing(rows))
        if whole:
            state = state._replace(out=state.out[..., VALUE_LANE : VALUE_LANE + d])
        return _finish(state, t)

    count = jnp.clip(mask.count, 0, width)
    out, lse = lax.map(sequence, (q, *padded, count, lengths, q_lens))
    return out.astype(q.dtype), lse


def _few(rows: int, form: Layout) -> bool:
    """Whether the copy of keys and values costs more than the products with so few query rows."""
    return rows // form.kv_heads <= _FEW_ROWS


def _chunks(rows: int, form: Layout, width: int, target: Target) -> list[_Chunk]:
    """Chooses chunks, the longest first; the last also takes what is less than it."""
    hkv, page_size = form.kv_heads, form.page_size
    few, cpu = _few(rows, form), target.platform == "cpu"
    room = _CHUNK_BYTES_ELSEWHERE
    if cpu:
        room = _CHUNK_BYTES_FEW_ROWS if few else _CHUNK_BYTES
    slot_bytes = max(2 * hkv * form.head_dim * 4, rows * 4)
    pages = max(1, min(width, room // (slot_bytes * page_size)))
    if not few:
        return [_Chunk(1, pages)]
    # With few rows the copy out of the pool is what costs, and it is faster without transposing.
    tile = max(1, min(pages, 64 // page_size))
    tiles = max(1, pages // tile)
    if not cpu or tiles == 1:
        return [_Chunk(tiles, tile)]
    rest = max(1, tiles // _REST)
    return [_Chunk(tiles - tiles % rest, tile), _Chunk(rest, tile)]


def _takes_whole_rows(form: Layout, target: Target) -> bool:
    """Whether a few rows meet keys and values that share rows as they lie in the pool.

    Queries and weights then meet twice the lanes, half of them for nothing. With few rows on a CPU
    that is cheap against two more copies that take keys and values apart.
    """
    return target.platform == "cpu" and form.packed and not form.quantized


def _sweep(
    trip: Callable[..., _State], chunks: list[_Chunk], count: jax.Array, state: _State
) -> _State:
    """Runs trips over `count` entries, as many of the longest chunk as fit, then of the next."""
    done: jax.Array | int = 0
    for chunk in chunks:
        left = count - done
        trips = left // chunk.entries if chunk is not chunks[-1] else -(-left // chunk.entries)
        state = lax.fori_loop(0, trips, partial(trip, chunk, done), state)
        done += trips * chunk.entries
    return state


def _positions(span: jax.Array, block: jax.Array, live: jax.Array, page_size: int) -> jax.Array:
    """Absolute positions `[E, PS]` of the slots of entries, `_NOWHERE` for hidden ones."""
    slot = jnp.arange(page_size, dtype=jnp.int32)
    lo, hi = (span & 0xFFFF)[:, None], (span >> 16)[:, None]
    shown = live[:, None] & (slot >= lo) & (slot < hi)
    return jnp.where(shown, block[:, None] * page_size + slot, _NOWHERE)


def _within(
    position: jax.Array, first: jax.Array, last: jax.Array, window: int | None
) -> jax.Array:
    """Which positions a query at `last` may see, and in a window some query from `first` on."""
    seen = position <= last
    return seen if window is None else seen & (position > first - window)


def _fetch(
    kv_pages: KVPages, form: Layout, page: jax.Array, wanted: jax.Array, chunk: _Chunk, whole: bool
) -> tuple[jax.Array, jax.Array]:
    """Copies keys and values of pages to float32 `[tiles, HKV, pages * PS, D]`.

    Values of slots that are not `wanted` `[tiles, pages * PS]` are 0: a hidden slot may hold
    anything, and zero times NaN would be NaN. With `whole`, both are the rows of the pool.
    """

    def tiled(x):
        x = x.reshape(chunk.tiles, chunk.pages, form.kv_heads, form.page_size, -1).swapaxes(1, 2)
        return x.reshape(chunk.tiles, form.kv_heads, chunk.pages * form.page_size, -1)

    def side(i):
        x, scales = read_pages(kv_pages, form, page, i)
        x = tiled(x).astype(jnp.float32)
        return x if scales is None else x * tiled(scales)

    shown = wanted[:, None, :, None]
    if whole:
        rows = cast(jax.Array, kv_pages).at[page, 0].get(mode="clip")
        rows = jnp.where(shown, tiled(rows).astype(jnp.float32), 0)
        return rows, rows
    return side(0), jnp.where(shown, side(1), 0)


def _products(
    rows: jax.Array, k: jax.Array, precision: lax.Precision, *, keys_first: bool
) -> jax.Array:
    """Products `[tiles, HKV, R, K]` of the rows `[HKV, R, D]` with keys `[tiles, HKV, K, D]`."""
    tiled = jnp.broadcast_to(rows, (k.shape[0], *rows.shape))
    if keys_first:  # a CPU multiplies a large matrix by a few columns twice as fast as turned round
        return jnp.einsum("chkd,chrd->chkr", k, tiled, precision=precision).swapaxes(2, 3)
    return jnp.einsum("chrd,chkd->chrk", tiled, k, precision=precision)


def _nothing(rows: jax.Array) -> _State:
    # The highest score starts finite, so that exp(-inf - high) is 0 and never exp(-inf + inf).
    high = jnp.full_like(rows[..., 0], jnp.finfo(jnp.float32).min)
    return _State(high, jnp.zeros_like(high), jnp.zeros_like(rows))


def _fold(state: _State, scores: jax.Array, v: jax.Array, precision: lax.Precision) -> _State:
    """Takes a chunk of scores `[tiles, HKV, R, K]` and values into the online softmax."""
    high = jnp.maximum(state.high, scores.max((0, 3)))
    shrink = jnp.exp(state.high - high)
    weights = jnp.exp(scores - high[..., None])
    out = jnp.einsum("chrk,chkd->chrd", weights, v, precision=precision).sum(0)
    total = shrink * state.total + weights.sum((0, 3))
    return _State(high, total, shrink[..., None] * state.out + out)


def _finish(state: _State, t: int) -> tuple[jax.Array, jax.Array]:
    """Normalises the rows `[HKV, T * G]` and puts them back as `[T, HQ, D]` and `[T, HQ]`."""
    some = state.total > 0
    total = jnp.where(some, state.total, 1)
    out = jnp.where(some[..., None], state.out / total[..., None], 0)
    lse = jnp.where(some, state.high + jnp.log(total), -jnp.inf)

    def heads_last(x):
        hkv, rows = x.shape[:2]
        return x.reshape(hkv, t, rows // t, -1).swapaxes(0, 1).reshape(t, hkv * rows // t, -1)

    return heads_last(out), heads_last(lse)[..., 0]
