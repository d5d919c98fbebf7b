"""Paged attention for Hopper GPUs (H100, H200): a Pallas kernel for Mosaic GPU.

The products are swapped, `S^T = K Q^T` and `O^T = V^T P^T`, so that tokens and head dim lie along
the 64 rows that a warpgroup's matrix instruction wants, and the few rows of a decode step (the
GQA group of one KV head) along the other side, padded to a multiple of 8 and not of 64.

A program of the grid takes one tile of queries of one sequence and KV head, and one split: its
share of the visible entries, worked out from their number on the device. Its first warpgroup
computes; the second walks the table and lets the copy engine fetch blocks of tokens, keys and
values by turns, into a ring of buffers in shared memory. Splits leave float32 partial sums, which
`join_splits` adds up. Pages of 8 bits come with their scales and are widened in shared memory.

What bounds a decode step is how fast the pool is read, so the defaults keep bytes in flight: 64 to
96 KiB a program, and programs small enough in shared memory and registers for two to share a
multiprocessor and hide each other's start, softmax and tail. At a head dim of 512 one program has
the multiprocessor and its ring three buffers of 64 KiB. Bandwidth times latency asks for about
40 KiB a multiprocessor. The fetching warpgroup reads page ids before it waits for a free buffer,
off the critical path. Where rows are few, the sum of the weights is kept by thread and reduced
across the warpgroup once at the end, which leaves one reduction (the maximum) to a block. A chunk
of queries walks all visible entries for each of its tiles, also those after the tile: decode is
what this is made for. The defaults come from such reckoning and not from a clock.
"""

from __future__ import annotations

import math
from functools import reduce
from operator import and_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from da_jax.kernels.chips import Target
from da_jax.kernels.paged_attention.mask import BlockMask
from da_jax.kernels.paged_attention.mosaic_gpu_plan import (
    SWIZZLED,
    Config,
    Plan,
    candidates,
    misfit,
    plan_of,
    reduction_bytes,
    refuses,
    scratch,
)
from da_jax.kernels.paged_attention.pool import VALUE_LANE, KVPages
from da_jax.kernels.paged_attention.prepare import (
    Tables,
    group_rows,
    join_splits,
    tables,
    ungroup_rows,
)
from da_jax.kernels.paged_attention.support import problem_of

__all__ = ["Config", "attend", "candidates", "refuses"]

_INTERPRETER: Any = getattr(plgpu, "InterpretGPUParams", None)  # since jax 0.11
_LOG2E = math.log2(math.e)
_LOWEST = -1e30  # finite, so that a difference of two of them is 0 and not NaN


class _Entry(NamedTuple):
    """What a block takes of one entry: slots `lo <= slot < hi` of the piece, from `position`."""

    lo: jax.Array
    hi: jax.Array
    position: jax.Array


class _Refs(NamedTuple):
    """Arguments of the kernel: global memory, then shared memory, then barriers."""

    q: Any  # [B, HKV, tiles, rows, lanes]
    kv: Any  # [P, 2, HKV, PS, lanes], or packed
    scales: Any  # [P, 2, HKV, PS], or None
    table: Tables
    out: Any  # [B, HKV, tiles, splits, lanes, rows]
    high: Any  # [B, HKV, tiles, splits, rows]
    total: Any  # [B, HKV, tiles, splits, rows]
    q_tile: Any  # [rows, lanes]
    ring: Any  # [stages, block, lanes], keys and values by turns
    weights: Any  # [rows, block]
    slab: Any  # [slab, rows] of the output on its way out
    row: Any  # [rows]
    q_full: Any
    full: Any  # [stages] the copy engine has filled a buffer
    empty: Any  # [stages] the product has read a buffer
    wide: Any = None  # [block, lanes] a block of 8 bits widened
    scale_ring: Any = None  # [stages, block]


class _State(NamedTuple):
    """Online softmax so far, in registers; logarithms are to base 2."""

    high: jax.Array  # [rows] highest score, finite
    total: jax.Array  # sum of weights: [rows], or parts of it [block, rows] where deferred
    out: tuple[jax.Array, ...]  # slabs [slab, rows] of the sum of weights times values


