"""`da-jax eval --suite lm_eval:TASK`: tasks of lm-evaluation-harness, with its own metrics."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from da_jax.checkpoints import convert, paths
from da_jax.engine.config import EngineConfig
from da_jax.engine.llm import LLM
from da_jax.evals import identity
from da_jax.protocol.styles import Style


@dataclasses.dataclass(frozen=True)
class Options:
    """What of the arguments of `da-jax eval` tasks of the harness take."""

    model: str
    tasks: Sequence[str]
    arms: Sequence[str]
    lengths: tuple[int, ...] | None
    n: int
    seed: int
    max_tokens: int | None
    out: Path
    style: Style | str
    thinking: bool
    json: bool
    config: EngineConfig


def run(
    options: Options, progress: Callable[[], AbstractContextManager[Callable[..., None]]]
) -> None:
    """Runs the tasks and prints their metrics in each arm; the harness cannot go on where it was.

    Raises:
      ValueError: as the harness, or the folder has a result already.
    """
    from da_jax.evals import harness  # it says how to install lm_eval

    if (options.out / "lm_eval.json").exists():
        raise ValueError(
            f"{options.out} has a lm_eval.json already, and runs of lm-evaluation-harness do not "
            "go on; name another folder"
        )
    settings: dict[str, Any] = {"limit": options.n, "seed": options.seed}
    if options.lengths is not None:
        settings["lengths"] = options.lengths
    if options.max_tokens is not None:
        settings["max_tokens"] = options.max_tokens
    harness.check(options.tasks, options.arms, harness.HarnessOptions(**settings))
    folder = convert.resolve(options.model)
    about = {
        "model": options.model,
        "checkpoint": identity.checkpoint(folder),
        "tokenizer": identity.tokenizer(paths.local_metadata(folder)),
    }
    with progress() as bars:
        llm = LLM.from_pretrained(
            folder, style=options.style, thinking=options.thinking, config=options.config,
            progress=bars,
        )  # fmt: skip
    report = harness.evaluate(
        llm, options.tasks, arms=options.arms, out=options.out, samples=True, about=about,
        **settings,
    )  # fmt: skip
    if options.json:
        print(json.dumps(report, default=str))
        return
    console = Console()
    console.print(_table(report))
    console.print(Text(f"lm_eval.json in {options.out}"), soft_wrap=True)


def _table(report: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    columns = ("task", "arm", "metric", "value", "± error", "less vanilla", "attended")
    for column in columns:
        table.add_column(column, justify="left" if column in ("task", "arm", "metric") else "right")
    for arm, found in report["arms"].items():
        for task, metrics in found["results"].items():
            cost = found["cost"].get(task, {})
            for name, value in metrics.items():
                if isinstance(value, int | float) and "_stderr" not in name:
                    metric, _, filtered = name.partition(",")
                    error = metrics.get(f"{metric}_stderr,{filtered}")
                    shown = f"{error:.4f}" if isinstance(error, float) else "–"
                    less = report["differences"].get(task, {}).get(name, {}).get(arm)
                    apart = "–" if less is None else "{value:+.4f} [{low:+.4f}, {high:+.4f}]"
                    attended = f"{cost['attended']:,.0f}" if cost else "–"
                    cells = (
                        task, arm, name, f"{value:.4f}", shown, apart.format(**less or {}),
                        attended,
                    )  # fmt: skip
                    table.add_row(*map(Text, cells))
    return table
