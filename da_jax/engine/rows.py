"""What the device programs take and give: arrays of a few fixed shapes, a row for each sequence."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from da_jax.engine.sampling import SamplingRows
from da_jax.kernels.paged_attention import BlockMask

FREE = 2**31 - 1
"""The room of a row that never pauses: nothing that it writes changes what it sees."""
PAUSE = 2**30
"""The cost of a token at which a tag can end: it uses up any room but `FREE`."""


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The static shapes of the device programs.

    Attributes:
      batches: batch sizes of the decode program; a batch takes the smallest that holds it.
      chunks: lengths of the prefill program, in tokens; a chunk takes the smallest that holds it.
      burst: most decode steps of one call.
      entries: width of a block mask.
      blocks: width of a block table.
      stop_ids: stop token ids a row.
    """

    batches: tuple[int, ...]
    chunks: tuple[int, ...]
    burst: int
    entries: int
    blocks: int
    stop_ids: int

    @staticmethod
    def bucket(sizes: tuple[int, ...], count: int) -> int:
        """The smallest of `sizes` (ascending) that holds `count`."""
        return next(size for size in sizes if size >= count)


class Rows(NamedTuple):
    """The sequences of one call, a row each.

    Attributes:
      block_table: int32 [B, NB], physical page of each logical block; page P drops what is written.
      mask: what each row sees in full attention; entries may reach beyond the current length.
      slot: int32 [B], where the row's rings and states are; the number of slots for an empty row.
      sampling: how each row chooses.
    """

    block_table: np.ndarray
    mask: BlockMask
    slot: np.ndarray
    sampling: SamplingRows


class DecodeRows(NamedTuple):
    """What a burst needs besides `Rows`.

    Attributes:
      token: int32 [B], the last token of each sequence, not yet in the cache.
      position: int32 [B], its absolute position.
      steps: int32 [B], most steps of this row in this burst; 0 for an empty row.
      room: int32 [B], what the row's tokens may cost before its mode may have changed, or `FREE`.
        Nothing costs before a tag may have begun.
      open: bool [B], whether a tag may have begun.
      guided: bool [B], whether the row also pauses where a tag may have begun.
      stop_ids: int32 [B, S], token ids at which the row pauses; -1 for none.
      forced: int32 [B, K], tokens to take instead of choosing; -1 for none.
      seen: bits [B, V], see `packed`: tokens that a response with a presence penalty already has.
      allowed: bits [B, V], tokens that may be chosen.
      wants_top: bool [], whether any row wants the likeliest alternatives.
      patience: float32 [], steps of an idle batch that the burst may waste on paused rows: it ends
        when the steps of paused rows, over the number of rows that began, exceed it.
    """

    token: np.ndarray
    position: np.ndarray
    steps: np.ndarray
    room: np.ndarray
    open: np.ndarray
    guided: np.ndarray
    stop_ids: np.ndarray
    forced: np.ndarray
    seen: np.ndarray
    allowed: np.ndarray
    wants_top: np.ndarray
    patience: np.ndarray


class Choice(NamedTuple):
    """Chosen tokens. [1, B] from a prefill, [K, B] from a burst; -1 where a row did not run.

    Attributes:
      token: int32.
      logprob: float32, log-probability under the model's own distribution.
      top_ids, top_logprobs: [..., MAX_LOGPROBS], zeros unless asked for.
      entries: int32, entries of the block mask that attention read in each layer.
    """

    token: jax.Array
    logprob: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array
    entries: jax.Array


def packed(ids: Iterable[int], words: int) -> np.ndarray:
    """uint32 [words], bit i % 32 of word i // 32 set for each id i: a set of tokens."""
    bits = np.zeros(words * 32, bool)
    bits[list(ids)] = True
    return np.packbits(bits, bitorder="little").view("<u4")


def unpacked(bits: jax.Array, size: int) -> jax.Array:
    """bool [B, size] from uint32 [B, words], see `packed`."""
    ids = jnp.arange(size)
    return (bits[:, ids // 32] >> (ids % 32).astype(jnp.uint32) & 1).astype(bool)
