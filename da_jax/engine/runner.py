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

from da_jax.cache import pools, states
from da_jax.cache.step import StepCache
from da_jax.engine.config import MAX_LOGPROBS
from da_jax.engine.sampling import SamplingRows, choose
from da_jax.kernels.paged_attention import BlockMask
from da_jax.models import host_table
from da_jax.models.decoder import Decoder

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
      stop_ids: int32 [B, S], token ids at which the row pauses; -1 for none.
      forced: int32 [B, K], tokens to take instead of choosing; -1 for none.
      seen: bool [B, V], tokens that a response with a presence penalty already has.
      wants_top: bool [], whether any row wants the likeliest alternatives.
    """

    token: np.ndarray
    position: np.ndarray
    steps: np.ndarray
    room: np.ndarray
    stop_ids: np.ndarray
    forced: np.ndarray
    seen: np.ndarray
    wants_top: np.ndarray


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


def forward(
    model: Decoder,
    plan: pools.CachePlan,
    caches: pools.Caches,
    tokens: jax.Array,
    position: jax.Array,
    q_lens: jax.Array,
    rows: Rows,
    *,
    impl: str | None,
) -> tuple[jax.Array, pools.Caches, jax.Array]:
    """Runs new tokens through the model and its caches.

    Args:
      model: the model.
      plan: sizes of the caches.
      caches: what the sequences have so far, the states as rows (see `states.take`).
      tokens: int32 [B, T], right-padded.
      position: int32 [B], absolute position of the first token of each row.
      q_lens: int32 [B], tokens of each row; 0 leaves the row out.
      rows: tables and masks.
      impl: attention backend.

    Returns:
      (hidden states [B, T, E], the written caches, entries read a row int32 [B]).
    """
    step = StepCache(
        model.config, plan, caches, block_table=rows.block_table, mask=rows.mask, slot=rows.slot,
        position=position, q_lens=q_lens, width=tokens.shape[1], impl=impl,
    )  # fmt: skip
    hidden = model(tokens, step.positions, step)
    return hidden, step.caches, step.entries


class Runner:
    """Owns the parameters, the caches and the compiled programs.

    Args:
      model: the model.
      shapes: static shapes.
      plan: sizes of the caches.
      costs: int32 [V], bytes that each token writes, and `PAUSE` where its text contains `>`.
      valid: bool [V], tokens that may be chosen.
      impl: attention backend, None to choose by platform.
      caches: what is allocated already, or only described; None allocates them.
    """

    def __init__(
        self,
        model: Decoder,
        shapes: Shapes,
        plan: pools.CachePlan,
        *,
        costs: np.ndarray,
        valid: np.ndarray,
        impl: str | None = None,
        caches: pools.Caches | None = None,
    ):
        self.shapes, self.plan, self.impl = shapes, plan, impl
        self._graph, self._state = nnx.split(model)
        self.caches = self._allocate() if caches is None else caches
        self._vocabulary = model.config.vocab_size
        self._costs, self._valid = jnp.asarray(costs), jnp.asarray(valid)
        # An accelerator would multiply float32 in bfloat16 passes; who asks for float32 wants it.
        exact = model.dtype == jnp.float32
        precise = jax.default_matmul_precision("highest" if exact else "default")
        self._prefill = precise(jax.jit(self.prefill_program, donate_argnames="caches"))
        self._decode = precise(jax.jit(self.decode_program, donate_argnames="caches"))

    def _allocate(self) -> pools.Caches:
        """Zeroed caches where the programs leave them, or their second call would compile anew."""
        weights = jax.tree.leaves(self._state)
        tables = [leaf for leaf in weights if host_table.on_host(leaf)]
        where = host_table.beside(tables[0]) if tables else weights[0].sharding
        return jax.device_put(pools.allocate(self.plan), where)

    def prefill(
        self, tokens: np.ndarray, position: int, rows: Rows, *, forced: int, wants_top: bool
    ) -> Choice:
        """Runs one chunk of one prompt; the choice, on the device, is what follows its last token.

        Args:
          tokens: int32 [n], n at most the largest chunk.
          position: absolute position of tokens[0].
          rows: one row.
          forced: the token to take instead of choosing, -1 for none.
          wants_top: whether to report the likeliest tokens.
        """
        padded = np.zeros((1, Shapes.bucket(self.shapes.chunks, len(tokens))), np.int32)
        padded[0, : len(tokens)] = tokens
        self.caches, choice = self._prefill(
            self._state, caches=self.caches, tokens=padded,
            position=np.array([position], np.int32), q_lens=np.array([len(tokens)], np.int32),
            rows=rows, forced=np.array([forced], np.int32), wants_top=np.array(wants_top),
        )  # fmt: skip
        return choice

    def decode(self, rows: Rows, decode: DecodeRows) -> Choice:
        """Runs a burst; the choices are on the device.

        Each row stops early when its room is used up or at one of its stop ids.
        """
        self.caches, choice = self._decode(
            self._state, caches=self.caches, rows=rows, decode=decode
        )
        return choice

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
            block_table=np.full((batch, self.shapes.blocks), self.plan.num_pages, np.int32),
            mask=BlockMask(table, table.copy(), table.copy(), np.zeros(batch, np.int32)),
            slot=np.full(batch, self.plan.num_slots, np.int32),
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
            room=np.full(batch, FREE, np.int32),
            stop_ids=np.full((batch, self.shapes.stop_ids), -1, np.int32),
            forced=np.full((batch, self.shapes.burst), -1, np.int32),
            seen=np.zeros((batch, self._vocabulary), bool),
            wants_top=np.array(False),
        )

    def prefill_program(self, state, *, caches, tokens, position, q_lens, rows, forced, wants_top):
        """What `prefill` compiles."""
        model = nnx.merge(self._graph, state)
        held = states.take(caches, rows.slot, position)
        hidden, held, entries = forward(
            model, self.plan, held, tokens, position, q_lens, rows, impl=self.impl
        )
        caches = states.put(caches, held, rows.slot)
        last = jnp.take_along_axis(hidden, (q_lens - 1)[:, None, None], axis=1)[:, 0]
        seen = jnp.zeros((tokens.shape[0], self._vocabulary), bool)
        choice = self._choose(model, last, seen, rows.sampling, wants_top, entries, forced)
        return caches, jax.tree.map(lambda x: x[None], choice)  # as of a burst of one step

    def decode_program(self, state, *, caches, rows, decode):
        """What `decode` compiles."""
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
            step, active, token, position, room, held, seen, out = carry
            hidden, held, entries = forward(
                model, self.plan, held, token[:, None], position, active.astype(jnp.int32), rows,
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
            room = jnp.where(room == FREE, FREE, room - self._costs[choice.token])
            stops = jnp.any(decode.stop_ids == choice.token[:, None], axis=1)
            return (
                step + 1,
                active & (room > 0) & ~stops & (step + 1 < decode.steps),
                jnp.where(active, choice.token, token),
                position + active.astype(jnp.int32),
                room,
                held,
                seen,
                out,
            )

        start = (
            jnp.int32(0), decode.steps > 0, decode.token, decode.position, decode.room,
            states.take(caches, rows.slot, decode.position), decode.seen, out,
        )  # fmt: skip
        *_, held, _, out = jax.lax.while_loop(running, body, start)
        return states.put(caches, held, rows.slot), out

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
