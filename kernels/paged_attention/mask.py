"""The block mask: which slots of which pages each sequence may see, as data of one shape.

A mask is a compacted list of entries. An entry is one page, the half-open range of its slots that
may be seen, and the logical block number that gives those slots their absolute positions. A page
with two visible ranges is listed twice. The width of the list is static, the number of entries in
use is data, so a new mask never needs a new program.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

Array: TypeAlias = jax.Array | NDArray[Any]
Row: TypeAlias = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], int]

MAX_PAGE_SIZE = (1 << 15) - 1
"""`span` packs two slot numbers in one non-negative int32."""


class BlockMask(NamedTuple):
    """Visible slots of `B` sequences in a table of static width `W`; a pytree of int32 arrays.

    Entry `e` of sequence `b` is in use when `e < count[b]`; entries may come in any order.

    Attributes:
        page: `[B, W]` physical page of the entry.
        span: `[B, W]` visible slots, `lo | hi << 16` with `lo <= slot < hi`.
        block: `[B, W]` logical block: slot `s` holds the token at position `block * page_size + s`.
        count: `[B]` entries in use.
    """

    page: Array
    span: Array
    block: Array
    count: Array  # type: ignore[assignment]  # hides tuple.count, which nobody needs


def compact(
    block_table: ArrayLike, spans: Sequence[tuple[int, int]], page_size: int, width: int
) -> Row:
    """Turns the visible token spans of one sequence into entries of a block mask, on the host.

    Args:
        block_table: `[NB]` int, the physical page of each logical block.
        spans: half-open token spans `(start, end)`, sorted and disjoint. Empty ones are dropped and
            touching ones joined.
        page_size: tokens a page holds.
        width: entries the table has room for.

    Returns:
        `(page, span, block, count)`: three int32 arrays `[width]` in order of position, zero
        beyond `count`, and the count. `stack` makes a `BlockMask` of such rows.

    Raises:
        ValueError: the spans are not sorted and disjoint, reach outside the block table, or need
            more than `width` entries; or the page size does not fit `span`.
    """
    if not 0 < page_size <= MAX_PAGE_SIZE:
        raise ValueError(f"page size {page_size}: give one between 1 and {MAX_PAGE_SIZE}")
    table = np.asarray(block_table, np.int32)
    start, end = _joined(spans, len(table) * page_size)
    first = start // page_size
    blocks = -(-end // page_size) - first
    total = int(blocks.sum())
    if total > width:
        raise ValueError(
            f"the spans need {total} entries but the mask is {width} wide: build the mask with a "
            f"width of at least {total}, or show fewer spans"
        )
    owner = np.repeat(np.arange(len(start)), blocks)
    block = np.arange(total) - (np.cumsum(blocks) - blocks - first)[owner]
    lo = np.maximum(start[owner] - block * page_size, 0)
    hi = np.minimum(end[owner] - block * page_size, page_size)
    columns = np.zeros((3, width), np.int32)
    columns[:, :total] = table[block], lo | hi << 16, block
    return columns[0], columns[1], columns[2], total


def stack(rows: Sequence[Row]) -> BlockMask:
    """Makes the mask of a batch from what `compact` gave for each sequence, all of one width."""
    page, span, block, count = zip(*rows)
    return BlockMask(np.stack(page), np.stack(span), np.stack(block), np.asarray(count, np.int32))


def validate(mask: BlockMask, num_pages: int, page_size: int) -> None:
    """Checks a mask on the host; backends trust it, and what they do with a bad one is undefined.

    Args:
        mask: arrays that can be read on the host.
        num_pages: pages in the pool, `P`.
        page_size: tokens a page holds.

    Raises:
        ValueError: a count exceeds the width, or an entry in use names a page outside the pool or
            slots outside the page. The message names the sequence, the entry and the value.
    """
    page, span, block, count = (np.asarray(x) for x in mask)
    width = page.shape[1]
    if count.min(initial=0) < 0 or count.max(initial=0) > width:
        raise ValueError(f"counts {count.tolist()} do not fit a mask of width {width}")
    used = np.arange(width) < count[:, None]
    lo, hi = span & 0xFFFF, span >> 16
    _refuse(used & ((page < 0) | (page >= num_pages)), page, "page", f"0..{num_pages - 1}")
    _refuse(used & ((lo > hi) | (hi > page_size)), span, "span", f"lo <= hi <= {page_size}")
    _refuse(used & (block < 0), block, "block", "0 or more")


def _refuse(bad: NDArray[np.bool_], values: NDArray[Any], name: str, allowed: str) -> None:
    if bad.any():
        b, e = np.argwhere(bad)[0]
        raise ValueError(
            f"sequence {b}, entry {e}: {name} {values[b, e]} is not allowed ({allowed}); "
            "rebuild the mask from the current block table"
        )


def _joined(
    spans: Sequence[tuple[int, int]], tokens: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Checks spans, drops empty ones and joins touching ones; returns starts and ends."""
    pairs = np.asarray(spans, np.int64).reshape(-1, 2)
    flat = pairs.ravel()
    if (np.diff(flat) < 0).any():
        raise ValueError(f"spans {list(spans)} must be sorted and disjoint")
    if flat.size and (flat[0] < 0 or flat[-1] > tokens):
        raise ValueError(
            f"spans {list(spans)} reach outside the {tokens} tokens of the block table"
        )
    pairs = pairs[pairs[:, 0] < pairs[:, 1]]
    apart = pairs[1:, 0] > pairs[:-1, 1]
    edge = np.ones(min(1, len(pairs)), bool)
    return pairs[np.r_[edge, apart], 0], pairs[np.r_[apart, edge], 1]
