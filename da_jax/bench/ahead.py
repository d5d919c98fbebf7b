"""Running one step ahead, the alternative to pausing: a prototype that only benchmarks use.

The device makes step t + 1 of every sequence, under what each saw before, while the host reads the
tokens of step t. Where one of these ended a tag, that sequence's step is made again under its new
view, the others idle; it writes the same place of the cache again. A recurrent state cannot go
back, so models with such layers cannot be run like this.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Several
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from da_jax.bench import drive
from da_jax.engine.batch import fill_decode, fill_rows
from da_jax.engine.engine import Engine
from da_jax.engine.packing import pack, unpack
from da_jax.engine.request import Done, Request, Response, TokenLogprob
from da_jax.engine.rows import FREE, Choice
from da_jax.engine.sequence import Sequence, View


class Ahead:
    """Decodes on an engine whose bursts are single steps.

    Args:
      engine: the engine, from `drive.build` with `burst=1`.

    Raises:
      ValueError: its bursts are longer, or the model has recurrent layers.
    """

    def __init__(self, engine: Engine):
        if engine.shapes.burst != 1:
            raise ValueError(f"bursts of {engine.shapes.burst} steps; one step ahead needs 1")
        if engine.runner.plan.states:
            raise ValueError("a recurrent state cannot go back, so a step cannot be made again")
        self._engine, runner = engine, engine.runner
        (batch,) = engine.shapes.batches
        like = {"rows": runner.empty_rows(batch), "decode": runner.empty_decode(batch)}

        def program(weights: Any, caches: Any, inputs: Any, fed: Any, kept: Choice) -> Any:
            given = unpack(inputs, like)
            decode = given["decode"]._replace(token=fed)
            caches, out = runner.decode_program(
                weights, caches=caches, rows=given["rows"], decode=decode
            )
            new = out.token >= 0
            merged = jax.tree.map(
                lambda a, b: jnp.where(new.reshape(*new.shape, *[1] * (a.ndim - 2)), a, b),
                out, kept,
            )  # fmt: skip
            return caches, merged

        inputs = runner._put(pack(like))
        nothing = jax.tree.map(lambda x: jnp.asarray(x)[None], runner._empty_choice(batch))
        self._fed = runner._put(np.zeros(batch, np.int32))
        self._nothing = jax.device_put(
            nothing._replace(token=nothing.token - 1), runner._everywhere
        )
        with jax.default_matmul_precision(runner.precision):
            lowered = jax.jit(
                program, donate_argnums=1, out_shardings=(runner._kept, runner._everywhere)
            ).lower(runner.weights, runner.caches, inputs, self._fed, self._nothing)
        self._run = lowered.compile()

    def run(self, requests: Several[Request]) -> drive.Measured:
        """Decodes requests of one length whose tokens are all forced, see `drive.run`."""
        engine = self._engine
        numbers = drive.seat(engine, requests)
        sequences = [s for n in numbers if (s := engine.scheduler.find(n)) is not None]
        if len({len(r.forced) for r in requests}) != 1 or len(sequences) > len(self._fed):
            raise ValueError("give at most as many requests as a batch has, all of one length")
        count = len(requests[0].forced)
        done: dict[int, Response] = {}
        start, host = time.perf_counter(), time.thread_time()
        fed = np.zeros(len(self._fed), np.int32)
        fed[: len(sequences)] = [s.last_token for s in sequences]
        views = [s.view() for s in sequences]
        steps, choices = 1, list[Choice]()
        now = self._launch(sequences, views, 1, engine.runner._put(fed), self._nothing)
        for token in range(1, count):
            if token + 1 < count:
                ahead = self._launch(sequences, views, token + 1, now.token[0], self._nothing)
                steps += 1
            jax.block_until_ready(now)
            choices.append(now)
            self._receive(sequences, now, done)
            if token + 1 == count:
                break
            new = [s.view() for s in sequences]
            if changed := [i for i, (old, view) in enumerate(zip(views, new)) if view is not old]:
                ahead = self._launch(sequences, new, token + 1, now.token[0], ahead, changed)
                steps += 1
            views, now = new, ahead
        # Waiting takes no processor time, as long as the device is not this thread.
        host, seconds = time.thread_time() - host, time.perf_counter() - start
        return drive.Measured(
            seconds=seconds,
            tokens=(count - 1) * len(sequences),
            steps=steps,
            bursts=steps,
            host=host,
            exposed=0.0,
            entries=sum(int(np.maximum(np.asarray(c.entries), 0).sum()) for c in choices),
            responses=tuple(done[number] for number in numbers),
        )

    def _launch(
        self,
        sequences: list[Sequence],
        views: list[View],
        index: int,
        fed: jax.Array,
        kept: Choice,
        only: list[int] | None = None,
    ) -> Choice:
        """Starts the step that gives response token `index`, of all rows or of a few."""
        engine, runner = self._engine, self._engine.runner
        batch = len(self._fed)
        rows = fill_rows(runner.empty_rows(batch), sequences, views, runner.plan)
        decode = fill_decode(runner.empty_decode(batch), sequences)
        decode.allowed[:] = engine._valid
        decode.room[:] = FREE
        decode.steps[:] = 0
        for row in range(len(sequences)) if only is None else only:
            sequence = sequences[row]
            decode.steps[row] = 1
            decode.position[row] = sequence.prompt_len + index - 1
            decode.forced[row] = sequence.request.forced[index]
        inputs = runner._put(pack({"rows": rows, "decode": decode}))
        runner.caches, choice = self._run(runner.weights, runner.caches, inputs, fed, kept)
        return choice

    def _receive(
        self, sequences: list[Sequence], choices: Choice, done: dict[int, Response]
    ) -> None:
        """Reads a token of each sequence."""
        host = jax.device_get(choices)
        pairs = zip(sequences, host.token[0].tolist(), host.logprob[0].tolist())
        for sequence, token, logprob in pairs:
            sequence.receive([TokenLogprob(token, logprob)])
            for event in sequence.read():
                if isinstance(event, Done):
                    done[event.request_id] = event.response
                    self._engine.scheduler.remove(sequence)
