"""The device programs: prefill of one chunk, and a burst of decode steps.

A program sees only arrays of a few fixed shapes, those of `Shapes`; masks, lengths and
sampling parameters are data. After `warm_up` nothing compiles.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from da_jax.cache import pools
from da_jax.engine.config import MAX_LOGPROBS
from da_jax.engine.sampling import SamplingRows, choose
from da_jax.kernels.paged_attention import (
    BlockMask,
    KVPages,
    layout_of,
    paged_attention,
    write_kv,
)
from da_jax.models.qwen import Qwen3


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
      mask: what each row sees; entries may reach beyond the current length.
      sampling: how each row chooses.
    """

    block_table: np.ndarray
    mask: BlockMask
    sampling: SamplingRows


class DecodeRows(NamedTuple):
    """What a burst needs besides `Rows`.

    Attributes:
      token: int32 [B], the last token of each sequence, not yet in the cache.
      position: int32 [B], its absolute position.
      steps: int32 [B], most steps of this row in this burst; 0 for an empty row.
      stop_ids: int32 [B, S], token ids at which the row pauses; -1 for none.
      forced: int32 [B, K], tokens to take instead of choosing; -1 for none.
      seen: bool [B, V], tokens that a response with a presence penalty already has.
      wants_top: bool [], whether any row wants the likeliest alternatives.
    """

    token: np.ndarray
    position: np.ndarray
    steps: np.ndarray
    stop_ids: np.ndarray
    forced: np.ndarray
    seen: np.ndarray
    wants_top: np.ndarray


