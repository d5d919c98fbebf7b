"""How the TPU kernel brings pages from HBM into its two buffers, and what it does to them there."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from da_jax.kernels.paged_attention.mosaic_tpu_plan import Plan


class Refs(NamedTuple):
    """What the kernel works on.

    Attributes:
        page, span, block, count, first, q_lens: SMEM, the fields of `Tables`, flattened; `block`
            is empty for one query a sequence.
        q: VMEM `[heads, rows, lanes]`.
        kv: HBM, the pages.
        scales: HBM, the scales of 8-bit pages, or None.
        out: VMEM `[heads, rows, lanes]`.
        lse: VMEM `[heads, 1, rows]`.
        kv_buffer: VMEM `[2, pages, sides, heads, PS, lanes]`.
        kv_arrived: DMA semaphores `[2]`.
        parity: SMEM `[1]`, the buffer of the next block to compute.
        high: VMEM `[heads, rows, 128]`, the highest score.
        total: VMEM `[heads, rows, 128]`, the sum of `exp(score - high)`.
        acc: VMEM `[heads, rows, lanes]`, the sum of `exp(score - high) * value`.
        scale_buffer: VMEM `[2, pages, 2, HKV, PS]` of 8-bit pages, or None.
        scales_arrived: DMA semaphores `[2]`, or None.
    """

    page: Any
    span: Any
    block: Any
    count: Any
    first: Any
    q_lens: Any
    q: Any
    kv: Any
    scales: Any
    out: Any
    lse: Any
    kv_buffer: Any
    kv_arrived: Any
    parity: Any
    high: Any
    total: Any
    acc: Any
    scale_buffer: Any
    scales_arrived: Any


class Block(NamedTuple):
    """A block of entries.

    Attributes:
        step: step of the grid, which is a tile of queries of a sequence.
        number: which block of the sequence.
        buffer: which of the two buffers it is copied to.
    """

    step: jax.Array
    number: jax.Array
    buffer: jax.Array

    def left(self, refs: Refs, plan: Plan) -> jax.Array:
        """Entries from this block on; more than a block holds if others follow."""
        return refs.count[self.step] - self.number * plan.pages

    def entry(self, plan: Plan, j: Any) -> jax.Array:
        """Where the flattened tables have entry `j`; the last of the row if none is left."""
        entry = jnp.minimum(self.number * plan.pages + j, plan.width - 1)
        return self.step // plan.tiles * plan.width + entry


def copies(refs: Refs, plan: Plan, at: Block, j: Any) -> list[Any]:
    """The transfers of the page of entry `j` of a block."""
    page = refs.page[at.entry(plan, j)]
    source = refs.kv.at[page]
    if plan.cores > 1:
        source = refs.kv.at[page, :, pl.ds(pl.program_id(0) * plan.heads, plan.heads)]
    target, arrived = refs.kv_buffer.at[at.buffer, j], refs.kv_arrived.at[at.buffer]
    made = [pltpu.make_async_copy(source, target, arrived)]
    if plan.form.quantized:
        target, arrived = refs.scale_buffer.at[at.buffer, j], refs.scales_arrived.at[at.buffer]
        made.append(pltpu.make_async_copy(refs.scales.at[page], target, arrived))
    return made


def start_block(refs: Refs, plan: Plan, at: Block) -> None:
    """Starts the transfers of a block."""

    @pl.loop(0, jnp.minimum(at.left(refs, plan), plan.pages))
    def _(j):
        for copy in copies(refs, plan, at, j):
            copy.start()


def wait_block(refs: Refs, plan: Plan, at: Block) -> None:
    """Waits until a block has arrived: once for a full block, page by page for the last."""
    left = at.left(refs, plan)

    @pl.when(left >= plan.pages)
    def _():
        buffers = [(refs.kv_buffer, refs.kv_arrived)]
        if plan.form.quantized:
            buffers.append((refs.scale_buffer, refs.scales_arrived))
        for buffer, arrived in buffers:
            whole = buffer.at[at.buffer]
            pltpu.make_async_copy(whole, whole, arrived.at[at.buffer]).wait()

    @pl.when(left < plan.pages)
    def _():
        @pl.loop(0, left)
        def _(j):
            for copy in copies(refs, plan, at, j):
                copy.wait()


def clear_buffers(refs: Refs, plan: Plan) -> None:
    """Zeroes the values in the buffers: where no page came yet they must be finite all the same."""
    side = refs.kv_buffer.shape[2] - 1
    zeros = jnp.zeros(refs.kv_buffer.shape[3:], refs.kv_buffer.dtype)

    @pl.loop(0, 2 * plan.pages)
    def _(i):
        refs.kv_buffer[i // plan.pages, i % plan.pages, side] = zeros


def read_spans(refs: Refs, plan: Plan, at: Block) -> list[jax.Array]:
    """The spans of the entries of a block, 0 beyond the last entry."""
    left = at.left(refs, plan)
    spans = (refs.span[at.entry(plan, j)] for j in range(plan.pages))
    return [jnp.where(j < left, span, 0) for j, span in enumerate(spans)]


def clean_hidden(refs: Refs, plan: Plan, at: Block, spans: list[jax.Array]) -> None:
    """Zeroes the values of hidden slots in the buffer: zero times NaN would be NaN."""
    whole = plan.form.page_size << 16
    side = refs.kv_buffer.shape[2] - 1

    # One test for all pages: most blocks hide nothing, and a loop over scalars is slow.
    @pl.when(functools.reduce(jnp.logical_or, [span != whole for span in spans]))
    def _():
        @pl.loop(0, jnp.minimum(at.left(refs, plan), plan.pages))
        def _(j):
            span = refs.span[at.entry(plan, j)]

            @pl.when(span != whole)
            def _():
                values = refs.kv_buffer[at.buffer, j, side]
                number = lax.broadcasted_iota(jnp.int32, values.shape, 1)
                keep = (number >= (span & 0xFFFF)) & (number < (span >> 16))
                refs.kv_buffer[at.buffer, j, side] = jnp.where(keep, values, jnp.zeros_like(values))
