"""`da-jax bench`: speed of this machine, never asserted by a test."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from da_jax.kernels.bench import Shape

Row = dict[str, Any]


def shape(
    q_heads: int, kv_heads: int, head_dim: int, page_size: int, dtype: str, kv_dtype: str
) -> Shape:
    """The layer to time.

    Raises:
        ValueError: sizes that make no layer, or a dtype that pages or queries cannot have.
    """
    import jax

    from da_jax.kernels import bench
    from da_jax.kernels.paged_attention.mask import MAX_PAGE_SIZE
    from da_jax.kernels.paged_attention.pool import DTYPES
    from da_jax.kernels.paged_attention.support import Q_DTYPES
    from da_jax.models.dtypes import KV_DTYPES

    sizes = (q_heads, kv_heads, head_dim, page_size)
    if min(sizes) < 1 or q_heads % kv_heads:
        raise ValueError(
            f"--q-heads {q_heads}, --kv-heads {kv_heads}, --head-dim {head_dim}, --page-size "
            f"{page_size}: all must be positive, and the query heads a multiple of the KV heads"
        )
    if page_size > MAX_PAGE_SIZE:
        raise ValueError(f"--page-size {page_size}: give at most {MAX_PAGE_SIZE}")
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    for name, value, allowed in (
        ("--dtype", dtype, Q_DTYPES),
        ("--kv-dtype", kv_dtype, dict.fromkeys((*KV_DTYPES, *DTYPES))),
    ):
        if value not in allowed:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
    return bench.Shape(*sizes, dtype, KV_DTYPES.get(kv_dtype, kv_dtype))


def attention(
    contexts: list[int] | None,
    batches: list[int] | None,
    backends: list[str] | None,
    heads: Shape,
    as_json: bool,
) -> None:
    """Times the attention operation."""
    from da_jax.kernels import bench

    _check_positive(contexts, batches)
    given = {"contexts": contexts, "batches": batches, "backends": backends}
    rows = bench.attention_rows(shape=heads, **{k: value for k, value in given.items() if value})
    show(rows, as_json, machine())


def tune(
    contexts: list[int] | None,
    batches: list[int] | None,
    backends: list[str] | None,
    heads: Shape,
    as_json: bool,
) -> None:
    """Measures the settings of kernels and stores the best of each."""
    from da_jax.kernels import bench
    from da_jax.kernels.paged_attention import tuning

    _check_positive(contexts, batches)
    names: list[str | None] = [*backends] if backends else [None]
    rows = [
        {"context": context, "batch": batch} | row
        for context in contexts or [32768]
        for batch in batches or [1]
        for backend in names
        for row in bench.tune(context, batch, backend, heads)
    ]
    show(rows, as_json, f"{machine()}; kept in {tuning.path()}")


def _check_positive(contexts: list[int] | None, batches: list[int] | None) -> None:
    for name, values in (("--context", contexts), ("--batch", batches)):
        if values and min(values) < 1:
            raise ValueError(f"{name} is {min(values)}; it must be at least 1")


def scanner(as_json: bool) -> None:
    """Times the tag scanner."""
    from da_jax.protocol.bench import scanner_throughput

    rows = [row._asdict() | {"chars_per_s": round(row.chars_per_s)} for row in scanner_throughput()]
    show(rows, as_json, machine())


def engine(
    model: str,
    batches: list[int] | None,
    contexts: list[int] | None,
    new_tokens: int,
    transcript_tokens: int,
    repeats: int,
    dtype: str,
    with_transformers: bool,
    profile: Path | None,
    as_json: bool,
) -> None:
    """Times prefill and decode of the engine, against transformers and with declarations."""
    from da_jax.bench import drive
    from da_jax.bench import engine as bench

    cases: Sequence[tuple[int, int]] = bench.DEFAULT_CASES
    if batches or contexts:
        cases = [(b, c) for c in contexts or [2048] for b in batches or [1, 8, 32]]
    plan = bench.Plan(
        cases=cases, new_tokens=new_tokens, transcript_tokens=transcript_tokens, repeats=repeats,
        transformers=with_transformers, profile=profile,
    )  # fmt: skip
    rows = list(bench.rows(drive.load(model, dtype), plan, _tell))
    declared = [row for row in rows if "predicted_ratio" in row]
    tables = {
        f"{machine()}\nEverything visible; ratio: speed of da-jax over that of transformers": [
            row for row in rows if row not in declared
        ],
        "A forced transcript; ratio: time with declarations in force over time without": declared,
    }
    _print_several(rows, tables, as_json)


def bursts(
    model: str,
    batches: list[int] | None,
    context: int,
    new_tokens: int,
    fixed: list[int] | None,
    as_json: bool,
) -> None:
    """Times ways to have a declaration in force at the next step."""
    from da_jax.bench import bursts as bench
    from da_jax.bench import drive

    plan = bench.Plan(
        batches=batches or bench.Plan.batches, context=context, new_tokens=new_tokens,
        bursts=fixed or bench.BURSTS,
    )  # fmt: skip
    rows = list(bench.rows(drive.load(model), plan, _tell))
    here = [row for row in rows if "host_share_of_step" not in row]
    tables = {
        f"{machine()}\nDecoding forced transcripts; every strategy attends to the same": here,
        "Foretold: the host of this machine, a step as long as the chip reads the weights": [
            row for row in rows if row not in here
        ],
    }
    _print_several(rows, tables, as_json)


def device(minutes: float, out: Path, tiny: bool, as_json: bool) -> None:
    """Times models of 4 billion parameters on the accelerator here."""
    from da_jax.bench import device as bench

    plan = bench.tiny() if tiny else bench.Plan()
    rows = bench.measure(dataclasses.replace(plan, minutes=minutes), out, _tell)
    _print_several(rows, {f"{machine()}; kept in {out}": rows}, as_json)


def _tell(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _print_several(rows: list[Row], tables: dict[str, list[Row]], as_json: bool) -> None:
    """Prints all rows as JSON, each with the machine; or tables by their titles."""
    if as_json:
        where = _facts()
        print(json.dumps([row | {"machine": where} for row in rows]))
        return
    for title, part in tables.items():
        show(part, False, title)


def _facts() -> dict[str, str]:
    from da_jax.kernels import bench

    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return bench.machine() | {"threads": str(threads)}


def machine() -> str:
    """Device and versions."""
    return ", ".join(f"{name} {value}" for name, value in _facts().items())


def show(rows: list[Row], as_json: bool, title: str) -> None:
    """Prints rows as a table, or as JSON."""
    if as_json:
        print(json.dumps(rows))
        return
    table = Table(title=title or None, title_justify="left")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(Text(str(row.get(column, ""))) for column in columns))
    width = None if Console().is_terminal else 200  # a file wants the whole table
    Console(width=width).print(table)
