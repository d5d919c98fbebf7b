"""A device that takes no time, so that what the host takes can be measured, and a chip foretold."""

from __future__ import annotations

import time

import jax
import numpy as np

from da_jax.engine.config import MAX_LOGPROBS
from da_jax.engine.engine import Engine
from da_jax.engine.packing import pack
from da_jax.engine.rows import FREE, PAUSE, Choice, DecodeRows, Rows
from da_jax.engine.timing import WEIGHT, Timing


class FixedPatience(Timing):
    """A patience that nothing measured changes.

    Args:
      patience: see `Timing`.
    """

    def __init__(self, patience: float):
        super().__init__()
        self.patience = patience

    def collected(self, steps: int) -> None:
        """Takes note of nothing."""


class Simulated:
    """Takes the place of an engine's decode program; rows take their forced tokens.

    The host does what it always does: the inputs go to the device, and a program is called with all
    weights and caches, though one that computes nothing.

    Args:
      engine: the engine; from now on it computes nothing in a burst.

    Attributes:
      steps: decode steps that a device would have made.
      bursts: calls.
      seconds: of the processor that the simulation itself took; not the host's.
      last: of the last call alone.
    """

    def __init__(self, engine: Engine):
        self._runner = runner = engine.runner
        self.steps, self.bursts, self.seconds, self.last = 0, 0, 0.0, 0.0
        (batch,) = engine.shapes.batches
        empty = {"rows": runner.empty_rows(batch), "decode": runner.empty_decode(batch)}
        inputs = runner._put(pack(empty))
        nothing = jax.jit(
            lambda weights, caches, inputs: (caches, inputs[:1]),
            donate_argnums=1,
            keep_unused=True,
            out_shardings=(runner._kept, runner._everywhere),
        )
        self._run = nothing.lower(runner.weights, runner.caches, inputs).compile()
        runner.decode = self._decode  # type: ignore[method-assign]

    def _decode(self, rows: Rows, decode: DecodeRows) -> Choice:
        runner = self._runner
        inputs = runner._put(pack({"rows": rows, "decode": decode}))
        runner.caches, _ = self._run(runner.weights, runner.caches, inputs)
        began = time.thread_time()
        choices = simulate(decode, runner._costs, runner._opens)
        self.steps += int((choices.token >= 0).any(1).sum())
        self.bursts += 1
        self.last = time.thread_time() - began
        self.seconds += self.last
        return choices


class ChipTiming(Timing):
    """What the engine would measure on a chip: our host's time, and the chip's for a step.

    Args:
      step: seconds of a decode step.
      simulated: the device, whose own time does not count.
    """

    def __init__(self, step: float, simulated: Simulated):
        super().__init__()
        self._chip, self._simulated = step, simulated

    def launched(self) -> None:
        """A burst was given to the device."""
        if self._collected is not None:
            host = time.thread_time() - self._simulated.last - self._collected
            before = host if self._between is None else self._between
            self._between = before + WEIGHT * (host - before)

    def collected(self, steps: int) -> None:
        """What a burst of so many steps chose is on the host."""
        self._collected = time.thread_time()
        if self._between is not None:
            self.patience = self._between / self._chip


def simulate(decode: DecodeRows, costs: np.ndarray, opens: np.ndarray) -> Choice:
    """What `Runner.decode` would choose, where every token is forced: 0 where none is.

    Args:
      decode: as for `Runner.decode`.
      costs, opens: as for `Runner`.
    """
    batch, burst = decode.forced.shape
    out = np.full((burst, batch), -1, np.int32)
    active, began = decode.steps > 0, int((decode.steps > 0).sum())
    room, opened, wasted = decode.room.copy(), decode.open.copy(), 0
    for step in range(burst):
        if not active.any() or wasted > decode.patience * began:
            break
        token = np.maximum(decode.forced[:, step], 0)
        out[step] = np.where(active, token, -1)
        opened |= opens[token]
        cost = costs[token]
        cost = np.where(opened | (cost >= PAUSE), cost, 0)
        room = np.where(room == FREE, room, room - cost)
        stops = (decode.stop_ids == token[:, None]).any(1) | (decode.guided & opens[token])
        active = active & (room > 0) & ~stops & (step + 1 < decode.steps)
        wasted += began - int(active.sum())
    numbers = np.zeros((burst, batch), np.int32)
    top = np.zeros((burst, batch, MAX_LOGPROBS), np.int32)
    return Choice(out, numbers.astype(np.float32), top, top.astype(np.float32), numbers)  # type: ignore[arg-type]
