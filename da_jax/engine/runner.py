"""The device programs: prefill of one chunk, a burst of decode steps, and a copy between slots.

A program sees only arrays of a few fixed shapes, those of `Shapes`; masks, lengths and
sampling parameters are data. After `warm_up` nothing compiles.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from da_jax.cache import pools, states
from da_jax.cache import sharding as cache_sharding
from da_jax.cache.step import StepCache
from da_jax.engine import multihost
from da_jax.engine.config import MAX_LOGPROBS
from da_jax.engine.packing import pack, unpack
from da_jax.engine.rows import FREE, PAUSE, Choice, DecodeRows, Rows, Shapes, unpacked
from da_jax.engine.sampling import SamplingRows, choose
from da_jax.kernels.paged_attention import BlockMask
from da_jax.models import parallel
from da_jax.models.decoder import Decoder

COMPILERS = min(os.cpu_count() or 1, 8)
"""Programs that are compiled at once."""


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
      opens: bool [V], tokens whose text contains `<`.
      impl: attention backend, None to choose by platform.
      caches: what is allocated already, or only described; None allocates them.

    Attributes:
      weights: the parameters, as the leaves of the model's state.
    """

    def __init__(
        self,
        model: Decoder,
        shapes: Shapes,
        plan: pools.CachePlan,
        *,
        costs: np.ndarray,
        opens: np.ndarray,
        impl: str | None = None,
        caches: pools.Caches | None = None,
    ):
        self.shapes, self.plan, self.impl = shapes, plan, impl
        self._graph, state = nnx.split(model)
        # Each call would take a state apart again, which costs more than the rest of the call.
        self.weights, self._structure = jax.tree.flatten(state)
        self._vocabulary = model.config.vocab_size
        self._costs, self._opens = costs, opens
        # An accelerator would multiply float32 in bfloat16 passes; who asks for float32 wants it.
        exact = model.dtype == jnp.float32
        self.precision = "highest" if exact else "default"
        self.mesh = parallel.mesh_of(self.weights[0])
        self._specs = cache_sharding.specs(model.config, plan)
        self._everywhere = NamedSharding(self.mesh, PartitionSpec())
        # The next call of a program takes the caches from where this one leaves them.
        self._kept = cache_sharding.shardings(model.config, plan, self.mesh)
        if caches is None:
            caches = cache_sharding.allocate(model.config, plan, self.mesh)
        self.caches = caches
        self._compiled: dict[tuple[str, int], Callable[..., Any]] = {}
        several = jax.process_count() > 1
        self._link = multihost.Link(self._lengths()) if several else None

    def _lengths(self) -> dict[tuple[str, int], int]:
        """Length of the packed inputs of every program."""
        return {
            (kind, program_size(kind, like)): len(pack(like)) for kind, _, like in self.programs()
        }

    def _put(self, packed: np.ndarray) -> jax.Array:
        """The inputs of a program, as one array on every device."""
        if self._link is None:
            return jax.device_put(packed, self._everywhere)
        # `device_put` would first compare what the processes have.
        read = packed.__getitem__
        return jax.make_array_from_callback(packed.shape, self._everywhere, read)

    def on_devices(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """A program as the devices that share the model run it together.

        Args:
          program: (weights, caches, inputs) to (caches, outputs). Each device runs it on its part
            of weights and caches; inputs and outputs are the same on all.
        """
        if self.mesh.size == 1:
            return program
        weights = [leaf.sharding.spec for leaf in self.weights]
        everywhere = PartitionSpec()
        return jax.shard_map(
            program, mesh=self.mesh, in_specs=(weights, self._specs, everywhere),
            out_specs=(self._specs, everywhere), check_vma=False,
        )  # fmt: skip

    def prefill(
        self,
        tokens: np.ndarray,
        position: int,
        rows: Rows,
        *,
        forced: int,
        allowed: np.ndarray,
        wants_top: bool,
    ) -> Choice:
        """Feeds one chunk of one sequence; the choice, on the device, follows its last token.

        Args:
          tokens: int32 [n], n at most the largest chunk.
          position: absolute position of tokens[0].
          rows: one row.
          forced: the token to take instead of choosing, -1 for none.
          allowed: uint32 [words], tokens that may be chosen, see `packed`.
          wants_top: whether to report the likeliest tokens.
        """
        inputs = self._prefill_inputs(Shapes.bucket(self.shapes.chunks, len(tokens)), rows)
        inputs["tokens"][0, : len(tokens)] = tokens
        inputs["position"][0], inputs["q_lens"][0] = position, len(tokens)
        inputs["forced"][0], inputs["allowed"][0] = forced, allowed
        return self._call("prefill", inputs | {"wants_top": np.array(wants_top)})

    def decode(self, rows: Rows, decode: DecodeRows) -> Choice:
        """Runs a burst; the choices are on the device.

        Each row stops early when its room is used up or at one of its stop ids.
        """
        return self._call("decode", {"rows": rows, "decode": decode})

    def copy(self, source: int, target: int) -> None:
        """Copies rings and states from one slot to another."""
        places = {"source": np.array(source, np.int32), "target": np.array(target, np.int32)}
        self._call("copy", places)

    def _call(self, kind: str, inputs: dict[str, Any]) -> Any:
        """Calls a program, also in the processes that follow."""
        which, packed = (kind, program_size(kind, inputs)), pack(inputs)
        if self._link is not None:
            self._link.send(which, packed)
        return self._run(which, packed)

    def _run(self, which: tuple[str, int], packed: np.ndarray) -> Any:
        run = self._compiled[which]
        self.caches, result = run(self.weights, self.caches, self._put(packed))
        return result

    def follow(self) -> None:
        """Makes every call that process 0 makes, until it stops; for all other processes.

        Raises:
          RuntimeError: in process 0, or where there is no other process.
        """
        if self._link is None or self._link.leads:
            raise RuntimeError(
                f"process {jax.process_index()} of {jax.process_count()} has none to follow; only "
                "those from 1 on follow process 0"
            )
        while (call := self._link.receive()) is not None:
            self._run(*call)

    def stop(self) -> None:
        """Ends `follow` in all other processes; does nothing where there are none."""
        if self._link is not None:
            self._link.stop()

    def programs(self) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        """Every program that ever runs: (kind, program, inputs that change nothing).

        A program takes (weights, caches, packed inputs) and returns (caches, what it chose).
        """
        for size in self.shapes.chunks:
            inputs = self._prefill_inputs(size, self.empty_rows(1))
            yield "prefill", self._packed(self.prefill_program, inputs), inputs
        for batch in self.shapes.batches:
            inputs = {"rows": self.empty_rows(batch), "decode": self.empty_decode(batch)}
            yield "decode", self._packed(self.decode_program, inputs), inputs
        if self.plan.rings or self.plan.states:
            last = np.array(self.plan.num_slots - 1, np.int32)
            inputs = {"source": last, "target": last}
            yield "copy", self._packed(self.copy_program, inputs), inputs

    def _packed(self, program: Callable[..., Any], like: dict[str, Any]) -> Any:
        @functools.wraps(program)
        def run(weights: list[jax.Array], caches: pools.Caches, inputs: jax.Array) -> Any:
            return program(weights, caches=caches, **unpack(inputs, like))

        del run.__wrapped__  # its signature is another
        out = self._kept, self._everywhere
        return jax.jit(self.on_devices(run), donate_argnums=1, out_shardings=out)

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compiles every program, several at a time, and runs each once on empty rows.

        A process that follows another only compiles: it runs them when it follows.
        """
        work = list(self.programs())
        progress(0, len(work))
        with (
            jax.default_matmul_precision(self.precision),
            concurrent.futures.ThreadPoolExecutor(COMPILERS) as compilers,
        ):
            compiling = []
            for kind, program, inputs in work:
                lowered = program.lower(self.weights, self.caches, self._put(pack(inputs)))
                compiling.append((kind, inputs, compilers.submit(lowered.compile)))
            for done, (kind, inputs, compiled) in enumerate(compiling, 1):
                self._compiled[kind, program_size(kind, inputs)] = compiled.result()
                progress(done, len(work))
        for kind, _, inputs in work if self._link is None or self._link.leads else ():
            self._call(kind, inputs)

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
            open=np.zeros(batch, bool),
            guided=np.zeros(batch, bool),
            stop_ids=np.full((batch, self.shapes.stop_ids), -1, np.int32),
            forced=np.full((batch, self.shapes.burst), -1, np.int32),
            seen=np.zeros((batch, self.words), np.uint32),
            allowed=np.zeros((batch, self.words), np.uint32),
            wants_top=np.array(False),
            patience=np.zeros((), np.float32),
        )

    @property
    def words(self) -> int:
        """Length of a `packed` set of tokens."""
        return -(-self._vocabulary // 32)

    def _prefill_inputs(self, size: int, rows: Rows) -> dict[str, Any]:
        return {
            "tokens": np.zeros((1, size), np.int32),
            "position": np.zeros(1, np.int32),
            "q_lens": np.zeros(1, np.int32),
            "rows": rows,
            "forced": np.full(1, -1, np.int32),
            "allowed": np.zeros((1, self.words), np.uint32),
            "wants_top": np.array(False),
        }

    def prefill_program(
        self, weights, *, caches, tokens, position, q_lens, rows, forced, allowed, wants_top
    ):
        """What `prefill` compiles."""
        model = self.model(weights)
        held = states.take(caches, rows.slot, position)
        hidden, held, entries = forward(
            model, self.plan, held, tokens, position, q_lens, rows, impl=self.impl
        )
        caches = states.put(caches, held, rows.slot)
        last = jnp.take_along_axis(hidden, (q_lens - 1)[:, None, None], axis=1)[:, 0]
        seen = jnp.zeros((tokens.shape[0], self._vocabulary), bool)
        allowed = unpacked(allowed, self._vocabulary)
        choice = self._choose(model, last, seen, allowed, rows.sampling, wants_top, entries, forced)
        return caches, jax.tree.map(lambda x: x[None], choice)  # as of a burst of one step

    def decode_program(self, weights, *, caches, rows, decode):
        """What `decode` compiles."""
        model = self.model(weights)
        batch, burst = decode.forced.shape
        allowed = unpacked(decode.allowed, self._vocabulary)
        costs, opens = jnp.asarray(self._costs), jnp.asarray(self._opens)
        out = jax.tree.map(
            lambda x: jnp.full((burst, *x.shape), -1 if x.dtype == jnp.int32 else 0, x.dtype),
            self._empty_choice(batch),
        )
        began = jnp.sum(decode.steps > 0)

        def running(carry: _Burst) -> jax.Array:
            patient = carry.wasted <= decode.patience * began
            return (carry.step < burst) & jnp.any(carry.active) & patient

        def body(carry: _Burst) -> _Burst:
            step, active = carry.step, carry.active
            hidden, held, entries = forward(
                model, self.plan, carry.held, carry.token[:, None], carry.position,
                active.astype(jnp.int32), rows, impl=self.impl,
            )  # fmt: skip
            sampling = rows.sampling._replace(generated=rows.sampling.generated + step)
            choice = self._choose(
                model, hidden[:, 0], carry.seen, allowed, sampling, decode.wants_top, entries,
                decode.forced[:, step],
            )  # fmt: skip
            token = choice.token
            opened = opens[token]
            open_ = carry.open | opened
            cost = costs[token]
            cost = jnp.where(open_ | (cost >= PAUSE), cost, 0)
            room = jnp.where(carry.room == FREE, FREE, carry.room - cost)
            stops = jnp.any(decode.stop_ids == token[:, None], axis=1) | (decode.guided & opened)
            goes_on = active & (room > 0) & ~stops & (step + 1 < decode.steps)
            return _Burst(
                step=step + 1,
                active=goes_on,
                token=jnp.where(active, token, carry.token),
                position=carry.position + active.astype(jnp.int32),
                room=room,
                open=open_,
                wasted=carry.wasted + began - jnp.sum(goes_on),
                held=held,
                seen=carry.seen.at[jnp.arange(batch), token].set(True),
                out=jax.tree.map(
                    lambda all_steps, now: all_steps.at[step].set(
                        jnp.where(active.reshape(-1, *[1] * (now.ndim - 1)), now, all_steps[step])
                    ),
                    carry.out,
                    choice,
                ),
            )

        start = _Burst(
            step=jnp.int32(0), active=decode.steps > 0, token=decode.token,
            position=decode.position, room=decode.room, open=decode.open, wasted=jnp.int32(0),
            held=states.take(caches, rows.slot, decode.position),
            seen=unpacked(decode.seen, self._vocabulary), out=out,
        )  # fmt: skip
        end = jax.lax.while_loop(running, body, start)
        return states.put(caches, end.held, rows.slot), end.out

    def copy_program(self, weights, *, caches, source, target):
        """What `copy` compiles."""
        del weights
        return states.copy(caches, source, target, self.plan.num_slots), None

    def model(self, weights: list[jax.Array]) -> Decoder:
        """The model with these parameters, which may be traced."""
        return nnx.merge(self._graph, jax.tree.unflatten(self._structure, weights))

    def _empty_choice(self, batch: int) -> Choice:
        return Choice(
            token=jnp.zeros(batch, jnp.int32),
            logprob=jnp.zeros(batch, jnp.float32),
            top_ids=jnp.zeros((batch, MAX_LOGPROBS), jnp.int32),
            top_logprobs=jnp.zeros((batch, MAX_LOGPROBS), jnp.float32),
            entries=jnp.zeros(batch, jnp.int32),
        )

    def _choose(self, model, hidden, seen, allowed, sampling, wants_top, entries, forced) -> Choice:
        logits = model.logits(hidden)  # [B, V]
        possible = jnp.where(allowed, logits, -jnp.inf)
        token = jnp.where(forced >= 0, forced, choose(possible, seen, sampling))
        total = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
        empty = self._empty_choice(hidden.shape[0])
        top_logits, top_ids = jax.lax.cond(
            wants_top,
            lambda: _top(possible),
            lambda: (empty.top_logprobs, empty.top_ids),
        )
        return Choice(token, chosen - total, top_ids, top_logits - total[:, None], entries)


class _Burst(NamedTuple):
    """The state of a burst: how far it is, and its rows [B]."""

    step: jax.Array
    active: jax.Array
    token: jax.Array
    position: jax.Array
    room: jax.Array
    open: jax.Array
    wasted: jax.Array
    held: pools.Caches
    seen: jax.Array
    out: Choice


def program_size(kind: str, inputs: dict[str, Any]) -> int:
    """What tells the programs of a kind apart: chunk, or batch."""
    if kind == "prefill":
        return inputs["tokens"].shape[1]
    return inputs["decode"].token.shape[0] if kind == "decode" else 0


def _top(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The MAX_LOGPROBS likeliest tokens of logits [B, V]; a smaller vocabulary is padded."""
    values, ids = jax.lax.top_k(logits, min(MAX_LOGPROBS, logits.shape[1]))
    pad = ((0, 0), (0, MAX_LOGPROBS - values.shape[1]))
    return jnp.pad(values, pad, constant_values=-jnp.inf), jnp.pad(ids, pad)
