"""`da-jax train`: supervised fine-tuning on recorded responses."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from da_jax.cli.options import read_style


def run(
    *,
    model: str,
    examples: Path,
    out: Path,
    style: str,
    settings: dict[str, Any],
    job: dict[str, Any],
    json_: bool,
) -> None:
    """Trains, and prints the loss of every step.

    Raises:
      ValueError, OSError: what went wrong; what cannot work is refused before the first step.
    """
    try:
        import optax  # noqa: F401
    except ImportError as error:
        raise ValueError("training needs optax; pip install 'da-jax[train]'") from error
    from da_jax.train import run as training
    from da_jax.train.step import Measured, Settings

    what = training.Job(
        model=model, examples=examples, out=out, settings=Settings(**settings),
        style=read_style(style), **job,
    )  # fmt: skip
    began = time.monotonic()
    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("loading", total=what.settings.steps)

        def report(step: int, measured: Measured) -> None:
            bar.update(task, completed=step, description=f"loss {measured.loss:.4f}")
            if json_:
                line = {"step": step, **measured._asdict(), "seconds": time.monotonic() - began}
                print(json.dumps(line), flush=True)

        measured = training.run(what, report)
    if not json_:
        first, last = measured[0].loss, measured[-1].loss
        began_at = what.settings.steps - len(measured) + 1
        print(f"wrote {out}: loss {first:.4f} in step {began_at}, {last:.4f} in the last")
