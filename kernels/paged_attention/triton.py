"""Decode and chunked prefill on NVIDIA GPUs with Pallas and its Triton backend.

The grid is (sequences x tiles of queries, KV heads, splits). A split walks its share of the slots
of the entries in use, `block` slots at a time, and gathers keys and values through pointers: a
block may be several pages or a part of one. Slots that no query of the tile sees are not loaded at
all, so what they hold cannot matter. Splits leave partial softmaxes in float32; XLA joins them.

The rows of a tile are its queries times the query heads of a KV head, padded to a power of two for
the tensor cores. A step looks up the pages of the next one, because Triton keeps several blocks in
flight only if their addresses do not wait for a load of the same step.

JAX deprecated this backend in 0.11 and says so whenever it compiles such a kernel.
"""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from da_jax.kernels.chips import Target
from da_jax.kernels.paged_attention import prepare
from da_jax.kernels.paged_attention.mask import BlockMask
from da_jax.kernels.paged_attention.pool import (
    VALUE_LANE,
    KVPages,
    Layout,
    QuantizedPages,
)
from da_jax.kernels.paged_attention.support import Problem, problem_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pallas import triton as plgpu

Ref: TypeAlias = Any

_LEAST = 16  # rows, slots and lanes of the smallest product on tensor cores
_NOWHERE = jnp.iinfo(jnp.int32).max
_LOWEST = float(jnp.finfo(jnp.float32).min)


@dataclass(frozen=True)
class Config:
    """Settings worth measuring.

    Attributes:
        splits: parts that the slots of a sequence are cut into.
        block: slots of a step; a power of two of at least 16.
        tile: queries of a program.
        warps: warps of a program; a power of two.
        stages: blocks in flight, the one at work included.
    """

    splits: int
    block: int
    tile: int
    warps: int
    stages: int


@dataclass(frozen=True)
class _Plan:
    """What is static in the kernel; `rows` is the padded number of rows of a tile."""

    form: Layout
    config: Config
    group: int
    rows: int
    tiles: int
    dtype: str  # what products take
    scale: float
    softcap: float | None
    window: int | None


def refuses(problem: Problem, target: Target) -> str | None:
    """Says why a problem does not fit, or None."""
    form = problem.form
    d = form.head_dim
    if d < _LEAST or d & (d - 1):
        return f"head dim {d}: it takes powers of two from {_LEAST} on; use xla"
    elements = math.prod(form.shape)
    if form.quantized and 1 << 31 < elements <= 1 << 32:
        return (
            f"a pool of {elements} bytes of {form.dtype}: from 2 to 4 GiB JAX computes addresses "
            "in 31 bits; make it smaller or larger"
        )
    need = _shared_memory(problem, target, Config(1, _LEAST, 1, 4, 2))
    if need > target.fast_memory:
        return (
            f"a group of {problem.group} with head dim {d} in {problem.compute_dtype} needs {need} "
            f"bytes of shared memory, {target.kind} has {target.fast_memory}: use fewer query "
            "heads a KV head, 16-bit queries and pages, or xla"
        )
    return None


