"""Holds the user's interruption back where it would tear apart what belongs together."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def shielded() -> Iterator[None]:
    """An interruption by the user (SIGINT) waits until the block ends.

    A call of a device program takes the caches and gives new ones: in between there are none.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield  # Python runs handlers in the main thread; None is a handler that is not Python's
        return
    held: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held:
            signal.raise_signal(signal.SIGINT)
