"""The report as sections of words and tables, which Markdown and HTML both show."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from da_jax.evals.report.rows import ARMS, MODES

Figures = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Table:
    """Columns and rows of text. The first `words` columns are words, the others numbers."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading with what follows it: paragraphs, points, a table."""

    title: str
    level: int = 2
    paragraphs: tuple[str, ...] = ()
    points: tuple[str, ...] = ()
    table: Table | None = None


def sections(report: Figures) -> list[Section]:
    """Everything that there is to say."""
    models = report["models"]
    found = [
        Section("Evaluation", 1, (_head(report),)),
        Section("All sources", table=_summary(models, "all")),
        Section("Read this first", points=tuple(_notes(models, report["level"]))),
        Section(
            "Groups of sources",
            paragraphs=("Controls are not expected to gain, and are in no mean over all sources.",),
            table=_groups(models),
        ),
        _terminating(models),
    ]
    for model in models:
        found += _of_model(model)
    return found


def _terminating(models: Sequence[Figures]) -> Section:
    title = "Without what did not end"
    if all(_all_ended(model) for model in models):
        return Section(title, paragraphs=("Every response ended by itself.",))
    return Section(
        title,
        paragraphs=(
            "The same without every example that ran into its limit of tokens in any arm.",
        ),
        table=_summary(models, "terminating"),
    )


def _all_ended(model: Figures) -> bool:
    ended = model["terminating"]
    return ended is not None and ended["responses"] == model["all"]["responses"]


def overview(report: Figures) -> Table:
    """The table that the command line shows at its end: narrow, and words first."""
    wide = _summary(report["models"], "all")
    words = ("model", "arm") if len(report["models"]) > 1 else ("arm",)
    names = (*words, "accuracy", "less vanilla", "attended", "of vanilla", "steps")
    places = [wide.columns.index(name) for name in names]
    rows = tuple(tuple(row[place] for place in places) for row in wide.rows)
    return Table(names, rows, len(words))


def _of_model(model: Figures) -> Iterator[Section]:
    figures, name = model["all"], model["name"]
    yield Section(
        f"{name}: sources",
        paragraphs=(
            f"n responses and tokens of the prompt: {' / '.join(figures['macro']['arms'])}.",
        ),
        table=_sources(figures["sources"]),
    )
    yield Section(
        f"{name}: where declarations cost more",
        paragraphs=(_costs(figures["costs_more"]), _saving(figures["saving"])),
    )
    yield Section(
        f"{name}: lengths",
        paragraphs=(_break_even(figures["break_even"], figures["macro"]),),
        table=_lengths(figures["lengths"]),
    )
    yield Section(
        f"{name}: modes",
        paragraphs=(
            "Shares of the generated tokens, and of the tokens that they attended, by mode.",
        ),
        table=_modes(figures),
    )
    yield Section(
        f"{name}: declarations",
        paragraphs=(
            "A hit is a response whose focuses named every chunk of the evidence. A response is "
            "of the right form if it has an answer, and did not end if it ran into its limit of "
            "tokens.",
        ),
        table=_declarations(figures),
    )
    if model["lost"]:
        yield Section(f"{name}: what declarations lost", table=_lost(model["lost"]))
    if origins := model["about"].get("sources"):
        yield Section(f"{name}: where the examples come from", table=_origins(origins))
    yield Section(f"{name}: settings", table=_settings(model))


def _head(report: Figures) -> str:
    return (
        "Accuracy is in per cent. Attended tokens are the sum over decode steps of the positions "
        "that full attention sees, token by token; read tokens are those of whole pages; steps are "
        "decode steps. Of all visible is the share of what the same responses would attend with "
        "everything visible. All are means over the responses of a source, then over sources, "
        f"which weigh the same. In brackets: {report['level']:.0%} intervals, of an arm by "
        "Wilson's score, of the difference of two arms by a paired bootstrap within sources "
        f"({report['draws']:,} draws). Made by da-jax {report['version']}."
    )


def _summary(models: Sequence[Figures], part: str) -> Table:
    rows: list[tuple[str, ...]] = []
    for model in models:
        if model[part]:
            rows += _arms_of(model[part]["macro"], (model["name"],))
    return Table(("model", *_ARM_COLUMNS), tuple(rows), 2)