def candidates(problem: Problem, target: Target) -> list[Config]:
    """Settings that fit, the default first, then what is worth measuring."""
    default = _default(problem, target)
    found = [default]
    found += [
        replace(default, block=block, stages=stages)
        for block in (default.block, 2 * default.block, default.block // 2)
        for stages in (2, 3, 4)
    ]
    found += [replace(default, warps=12 - default.warps)]
    found += [
        replace(default, splits=splits) for splits in (default.splits * 2, default.splits // 2)
    ]
    return [
        config
        for config in dict.fromkeys(found)
        if config.block >= _LEAST
        and 1 <= config.splits <= _steps(problem, config.block)
        and _shared_memory(problem, target, config) <= target.fast_memory
    ]


def _default(problem: Problem, target: Target) -> Config:
    """Three stages, or two, of as many slots as fit, and a program or two a multiprocessor."""
    d, wide = problem.form.head_dim, problem.compute_dtype == "float32"
    # Programs with larger products than these spill registers, sooner without tensor cores.
    most_rows = min(64, max(_LEAST, (1 << 12 if wide else 1 << 14) // d))
    block = min(64, max(_LEAST, (1 << 12) // d) if wide else max(32, (1 << 13) // d))
    tile = max(1, min(problem.queries, most_rows // problem.group))
    options = itertools.product((tile, -(-tile // 2), 1), (block, _LEAST), (3, 2))
    configs = (Config(1, slots, queries, 4, stages) for queries, slots, stages in options)
    fits = lambda config: _shared_memory(problem, target, config) <= target.fast_memory
    config = next(filter(fits, configs))
    heavy = wide or problem.form.quantized or _rows(problem, config.tile) * d >= 1 << 13
    resident = target.fast_memory // _shared_memory(problem, target, config)
    programs = problem.batch * problem.form.kv_heads * -(-problem.queries // config.tile)
    room = target.cores * min(2, resident)
    splits = max(1, min(room // programs, _steps(problem, config.block)))
    return replace(config, splits=splits, warps=8 if heavy else 4)


def _steps(problem: Problem, block: int) -> int:
    """Blocks of slots that a sequence may have."""
    return max(1, -(-problem.width * problem.form.page_size // block))


def _rows(problem: Problem, tile: int) -> int:
    return max(_LEAST, pl.next_power_of_2(tile * problem.group))


def _shared_memory(problem: Problem, target: Target, config: Config) -> int:
    """Bytes of shared memory of a program: what XLA's Triton allocates, or a little more."""
    form, rows = problem.form, _rows(problem, config.tile)
    size = jnp.dtype(problem.compute_dtype).itemsize
    slot = 2 * form.head_dim * jnp.dtype(form.dtype).itemsize + (8 if form.quantized else 0)
    waiting = (config.stages - 1) * config.block * slot
    operands = rows * (form.head_dim + config.block) * size
    if size == 4 and form.dtype != problem.compute_dtype:
        operands += config.block * form.head_dim * size
    # Larger products of these chips leave the result in a layout that is changed through memory.
    large = rows >= 64 and size == 2 and target.family in ("hopper", "blackwell")
    return waiting + operands + (rows * form.head_dim * 4 if large else 0) + 256


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
    """Backend of `paged_attention`: the output `[B, T, HQ, D]` and the float32 lse `[B, T, HQ]`.

    Raises:
        ValueError: `config` needs more shared memory than the target has.
    """
    problem = problem_of(q, kv_pages, mask, window)
    form, t = problem.form, problem.queries
    config = config or _default(problem, target)
    need = _shared_memory(problem, target, config)
    if need > target.fast_memory:
        raise ValueError(
            f"{config} needs {need} bytes of shared memory and {target.kind} has "
            f"{target.fast_memory}: lower block, stages or tile"
        )
    tiles = -(-t // config.tile)
    tables = prepare.tables(
        mask, lengths, q_lens, num_pages=form.num_pages, page_size=form.page_size, window=window,
        tile=config.tile, tiles=tiles,
    )  # fmt: skip
    plan = _Plan(
        form, config, problem.group, _rows(problem, config.tile), tiles, problem.compute_dtype,
        scale, softcap, window,
    )  # fmt: skip
    # The kernel pads the rows itself, which saves a copy of the queries.
    grouped = prepare.group_rows(q, form.kv_heads, config.tile, config.tile * problem.group)
    out, high, total = _call(grouped, kv_pages, tables, plan, interpret)
    out, lse = prepare.join_splits(out, high, total, axis=3)
    ungroup = partial(prepare.ungroup_rows, queries=t, tile=config.tile, group=problem.group)
    return ungroup(out).astype(q.dtype), ungroup(lse)


def _call(
    q: jax.Array, kv_pages: KVPages, tables: prepare.Tables, plan: _Plan, interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the kernel on `[B, HKV, tiles, tile * G, D]`; parts `[B, HKV, tiles, splits, ...]`."""
    b, hkv, tiles, used, d = q.shape
    config = plan.config
    pool = list(kv_pages) if isinstance(kv_pages, QuantizedPages) else [kv_pages]

    def spec(of: int, *shape: int) -> pl.BlockSpec:
        """A block of a sequence (1), of a tile of a KV head (3), or of a split of that (4)."""
        rest = (0,) * len(shape)
        places = {
            1: lambda i, h, s: (i // tiles, *rest),
            3: lambda i, h, s: (i // tiles, h, i % tiles, *rest),
            4: lambda i, h, s: (i // tiles, h, i % tiles, s, *rest),
        }
        return pl.BlockSpec((*(None,) * of, *shape), places[of])

    width = tables.page.shape[1]
    parts = (b, hkv, tiles, config.splits, used)
    return pl.pallas_call(
        partial(_kernel, plan=plan),
        grid=(b * tiles, hkv, config.splits),
        in_specs=[
            spec(3, used, d),
            *(spec(1, width) for _ in (tables.page, tables.span, tables.block)),
            pl.BlockSpec((None, 1), lambda i, h, s: (i // tiles, i % tiles)),
            *(pl.BlockSpec((1,), lambda i, h, s: (i // tiles,)) for _ in range(2)),
            *(pl.BlockSpec(x.shape, lambda i, h, s, n=x.ndim: (0,) * n) for x in pool),
        ],
        out_specs=[spec(4, used, d), spec(4, used), spec(4, used)],
        out_shape=[
            jax.ShapeDtypeStruct((*parts, d), jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.float32),
        ],
        # Without these JAX would take the Mosaic backend.
        compiler_params=plgpu.CompilerParams(num_warps=config.warps, num_stages=config.stages),
        interpret=interpret,
        name="paged_attention_triton",
    )(q, *tables, *pool)


def _kernel(
    q_ref: Ref,
    page_ref: Ref,
    span_ref: Ref,
    block_ref: Ref,
    count_ref: Ref,
    first_ref: Ref,
    q_lens_ref: Ref,
    *refs: Ref,
    plan: _Plan,
) -> None:
    """One split of one tile and KV head: refs `[rows, D]`, three `[W]`, three `[1]`, the pool, and
    of the outputs `[rows, D]` and two `[rows]`."""
    *pool, out_ref, high_ref, total_ref = refs
    config, form = plan.config, plan.form
    head, split, count = pl.program_id(1), pl.program_id(2), count_ref[0]
    used, d = q_ref.shape
    row, lane = jnp.arange(plan.rows), jnp.arange(d)
    real = (row < used)[:, None]
    q = plgpu.load(q_ref.at[row[:, None], lane[None]], mask=real, other=0).astype(plan.dtype)
    t0 = lax.rem(pl.program_id(0), plan.tiles) * config.tile
    t = t0 + row // plan.group
    t_end = jnp.minimum(t0 + config.tile, q_lens_ref[0])
    query = jnp.where(t < t_end, first_ref[0] + t, -1)  # positions; -1 sees nothing
    earliest, last = first_ref[0] + t0, first_ref[0] + t_end - 1
    locate = partial(_locate, (page_ref, span_ref, block_ref), count, config.block, form)

    def step(i, carry):
        (page, slot, position), high, total, out = carry
        wanted = _seen(position, last, earliest, plan.window)
        k, v = (_gather(pool[0], form, side, head, page, slot, wanted) for side in (0, 1))
        scores = _dot(q, k.astype(plan.dtype), 1) * plan.scale
        if form.quantized:
            scores *= _gather_scales(pool[1], 0, head, page, slot, wanted)[None]
        if plan.softcap is not None:
            scores = plan.softcap * jnp.tanh(scores / plan.softcap)
        seen = _seen(position[None], query[:, None], query[:, None], plan.window)
        scores = jnp.where(seen, scores, -jnp.inf)
        peak = jnp.maximum(high, scores.max(1))
        shrink, weights = jnp.exp(high - peak), jnp.exp(scores - peak[:, None])
        total = shrink * total + weights.sum(1)
        if form.quantized:
            weights *= _gather_scales(pool[1], 1, head, page, slot, wanted)[None]
        out = shrink[:, None] * out + _dot(weights.astype(plan.dtype), v.astype(plan.dtype), 0)
        return locate(i + 1), peak, total, out

    begin, end = _share(split, config.splits, _blocks(count, form.page_size, config.block))
    # The highest score starts finite, so that exp(-inf - high) is 0 and never exp(-inf + inf).
    high = jnp.full((plan.rows,), _LOWEST, jnp.float32)
    start = (locate(begin), high, jnp.zeros_like(high), jnp.zeros((plan.rows, d), jnp.float32))
    _, high, total, out = lax.fori_loop(begin, end, step, start)
    plgpu.store(out_ref.at[row[:, None], lane[None]], out, mask=real)
    plgpu.store(high_ref.at[row], high, mask=row < used)
    plgpu.store(total_ref.at[row], total, mask=row < used)


def _blocks(count: jax.Array, page_size: int, block: int) -> jax.Array:
    """Blocks that hold the slots of `count` entries."""
    return lax.div(count * page_size + block - 1, block)


def _share(split: jax.Array, splits: int, blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The blocks `begin <= i < end` that a split walks; shares differ by one block at most."""
    return lax.div(split * blocks, splits), lax.div((split + 1) * blocks, splits)


def _locate(
    tables: tuple[Ref, Ref, Ref], count: jax.Array, block: int, form: Layout, i: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Pages, slots and positions `[block]` of block `i`; the position of a hidden slot is
    `_NOWHERE`."""
    index = i * block + jnp.arange(block)
    size = jnp.full_like(index, form.page_size)
    entry, slot = lax.div(index, size), lax.rem(index, size)
    live = entry < count
    page, span, logical = (plgpu.load(ref.at[entry], mask=live, other=0) for ref in tables)
    shown = (slot >= span & 0xFFFF) & (slot < span >> 16)
    return page, slot, jnp.where(shown, logical * form.page_size + slot, _NOWHERE)


def _seen(
    position: jax.Array, last: jax.Array, earliest: jax.Array, window: int | None
) -> jax.Array:
    """Whether queries from `earliest` to `last` see positions, some of them each."""
    seen = position <= last
    return seen if window is None else seen & (position > earliest - window)


def _gather(
    pool: Ref,
    form: Layout,
    side: int,
    head: jax.Array,
    page: jax.Array,
    slot: jax.Array,
    wanted: jax.Array,
) -> jax.Array:
    """Loads keys (side 0) or values (1) `[block, D]`; zeros where they are not wanted."""
    at, lane = (0, side * VALUE_LANE) if form.packed else (side, 0)
    lanes = (lane + jnp.arange(form.head_dim))[None]
    rows = pool.at[page[:, None], at, head, slot[:, None], lanes]
    return plgpu.load(rows, mask=wanted[:, None], other=jnp.zeros((), form.dtype))


def _gather_scales(
    scales: Ref, side: int, head: jax.Array, page: jax.Array, slot: jax.Array, wanted: jax.Array
) -> jax.Array:
    return plgpu.load(scales.at[page, side, head, slot], mask=wanted, other=0)


def _dot(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """Contracts the columns of `a` with axis `axis` of `b`, in float32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        a, b, (((1,), (axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
