"""Packed training batches: one context, and many questions that each see it under their own mask.

A row of ``T`` tokens holds one or more *segments*. A segment is a question with its response; it
sees the context as its modes allow, and itself causally. All segments of a context start at the
position that follows the context, as if each were alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from da_jax.checkpoints.tiny import language as lang
from da_jax.checkpoints.tiny import scenes, tasks

PADDING = -1
SCAFFOLD = 0
ROLES = ("", "id", "value", "letter", "copy")
"""Meaning of ``Batch.role``: 0 is any other response token."""
MAX_FOCUS = 3


class Batch(NamedTuple):
    """Arrays of one step; B contexts of L tokens, R rows of T tokens each.

    Attributes:
        context: [B, L] int32 token ids.
        chunk: [B, L] int32 chunk number of each token, 0 for the scaffold, -1 for padding.
        position: [B, L] int32 RoPE positions; gaps between chunks are allowed.
        chunk_id: [B, L] int32 token id of the number in the token's chunk wrapper, or -1.
        rows: [B, R, T] int32 token ids.
        segment: [B, R, T] int32 number of the segment within its row, -1 for padding.
        row_position: [B, R, T] int32 RoPE positions.
        everything: [B, R, T] bool, the token sees the whole context.
        focus: [B, R, T, 3] int32 chunks that it sees otherwise; -2 for none.
        target: [B, R, T] int32 the next token.
        role: [B, R, T] int32 index into ``ROLES`` of the next token, -1 where nothing is learnt.
    """

    context: np.ndarray
    chunk: np.ndarray
    position: np.ndarray
    chunk_id: np.ndarray
    rows: np.ndarray
    segment: np.ndarray
    row_position: np.ndarray
    everything: np.ndarray
    focus: np.ndarray
    target: np.ndarray
    role: np.ndarray


@dataclass(frozen=True)
class Shape:
    """Sizes of a batch and what is drawn into it.

    Attributes:
        chunks: range of the number of chunks.
        context: L, tokens of context; beyond 512 a multiple of 512, the block of attention.
        contexts: B.
        rows: R.
        row: T.
        mix: weight of each question type.
        masked: share of segments whose modes act; the others see everything.
        copy: share of rows that repeat a span of the context (teaches induction).
        gap: chunks are moved apart by up to this many positions in all.
        ids: share of contexts whose first chunk has a random number instead of 1.
        newlines: share of chunks of several lines.
        held_out: draw from the pairs that training never sees.
        topics: weight of each topic of the second training step; none for the first.
        plain: share of contexts in the plain prompt, where everything stays visible.
        misled: share of segments with a wrong number in their focus tag, see ``tasks.misled``.
    """

    chunks: tuple[int, int]
    context: int
    contexts: int
    rows: int
    row: int = 64
    mix: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(lang.KINDS, 1.0))
    masked: float = 0.75
    copy: float = 0.0
    gap: int = 3800
    ids: float = 0.5
    newlines: float = 0.0
    held_out: bool = False
    topics: Mapping[str, float] = field(default_factory=dict)
    plain: float = 0.0
    misled: float = 0.0


@dataclass(frozen=True)
class Placed:
    """Where a segment lies in a batch: ``start:end`` of a row; its response from ``response``."""

    context: int
    row: int
    start: int
    response: int
    end: int
    document: lang.Document
    question: lang.Question
    tokens: tuple[lang.Token, ...]


def _empty(shape: Shape) -> Batch:
    wide, tall = (shape.contexts, shape.context), (shape.contexts, shape.rows, shape.row)
    full = lambda size, value: np.full(size, value, np.int32)
    pad = lang.IDS[lang.PAD]
    return Batch(
        context=full(wide, pad),
        chunk=full(wide, PADDING),
        position=np.tile(np.arange(shape.context, dtype=np.int32), (shape.contexts, 1)),
        chunk_id=full(wide, -1),
        rows=full(tall, pad),
        segment=full(tall, PADDING),
        row_position=full(tall, 0),
        everything=np.zeros(tall, bool),
        focus=full((*tall, MAX_FOCUS), -2),
        target=full(tall, pad),
        role=full(tall, -1),
    )


def _place_context(
    batch: Batch, b: int, document: lang.Document, first_id: int, gaps: np.ndarray, plain: bool
) -> int:
    """Writes a document's context; returns the position after its last token."""
    pieces = lang.prompt_head(plain)
    chunk = [SCAFFOLD] * len(pieces)
    label = [-1] * len(pieces)
    for number, chunk_pieces in enumerate(document.chunks, 1):
        shown = number + first_id - 1
        wrapped = [*chunk_pieces] if plain else lang.prompt_chunk(shown, chunk_pieces)
        pieces += wrapped
        chunk += [number] * len(wrapped)
        number_id = -1 if plain else lang.IDS[f"{shown}"]
        label += [-1, *([number_id] * (len(wrapped) - 1))]
    size = len(pieces)
    batch.context[b, :size] = [lang.IDS[piece] for piece in pieces]
    batch.chunk[b, :size] = chunk
    batch.chunk_id[b, :size] = label
    batch.position[b, :size] += gaps[np.array(chunk)]
    return int(batch.position[b, size - 1]) + 1


