"""Who runs: a queue, and the pages and slots of the sequences that left it."""

from __future__ import annotations

from collections import deque

from da_jax.cache.pages import PagePool
from da_jax.engine.sequence import Sequence


class Scheduler:
    """First come, first served, as long as there is room and enough pages are free.

    A sequence takes the pages of its whole life (prompt and `max_tokens`) when it is admitted, so
    that it can never run out of them later, and a slot for what does not grow with its length.

    Args:
      pool: the page pool.
      max_num_seqs: most sequences at once.
      page_size: tokens a page.
    """

    def __init__(self, pool: PagePool, max_num_seqs: int, page_size: int):
        self._pool, self._page_size = pool, page_size
        self._slots = list(range(max_num_seqs))  # free ones
        self._waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def idle(self) -> bool:
        """Whether nobody runs or waits."""
        return not self._waiting and not self.running

    def pages_for(self, sequence: Sequence) -> int:
        """Pages that the sequence needs over its life."""
        return -(-sequence.max_len // self._page_size)

    def enqueue(self, sequence: Sequence) -> None:
        """Puts a sequence at the end of the queue."""
        self._waiting.append(sequence)

    def admit(self) -> None:
        """Moves waiting sequences to `running` in their order, until one does not fit."""
        while self._waiting and self._slots:
            needed = self.pages_for(self._waiting[0])
            if needed > self._pool.num_free:
                return
            sequence = self._waiting.popleft()
            sequence.place(self._pool.allocate(needed), self._slots.pop())
            self.running.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out wherever it is, and frees what it held."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._pool.free(sequence.pages.tolist())
            self._slots.append(sequence.slot)
        else:
            self._waiting.remove(sequence)

    def find(self, request_id: int) -> Sequence | None:
        """The sequence of a request that has not finished."""
        everyone = (*self.running, *self._waiting)
        return next((s for s in everyone if s.request_id == request_id), None)