class _Program(NamedTuple):
    """Which part of the work a program of the grid does.

    Attributes:
        start: first unit of its share; a unit is what a block takes of one entry.
        end: unit after its last.
        steps: blocks it walks.
    """

    b: jax.Array
    head: jax.Array
    tile: jax.Array
    split: jax.Array
    start: jax.Array
    end: jax.Array
    steps: jax.Array


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
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Backend of `paged_attention`: the output `[B, T, HQ, D]` and the float32 lse `[B, T, HQ]`."""
    problem = problem_of(q, kv_pages, mask, window)
    form, t, d = problem.form, problem.queries, q.shape[3]
    plan = plan_of(problem, config or candidates(problem, target)[0])
    reason = misfit(plan, target)
    if reason is not None:
        raise ValueError(f"{plan.config}: {reason}")
    table = tables(
        mask, lengths, q_lens, num_pages=form.num_pages, page_size=form.page_size,
        window=window, tile=plan.tile, tiles=plan.tiles,
    )  # fmt: skip
    rows = group_rows(q, form.kv_heads, plan.tile, plan.rows)
    rows = jnp.pad(rows, [(0, 0)] * 4 + [(0, plan.lanes - d)])
    call = _call(plan, problem, rows.dtype, scale, softcap, window, interpret)
    out, high, total = call(rows, *jax.tree.leaves(kv_pages), *table)
    out, lse = join_splits(out.swapaxes(-1, -2)[..., :d], high / _LOG2E, total, axis=3)
    out, lse = (ungroup_rows(x, t, plan.tile, plan.group) for x in (out, lse))
    return out.astype(q.dtype), lse


def _call(plan, problem, dtype, scale, softcap, window, interpret):
    config, form = plan.config, problem.form

    def paged_attention(q, kv, *rest):
        scales, rest = (rest[0], rest[1:]) if plan.quantized else (None, rest)
        table, rest = Tables(*rest[: len(Tables._fields)]), rest[len(Tables._fields) :]
        refs = _Refs(q, kv, scales, table, *rest)
        program = _program(plan, refs.table)

        @pl.when(lax.axis_index("warpgroup") == 0)
        def _():
            _compute(plan, refs, program, scale, softcap, window)

        @pl.when(lax.axis_index("warpgroup") == 1)
        def _():
            _fetch(plan, refs, program)

    partial_shape = (problem.batch, form.kv_heads, plan.tiles, config.splits)
    sums = jax.ShapeDtypeStruct((*partial_shape, plan.rows), jnp.float32)
    return plgpu.kernel(
        paged_attention,
        out_type=[
            jax.ShapeDtypeStruct((*partial_shape, plan.lanes, plan.rows), jnp.float32), sums, sums
        ],
        grid=(config.splits, form.kv_heads, problem.batch * plan.tiles),
        grid_names=("split", "head", "tile"),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=scratch(plan, dtype),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=reduction_bytes(plan)
        ),
        interpret=_INTERPRETER() if interpret else None,
    )  # fmt: skip


def _program(plan: Plan, table: Tables) -> _Program:
    at, split = lax.axis_index("tile"), lax.axis_index("split")
    b, tile = lax.div(at, jnp.int32(plan.tiles)), lax.rem(at, jnp.int32(plan.tiles))
    start, end = _share(table.count[b, tile] * plan.parts, split, plan.config.splits, plan.pages)
    steps = lax.div(jnp.maximum(end - start, 0) + plan.pages - 1, jnp.int32(plan.pages))
    return _Program(b, lax.axis_index("head"), tile, split, start, end, steps)


def _share(
    units: jax.Array, split: jax.Array, splits: int, step: int
) -> tuple[jax.Array, jax.Array]:
    """The half-open range of units that a split takes: equal shares, whole blocks."""
    share = lax.div(units + splits * step - 1, jnp.int32(splits * step)) * step
    return split * share, jnp.minimum((split + 1) * share, units)


def _fetch(plan: Plan, refs: _Refs, program: _Program) -> None:
    """The warpgroup that fetches: keys and values of each block, as buffers become free."""
    stages, pages = plan.config.stages, plan.pages

    @pl.loop(0, program.steps)
    def _(i):
        units = [jnp.minimum(program.start + i * pages + j, program.end - 1) for j in range(pages)]
        sources = [_source(plan, refs, program, unit) for unit in units]
        for side in (0, 1):
            turn = 2 * i + side
            at = lax.rem(turn, jnp.int32(stages))

            @pl.when(turn >= stages)
            def _(at=at):
                _wait(refs.empty.at[at])

            row = 0 if plan.packed else side
            lanes = pl.ds(side * VALUE_LANE, plan.lanes) if plan.packed else slice(None)
            for j, (page, tokens) in enumerate(sources):
                plgpu.copy_gmem_to_smem(
                    refs.kv.at[page, row, program.head, tokens, lanes],
                    refs.ring.at[at, pl.ds(j * plan.piece, plan.piece)],
                    refs.full.at[at],
                )
                if plan.quantized:
                    plgpu.copy_gmem_to_smem(
                        refs.scales.at[page, side, program.head, tokens],
                        refs.scale_ring.at[at, pl.ds(j * plan.piece, plan.piece)],
                        refs.full.at[at],
                    )

    # Every phase of a barrier is waited for, also the last ones.
    @pl.loop(0, jnp.minimum(2 * program.steps, stages))
    def _(i):
        turn = jnp.maximum(2 * program.steps - stages, 0) + i
        _wait(refs.empty.at[lax.rem(turn, jnp.int32(stages))])


def _source(plan: Plan, refs: _Refs, program: _Program, unit: jax.Array):
    """The page and the tokens of a unit."""
    page = refs.table.page[program.b, lax.div(unit, jnp.int32(plan.parts))]
    return page, pl.ds(lax.rem(unit, jnp.int32(plan.parts)) * plan.piece, plan.piece)


def _compute(plan: Plan, refs: _Refs, program: _Program, scale, softcap, window) -> None:
    """The warpgroup that computes: online softmax over the blocks of the program's share."""
    stages = jnp.int32(plan.config.stages)
    at = (program.b, program.head, program.tile)
    plgpu.copy_gmem_to_smem(refs.q.at[at], refs.q_tile, refs.q_full)
    _wait(refs.q_full)
    query = _query_positions(plan, refs.table, program) if plan.queries > 1 else None

    def step(i, state):
        entries = [_entry(plan, refs.table, program, i * plan.pages + j) for j in range(plan.pages)]
        key, value = lax.rem(2 * i, stages), lax.rem(2 * i + 1, stages)
        _wait_filled(refs.full.at[key])
        keys = _operand(plan, refs, key)
        scores = _matmul(keys, refs.q_tile.transpose((1, 0)), plan.scores)
        if plan.quantized:
            scores = scores * _scales(plan, refs, key)
        plgpu.barrier_arrive(refs.empty.at[key])
        seen = _seen(plan, entries, query, window)
        scores = jnp.where(seen, _logits(scores, scale, softcap), _LOWEST)
        high, total, weights, shrink = _fold(plan, state, scores, seen)
        _wait_filled(refs.full.at[value])
        values = _operand(plan, refs, value)
        if plan.quantized:
            weights = jnp.where(seen, weights * _scales(plan, refs, value), 0.0)
        refs.weights.transpose((1, 0))[...] = weights.astype(refs.weights.dtype)
        _hide_values(plan, values, entries)
        plgpu.commit_smem()
        out = []
        for n, slab in enumerate(state.out):
            part = values.at[:, pl.ds(n * plan.slab, plan.slab)].transpose((1, 0))
            new = _matmul(part, refs.weights.transpose((1, 0)), slab.shape)
            out.append(slab * lax.broadcast_in_dim(shrink, slab.shape, [1]) + new)
        plgpu.barrier_arrive(refs.empty.at[value])
        return _State(high, total, tuple(out))

    state = lax.fori_loop(0, program.steps, step, _nothing(plan))
    total = state.total.sum(axis=0) if plan.deferred else state.total
    to = (*at, program.split)
    _store(refs.row, state.high, refs.high.at[to])
    _store(refs.row, total, refs.total.at[to])
    for n, slab in enumerate(state.out):
        _store(refs.slab, slab, refs.out.at[(*to, pl.ds(n * plan.slab, plan.slab))])


