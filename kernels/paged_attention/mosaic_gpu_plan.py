"""Sizes of the Mosaic GPU kernel: what fits a Hopper GPU, what to start with, what to measure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from da_jax.kernels.chips import Target
from da_jax.kernels.paged_attention.pool import QUANTIZED, VALUE_LANE
from da_jax.kernels.paged_attention.support import Problem

SWIZZLED = 64
"""16-bit elements in the 128 bytes that swizzled shared memory is made of."""

_SLAB_ELEMENTS = 2048  # of the output in one product: 16 registers a thread
_TILE_ELEMENTS = 8192  # of the output of a tile: 64 registers a thread
_MOST_TILE_ROWS = 48  # queries times group, for the registers of the scores
_DEFERRED_ROWS = 16
_SCALES = 32  # float32 in the 128 bytes that a copy to shared memory is aligned to
_BLOCK = 64  # tokens: rows of the matrix instruction
_FEWEST_SHARED = 3  # buffers each of two programs on a multiprocessor needs
_MOST_STAGES = 8
_WARPGROUP = 128  # threads
_KIB = 1 << 10


@dataclass(frozen=True)
class Config:
    """Settings worth measuring.

    Attributes:
        splits: programs that share the entries of one sequence, KV head and tile of queries.
        stages: buffers in the ring; keys or values of one block fill one.
        block: tokens a block, a multiple of 64.
    """

    splits: int
    stages: int
    block: int


@dataclass(frozen=True)
class Plan:
    """The kernel that one problem and config make.

    Attributes:
        config: its settings.
        queries: `T`.
        tile: queries a tile.
        tiles: tiles a sequence.
        rows: rows of a tile, one for each query and head of the group, padded to a multiple of 8.
        group: query heads a KV head.
        lanes: elements of a key as the kernel sees it: the head dim, or 64 where pages are packed.
        page_size: tokens a page.
        packed: whether keys and values share rows.
        dtype: of the pages.
        width: entries of the table.
    """

    config: Config
    queries: int
    tile: int
    tiles: int
    rows: int
    group: int
    lanes: int
    page_size: int
    packed: bool
    dtype: str
    width: int

    @property
    def pages(self) -> int:
        """Entries a block takes; 1 where a page makes a block or more."""
        return max(1, self.config.block // self.page_size)

    @property
    def parts(self) -> int:
        """Blocks a page makes; 1 where a page makes a block or less."""
        return max(1, self.page_size // self.config.block)

    @property
    def piece(self) -> int:
        """Tokens of one page in one block."""
        return min(self.page_size, self.config.block)

    @property
    def quantized(self) -> bool:
        """Whether pages have 8 bits and scales; blocks are widened before their products."""
        return self.dtype in QUANTIZED

    @property
    def row(self) -> int:
        """Elements of the dtype of the pages in one swizzled row of shared memory."""
        return min(self.lanes, 128) if self.quantized else SWIZZLED

    @property
    def deferred(self) -> bool:
        """Whether the sum of the weights is kept by thread, and reduced at the end only."""
        return self.rows <= _DEFERRED_ROWS

    @property
    def slab(self) -> int:
        """Lanes of the output computed at once, to bound the registers of the product."""
        room = max(SWIZZLED, _SLAB_ELEMENTS // self.rows)
        whole = [n for n in range(SWIZZLED, self.lanes + 1, SWIZZLED) if self.lanes % n == 0]
        return max(n for n in whole if n <= room)

    @property
    def scores(self) -> tuple[int, int]:
        """Shape of the scores of a block."""
        return self.config.block, self.rows


def plan_of(problem: Problem, config: Config) -> Plan:
    """The kernel for a problem: tiles of queries as large as the registers allow."""
    form = problem.form
    lanes = VALUE_LANE if form.packed else form.head_dim
    rows = min(_MOST_TILE_ROWS, _TILE_ELEMENTS // lanes)
    tile = max(1, min(problem.queries, rows // problem.group))
    return Plan(
        config=config,
        queries=problem.queries,
        tile=tile,
        tiles=-(-problem.queries // tile),
        rows=-(-tile * problem.group // 8) * 8,
        group=problem.group,
        lanes=lanes,
        page_size=form.page_size,
        packed=form.packed,
        dtype=form.dtype,
        width=problem.width,
    )


def refuses(problem: Problem, target: Target) -> str | None:
    """Says why this problem does not fit the kernel or the chip, or None."""
    form = problem.form
    if problem.compute_dtype == "float32" or (form.quantized and problem.q_dtype != "bfloat16"):
        return (
            f"queries of {problem.q_dtype} over pages of {form.dtype}: its products take bfloat16 "
            "or float16, the same in both, or bfloat16 queries over pages of 8 bits; make both "
            "bfloat16"
        )
    if not form.packed and form.head_dim % SWIZZLED:
        return f"head dim {form.head_dim}: it takes multiples of {SWIZZLED}, or packed pages"
    if form.page_size % _BLOCK and (_BLOCK % form.page_size or form.page_size < 8):
        return f"pages of {form.page_size} tokens: it takes 8, 16, 32 and multiples of {_BLOCK}"
    if form.quantized and form.page_size < _SCALES:
        return (
            f"pages of {form.page_size} tokens of 8 bits: it fetches {_SCALES} scales or more at "
            "once, so make pages that large"
        )
    if form.quantized and not form.packed and form.head_dim % 128:
        return f"head dim {form.head_dim} with pages of 8 bits: it takes multiples of 128"
    plan = plan_of(problem, Config(splits=1, stages=2, block=_BLOCK))
    if plan.rows * plan.lanes > 2 * _TILE_ELEMENTS:
        most = 2 * _TILE_ELEMENTS // plan.lanes
        return (
            f"{problem.group} query heads a KV head: at a head dim of {form.head_dim} it has "
            f"registers for {most}; shard the query heads over more devices"
        )
    return misfit(plan, target)


def misfit(plan: Plan, target: Target) -> str | None:
    """Says why a config does not go with the problem or the chip, or None."""
    config = plan.config
    block, page_size = config.block, plan.page_size
    if block % _BLOCK or (block % page_size and page_size % block):
        return f"blocks of {block} tokens do not go with pages of {page_size}"
    need = _shared_memory(plan)
    if config.stages < 2 or need > target.fast_memory:
        return (
            f"{config.stages} stages of {block} tokens need {need} bytes of shared memory, "
            f"{target.kind} has {target.fast_memory}: take fewer stages (2 at least), a smaller "
            "block or a smaller head dim"
        )
    return None


def scratch(plan: Plan, dtype: jnp.dtype) -> list[Any]:
    """Shared memory and barriers of the kernel, in its order; `dtype` is that of the queries."""
    stages, block, per_page = plan.config.stages, plan.config.block, 2 if plan.quantized else 1

    def swizzled(*shape, dtype=dtype, row=SWIZZLED):
        size = row * jnp.dtype(dtype).itemsize
        transforms = (plgpu.TilingTransform((8, row)), plgpu.SwizzleTransform(size))
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    arrays = [
        swizzled(plan.rows, plan.lanes),
        swizzled(stages, block, plan.lanes, dtype=plan.dtype, row=plan.row),
        swizzled(plan.rows, block),
        plgpu.SMEM((plan.slab, plan.rows), jnp.float32),
        plgpu.SMEM((plan.rows,), jnp.float32),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=per_page * plan.pages, num_barriers=stages),
        plgpu.Barrier(num_barriers=stages),
    ]
    if plan.quantized:
        arrays += [swizzled(block, plan.lanes), plgpu.SMEM((stages, block), jnp.float32)]
    return arrays


def _shared_memory(plan: Plan, stages: int | None = None) -> int:
    """Bytes of shared memory that a program takes; each array is aligned to 1 KiB."""
    stages = plan.config.stages if stages is None else stages
    block = plan.config.block
    arrays = [
        2 * plan.rows * plan.lanes,
        stages * block * plan.lanes * (1 if plan.quantized else 2),
        2 * plan.rows * block,
        4 * plan.slab * plan.rows,
        4 * plan.rows,
        reduction_bytes(plan),
        8 * (1 + 2 * stages),  # barriers
    ]
    if plan.quantized:
        arrays += [4 * stages * block, 2 * block * plan.lanes]
    return sum(-(-size // 1024) * 1024 for size in arrays)


def reduction_bytes(plan: Plan) -> int:
    return _WARPGROUP * max(16, plan.rows)


def candidates(problem: Problem, target: Target) -> list[Config]:
    """Configs that fit, the default first, then what is worth measuring."""
    default = _default(problem, target)
    other = 3 * _BLOCK - default.block  # the other of 64 and 128 tokens
    changes: list[dict[str, int]] = [
        {},
        {"splits": 2 * default.splits},
        {"splits": max(1, default.splits // 2)},
        {"stages": default.stages + 1},
        {"stages": max(2, default.stages - 1)},
        {"block": other, "stages": max(2, default.stages * default.block // other)},
    ]
    found = list(dict.fromkeys(replace(default, **change) for change in changes))
    return [config for config in found if misfit(plan_of(problem, config), target) is None]


def _default(problem: Problem, target: Target) -> Config:
    """Two programs a multiprocessor where three buffers or more leave room, else one that fills it.

    Long blocks spread the latency of a softmax over more bytes, but take the registers that a
    second program would need where there are many rows or pages to a block.
    """
    plan = plan_of(problem, Config(splits=1, stages=2, block=_BLOCK))
    block = plan.config.block
    long = plan.page_size % (2 * block) == 0 or plan.page_size == block
    if long and plan.lanes <= 128 and plan.rows <= 8 and not plan.quantized:
        block *= 2
    plan = replace(plan, config=replace(plan.config, block=block))
    half = target.fast_memory // 2 - _KIB // 2  # the system keeps 1 KiB of each program
    together = _stages(plan, half)
    light = plan.rows <= 16 and (plan.lanes <= 128 or not plan.quantized)
    shared = together >= _FEWEST_SHARED and light
    stages = together if shared else _stages(plan, target.fast_memory)
    programs = problem.batch * problem.form.kv_heads * plan.tiles
    room = target.cores * (2 if shared else 1)
    blocks = -(-problem.width * plan.page_size // block)
    splits = max(1, min(room // programs, blocks))
    return Config(splits, stages, block)


def _stages(plan: Plan, room: int) -> int:
    """How many stages fit, 2 if none do: `misfit` says why."""
    fit = (n for n in range(_MOST_STAGES, 2, -1) if _shared_memory(plan, n) <= room)
    return next(fit, 2)
