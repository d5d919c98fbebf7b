"""Names of suites and tasks, and what they stand for."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from da_jax.evals.task import Task

if TYPE_CHECKING:
    from da_jax.evals.public import PublicOptions

LM_EVAL = "lm_eval:"
"""What names of tasks of lm-evaluation-harness begin with; those run in `da_jax.evals.harness`."""

_SUITES = {
    "offline15": ("da_jax.evals.offline", "TASKS"),
    "controls": ("da_jax.evals.offline", "CONTROLS"),
    "paper15": ("da_jax.evals.public", "TASKS"),
    "compact": ("da_jax.evals.compact", "TASKS"),
    "compact_short": ("da_jax.evals.compact", "SHORT"),
}
"""Suite to (module, table of its tasks)."""

SUITES = tuple(_SUITES)
"""Names of all suites."""


def load(names: Iterable[str], public: PublicOptions | None = None) -> list[Task]:
    """The tasks of suites and single tasks, each once, in the order in which they are named.

    Args:
      names: suites, tasks, or several of them with commas between.
      public: where public data and the judge are; tasks of `paper15` need it.

    Raises:
      ValueError: no name, an unknown one, or one of lm-evaluation-harness, whose tasks have
        metrics of their own.
    """
    tables = _tables()
    found: dict[str, Task] = {}
    for name in split(names):
        if name.startswith(LM_EVAL):
            raise ValueError(
                f"suite {name!r} is a task of lm-evaluation-harness, which scores by itself; name "
                "it alone, not together with tasks of da-jax"
            )
        for task_name in _expand(name, tables):
            if task_name not in found:
                found[task_name] = _make(tables[task_name], public)
    return list(found.values())


def split(names: Iterable[str]) -> list[str]:
    """The single names.

    Raises:
      ValueError: there is none.
    """
    single = [part.strip() for name in names for part in name.split(",") if part.strip()]
    if not single:
        raise ValueError(f"no suite is named; use one or more of {', '.join(SUITES)}, or a task")
    return single


def _tables() -> dict[str, Any]:
    """Every task by name, or what makes it."""
    tables: dict[str, Any] = {}
    for suite in _SUITES.values():
        tables |= _table(*suite)
    return tables


def _table(module: str, table: str) -> Mapping[str, Any]:
    return getattr(importlib.import_module(module), table)


def _expand(name: str, tables: Mapping[str, Any]) -> list[str]:
    """The tasks that a name stands for."""
    if name in _SUITES:
        return list(_table(*_SUITES[name]))
    if name in tables:
        return [name]
    known = [*_SUITES, *tables]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    advice = f"did you mean {' or '.join(map(repr, near))}?" if near else f"use {', '.join(known)}"
    raise ValueError(
        f"unknown suite or task {name!r}; {advice} (tasks of lm-evaluation-harness begin with "
        f"{LM_EVAL!r})"
    )


def _make(entry: Task | Callable[[PublicOptions], Task], public: PublicOptions | None) -> Task:
    if isinstance(entry, Task):
        return entry
    if public is None:
        from da_jax.evals.public import PublicOptions

        public = PublicOptions()
    return entry(public)
