"""The figures of a report: means by source, their means over sources, and arms compared.

Every figure is a finite number, or None where there is nothing to compute it from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from da_jax.evals import stats
from da_jax.evals.report.rows import ARMS, MODES, Row, by_source

Sources = Mapping[str, Sequence[Row]]
COMPARED = (("da", "vanilla"), ("unmasked", "vanilla"), ("da", "unmasked"))
"""Pairs of arms; each is also the key `da/vanilla` of a comparison."""


def slice_of(rows: Sequence[Row]) -> dict[str, Any]:
    """All figures of some rows.

    Returns:
      `sources` and `lengths`, lists; `groups`, by name, and `macro`, over all sources but controls
      unless there are no others; each with `arms` and `compared`. `break_even`, `costs_more` (of
      all sources) and `saving` compare `da` with `vanilla`.
    """
    sources = by_source(rows)
    plain = {name: found for name, found in sources.items() if found[0].group != "control"}
    groups: dict[str, dict[str, Sequence[Row]]] = {}
    for name, found in sources.items():
        groups.setdefault(found[0].group, {})[name] = found
    main = plain or sources
    return {
        "responses": len(rows),
        "sources": [
            {"task": name, "group": found[0].group, **unit({name: found})}
            for name, found in sources.items()
        ],
        "groups": {name: unit(found) for name, found in groups.items()},
        "macro": unit(main),
        "lengths": [
            {"length": length, "sources": len(found), **unit(found)}
            for length, found in _by_length(main).items()
        ],
        "break_even": {"macro": break_even(main)}
        | {name: break_even({name: found}) for name, found in sources.items()},
        "costs_more": costs_more(sources),
        "saving": saving(main),
    }


def unit(sources: Sources) -> dict[str, Any]:
    """The figures of sources together: of each arm, and of arms compared."""
    arms = {arm: list(_rows(sources, arm).values()) for arm in ARMS}
    compared = {f"{one}/{other}": compare(sources, one, other) for one, other in COMPARED}
    return {
        "arms": {arm: arm_figures(rows) for arm, rows in arms.items() if rows},
        "compared": {name: figures for name, figures in compared.items() if figures},
    }


def arm_figures(sources: Sequence[Sequence[Row]]) -> dict[str, Any]:
    """The figures of one arm: means within each source, then over sources."""
    means = _means(sources)
    accuracy = stats.macro(
        [stats.wilson(min(_mean(rows, "score"), 1.0), len(rows)) for rows in sources]
    )
    declines: Counter[str] = Counter()
    for rows in sources:
        for row in rows:
            declines.update(row.declines)
    hits = [hits for rows in sources if (hits := [r.hit for r in rows if r.hit is not None])]
    totals = {what: sum(means[f"{what}_{m}"] for m in MODES) for what in ("tokens", "attended")}
    return {
        "n": sum(map(len, sources)),
        "sources": len(sources),
        "accuracy": accuracy._asdict(),
        "attended": means["attended"],
        "read": means["read"],
        "attended_vanilla": means["attended_vanilla"],
        "attended_of_own_vanilla": _ratio(means["attended"], means["attended_vanilla"]),
        "steps": means["steps"],
        "prompt_tokens": means["prompt_tokens"],
        "modes": {
            mode: {
                "tokens": means[f"tokens_{mode}"],
                "token_share": _ratio(means[f"tokens_{mode}"], totals["tokens"]),
                "attended": means[f"attended_{mode}"],
                "attended_share": _ratio(means[f"attended_{mode}"], totals["attended"]),
            }
            for mode in MODES
        },
        "focus": {
            "attempts": means["attempts"],
            "successes": means["successes"],
            "success_rate": _ratio(means["successes"], means["attempts"]),
        },
        "evidence_hit": {
            "value": float(np.mean([np.mean(h) for h in hits])) if hits else None,
            "n": sum(map(len, hits)),
        },
        "declines": dict(sorted(declines.items())),
        "format_correct": means["format_correct"],
        "non_terminating": means["non_terminating"],
    }


def compare(sources: Sources, one: str, other: str) -> dict[str, Any] | None:
    """One arm against another over the examples that both have; None where there are none."""
    pairs = _pairs(sources, one, other)
    if not pairs:
        return None
    ones, others = ([[p[side] for p in found] for found in pairs.values()] for side in (0, 1))
    scores = [
        np.array([a.numbers["score"] - b.numbers["score"] for a, b in found])
        for found in pairs.values()
    ]
    mine, theirs = _means(ones), _means(others)
    ratios = [_ratio(_mean(a, "attended"), _mean(b, "attended")) for a, b in zip(ones, others)]
    known = [ratio for ratio in ratios if ratio is not None]
    return {
        "pairs": sum(map(len, pairs.values())),
        "differing": int(sum(np.count_nonzero(source) for source in scores)),
        "accuracy": stats.paired_bootstrap(scores)._asdict(),
        "attended": _ratio(mine["attended"], theirs["attended"]),
        "read": _ratio(mine["read"], theirs["read"]),
        "steps": _ratio(mine["steps"], theirs["steps"]),
        "mean_of_sources": float(np.mean(known)) if known else None,
    }


def break_even(sources: Sources) -> dict[str, Any]:
    """The length from which on `da` attends fewer tokens than `vanilla`.

    Only sources count that were measured at every length, so that lengths differ in nothing else.

    Returns:
      `tokens`, None unless it lies between measured lengths; `status`: `measured`, `below` the
      shortest length, or `none` where it attends no fewer at the longest one, or nothing was
      measured; and `sources`, how many count.
    """
    pairs = {length: _pairs(f, "da", "vanilla") for length, f in _by_length(sources).items()}
    pairs = {length: found for length, found in pairs.items() if found}
    whole = set[str].intersection(*map(set, pairs.values())) if pairs else set()
    differences = [
        float(np.mean([np.mean([_more(a, b) for a, b in found[name]]) for name in sorted(whole)]))
        for found in pairs.values()
        if whole
    ]
    at = stats.crossing(list(pairs), differences)
    status = "none" if at is None else "measured" if at else "below"
    return {"tokens": at or None, "status": status, "sources": len(whole)}


def costs_more(sources: Sources) -> list[dict[str, Any]]:
    """The sources in which `da` attends more tokens than `vanilla`, the worst first."""
    found = []
    for name in sources:
        figures = compare({name: sources[name]}, "da", "vanilla")
        if figures and (figures["attended"] or 0) > 1:
            group = sources[name][0].group
            found.append({"task": name, "group": group, "ratio": figures["attended"]})
    return sorted(found, key=lambda one: -one["ratio"])


def saving(sources: Sources) -> dict[str, Any]:
    """How attended tokens that `da` saves of `vanilla` spread over sources.

    Returns:
      `reduction`, of the means over sources; `mean_of_sources`, of their ratios da/vanilla; `top`,
      the names of the two sources that save most, none where no example is in both arms;
      `top_share`, their share of all that is saved;
      `reduction_without_top`.
    """
    pairs = _pairs(sources, "da", "vanilla")
    spent = {n: float(np.mean([b.numbers["attended"] for _, b in p])) for n, p in pairs.items()}
    saved = {n: -float(np.mean([_more(a, b) for a, b in p])) for n, p in pairs.items()}
    top = sorted(saved, key=lambda name: -saved[name])[:2]
    rest = [name for name in saved if name not in top]
    total = sum(saved.values())
    ratios = [1 - saved[name] / spent[name] for name in saved if spent[name]]
    return {
        "reduction": _ratio(total, sum(spent.values())),
        "mean_of_sources": float(np.mean(ratios)) if ratios else None,
        "top": top,
        "top_share": _ratio(sum(saved[n] for n in top), total) if total > 0 else None,
        "reduction_without_top": _ratio(sum(saved[n] for n in rest), sum(spent[n] for n in rest)),
    }


def lost(rows: Sequence[Row], most: int) -> list[dict[str, Any]]:
    """Examples that `da` answers worse than `vanilla`, those with the greatest loss first."""
    found = []
    for pairs in _pairs(by_source(rows), "da", "vanilla").values():
        found += [(b.numbers["score"] - a.numbers["score"], a, b) for a, b in pairs]
    worst = sorted((one for one in found if one[0] > 0), key=lambda one: (-one[0], one[1].example))
    return [
        {
            "task": a.task, "length": a.length, "index": a.index, "loss": loss,
            "expected": list(a.expected), "vanilla": b.answer, "da": a.answer, "da_text": a.text,
        }
        for loss, a, b in worst[:most]
    ]  # fmt: skip


def _rows(sources: Sources, arm: str) -> dict[str, list[Row]]:
    """The rows of an arm, of the sources that have some."""
    found = {name: [row for row in rows if row.arm == arm] for name, rows in sources.items()}
    return {name: rows for name, rows in found.items() if rows}


def _pairs(sources: Sources, one: str, other: str) -> dict[str, list[tuple[Row, Row]]]:
    """The rows of two arms for the examples that both have, by source; no source without any."""
    found: dict[str, list[tuple[Row, Row]]] = {}
    for name, rows in sources.items():
        arms = {arm: {row.example: row for row in rows if row.arm == arm} for arm in (one, other)}
        both = [(arms[one][key], arms[other][key]) for key in arms[one] if key in arms[other]]
        if both:
            found[name] = both
    return found


def _by_length(sources: Sources) -> dict[int, dict[str, list[Row]]]:
    found: dict[int, dict[str, list[Row]]] = {}
    for name, rows in sources.items():
        for row in rows:
            found.setdefault(row.length, {}).setdefault(name, []).append(row)
    return dict(sorted(found.items()))


def _means(sources: Sequence[Sequence[Row]]) -> dict[str, float]:
    """The mean over sources of the mean within each, by name of the number."""
    names = sources[0][0].numbers
    return {name: float(np.mean([_mean(rows, name) for rows in sources])) for name in names}


def _mean(rows: Sequence[Row], name: str) -> float:
    return float(np.mean([row.numbers[name] for row in rows]))


def _more(one: Row, other: Row) -> float:
    return one.numbers["attended"] - other.numbers["attended"]


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
