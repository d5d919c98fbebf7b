"""Who runs: a bounded queue, the slots and pages of those that left it, and who gives way.

Sequences are ordered by rank: priority, then arrival. A sequence takes a slot when it is admitted
and pages as it grows. When pages run out, the last in order gives up its own and waits again; what
it had is computed anew later. The first in order therefore always gets on.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from da_jax.cache.prefix import PrefixCache, page_names
from da_jax.engine.sequence import Sequence

PATIENCE = 8
"""Every so many times the longest waiting one goes first, whatever its priority."""


class QueueFull(RuntimeError):
    """Too many requests wait; try again when some have ended."""


class Scheduler:
    """Queue, slots and pages.

    Args:
      prefix: the prefix cache and its page pool.
      max_num_seqs: most sequences at once.
      page_size: tokens a page.
      max_waiting: most sequences in the queue.
      margin: tokens beyond what it has, for which a sequence needs room when it is admitted.
      find_prefixes: whether prompts look for their beginning in the cache.
    """

    def __init__(
        self,
        prefix: PrefixCache,
        *,
        max_num_seqs: int,
        page_size: int,
        max_waiting: int,
        margin: int,
        find_prefixes: bool = True,
    ):
        self.prefix, self._pool = prefix, prefix.pool
        self._page_size, self._margin = page_size, margin
        self._max_waiting, self.find_prefixes = max_waiting, find_prefixes
        self._slots = list(range(max_num_seqs))  # free ones
        self._waiting: dict[int, Sequence] = {}  # by request id
        self._by_rank: list[tuple[tuple[float, int], int]] = []  # heap; may hold who left
        self._by_arrival: list[int] = []  # heap; may hold who left
        self._turns = 0
        self.running: list[Sequence] = []
        self.preemptions = 0

    @property
    def idle(self) -> bool:
        """Whether nobody runs or waits."""
        return not self._waiting and not self.running

    @property
    def room(self) -> int:
        """How many more may wait."""
        return max(self._max_waiting - len(self._waiting), 0)

    @property
    def everyone(self) -> list[Sequence]:
        """All that run or wait."""
        return [*self.running, *self._waiting.values()]

    def enqueue(self, sequence: Sequence) -> None:
        """Lets a new sequence wait.

        Raises:
          QueueFull: when as many wait as may.
        """
        if not self.room:
            raise QueueFull(
                f"{len(self._waiting)} requests wait, and max_waiting is {self._max_waiting}; "
                "add more when some have ended, or raise it"
            )
        self._wait(sequence)

    def admit(self) -> None:
        """Gives slots to waiting sequences in their order, until one does not fit."""
        while self._slots and self._waiting:
            self._turns += 1
            sequence = self._next(by_arrival=self._turns % PATIENCE == 0)
            if self.running and self._pages_wanted(sequence) > self._unpromised():
                self._turns -= 1
                return
            del self._waiting[sequence.request_id]
            sequence.slot = self._slots.pop()
            self.running.append(sequence)

    def next_prefill(self, turn: int) -> Sequence | None:
        """Whose prompt gets the next chunk.

        In turn the first in order, and of those of its priority the one that needs fewest tokens,
        so that a long prompt does not keep short ones waiting.
        """
        unfinished = [s for s in self.running if s.cached < s.fed]
        if not unfinished:
            return None
        first = min(unfinished, key=lambda s: s.rank)
        if turn % 2 == 0:
            return first
        peers = [s for s in unfinished if s.rank[0] == first.rank[0]]
        return min(peers, key=lambda s: (s.fed - s.cached, s.rank))

    def skip_cached(self, sequence: Sequence) -> int | None:
        """Takes over pages that hold what the sequence would prefill next.

        Returns:
          The slot whose rings and states it has to copy, if it moved on and needs them.
        """
        page, left = divmod(sequence.cached, self._page_size)
        if not self.find_prefixes or left or len(sequence.pages) != page:
            return None
        names = self._names(sequence)[: self._most_cached(sequence)]
        pages, slot = self.prefix.match(names, page)
        if not pages:
            return None
        self._pool.hold(pages)
        sequence.pages = np.append(sequence.pages, np.asarray(pages, np.int32))
        sequence.cached += len(pages) * self._page_size
        if slot is not None:
            self.prefix.used(names[len(sequence.pages) - 1])
        return slot

    def cached_tokens(self, prompt: np.ndarray) -> int:
        """Tokens at the start of a prompt int32 [N] that are in the cache."""
        if not self.find_prefixes:
            return 0
        names = page_names(self.prefix.root, prompt[:-1], self._page_size)
        return len(self.prefix.match(names)[0]) * self._page_size

    @property
    def load(self) -> int:
        """How many run or wait."""
        return len(self.running) + len(self._waiting)

    def border(self, sequence: Sequence) -> int | None:
        """Where prefill stops to copy rings and states: the last page border of the shared part.

        That is what comes before the question; for a prompt without chunks all but its end.
        """
        if not (self.find_prefixes and self.prefix.keeps_copies):
            return None
        prompt = sequence.request.prompt
        end = prompt.chunks[-1][1] if prompt.chunks else sequence.prompt_len - 1
        border = min(end, sequence.shareable, sequence.prompt_len - 1)
        return border // self._page_size * self._page_size

    def share(self, sequence: Sequence, since: int) -> None:
        """Makes the whole pages of the prompt that were filled since position `since` findable."""
        if not self.find_prefixes:
            return
        end = min(sequence.cached, sequence.shareable)
        fresh = slice(since // self._page_size, end // self._page_size)
        for page, name in zip(sequence.pages[fresh].tolist(), self._names(sequence)[fresh]):
            self._pool.name(page, name)

    def copy_target(self, sequence: Sequence) -> tuple[bytes, int] | None:
        """(name, slot) for a copy of its rings and states, if it stands at its `border`."""
        if not sequence.cached or sequence.cached != self.border(sequence):
            return None
        name = self._names(sequence)[sequence.cached // self._page_size - 1]
        slot = self.prefix.slot_for(name)
        return None if slot is None else (name, slot)

    def reserve(self, sequence: Sequence, tokens: int) -> Sequence | None:
        """Makes sure that the pages of a running sequence hold `tokens` tokens.

        Returns:
          None when they do. Else who has to give way first: `preempt` it and ask again; or the
          sequence itself, when nobody behind it has pages and it cannot get on now.
        """
        missing = -(-tokens // self._page_size) - len(sequence.pages)
        if missing <= 0:
            return None
        if missing <= self._pool.num_free:
            new = np.asarray(self._pool.allocate(missing), np.int32)
            sequence.pages = np.append(sequence.pages, new)
            return None
        behind = [s for s in self.running if s.rank > sequence.rank and len(s.pages)]
        return max(behind, key=lambda s: s.rank, default=sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Takes a running sequence's pages and slot and lets it wait again, in its old place."""
        self._release(sequence)
        sequence.lose_cache()
        self._wait(sequence)
        self.preemptions += 1

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out wherever it is, and frees what it held."""
        if self._waiting.pop(sequence.request_id, None) is None:
            self._release(sequence)

    def find(self, request_id: int) -> Sequence | None:
        """The sequence of a request that has not finished."""
        if request_id in self._waiting:
            return self._waiting[request_id]
        return next((s for s in self.running if s.request_id == request_id), None)

    def _wait(self, sequence: Sequence) -> None:
        self._waiting[sequence.request_id] = sequence
        heapq.heappush(self._by_rank, (sequence.rank, sequence.request_id))
        heapq.heappush(self._by_arrival, sequence.request_id)

    def _next(self, by_arrival: bool) -> Sequence:
        while self._by_rank[0][1] not in self._waiting:
            heapq.heappop(self._by_rank)
        while self._by_arrival[0] not in self._waiting:
            heapq.heappop(self._by_arrival)
        if not by_arrival:
            return self._waiting[self._by_rank[0][1]]
        oldest = self._waiting[self._by_arrival[0]]
        oldest.rank = (-math.inf, oldest.request_id)  # nobody makes it give way again
        return oldest

    def _release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._pool.free(sequence.pages.tolist())
        self._slots.append(sequence.slot)

    def _names(self, sequence: Sequence) -> list[bytes]:
        if sequence.names is None:
            ids = sequence.request.prompt.ids[: sequence.shareable]
            sequence.names = page_names(self.prefix.root, ids, self._page_size)
        return sequence.names

    def _most_cached(self, sequence: Sequence) -> int:
        """Pages that it may take from the cache.

        The last token of a prompt gives the first choice, so it is computed in any case.
        """
        most = min(sequence.shareable, sequence.fed - (sequence.length == sequence.prompt_len))
        return most // self._page_size

    def _goal(self, sequence: Sequence) -> int:
        """Pages for what it has and a little more."""
        return -(-min(sequence.fed + self._margin, sequence.max_len) // self._page_size)

    def _pages_wanted(self, sequence: Sequence) -> int:
        """Free pages that it would take now."""
        found: list[int] = []
        if self.find_prefixes:
            found, _ = self.prefix.match(self._names(sequence)[: self._most_cached(sequence)])
        return self._goal(sequence) - len(found) + self._pool.taken_by(found)

    def _unpromised(self) -> int:
        """Free pages that nobody who runs is on the way to."""
        promised = (self._goal(s) - len(s.pages) for s in self.running if not s.decoding)
        return self._pool.num_free - sum(max(count, 0) for count in promised)
