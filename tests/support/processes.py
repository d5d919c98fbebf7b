"""One of several processes that share a model: `python -m support.processes INDEX COUNT PORT ...`.

The other arguments are a folder and `end` or `fail`. Process 0 prints what the engine answers as
JSON and then ends or fails; the others print that they followed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from support import devices


def main(index: int, count: int, port: int, folder: Path, how: str) -> None:
    """Runs one process; with a count of 1 the only one, on all of its devices."""
    import jax

    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", count, index)
    llm = devices.engine(folder, jax.device_count())
    if index:
        try:
            llm.generate("document", "question")
        except RuntimeError as error:
            assert "follows process 0" in str(error), error
        llm.follow()
        print(json.dumps({"followed": index}))
        return
    if count == 1:
        try:
            llm.follow()
        except RuntimeError as error:
            assert "has none to follow" in str(error), error
    print(json.dumps(devices.answers(llm)), flush=True)
    if how == "fail":
        raise ValueError("process 0 fails")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), Path(sys.argv[4]), sys.argv[5])
