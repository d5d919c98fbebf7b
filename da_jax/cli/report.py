"""`da-jax report`: the figures of runs as tables and plots."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from da_jax.evals import report
from da_jax.evals.report import document


def run(folders: Sequence[Path], out: Path | None, page: bool, as_json: bool) -> None:
    """Writes the report of some runs, and shows the figures over all sources.

    Raises:
      ValueError: several folders and none to write to, or one that holds no run.
    """
    if out is None and len(folders) > 1:
        raise ValueError(f"--out is missing; name the folder for the report of {len(folders)} runs")
    show(folders, out or folders[0], page, as_json)


def show(folders: Sequence[Path], out: Path, page: bool, as_json: bool) -> None:
    """Writes the report, and prints its figures over all sources, or all of them as JSON."""
    figures = report.write(folders, out, page=page)
    if as_json:
        print(json.dumps(figures, allow_nan=False))
        return
    found = document.overview(figures)
    table = Table(box=None, pad_edge=False)
    for place, column in enumerate(found.columns):
        table.add_column(column, justify="left" if place < found.words else "right")
    for row in found.rows:
        table.add_row(*map(Text, row))
    console = Console()
    console.print(table)
    names = [name for name in report.NAMES if (out / name).exists()]
    console.print(Text(f"{', '.join(names)} in {out}"), soft_wrap=True)
