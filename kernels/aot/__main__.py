"""The child process of `runner`: compiles for one machine and prints a line for each check."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from da_jax.kernels.aot.runner import child


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the arguments that `runner` gives and does the checks."""
    parser = argparse.ArgumentParser(description="Internal: use `da-jax bench aot`.")
    parser.add_argument("--child", required=True, metavar="TARGET")
    parser.add_argument("--backend", action="append")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--scratch", type=Path, required=True)
    given = parser.parse_args(arguments)
    child(given.child, given.backend, given.full, given.start, given.scratch)


if __name__ == "__main__":
    main()
