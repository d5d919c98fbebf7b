"""Paged attention on TPU, in Pallas.

The grid runs over cores (each takes a share of the KV heads) and, within a core, over tiles of
queries of one sequence after the other. A tile walks the entries of its sequence in blocks of
several pages: while one block is computed, the pages of the next are on their way from HBM into the
other of two buffers, also across the border to the next tile. The number of blocks is data.

Scores are softmaxed online in float32. Slots that nobody may see can hold NaN: in the keys it only
reaches scores that are replaced anyway, in the values it is overwritten after a page has arrived,
and only pages that have hidden slots pay for that.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from da_jax.kernels.chips import Target
from da_jax.kernels.paged_attention.mask import BlockMask
from da_jax.kernels.paged_attention.mosaic_tpu_pages import (
    Block,
    Refs,
    clean_hidden,
    clear_buffers,
    read_spans,
    start_block,
    wait_block,
)
from da_jax.kernels.paged_attention.mosaic_tpu_plan import (
    LANES,
    Config,
    Plan,
    candidates,
    make_plan,
    pages_of_unit,
    refuses,
    vmem_limit,
)
from da_jax.kernels.paged_attention.pool import (
    VALUE_LANE,
    KVPages,
    QuantizedPages,
)
from da_jax.kernels.paged_attention.prepare import Tables, group_rows, tables, ungroup_rows
from da_jax.kernels.paged_attention.support import problem_of

_MANY_ROWS = 64  # with fewer, heads are unrolled so that they overlap
_LOWEST = float(jnp.finfo(jnp.float32).min)

__all__ = ["Config", "attend", "candidates", "refuses"]


class Slots(NamedTuple):
    """The slots of a block, int32 `[1, slots]` each: number in the page, visible range, block."""

    number: jax.Array
    lo: jax.Array
    hi: jax.Array
    block: jax.Array | None

    @property
    def shown(self) -> jax.Array:
        """Which slots some query of the sequence sees."""
        return (self.number >= self.lo) & (self.number < self.hi)


def read_slots(refs: Refs, plan: Plan, at: Block, spans: list[jax.Array]) -> Slots:
    """Spreads the entries of a block over its slots."""
    size = plan.form.page_size
    unit = pages_of_unit(size)
    lane = lax.broadcasted_iota(jnp.int32, (1, unit * size), 1)

    def spread(values: list[jax.Array]) -> jax.Array:
        units = []
        for start in range(0, plan.pages, unit):
            row = jnp.zeros((1, unit * size), jnp.int32)
            for place, value in enumerate(values[start : start + unit]):
                row = jnp.where(lane // size == place, value, row)
            units.append(row)
        return jnp.concatenate(units, axis=1)

    span = spread(spans)
    logical = None
    if plan.queries > 1:
        logical = spread([refs.block[at.entry(plan, j)] for j in range(plan.pages)])
    number = jnp.concatenate([lane % size] * (plan.pages // unit), axis=1)
    return Slots(number, span & 0xFFFF, span >> 16, logical)


def visible(refs: Refs, plan: Plan, step: jax.Array, slots: Slots) -> jax.Array:
    """Which rows see which slots: `[1, slots]` for one query a sequence, else `[rows, slots]`."""
    if slots.block is None:
        return slots.shown
    sequence, tile = step // plan.tiles, step % plan.tiles
    query = lax.broadcasted_iota(jnp.int32, (plan.rows, 1), 0) // plan.group + tile * plan.tile
    # A query that is not there sits before everything, so it sees nothing.
    query = jnp.where(query < refs.q_lens[sequence], query + refs.first[sequence], -1)
    position = slots.block * plan.form.page_size + slots.number
    seen = slots.shown & (position <= query)
    if plan.window is not None:
        seen &= position > query - plan.window
    return seen


def scale_rows(refs: Refs, plan: Plan, at: Block, slots: Slots) -> list[jax.Array]:
    """The scales of a block, of its keys and of its values: `[HKV, slots]` float32, 0 if hidden."""
    size = plan.form.page_size
    rows = []
    for side in (0, 1):
        parts = [refs.scale_buffer[at.buffer, j, side, :, :size] for j in range(plan.pages)]
        rows.append(jnp.where(slots.shown, jnp.concatenate(parts, axis=1), 0.0))
    return rows


def fold_block(refs: Refs, plan: Plan, at: Block, spans: list[jax.Array]) -> None:
    """Takes a block that has arrived into the softmax of the tile."""
    slots = read_slots(refs, plan, at, spans)
    seen = visible(refs, plan, at.step, slots)
    scales = scale_rows(refs, plan, at, slots) if plan.form.quantized else None

    def fold(head: Any) -> None:
        key_scale = value_scale = None
        if scales is not None:
            key_scale, value_scale = (_row_of(x, plan, head) for x in scales)
        _fold_head(refs, plan, at.buffer, head, seen, key_scale, value_scale)

    if plan.rows > _MANY_ROWS:
        pl.loop(0, plan.heads)(fold)
    else:
        for head in range(plan.heads):
            fold(head)


def _row_of(rows: jax.Array, plan: Plan, head: Any) -> jax.Array:
    """The row of a head of this core: `[1, slots]`."""
    if plan.cores == 1 and isinstance(head, int):
        return rows[head : head + 1]
    index = pl.program_id(0) * plan.heads + head
    mine = lax.broadcasted_iota(jnp.int32, rows.shape, 0) == index
    return jnp.where(mine, rows, 0.0).sum(0, keepdims=True)


def _fold_head(
    refs: Refs,
    plan: Plan,
    buffer: jax.Array,
    head: Any,
    seen: jax.Array,
    key_scale: jax.Array | None,
    value_scale: jax.Array | None,
) -> None:
    """Takes a block of one head into the softmax."""
    compute = jnp.dtype(plan.compute)
    precision = lax.Precision.HIGHEST if compute == jnp.float32 else lax.Precision.DEFAULT

    def side(i: int) -> jax.Array:
        x = refs.kv_buffer[buffer, :, i, head]
        return x.reshape(plan.slots, plan.lanes).astype(compute)

    def product(x: jax.Array, y: jax.Array, contract: int) -> jax.Array:
        dims = (((1,), (contract,)), ((), ()))
        return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)

    scores = product(refs.q[head], side(0), 1) * plan.scale
    if key_scale is not None:
        scores *= key_scale
    if plan.softcap is not None:
        scores = plan.softcap * jnp.tanh(scores / plan.softcap)
    scores = jnp.where(seen, scores, -jnp.inf)
    before = refs.high[head][:, :1]
    high = jnp.maximum(before, scores.max(1, keepdims=True))
    weights, shrink = jnp.exp(scores - high), jnp.exp(before - high)
    total = shrink * refs.total[head][:, :1] + weights.sum(1, keepdims=True)
    if value_scale is not None:
        weights *= value_scale
    refs.high[head] = jnp.broadcast_to(high, (plan.rows, LANES))
    refs.total[head] = jnp.broadcast_to(total, (plan.rows, LANES))
    values = side(refs.kv_buffer.shape[2] - 1)
    refs.acc[head] = shrink * refs.acc[head] + product(weights.astype(compute), values, 0)


def _next_step(refs: Refs, step: Any, steps: int) -> jax.Array:
    """The first step after this one that has entries, or the number of steps."""

    def idle(at):
        return (at < steps) & (refs.count[jnp.minimum(at, steps - 1)] == 0)

    return lax.while_loop(idle, lambda at: at + 1, jnp.int32(step + 1))


def _kernel(plan: Plan, steps: int, *given: Any) -> None:
    """One step of the grid; `given` are the `Refs` in order, without those of scales if none."""
    quantized = plan.form.quantized
    names = [name for name in Refs._fields if quantized or not name.startswith("scale")]
    refs = Refs(**{**dict.fromkeys(Refs._fields), **dict(zip(names, given))})
    step = pl.program_id(1)

    @pl.when(step == 0)
    def _():
        refs.parity[0] = 0
        clear_buffers(refs, plan)
        earliest = _next_step(refs, -1, steps)

        @pl.when(earliest < steps)
        def _():
            start_block(refs, plan, Block(earliest, jnp.int32(0), jnp.int32(0)))

    # The highest score starts finite, so that exp(-inf - high) is 0 and never exp(-inf + inf).
    refs.high[...] = jnp.full(refs.high.shape, _LOWEST, jnp.float32)
    refs.total[...] = jnp.zeros(refs.total.shape, jnp.float32)
    refs.acc[...] = jnp.zeros(refs.acc.shape, jnp.float32)
    blocks = pl.cdiv(refs.count[step], plan.pages)

    @pl.loop(0, blocks)
    def _(number):
        at = Block(step, number, refs.parity[0])
        refs.parity[0] = 1 - at.buffer
        last = number + 1 == blocks
        upcoming = lax.cond(last, lambda: _next_step(refs, step, steps), lambda: step)

        @pl.when(upcoming < steps)
        def _():
            start_block(refs, plan, Block(upcoming, jnp.where(last, 0, number + 1), 1 - at.buffer))

        wait_block(refs, plan, at)
        spans = read_spans(refs, plan, at)
        clean_hidden(refs, plan, at, spans)
        fold_block(refs, plan, at, spans)

    total = refs.total[...]
    some = total > 0
    safe = jnp.where(some, total, 1.0)
    refs.out[...] = (refs.acc[...] / safe[:, :, :1]).astype(refs.out.dtype)
    lse = jnp.where(some, refs.high[...] + jnp.log(safe), -jnp.inf)
    for head in range(plan.heads):  # the same in all lanes, so that turned over any row will do
        refs.lse[head] = lse[head].T[:1]


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
    config: Config | None,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Backend of `paged_attention`: the output `[B, T, HQ, D]` and the float32 lse `[B, T, HQ]`."""
    batch, queries, _, head_dim = q.shape
    problem = problem_of(q, kv_pages, mask, window)
    form = problem.form
    plan = make_plan(problem, target, config or Config())
    plan = dataclasses.replace(plan, scale=scale, softcap=softcap, window=window)
    cut = tables(
        mask, lengths, q_lens, num_pages=form.num_pages, page_size=form.page_size, window=window,
        tile=plan.tile, tiles=plan.tiles,
    )  # fmt: skip
    parts = []
    for start in range(0, batch, plan.sequences):
        some = slice(start, start + plan.sequences)
        part = Tables(*(x[some] for x in cut))
        parts.append(_call(q[some], kv_pages, part, plan, target, interpret))
    out, lse = (jnp.concatenate(x) if len(x) > 1 else x[0] for x in zip(*parts))
    lane = VALUE_LANE if form.packed else 0
    out = out[..., lane : lane + head_dim].astype(q.dtype)
    ungroup = partial(ungroup_rows, queries=queries, tile=plan.tile, group=plan.group)
    return ungroup(out), ungroup(lse[..., 0, :])


