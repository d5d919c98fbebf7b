"""The report of one or several runs: figures as JSON, and tables and plots of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from da_jax import __version__
from da_jax.evals import folder as folders
from da_jax.evals import stats
from da_jax.evals.offline import outside as answers
from da_jax.evals.report import document, figures, html, markdown, plots, rows

NAMES = ("report.json", "report.md", "report.html")
"""The files of a report."""
_LOST = 20  # examples that are shown of those that declarations lost


def build(paths: Sequence[Path]) -> dict[str, Any]:
    """The figures of runs, in values that JSON can hold; every number is finite, or None.

    Args:
      paths: folders that `da-jax eval` wrote, one for each model or setting.

    Raises:
      ValueError: a folder is none, is damaged, or has no response.
    """
    if len({path.resolve() for path in paths}) < len(paths):
        raise ValueError(f"a folder is named twice among {', '.join(map(str, paths))}")
    models = [_model(path) for path in paths]
    names = [model["name"] for model in models]
    for model, path in zip(models, paths):
        if names.count(model["name"]) > 1:
            model["name"] = f"{model['name']} ({path.resolve().name})"
    return {
        "format": 1,
        "version": __version__,
        "level": stats.LEVEL,
        "draws": stats.DRAWS,
        "models": models,
    }


def write(paths: Sequence[Path], out: Path, *, page: bool = True) -> dict[str, Any]:
    """Writes `report.json`, `report.md` and `report.html` into a folder; returns the figures.

    Args:
      paths: as in `build`.
      out: the folder; created.
      page: whether to write `report.html`; without it an old one is removed.

    Raises:
      ValueError: as `build`, or matplotlib is missing; nothing was written.
    """
    if page:
        plots.require()
    report = build(paths)
    sections = document.sections(report)
    texts = [
        json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n",
        markdown.render(sections),
    ]
    if page:
        texts.append(html.render(sections, plots.draw(report)))
    out.mkdir(parents=True, exist_ok=True)
    for name, text in zip(NAMES, texts):
        (out / name).write_text(text, encoding="utf-8")
    for name in NAMES[len(texts) :]:
        (out / name).unlink(missing_ok=True)
    return report


def _model(path: Path) -> dict[str, Any]:
    settings, about = folders.read_settings(path)
    found, asked, outside = [], set(), Counter[str]()
    for record in folders.read_records(path):
        found.append(rows.row(record))
        outside[record.arm] += answers.outside(record)
        asked.add((record.task, record.arm, record.prompt_sha256))
    order = {task: place for place, task in enumerate(settings["tasks"])}
    found.sort(key=lambda row: (order.get(row.task, len(order)), row.example))
    if not found:
        raise ValueError(f"{path} has no response yet; run `da-jax eval --out {path}` first")
    ended = rows.terminating(found)
    return {
        "name": str(about.get("model", path.name)),
        "settings": settings,
        "about": about,
        "da_only": bool(settings.get("style", {}).get("da_only")),
        "unscored": folders.count_unscored(path),
        "repeated": len(found) - len(asked),
        "outside": {arm: number for arm, number in outside.items() if number},
        "examples": {
            arm: number
            for arm in rows.ARMS
            if (number := len({row.example for row in found if row.arm == arm}))
        },
        "all": figures.slice_of(found),
        "terminating": figures.slice_of(ended) if ended else None,
        "lost": figures.lost(found, _LOST),
    }
