"""`da-jax bench aot`: compile attention for TPUs and GPUs without having any."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_COLUMNS = {
    "target": "target",
    "backend": "backend",
    "case": "case",
    "ok": "ok",
    "temp_bytes": "temp MiB",
    "shared_bytes": "shared KiB",
    "registers": "registers",
    "spills": "spills",
    "seconds": "s",
    "error": "error",
}
_UNITS = {"temp_bytes": 1 << 20, "shared_bytes": 1 << 10}


def run(targets: list[str] | None, backends: list[str] | None, full: bool, as_json: bool) -> None:
    """Prints the rows; the exit code is 1 if any is not ok."""
    from da_jax.kernels import aot

    with Console(stderr=True).status("Compiling"):
        rows = aot.rows(targets or None, backends or None, full)
    if as_json:
        print(json.dumps(rows))
    else:
        _print(rows)
    if not all(row["ok"] for row in rows):
        sys.exit(1)


def _print(rows: list[dict[str, Any]]) -> None:
    bad = sum(not row["ok"] for row in rows)
    table = Table(title=f"jax {version('jax')}: {len(rows) - bad} ok, {bad} not")
    table.title_justify = "left"
    empty = lambda key: all(row.get(key) in (None, "") for row in rows)
    shown = {key: title for key, title in _COLUMNS.items() if not empty(key)}
    for key, title in shown.items():
        words = key in ("target", "backend", "case", "error")
        table.add_column(title, justify="left" if words else "right")
    for row in rows:
        table.add_row(*(Text(_text(key, row.get(key))) for key in shown))
    width = None if Console().is_terminal else 200  # a file wants the whole table
    Console(width=width).print(table)


def _text(key: str, value: Any) -> str:
    if value is None:
        return ""
    if key == "ok":
        return "yes" if value else "NO"
    return f"{value / _UNITS[key]:.1f}" if key in _UNITS else str(value)