def _call(
    q: jax.Array, kv_pages: KVPages, cut: Tables, plan: Plan, target: Target, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel: `[B, HKV, tiles, rows, lanes]` and float32 `[B, HKV, tiles, 1, rows]`."""
    form, (batch, _, _, head_dim) = plan.form, q.shape
    out_dtype = q.dtype if q.dtype != jnp.float16 else jnp.float32
    q = jnp.pad(q, [(0, 0)] * 3 + [(0, plan.lanes - head_dim)]).astype(plan.compute)
    rows = group_rows(q, form.kv_heads, plan.tile, plan.rows)
    values, scales = kv_pages, []
    if isinstance(kv_pages, QuantizedPages):
        values, scales = kv_pages.values, [kv_pages.scales]
        if isinstance(scales[0], jax.core.Tracer):
            # XLA on TPU7x would move all scales to VMEM before each call of a larger program.
            scales = [pltpu.with_memory_space_constraint(scales[0], pltpu.HBM)]
    steps = batch * plan.tiles

    def tile_of(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, plan.heads, None, *shape),
            lambda core, step, *_: (step // plan.tiles, core, step % plan.tiles, 0, 0),
        )

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    shape = (batch, form.kv_heads, plan.tiles)
    kernel = pl.pallas_call(
        lambda *refs: _kernel(plan, steps, *refs),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=(plan.cores, steps),
            in_specs=[tile_of(plan.rows, plan.lanes), anywhere, *([anywhere] * len(scales))],
            out_specs=[tile_of(plan.rows, plan.lanes), tile_of(1, plan.rows)],
            scratch_shapes=_scratch(plan, values, *scales),
        ),
        out_shape=[
            jax.ShapeDtypeStruct((*shape, plan.rows, plan.lanes), out_dtype),
            jax.ShapeDtypeStruct((*shape, 1, plan.rows), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel" if plan.cores > 1 else "arbitrary", "arbitrary"),
            vmem_limit_bytes=vmem_limit(plan, target),
            disable_bounds_checks=not interpret,  # `tables` keeps page ids inside the pool
        ),
        cost_estimate=_cost(plan, steps),
        interpret=pltpu.InterpretParams(uninitialized_memory="nan") if interpret else False,
        name=f"paged_attention_t{plan.queries}_n{plan.pages}",
    )
    block = cut.block.reshape(-1) if plan.queries > 1 else jnp.zeros(1, jnp.int32)
    flat = [cut.page.reshape(-1), cut.span.reshape(-1), block, cut.count.reshape(-1)]
    return kernel(*flat, cut.first, cut.q_lens, rows, values, *scales)


def _scratch(plan: Plan, values: Any, scales: Any = None) -> list[Any]:
    """What `Refs` has from `kv_buffer` on."""
    state = (plan.heads, plan.rows, LANES)
    two = pltpu.SemaphoreType.DMA((2,))
    scratch = [
        pltpu.VMEM((2, plan.pages, values.shape[1], plan.heads, *values.shape[3:]), values.dtype),
        two,
        pltpu.SMEM((1,), jnp.int32),
        pltpu.VMEM(state, jnp.float32),
        pltpu.VMEM(state, jnp.float32),
        pltpu.VMEM((plan.heads, plan.rows, plan.lanes), jnp.float32),
    ]
    if scales is not None:
        scratch += [pltpu.VMEM((2, plan.pages, *scales.shape[1:]), scales.dtype), two]
    return scratch


def _cost(plan: Plan, steps: int) -> pl.CostEstimate:
    """What a call costs with every entry in use."""
    slots = steps * plan.width * plan.form.page_size
    scores = slots * plan.form.kv_heads * plan.rows
    return pl.CostEstimate(
        flops=4 * scores * plan.lanes,
        transcendentals=scores,
        bytes_accessed=steps * plan.width * plan.form.page_bytes,
    )
