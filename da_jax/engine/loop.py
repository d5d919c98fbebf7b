"""What answers requests: one engine, or several replicas of it behind the same few methods."""

from __future__ import annotations

import abc
from collections.abc import Callable, Generator, Iterable, Iterator

from da_jax.engine.interrupts import shielded
from da_jax.engine.request import Done, Event, Request


class RequestError(ValueError):
    """A request that cannot run, with the value and the remedy. Other requests are not touched."""


class Loop(abc.ABC):
    """Takes requests, does a step of work at a time, and says what came of it."""

    def __init__(self) -> None:
        self._pending: list[Event] = []  # for the next `step` to return
        self._boxes: dict[int, list[Event]] = {}  # events of requests that a `run` waits for

    @abc.abstractmethod
    def check(self, request: Request) -> None:
        """Refuses a request that can never run.

        Raises:
          RequestError: with the value and the remedy.
        """

    @abc.abstractmethod
    def add(self, request: Request) -> int:
        """Queues a request and returns its number.

        Raises:
          RequestError: when it can never run; nothing was queued.
          QueueFull: when `max_waiting` requests wait already; nothing was queued.
        """

    @abc.abstractmethod
    def step(self) -> list[Event]:
        """Does the next piece of work for everybody."""

    @property
    @abc.abstractmethod
    def idle(self) -> bool:
        """Whether there is nothing left to do or to tell."""

    @property
    @abc.abstractmethod
    def room(self) -> int:
        """How many more requests may wait."""

    @abc.abstractmethod
    def _cancel(self, request_id: int) -> list[Event]: ...

    def cancel(self, request_id: int) -> None:
        """Ends a request now; its response holds what was generated. Unknown ids do nothing."""
        self._pending += self._cancel(request_id)

    def run(self, requests: Iterable[Request]) -> Generator[Event, None, None]:
        """Answers requests, yielding their events and no others.

        Several runs may be interleaved in one thread; each advances all of them. A run that is
        abandoned cancels what it has not finished.

        Args:
          requests: a list is checked at once; what else can be iterated is asked for the next
            request when it may wait, so that there can be any number of them.

        Raises:
          RequestError: when one of them can never run.
        """
        if isinstance(requests, list | tuple):
            for request in requests:
                self.check(request)
        return self._events(iter(requests))

    def _events(self, requests: Iterator[Request]) -> Generator[Event, None, None]:
        box, unfinished = list[Event](), set[int]()
        more = True
        try:
            while more or unfinished:
                while more and self.room:
                    request = next(requests, None)
                    if more := request is not None:
                        number = self.add(request)
                        unfinished.add(number)
                        self._boxes[number] = box
                while not box and (unfinished or (more and not self.room)):
                    if self.idle:
                        raise RuntimeError(f"requests {sorted(unfinished)} were lost by a fault")
                    for event in self.step():
                        self._boxes.get(event.request_id, self._pending).append(event)
                if not box:
                    continue
                event = box.pop(0)
                if isinstance(event, Done):
                    unfinished.remove(event.request_id)
                    del self._boxes[event.request_id]
                yield event
        finally:
            for number in unfinished:
                self._cancel(number)
                del self._boxes[number]
            self._forget(unfinished)

    def _forget(self, numbers: set[int]) -> None:
        """Drops the events of requests that nobody waits for."""
        self._pending = [event for event in self._pending if event.request_id not in numbers]

    def _all(self, *work: Callable[[], list[Event]]) -> list[Event]:
        """What is pending, and what some pieces of work bring about."""
        for part in work:
            with shielded():
                made = part()  # which may replace the list below, when a stream is closed meanwhile
                self._pending += made  # kept if the next part fails
        events, self._pending = self._pending, []
        return events