def _place_segment(
    batch: Batch,
    at: tuple[int, int, int, int],
    position: int,
    document: lang.Document,
    question: lang.Question,
    tokens: list[lang.Token],
    masked: bool,
) -> Placed:
    """Writes a segment, number ``at[3]`` of its row, at context, row and start ``at[:3]``."""
    b, row, start, number = at
    tail = lang.prompt_tail(question)
    ids = [lang.IDS[piece] for piece in tail] + [lang.IDS[token.piece] for token in tokens]
    end, response = start + len(ids), start + len(tail)
    where = np.s_[b, row, start:end]
    batch.rows[where] = ids
    batch.segment[where] = number
    batch.row_position[where] = position + np.arange(len(ids))
    batch.everything[where] = True
    batch.target[b, row, start : end - 1] = ids[1:]
    roles = [-1 if token.role == tasks.GIVEN else ROLES.index(token.role) for token in tokens]
    batch.role[b, row, response - 1 : end - 1] = roles
    if masked:
        for i, token in enumerate(tokens, response):
            batch.everything[b, row, i] = token.mode == "global"
            batch.focus[b, row, i, : len(token.focus)] = token.focus
    return Placed(b, row, start, response, end, document, question, tuple(tokens))


def _place_copy(rng: np.random.Generator, batch: Batch, b: int, row: int, position: int) -> int:
    """Fills a row with a span of the context, to be continued from what precedes it there."""
    size = int((batch.chunk[b] >= 0).sum())
    length = min(batch.rows.shape[2], size - 1)
    start = int(rng.integers(0, size - length))
    span = batch.context[b, start : start + length + 1]
    batch.rows[b, row, :length] = span[:-1]
    batch.target[b, row, :length] = span[1:]
    batch.segment[b, row, :length] = 0
    batch.row_position[b, row, :length] = position + np.arange(length)
    batch.everything[b, row, :length] = True
    batch.role[b, row, 8:length] = ROLES.index("copy")
    return length


def make_batch(rng: np.random.Generator, shape: Shape) -> tuple[Batch, list[Placed]]:
    """Draws a batch; returns it with the places of its segments."""
    batch = _empty(shape)
    placed: list[Placed] = []
    for b in range(shape.contexts):
        document, first_id = _draw_document(rng, shape)
        gaps = _draw_gaps(rng, shape, len(document.chunks))
        plain = bool(shape.plain and rng.random() < shape.plain)
        position = _place_context(batch, b, document, first_id, gaps, plain)
        used = np.zeros(shape.rows, int)
        segments = np.zeros(shape.rows, int)
        for row in range(shape.rows):
            if rng.random() < shape.copy:
                _place_copy(rng, batch, b, row, position)
                used[row] = shape.row
        for question in _draw_questions(rng, shape, document):
            tokens = tasks.respond(document, question, first_id, plain)
            masked = None
            if shape.misled and not plain and rng.random() < shape.misled:
                masked = bool(rng.random() < shape.masked)
                tokens = tasks.misled(
                    rng, document, question, tokens, first_id=first_id, masked=masked
                )
            need = len(lang.prompt_tail(question)) + len(tokens)
            fits = np.flatnonzero(used + need <= shape.row)
            if not len(fits):
                continue
            row = int(fits[np.argmax(used[fits])])
            at = (b, row, int(used[row]), int(segments[row]))
            if masked is None:
                masked = bool(rng.random() < shape.masked) and not plain
            asked = (document, question, tokens, masked)
            placed.append(_place_segment(batch, at, position, *asked))
            used[row] += need
            segments[row] += 1
    return batch, placed


def _draw_document(rng: np.random.Generator, shape: Shape) -> tuple[lang.Document, int]:
    """A document that fits the shape, and the number that its first chunk shows."""
    chunks = int(rng.integers(shape.chunks[0], shape.chunks[1] + 1))
    room = shape.context - len(lang.prompt_head())
    if shape.topics:
        weights = np.array(list(shape.topics.values()))
        topic = str(rng.choice(list(shape.topics), p=weights / weights.sum()))
        document = scenes.make_scene(rng, topic, chunks, held_out=shape.held_out, max_tokens=room)
    else:
        document = lang.make_document(
            rng, chunks, held_out=shape.held_out, newlines=shape.newlines, max_tokens=room
        )
    if rng.random() >= shape.ids:
        return document, 1
    return document, 1 + int(rng.integers(0, lang.MAX_ID - len(document.chunks) + 1))


def _draw_gaps(rng: np.random.Generator, shape: Shape, count: int) -> np.ndarray:
    """How far scaffold and each chunk move to the right, [count + 1]."""
    if not shape.gap or rng.random() >= 0.7:
        return np.zeros(count + 1, np.int32)
    shares = rng.dirichlet(np.ones(count + 1))
    return np.cumsum(shares * rng.random() * shape.gap).astype(np.int32)


def _draw_questions(
    rng: np.random.Generator, shape: Shape, document: lang.Document
) -> Iterator[lang.Question]:
    """More questions than fit the rows."""
    weights = np.array(list(shape.mix.values()))
    for kind in rng.choice(list(shape.mix), 6 * shape.rows, p=weights / weights.sum()):
        ask = tasks.ask if shape.topics else lang.ask
        question = ask(rng, document, str(kind))
        if question is not None:
            yield question