def _groups(models: Sequence[Figures]) -> Table:
    rows: list[tuple[str, ...]] = []
    for model in models:
        for name, unit in model["all"]["groups"].items():
            rows += _arms_of(unit, (model["name"], name))
    return Table(("model", "group", *_ARM_COLUMNS), tuple(rows), 3)


_ARM_COLUMNS = (
    "arm", "sources", "n", "accuracy", "less vanilla", "attended", "of vanilla", "of unmasked",
    "of all visible", "read", "steps",
)  # fmt: skip


def _arms_of(unit: Figures, first: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """A row for each arm."""
    for arm, figures in unit["arms"].items():
        to_vanilla = unit["compared"].get(f"{arm}/vanilla")
        to_unmasked = unit["compared"].get(f"{arm}/unmasked")
        yield (
            *first,
            arm,
            str(figures["sources"]),
            f"{figures['n']:,}",
            interval(figures["accuracy"]),
            difference(to_vanilla),
            count(figures["attended"]),
            share(to_vanilla and to_vanilla["attended"]),
            share(to_unmasked and to_unmasked["attended"]),
            share(figures["attended_of_own_vanilla"]),
            count(figures["read"]),
            count(figures["steps"], 1),
        )


def _sources(found: Sequence[Figures]) -> Table:
    columns = ("source", "group", "n", "prompt", *(f"accuracy {arm}" for arm in ARMS),
               "da less vanilla", *(f"attended {arm}" for arm in ARMS), "da/vanilla", "da/unmasked",
               *(f"read {arm}" for arm in ARMS), "read da/vanilla",
               *(f"steps {arm}" for arm in ARMS))  # fmt: skip
    rows = []
    for one in found:
        arms, compared = one["arms"], one["compared"]
        rows.append((
            one["task"], one["group"], " / ".join(str(arms[arm]["n"]) for arm in arms),
            " / ".join(count(arms[arm]["prompt_tokens"]) for arm in arms),
            *(interval(arms[arm]["accuracy"]) if arm in arms else NONE for arm in ARMS),
            difference(compared.get("da/vanilla")),
            *(count(arms[arm]["attended"]) if arm in arms else NONE for arm in ARMS),
            *(share((compared.get(f"da/{arm}") or {}).get("attended"))
              for arm in ("vanilla", "unmasked")),
            *(count(arms[arm]["read"]) if arm in arms else NONE for arm in ARMS),
            share((compared.get("da/vanilla") or {}).get("read")),
            *(count(arms[arm]["steps"], 1) if arm in arms else NONE for arm in ARMS),
        ))  # fmt: skip
    return Table(columns, tuple(rows), 2)


def _lengths(found: Sequence[Figures]) -> Table:
    columns = ("length", "sources", *(f"accuracy {arm}" for arm in ARMS), "da less vanilla",
               *(f"attended {arm}" for arm in ARMS), "da/vanilla", "read da/vanilla",
               "steps da/vanilla")  # fmt: skip
    rows = []
    for one in found:
        arms, versus = one["arms"], one["compared"].get("da/vanilla") or {}
        rows.append((
            f"{one['length']:,}", str(one["sources"]),
            *(interval(arms[arm]["accuracy"]) if arm in arms else NONE for arm in ARMS),
            difference(versus),
            *(count(arms[arm]["attended"]) if arm in arms else NONE for arm in ARMS),
            *(share(versus.get(name)) for name in ("attended", "read", "steps")),
        ))  # fmt: skip
    return Table(columns, tuple(rows), 0)


def _units(figures: Figures) -> Iterator[tuple[str, Figures]]:
    """All sources together, and each."""
    yield "all sources", figures["macro"]
    for one in figures["sources"]:
        yield one["task"], one


def _modes(figures: Figures) -> Table:
    columns = ("source", "arm", *(f"tokens {mode}" for mode in MODES),
               *(f"attended {mode}" for mode in MODES))  # fmt: skip
    rows = [
        (name, arm, *(share(unit["arms"][arm]["modes"][mode][what])
                      for what in ("token_share", "attended_share") for mode in MODES))
        for name, unit in _units(figures) for arm in ("unmasked", "da") if arm in unit["arms"]
    ]  # fmt: skip
    return Table(columns, tuple(rows), 2)


def _declarations(figures: Figures) -> Table:
    columns = ("source", "arm", "focuses tried", "honoured", "hits", "of the right form",
               "did not end", "declined")  # fmt: skip
    rows = []
    for name, unit in _units(figures):
        for arm, found in unit["arms"].items():
            focus, hit = found["focus"], found["evidence_hit"]
            declines = ", ".join(f"{n} {reason}" for reason, n in found["declines"].items())
            rows.append((
                name, arm, count(focus["attempts"], 2), share(focus["success_rate"]),
                share(hit["value"]), share(found["format_correct"]),
                share(found["non_terminating"]), declines or "0",
            ))  # fmt: skip
    return Table(columns, tuple(rows), 2)


def _lost(found: Sequence[Figures]) -> Table:
    rows = [
        (one["task"], str(one["length"]), str(one["index"]), ", ".join(one["expected"]),
         one["vanilla"], one["da"], _short(one["da_text"]))
        for one in found
    ]  # fmt: skip
    columns = ("source", "length", "example", "expected", "vanilla", "da", "response of da")
    return Table(columns, tuple(tuple(map(_short, row)) for row in rows), len(columns))


def _origins(sources: Figures) -> Table:
    columns = ("source", "description", "origin", "licence")
    rows = tuple((name, *(_short(one[c]) for c in columns[1:])) for name, one in sources.items())
    return Table(columns, rows, len(columns))


def _settings(model: Figures) -> Table:
    rows = []
    for name, value in {**model["about"], **model["settings"]}.items():
        if name == "sources":  # a section of their own
            continue
        if name == "style":
            value = value.get("name")
        if isinstance(value, Mapping):
            value = ", ".join(f"{key} {part}" for key, part in value.items())
        elif isinstance(value, list):
            value = ", ".join(map(str, value))
        rows.append((name.replace("_", " "), _short(str(value), 400)))
    return Table(("setting", "value"), tuple(rows), 2)


def _notes(models: Sequence[Figures], level: float) -> Iterator[str]:
    for model in models:
        for note in (*_notes_of(model), *_no_difference(model, level)):
            yield f"{model['name']}: {note}"


def _notes_of(model: Figures) -> Iterator[str]:
    figures = model["all"]
    sizes = [arm["n"] for one in figures["sources"] for arm in one["arms"].values()]
    yield (
        f"{len(figures['sources'])} sources; the least has {min(sizes)} responses in an arm, the "
        f"largest {max(sizes)}."
    )
    if model["da_only"]:
        yield (
            "this checkpoint knows only the DA prompt, so that its arm vanilla is the unmasked "
            "one: it tells what the mask does, and not what the prompt costs."
        )
    if model["unscored"]:
        yield f"{model['unscored']} responses wait for a score and are in no figure."
    if model["repeated"]:
        yield (
            f"{model['repeated']} responses answer a prompt that another of the same source and "
            "arm answers, at another length or as another example: they count as independent, and "
            "the intervals are too narrow."
        )
    if model["outside"]:
        found = ", ".join(f"{number} of {arm}" for arm, number in model["outside"].items())
        yield (
            f'{found}: the right value follows "Answer:", outside of the answer that is scored. '
            "These responses lose by their form, not by what they read."
        )
    if len(set(model["examples"].values())) > 1:
        asked = ", ".join(f"{arm} {number}" for arm, number in model["examples"].items())
        yield (
            f"the arms do not have the same examples ({asked}): the run is not finished, or was "
            "asked so. Arms are compared over the examples that both have."
        )
    yield _saving(figures["saving"])
    main = figures["macro"]
    if all(one["group"] == "control" for one in figures["sources"]):
        yield "there are only controls, so that all sources are controls here."
    endless = [arm for arm, found in main["arms"].items() if found["non_terminating"]]
    if endless:
        yield (
            f"some responses of {', '.join(endless)} ran into their limit of tokens; see the "
            "section without them."
        )
    if not any(arm["accuracy"]["value"] for arm in main["arms"].values()):
        yield "no answer is right in any arm, so that nothing is said of what declarations cost."


def _no_difference(model: Figures, level: float) -> Iterator[str]:
    """What pairs that all score the same can and cannot say."""
    main = model["all"]["macro"]
    if not any(arm["accuracy"]["value"] for arm in main["arms"].values()):
        return
    for name, versus in main["compared"].items():
        if versus["differing"] or (model["da_only"] and name == "unmasked/vanilla"):
            continue
        n = versus["pairs"]
        same = f"in all of {n} pairs" if n > 1 else "in the one pair that there is"
        most = 1 - (1 - level) ** (1 / n)  # none of n is then as rare as 1 - level
        yield (
            f"{name.replace('/', ' and ')} score the same {same}. The interval of a bootstrap is "
            f"then empty, and means little: with {n} pair{'s' * (n > 1)} of all sources together, "
            f"up to {most:.1%} of such pairs may differ ({level:.0%} confidence). That is of "
            "pairs, not of the accuracy, which is a mean over sources."
        )


def _saving(saving: Figures) -> str:
    if not saving["top"]:
        return "da and vanilla have no example in common, so that nothing is said of savings."
    if saving["reduction"] is None:
        return (
            "vanilla attends nothing in the examples that da has too (its responses are of one "
            "token), so that nothing is said of savings."
        )
    text = f"Over all sources da attends {1 - saving['reduction']:.1%} of what vanilla does"
    if saving["mean_of_sources"] is not None:
        text += f", in the mean of the sources' ratios {saving['mean_of_sources']:.1%}"
    text += "."
    if saving["top_share"] is None or saving["reduction_without_top"] is None:
        return text
    text += f" {' and '.join(saving['top'])} carry {saving['top_share']:.0%} of what is saved"
    return f"{text}; without them da attends {1 - saving['reduction_without_top']:.1%}."


def _costs(found: Sequence[Figures]) -> str:
    """In which sources and, apart from them, controls `da` attends more than `vanilla`."""
    controls = [one for one in found if one["group"] == "control"]
    sources = [one for one in found if one["group"] != "control"]
    text = f"da attends more tokens than vanilla in {_named('source', sources)}"
    return f"{text}; and in {_named('control', controls)}." if controls else f"{text}."


def _named(what: str, found: Sequence[Figures]) -> str:
    if not found:
        return f"no {what}"
    listed = ", ".join(f"{one['task']} ({one['ratio']:.2f} times)" for one in found)
    return f"{len(found)} {what}{'s' * (len(found) > 1)}: {listed}"


def _break_even(found: Figures, macro: Figures) -> str:
    said = []
    for name, one in found.items():
        words = {
            "measured": f"{one['tokens'] or 0:,.0f}",
            "below": "below the shortest length",
            "none": "none measured",
        }[one["status"]]
        if name == "macro":
            name, total = "all sources", max(arm["sources"] for arm in macro["arms"].values())
            if one["sources"] < total:
                name = f"{one['sources']} of {total} sources, those measured at every length,"
        said.append(f"{name} {words}")
    return (
        "Length from which on da attends fewer tokens than vanilla, between measured lengths by "
        f"linear interpolation: {', '.join(said)}."
    )


NONE = "–"


def interval(estimate: Figures) -> str:
    """A share and its interval, in per cent."""
    value, low, high = (100 * estimate[name] for name in ("value", "low", "high"))
    return f"{value:.1f} [{low:.1f}, {high:.1f}]"


def difference(compared: Figures | None) -> str:
    """A difference of accuracies and its interval, in points."""
    if not compared:
        return NONE
    value, low, high = (100 * compared["accuracy"][name] for name in ("value", "low", "high"))
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"


def share(value: float | None) -> str:
    """A share or ratio, in per cent."""
    return NONE if value is None else f"{value:.1%}"


def count(value: float, digits: int = 0) -> str:
    """A number of things."""
    return f"{value:,.{digits}f}"


def _short(text: str, most: int = 300) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
