"""What a burst costs, measured while the engine runs, and how long a burst should therefore last.

A paused row idles until its burst ends; a burst that ends early costs the host's work between two
bursts. Neither changes a result.
"""

from __future__ import annotations

import time

WEIGHT = 0.2
"""Weight of a new measurement in the running means."""


class Timing:
    """Running means of the time between bursts and of a decode step.

    Attributes:
      patience: how many steps of an idle batch a burst may waste: as much time as ending it costs,
        so that what is lost is never more than twice the least possible.
    """

    def __init__(self) -> None:
        self.patience = 1.0
        self._between: float | None = None
        self._step: float | None = None
        self._launched: float | None = None
        self._collected: float | None = None

    def began(self) -> None:
        """A step began; what was between bursts before it was not the host's work alone."""
        self._collected = None

    def prefilled(self) -> None:
        """A prefill was given to the device; the burst after it tells nothing."""
        self._launched = self._collected = None

    def launched(self) -> None:
        """A burst was given to the device."""
        self._launched = time.perf_counter()
        if self._collected is not None:
            self._between = _mean(self._between, self._launched - self._collected)

    def collected(self, steps: int) -> None:
        """What a burst of so many steps chose is on the host."""
        self._collected = time.perf_counter()
        if self._launched is not None and steps:
            self._step = _mean(self._step, (self._collected - self._launched) / steps)
        if self._between is not None and self._step:
            self.patience = self._between / self._step


def _mean(before: float | None, new: float) -> float:
    return new if before is None else before + WEIGHT * (new - before)
