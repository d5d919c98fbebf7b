"""What the TPU kernel makes of a problem: tiles, blocks, and the memory they need."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import jax.numpy as jnp

from da_jax.kernels.chips import Target
from da_jax.kernels.paged_attention.pool import VALUE_LANE, Layout
from da_jax.kernels.paged_attention.support import Problem

LANES = 128
SMEM_BYTES = (1 << 20) - (16 << 10)
"""What the SMEM of a TPU core has for tables; the compiler takes the rest."""
_MAX_PAGES = 64  # the masks of a block's pages are unrolled in the program
_SMALL_VMEM = 16 << 20


@dataclass(frozen=True)
class Config:
    """Settings worth measuring.

    Attributes:
        block_bytes: KV bytes of a block for one core; two blocks are in VMEM at a time.
        tile_rows: query rows (queries times heads of a group) of a tile for each KV head.
    """

    block_bytes: int = 4 << 20
    tile_rows: int = 512


@dataclass(frozen=True)
class Plan:
    """The program for a problem.

    Attributes:
        form: layout of the pool.
        group: query heads a KV head.
        queries: `T`.
        width: `W`, entries a sequence.
        compute: dtype that matrix products take.
        cores: cores that share the KV heads.
        tile: queries a tile.
        rows: rows of a tile for each KV head, padded.
        pages: pages a block.
        sequences: sequences a call, as far as their tables fit SMEM.
        vmem_bytes: estimate of what one core needs.
        scale: factor on the scores.
        softcap: bound on the scores.
        window: sliding window.
    """

    form: Layout
    group: int
    queries: int
    width: int
    compute: str
    cores: int
    tile: int
    rows: int
    pages: int
    sequences: int
    vmem_bytes: int
    scale: float = 1.0
    softcap: float | None = None
    window: int | None = None

    @property
    def tiles(self) -> int:
        """Tiles a sequence."""
        return -(-self.queries // self.tile)

    @property
    def heads(self) -> int:
        """KV heads a core."""
        return self.form.kv_heads // self.cores

    @property
    def lanes(self) -> int:
        """Lanes of a row of the pool."""
        return self.form.shape[-1]

    @property
    def slots(self) -> int:
        """Slots a block."""
        return self.pages * self.form.page_size


def refuses(problem: Problem, target: Target) -> str | None:
    """Says why a problem does not fit, with the setting to change, or None."""
    form = problem.form
    if not form.packed and form.head_dim % LANES:
        return (
            f"unpacked pages of head dim {form.head_dim}: rows must be a multiple of {LANES} "
            "lanes; allocate the pool with `empty_pages(layout(...))`, which packs a head dim up "
            f"to {VALUE_LANE}, or pad the heads to {-(-form.head_dim // LANES) * LANES}"
        )
    if form.page_size % 8:
        return f"page size {form.page_size}: use a multiple of 8"
    needed = smem_bytes(1, problem.width, problem.queries, problem.queries)
    if needed > SMEM_BYTES:
        return (
            f"the tables of a sequence need {needed} bytes of SMEM at a mask width of "
            f"{problem.width}, a core has {SMEM_BYTES}: use larger pages than {form.page_size}, "
            "or a narrower mask"
        )
    plan = make_plan(problem, target, Config())
    if plan.vmem_bytes > _vmem_room(target):
        return (
            f"the smallest block needs {plan.vmem_bytes} bytes of VMEM, {target.kind} allows "
            f"{_vmem_room(target)}: use smaller pages than {form.page_size}, or shard the "
            f"{form.kv_heads} KV heads over more devices"
        )
    return None


def candidates(problem: Problem, target: Target) -> list[Config]:
    """Settings to measure, the default first; those that come to the same program are left out."""
    found: dict[Plan, Config] = {}
    for block_bytes in (4 << 20, 2 << 20, 8 << 20):
        config = Config(block_bytes)
        found.setdefault(make_plan(problem, target, config), config)
    return list(found.values())


def _vmem_room(target: Target) -> int:
    """Bytes of VMEM that a plan may use; the rest is for what the estimate misses."""
    return (target.fast_memory or _SMALL_VMEM) * 5 // 8


def smem_bytes(batch: int, width: int, queries: int, tiles: int) -> int:
    """Bytes of the tables of some sequences."""
    words = (3 if queries > 1 else 2) * batch * width + batch * (tiles + 2)
    return 4 * (words + 6 * 1024)  # each table is padded


def _round_up(x: int, to: int) -> int:
    return -(-x // to) * to


def make_plan(problem: Problem, target: Target, config: Config) -> Plan:
    """Chooses the largest tile and block within the settings that fit VMEM, or the smallest."""
    form = problem.form
    compute = "bfloat16" if problem.compute_dtype == "bfloat16" else "float32"
    cores = target.cores if form.kv_heads % target.cores == 0 else 1
    unit = pages_of_unit(form.page_size)
    most = min(config.block_bytes * cores // form.page_bytes, problem.width, _MAX_PAGES)
    options = [pages for pages in (most, most // 2, most // 4, 1) if pages]
    tile_rows = max(config.tile_rows, problem.group)
    while True:
        tile = max(1, min(problem.queries, tile_rows // problem.group))
        tiles = -(-problem.queries // tile)
        tile = -(-problem.queries // tiles)
        rows = _round_up(tile * problem.group, 32 // jnp.dtype(compute).itemsize)
        batch = problem.batch
        while batch > 1 and smem_bytes(batch, problem.width, problem.queries, tiles) > SMEM_BYTES:
            batch = -(-batch // 2)
        for pages in options:
            plan = Plan(
                form, problem.group, problem.queries, problem.width, compute, cores, tile, rows,
                _round_up(pages, unit), batch, 0,
            )  # fmt: skip
            plan = dataclasses.replace(plan, vmem_bytes=_vmem_bytes(plan, problem))
            if plan.vmem_bytes <= _vmem_room(target):
                return plan
        if tile == 1:
            return plan
        tile_rows //= 2


def pages_of_unit(page_size: int) -> int:
    """How many pages fill whole rows of 128 lanes with their slots."""
    return math.lcm(page_size, LANES) // page_size


def _vmem_bytes(plan: Plan, problem: Problem) -> int:
    """Bytes of VMEM that a plan needs on one core, scratch and temporaries together."""
    form, rows, lanes = plan.form, plan.rows, plan.lanes
    size = jnp.dtype(plan.compute).itemsize
    itemsize = jnp.dtype(form.dtype).itemsize
    buffers = 2 * plan.pages * math.prod(form.shape[1:]) * itemsize // plan.cores
    scales = 0
    if form.quantized:  # every core takes those of all heads
        scales = 2 * plan.pages * 4 * math.prod(form.scales_shape[1:])
        scales += 2 * 4 * _round_up(form.kv_heads, 8) * plan.slots
    blocks = 2 * plan.heads * (rows * lanes * (size + 4) + 8 * _round_up(rows, LANES) * 4)
    state = plan.heads * rows * (lanes + 2 * LANES) * 4
    scores = 4 * rows * plan.slots * 4
    operands = 2 * plan.slots * lanes * size * (3 if size == 4 else 1)
    return buffers + scales + blocks + state + scores + operands


def vmem_limit(plan: Plan, target: Target) -> int:
    """Bytes of VMEM to ask of the compiler."""
    most = (target.fast_memory or _SMALL_VMEM) * 7 // 8
    return min(most, plan.vmem_bytes * 3 // 2 + (4 << 20))