def _nothing(plan: Plan) -> _State:
    layout = plgpu.Layout.WGMMA
    by_row = lambda x: plgpu.layout_cast(jnp.full((plan.rows,), x, jnp.float32), layout.reduce(0))
    zeros = lambda *shape: plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
    total = zeros(*plan.scores) if plan.deferred else by_row(0)
    slabs = [zeros(plan.slab, plan.rows) for _ in range(plan.lanes // plan.slab)]
    return _State(by_row(_LOWEST), total, tuple(slabs))


def _fold(plan: Plan, state: _State, scores: jax.Array, seen: jax.Array):
    """The highest score and the sum of weights with a block taken in, its weights, and the factor
    on what was summed before."""
    high = jnp.maximum(state.high, scores.max(axis=0))
    weights = jnp.exp2(scores - lax.broadcast_in_dim(high, plan.scores, [1]))
    weights = jnp.where(seen, weights, 0.0)
    shrink = jnp.exp2(state.high - high)
    if plan.deferred:
        total = state.total * lax.broadcast_in_dim(shrink, plan.scores, [1]) + weights
    else:
        total = state.total * shrink + weights.sum(axis=0)
    return high, total, weights, shrink


def _store(staging, values: jax.Array, destination) -> None:
    """Copies registers to global memory by way of shared memory."""
    staging[...] = values
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staging, destination)
    plgpu.wait_smem_to_gmem(0)


def _wait(barrier) -> None:
    plgpu.barrier_wait(barrier)


def _wait_filled(barrier) -> None:
    """Waits until the copy engine has filled a buffer."""
    plgpu.barrier_wait(barrier)


def _matmul(a, b, shape: tuple[int, int]) -> jax.Array:
    """The product of two matrices in shared memory, in float32 registers."""

    def product(accumulator):
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))


