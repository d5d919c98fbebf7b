"""Builds the host arrays of a program's rows from the sequences that they stand for."""

from __future__ import annotations

from collections.abc import Sequence as Several

import numpy as np

from da_jax.cache.pools import CachePlan
from da_jax.engine.rows import FREE, DecodeRows, Rows, packed
from da_jax.engine.sequence import Sequence, View
from da_jax.kernels.paged_attention import validate


def fill_rows(
    rows: Rows, sequences: Several[Sequence], views: Several[View], plan: CachePlan
) -> Rows:
    """Writes a row for each sequence, as it sees its pages through its view.

    Args:
      rows: empty rows, at least as many; they are changed.
      sequences: who they stand for.
      views: what each sees.
      plan: how many pages there are, and of what size.
    """
    mask = rows.mask
    for row, (sequence, view) in enumerate(zip(sequences, views)):
        pages = sequence.pages
        count = view.entries(len(pages) * plan.page_size)
        rows.block_table[row, : len(pages)] = pages
        mask.page[row, :count] = pages[view.block[:count]]
        mask.span[row, :count], mask.block[row, :count] = view.span[:count], view.block[:count]
        mask.count[row], rows.slot[row] = count, sequence.slot
        params, sampling = sequence.request.params, rows.sampling
        sampling.temperature[row] = params.temperature
        sampling.top_p[row] = params.top_p
        sampling.top_k[row] = params.top_k
        sampling.presence_penalty[row] = params.presence_penalty
        sampling.key[row] = sequence.key
        sampling.generated[row] = sequence.length - sequence.prompt_len
    validate(mask, plan.num_pages, plan.page_size)
    return rows


def allowed_of(sequence: Sequence) -> np.ndarray | np.uint32:
    """The tokens that a sequence may choose next: its mask, or one word of ones for all."""
    mask = sequence.allowed()
    return np.uint32(0xFFFFFFFF) if mask is None else mask


def fill_decode(decode: DecodeRows, sequences: Several[Sequence]) -> DecodeRows:
    """Writes what a burst needs of each sequence.

    Args:
      decode: empty rows, at least as many, that allow all tokens there are; they are changed.
      sequences: who they stand for.
    """
    burst = decode.forced.shape[1]
    for row, sequence in enumerate(sequences):
        decode.token[row] = sequence.last_token
        decode.position[row] = sequence.length - 1
        decode.steps[row] = sequence.steps(burst)
        decode.guided[row] = sequence.guided
        decode.allowed[row] &= allowed_of(sequence)
        decode.room[row] = FREE if sequence.room is None else sequence.room
        decode.open[row] = sequence.open
        ids = sorted(sequence.stop_ids)
        decode.stop_ids[row, : len(ids)] = ids
        decode.forced[row] = sequence.forced(burst)
        if sequence.request.params.presence_penalty:
            decode.seen[row] = packed(sequence.generated, decode.seen.shape[1])
    return decode
