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
_MODEL_COLUMNS = {
    "target": "target",
    "program": "program",
    "ok": "ok",
    "argument_bytes": "device GB",
    "temp_bytes": "temp GB",
    "workspace_bytes": "kept GB",
    "host_bytes": "host GB",
    "memory_bytes": "of GB",
    "seconds": "s",
    "error": "error",
}
_UNITS = {"temp_bytes": 1 << 20, "shared_bytes": 1 << 10}
_MODEL_UNITS = dict.fromkeys(
    ("argument_bytes", "temp_bytes", "workspace_bytes", "host_bytes", "memory_bytes"), 10**9
)


def run(targets: list[str] | None, backends: list[str] | None, full: bool, as_json: bool) -> None:
    """Prints the rows of the kernels; the exit code is 1 if any is not ok."""
    from da_jax.kernels import aot

    with Console(stderr=True).status("Compiling"):
        rows = aot.rows(targets or None, backends or None, full)
    _show(rows, as_json, _COLUMNS, _UNITS)


def run_model(
    model: str, targets: list[str] | None, *, batch: int, context: int, weights: str,
    tensor_parallel: int, kv_dtype: str, as_json: bool,
) -> None:  # fmt: skip
    """Prints the rows of a model's programs; the exit code is 1 if any is not ok."""
    from da_jax.engine import aot

    if weights not in ("auto", "int8"):
        raise ValueError(f"--weights is {weights!r}; it must be auto or int8")
    if not targets:
        raise ValueError("name at least one --target with --model, such as --target v5e")
    with Console(stderr=True).status("Compiling; a large model takes minutes a target"):
        plan = aot.Plan(model, batch, context, weights == "int8", tensor_parallel, kv_dtype)
        rows = aot.rows(plan, targets)
    _show(rows, as_json, _MODEL_COLUMNS, _MODEL_UNITS)


def _show(
    rows: list[dict[str, Any]], as_json: bool, columns: dict[str, str], units: dict[str, int]
) -> None:
    if as_json:
        print(json.dumps(rows))
    else:
        _print(rows, columns, units)
    if not all(row["ok"] for row in rows):
        sys.exit(1)


def _print(rows: list[dict[str, Any]], columns: dict[str, str], units: dict[str, int]) -> None:
    bad = sum(not row["ok"] for row in rows)
    table = Table(title=f"jax {version('jax')}: {len(rows) - bad} ok, {bad} not")
    table.title_justify = "left"
    empty = lambda key: all(row.get(key) in (None, "") for row in rows)
    shown = {key: title for key, title in columns.items() if not empty(key)}
    for key, title in shown.items():
        words = key in ("target", "backend", "case", "program", "error")
        table.add_column(title, justify="left" if words else "right")
    for row in rows:
        table.add_row(*(Text(_text(key, row.get(key), units)) for key in shown))
    width = None if Console().is_terminal else 200  # a file wants the whole table
    Console(width=width).print(table)


def _text(key: str, value: Any, units: dict[str, int]) -> str:
    if value is None:
        return ""
    if key == "ok":
        return "yes" if value else "NO"
    return f"{value / units[key]:.1f}" if key in units else str(value)