class Choice(NamedTuple):
    """Chosen tokens. [B] from a prefill, [K, B] from a burst; -1 where a row did not run.

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


class PagedAttend:
    """Writes a layer's new keys and values into its pages, then attends to what the mask shows.

    Args:
      pages: KV pages of each layer; replaced by the written ones.
      page, slot: int32 [B, T], where each new token goes; page P drops it.
      mask: what each row sees.
      lengths: int32 [B], KV tokens of each row including the new ones.
      q_lens: int32 [B], new tokens of each row.
      scale: factor on the scores.
      impl: attention backend.
    """

    def __init__(
        self,
        pages: list[KVPages],
        page: jax.Array,
        slot: jax.Array,
        mask: BlockMask,
        lengths: jax.Array,
        q_lens: jax.Array,
        *,
        scale: float,
        impl: str | None,
    ):
        self.pages = list(pages)
        self._write = functools.partial(write_kv, pages=page, slots=slot)
        self._attend = functools.partial(
            paged_attention, mask=mask, lengths=lengths, q_lens=q_lens, scale=scale, impl=impl
        )

    def __call__(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        self.pages[layer] = self._write(self.pages[layer], k, v)
        return self._attend(q, self.pages[layer])


def visible_entries(mask: BlockMask, page_size: int, lengths: jax.Array) -> BlockMask:
    """The mask without the entries that begin beyond the current lengths [B].

    Entries ascend by position, so those are the last ones: only the count changes.
    """
    first = mask.block * page_size + (mask.span & 0xFFFF)
    used = jnp.arange(mask.page.shape[1]) < mask.count[:, None]
    return mask._replace(count=jnp.sum(used & (first < lengths[:, None]), axis=1, dtype=jnp.int32))


def forward(
    model: Qwen3,
    pages: list[KVPages],
    tokens: jax.Array,
    position: jax.Array,
    q_lens: jax.Array,
    rows: Rows,
    *,
    impl: str | None,
) -> tuple[jax.Array, list[KVPages], jax.Array]:
    """Runs new tokens through the model and its paged cache.

    Args:
      model: the model.
      pages: KV pages of each layer.
      tokens: int32 [B, T], right-padded.
      position: int32 [B], absolute position of the first token of each row.
      q_lens: int32 [B], tokens of each row; 0 leaves the row out.
      rows: tables and masks.
      impl: attention backend.

    Returns:
      (hidden states [B, T, E], the written pages, entries read a row int32 [B]).
    """
    form = layout_of(pages[0], model.config.head_dim)
    steps = jnp.arange(tokens.shape[1])
    positions = position[:, None] + steps
    real = steps < q_lens[:, None]
    block = jnp.minimum(positions // form.page_size, rows.block_table.shape[1] - 1)
    page = jnp.where(real, jnp.take_along_axis(rows.block_table, block, axis=1), form.num_pages)
    lengths = jnp.where(q_lens > 0, position + q_lens, 0)
    mask = visible_entries(rows.mask, form.page_size, lengths)
    attend = PagedAttend(
        pages, page, positions % form.page_size, mask, lengths, q_lens,
        scale=model.config.head_dim**-0.5, impl=impl,
    )  # fmt: skip
    hidden = model(tokens, positions, attend)
    return hidden, attend.pages, mask.count


class Runner:
    """Owns the parameters, the KV pages and the compiled programs.

    Args:
      model: the model.
      shapes: static shapes.
      pool: size of the KV pool.
      dtype: what the model computes in.
      pauses: bool [V], tokens at which a burst pauses a row: their text contains `>`.
      valid: bool [V], tokens that may be chosen.
      impl: attention backend, None to choose by platform.
    """

    def __init__(
        self,
        model: Qwen3,
        shapes: Shapes,
        pool: pools.PoolPlan,
        *,
        dtype: jnp.dtype,
        pauses: np.ndarray,
        valid: np.ndarray,
        impl: str | None = None,
    ):
        self.shapes, self.pool, self.impl = shapes, pool, impl
        self._graph, self._state = nnx.split(model)
        self.pages = pools.allocate(pool)
        self._vocabulary = model.config.vocab_size
        self._pauses, self._valid = jnp.asarray(pauses), jnp.asarray(valid)
        # An accelerator would multiply float32 in bfloat16 passes; who asks for float32 wants it.
        precise = jax.default_matmul_precision("highest" if dtype == jnp.float32 else "default")
        self._prefill = precise(jax.jit(self._prefill_program, donate_argnames="pages"))
        self._decode = precise(jax.jit(self._decode_program, donate_argnames="pages"))

    def prefill(
        self, tokens: np.ndarray, position: int, rows: Rows, *, forced: int, wants_top: bool
    ) -> Choice:
        """Runs one chunk of one prompt; the choice is what follows its last token.

        Args:
          tokens: int32 [n], n at most the largest chunk.
          position: absolute position of tokens[0].
          rows: one row.
          forced: the token to take instead of choosing, -1 for none.
          wants_top: whether to report the likeliest tokens.
        """
        padded = np.zeros((1, Shapes.bucket(self.shapes.chunks, len(tokens))), np.int32)
        padded[0, : len(tokens)] = tokens
        self.pages, choice = self._prefill(
            self._state, pages=self.pages, tokens=padded,
            position=np.array([position], np.int32), q_lens=np.array([len(tokens)], np.int32),
            rows=rows, forced=np.array([forced], np.int32), wants_top=np.array(wants_top),
        )  # fmt: skip
        return jax.device_get(choice)

    def decode(self, rows: Rows, decode: DecodeRows) -> Choice:
        """Runs a burst. Each row stops early at a token of `pauses` or of its stop ids."""
        self.pages, choice = self._decode(self._state, pages=self.pages, rows=rows, decode=decode)
        return jax.device_get(choice)

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compiles every program by running it on empty rows, which change nothing."""
        work = list(self._empty_calls())
        for done, call in enumerate(work):
            progress(done, len(work))
            call()
        progress(len(work), len(work))

    def _empty_calls(self) -> Iterator[Callable[[], Choice]]:
        for size in self.shapes.chunks:
            yield functools.partial(
                self.prefill, np.zeros(size, np.int32), 0, self.empty_rows(1),
                forced=-1, wants_top=False,
            )  # fmt: skip
        for batch in self.shapes.batches:
            yield functools.partial(self.decode, self.empty_rows(batch), self.empty_decode(batch))

    def empty_rows(self, batch: int) -> Rows:
        """Rows of no sequence: they see nothing, and what they write is dropped."""
        table = np.zeros((batch, self.shapes.entries), np.int32)
        return Rows(
            block_table=np.full((batch, self.shapes.blocks), self.pool.num_pages, np.int32),
            mask=BlockMask(table, table.copy(), table.copy(), np.zeros(batch, np.int32)),
            sampling=SamplingRows(
                temperature=np.zeros(batch, np.float32),
                top_p=np.ones(batch, np.float32),
                presence_penalty=np.zeros(batch, np.float32),
                top_k=np.zeros(batch, np.int32),
                key=np.zeros((batch, 2), np.uint32),
                generated=np.zeros(batch, np.int32),
            ),
        )

    def empty_decode(self, batch: int) -> DecodeRows:
        """The decode part of `empty_rows`."""
        return DecodeRows(
            token=np.zeros(batch, np.int32),
            position=np.zeros(batch, np.int32),
            steps=np.zeros(batch, np.int32),
            stop_ids=np.full((batch, self.shapes.stop_ids), -1, np.int32),
            forced=np.full((batch, self.shapes.burst), -1, np.int32),
            seen=np.zeros((batch, self._vocabulary), bool),
            wants_top=np.array(False),
        )

    def _prefill_program(self, state, *, pages, tokens, position, q_lens, rows, forced, wants_top):
        model = nnx.merge(self._graph, state)
        hidden, pages, entries = forward(
            model, pages, tokens, position, q_lens, rows, impl=self.impl
        )
        last = jnp.take_along_axis(hidden, (q_lens - 1)[:, None, None], axis=1)[:, 0]
        seen = jnp.zeros((tokens.shape[0], self._vocabulary), bool)
        return pages, self._choose(model, last, seen, rows.sampling, wants_top, entries, forced)

    def _decode_program(self, state, *, pages, rows, decode):
        model = nnx.merge(self._graph, state)
        batch, burst = decode.forced.shape
        out = jax.tree.map(
            lambda x: jnp.full((burst, *x.shape), -1 if x.dtype == jnp.int32 else 0, x.dtype),
            self._empty_choice(batch),
        )

        def running(carry):
            step, active, *_ = carry
            return (step < burst) & jnp.any(active)

        def body(carry):
            step, active, token, position, pages, seen, out = carry
            hidden, pages, entries = forward(
                model, pages, token[:, None], position, active.astype(jnp.int32), rows,
                impl=self.impl,
            )  # fmt: skip
            sampling = rows.sampling._replace(generated=rows.sampling.generated + step)
            choice = self._choose(
                model, hidden[:, 0], seen, sampling, decode.wants_top, entries,
                decode.forced[:, step],
            )  # fmt: skip
            seen = seen.at[jnp.arange(batch), choice.token].set(True)
            out = jax.tree.map(
                lambda all_steps, now: all_steps.at[step].set(
                    jnp.where(active.reshape(-1, *[1] * (now.ndim - 1)), now, all_steps[step])
                ),
                out,
                choice,
            )
            stops = jnp.any(decode.stop_ids == choice.token[:, None], axis=1)
            goes_on = ~self._pauses[choice.token] & ~stops & (step + 1 < decode.steps)
            return (
                step + 1,
                active & goes_on,
                jnp.where(active, choice.token, token),
                position + active.astype(jnp.int32),
                pages,
                seen,
                out,
            )

        start = (
            jnp.int32(0), decode.steps > 0, decode.token, decode.position, pages, decode.seen, out,
        )  # fmt: skip
        *_, pages, _, out = jax.lax.while_loop(running, body, start)
        return pages, out

    def _empty_choice(self, batch: int) -> Choice:
        return Choice(
            token=jnp.zeros(batch, jnp.int32),
            logprob=jnp.zeros(batch, jnp.float32),
            top_ids=jnp.zeros((batch, MAX_LOGPROBS), jnp.int32),
            top_logprobs=jnp.zeros((batch, MAX_LOGPROBS), jnp.float32),
            entries=jnp.zeros(batch, jnp.int32),
        )

    def _choose(self, model, hidden, seen, sampling, wants_top, entries, forced) -> Choice:
        logits = model.logits(hidden)  # [B, V]
        allowed = jnp.where(self._valid, logits, -jnp.inf)
        token = jnp.where(forced >= 0, forced, choose(allowed, seen, sampling))
        total = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
        empty = self._empty_choice(hidden.shape[0])
        top_logits, top_ids = jax.lax.cond(
            wants_top,
            lambda: _top(allowed),
            lambda: (empty.top_logprobs, empty.top_ids),
        )
        return Choice(token, chosen - total, top_ids, top_logits - total[:, None], entries)


def _top(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The MAX_LOGPROBS likeliest tokens of logits [B, V]; a smaller vocabulary is padded."""
    values, ids = jax.lax.top_k(logits, min(MAX_LOGPROBS, logits.shape[1]))
    pad = ((0, 0), (0, MAX_LOGPROBS - values.shape[1]))
    return jnp.pad(values, pad, constant_values=-jnp.inf), jnp.pad(ids, pad)