def _operand(plan: Plan, refs: _Refs, at: jax.Array):
    """A buffer of the ring as products take it: 8 bits are widened first."""
    if not plan.quantized:
        return refs.ring.at[at]
    for lane in range(0, plan.lanes, plan.row):
        part = refs.ring.at[at, :, pl.ds(lane, plan.row)][...]
        if plan.dtype == "float8_e4m3fn":
            part = part.astype(jnp.float16)  # what the hardware can do, and exact
        refs.wide.at[:, pl.ds(lane, plan.row)][...] = part.astype(refs.wide.dtype)
    plgpu.commit_smem()
    return refs.wide


def _scales(plan: Plan, refs: _Refs, at: jax.Array) -> jax.Array:
    """Scales of the tokens in a buffer of the ring, `[block, rows]`."""
    scales = plgpu.layout_cast(refs.scale_ring.at[at][...], plgpu.Layout.WGMMA.reduce(1))
    return lax.broadcast_in_dim(scales, plan.scores, [0])


def _logits(scores: jax.Array, scale: float, softcap: float | None) -> jax.Array:
    """Scaled and capped scores, in units of the logarithm to base 2."""
    if softcap is None:
        return scores * (scale * _LOG2E)
    # The hardware's tanh is good for 3 digits only.
    power = jnp.exp2(scores * (2 * scale / softcap * _LOG2E))
    return softcap * _LOG2E - (2 * softcap * _LOG2E) / (power + 1.0)


def _entry(plan: Plan, table: Tables, program: _Program, offset: jax.Array) -> _Entry:
    """The unit at an offset into the program's share; empty beyond its end."""
    unit = program.start + offset
    at = jnp.minimum(lax.div(unit, jnp.int32(plan.parts)), plan.width - 1)
    skipped = lax.rem(unit, jnp.int32(plan.parts)) * plan.piece
    span = jnp.where(unit < program.end, table.span[program.b, at], 0)
    position = skipped
    if plan.queries > 1:
        position = table.block[program.b, at] * plan.page_size + skipped
    return _Entry((span & 0xFFFF) - skipped, (span >> 16) - skipped, position)


def _query_positions(plan: Plan, table: Tables, program: _Program) -> jax.Array:
    """Position of the query of each row, along the columns of `[block, rows]`; -1 for padding."""
    row = plgpu.broadcasted_iota(jnp.int32, plan.scores, 1, layout=plgpu.Layout.WGMMA)
    query = program.tile * plan.tile + lax.div(row, jnp.full_like(row, plan.group))
    return jnp.where(query < table.q_lens[program.b], table.first[program.b] + query, -1)


def _seen(
    plan: Plan, entries: list[_Entry], query: jax.Array | None, window: int | None
) -> jax.Array:
    """Which tokens of a block each row sees, `[block, rows]`.

    With one query a sequence the spans say it all: the table is cut to the length and the window.
    """
    token = plgpu.broadcasted_iota(jnp.int32, plan.scores, 0, layout=plgpu.Layout.WGMMA)
    seen = token < 0
    for j, entry in enumerate(entries):
        slot = token - j * plan.piece
        shown = (slot >= entry.lo) & (slot < entry.hi)
        if query is not None:
            position = slot + entry.position
            shown = shown & (position <= query)
            if window is not None:
                shown = shown & (position > query - window)
        seen = seen | shown
    return seen


def _hide_values(plan: Plan, values, entries: list[_Entry]) -> None:
    """Zeroes hidden values in shared memory, where a block has any: they may be NaN."""
    whole = [(entry.lo <= 0) & (entry.hi >= plan.piece) for entry in entries]

    @pl.when(~reduce(and_, whole))
    def _():
        shape = (plan.config.block, SWIZZLED)
        token = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
        shown = token < 0
        for j, entry in enumerate(entries):
            slot = token - j * plan.piece
            shown = shown | ((slot >= entry.lo) & (slot < entry.hi))
        for lane in range(0, plan.lanes, SWIZZLED):
            slab = values.at[:, pl.ds(lane, SWIZZLED)]
            slab[...] = jnp.where(shown, slab[...], jnp.zeros((), slab.dtype))
