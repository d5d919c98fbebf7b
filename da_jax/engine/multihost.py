"""Several processes that share one model, one on each host: process 0 leads, the others follow.

All processes must call the same device programs in the same order with the same inputs. Process 0
runs the engine. Before each call it tells the others, through the devices, which program it is and
with what inputs; they make the same call and forget what comes out.

Each message is the number of a program, and then its packed inputs, whose length follows from it.
The number 0 says that there is nothing more to do.
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils

Program = tuple[str, int]  # kind and size
_STOP = 0


class Link:
    """What passes between the processes; process 0 sends, all others receive.

    Args:
      lengths: length of the packed inputs of every device program; in all processes the same, in
        the same order.
    """

    def __init__(self, lengths: Mapping[Program, int]):
        self._programs, self._lengths = tuple(lengths), dict(lengths)
        self.leads = jax.process_index() == 0
        self._open = True
        if self.leads:
            atexit.register(self.stop)  # also after an error, or the others would wait for ever

    def send(self, program: Program, packed: np.ndarray) -> None:
        """Tells the others to call a program; an interrupted message ends the link for good.

        Args:
          program: which.
          packed: int32 [N], its inputs.

        Raises:
          RuntimeError: in a process that follows, or after `stop` or an interrupted message.
        """
        if not self.leads:
            raise RuntimeError(
                f"process {jax.process_index()} follows process 0: call `follow` there, and give "
                "requests to process 0"
            )
        if not self._open:
            raise RuntimeError("the other processes were told to stop; start all of them again")
        number = np.int32(1 + self._programs.index(program))
        self._open = False
        _share(number)
        _share(packed)
        self._open = True

    def receive(self) -> tuple[Program, np.ndarray] | None:
        """Waits for the next call: (program, packed inputs int32 [N]), or None after the last."""
        number = int(_share(np.int32(_STOP)))
        if number == _STOP:
            return None
        program = self._programs[number - 1]
        return program, _share(np.zeros(self._lengths[program], np.int32))

    def stop(self) -> None:
        """Tells the others that nothing more will come; again, it does nothing."""
        if self.leads and self._open:
            self._open = False
            _share(np.int32(_STOP))


def _share(array: np.ndarray | np.int32) -> np.ndarray:
    """What process 0 has; of the others only the shape matters."""
    return np.asarray(multihost_utils.broadcast_one_to_all(array))
