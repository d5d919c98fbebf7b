"""Data parallelism: several engines with the same model, each on devices of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from da_jax.engine.engine import Engine
from da_jax.engine.loop import Loop
from da_jax.engine.request import Event, Request
from da_jax.engine.scheduler import QueueFull


class Replicas(Loop):
    """Gives each request to one of several engines.

    A step is a step of each. While the host serves one, the devices of the others run on.

    Args:
      engines: with one counter of request numbers and the same settings.
    """

    def __init__(self, engines: Sequence[Engine]):
        super().__init__()
        self.engines = tuple(engines)

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compiles every program of every engine."""
        for index, engine in enumerate(self.engines):
            report = lambda done, total, index=index: progress(
                index * total + done, len(self.engines) * total
            )
            engine.warm_up(report)

    def check(self, request: Request) -> None:
        """Refuses a request that can never run, as an engine does."""
        self.engines[0].check(request)

    def add(self, request: Request) -> int:
        """Queues a request where most of its prompt is cached, unless others have less to do."""
        self.check(request)
        free = [engine for engine in self.engines if engine.room]
        if not free:
            raise QueueFull(
                f"max_waiting requests wait for each of {len(self.engines)} replicas; add more "
                "when some have ended, or raise it"
            )
        least = min(engine.scheduler.load for engine in free)
        slots = free[0].config.max_num_seqs
        near = [engine for engine in free if engine.scheduler.load < least + slots]
        cached = {engine: engine.cached_tokens(request) for engine in near}
        return max(near, key=lambda engine: (cached[engine], -engine.scheduler.load)).add(request)

    def step(self) -> list[Event]:
        """A step of each engine."""
        return self._all(*(engine.step for engine in self.engines if not engine.idle))

    @property
    def idle(self) -> bool:
        """Whether no engine has anything left to do or to tell."""
        return all(engine.idle for engine in self.engines) and not self._pending

    @property
    def room(self) -> int:
        """How many more requests may wait."""
        return sum(engine.room for engine in self.engines)

    def _cancel(self, request_id: int) -> list[Event]:
        return [event for engine in self.engines for event in engine._cancel(request_id)]

    def _forget(self, numbers: set[int]) -> None:
        super()._forget(numbers)
        for engine in self.engines:
            engine._forget(numbers)
