"""The plots of a report, drawn by matplotlib as SVG."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from da_jax.evals.report.rows import ARMS, MODES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKERS = {"vanilla": "o", "unmasked": "s", "da": "^"}
_MODE_COLOURS = {"global": "#d99a1c", "focus": "#2b8a3e", "local": "#1c7ed6"}
_COLOURS = ("#1c7ed6", "#d6336c", "#2b8a3e", "#d99a1c", "#7048e8", "#0c8599", "#a61e4d", "#495057")


class Plot(NamedTuple):
    """An image with what is said of it."""

    title: str
    caption: str
    svg: bytes


def require() -> None:
    """Refuses to begin without matplotlib.

    Raises:
      ValueError: with how to install it.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "the plots of report.html need matplotlib, which is not installed: "
            "pip install 'da-jax[eval]', or leave the page out with --no-html"
        )


def draw(report: Mapping[str, Any]) -> list[Plot]:
    """Accuracy against attended tokens, saving by length, and the mix of modes."""
    models = report["models"]
    return [
        Plot(
            "Accuracy against attended tokens",
            "Mean over sources, with the interval of the accuracy; pale: single sources.",
            _svg(lambda axes: _accuracy(axes, models)),
        ),
        Plot(
            "Attended tokens saved by length",
            "Share of the attended tokens of vanilla that da does without; below 0 it costs more.",
            _svg(lambda axes: _lengths(axes, models)),
        ),
        Plot(
            "Mix of modes",
            "Shares of the tokens that da generates, and of the tokens that they attend, by mode.",
            _svg(lambda axes: _modes(axes, models), height=1.6 + 0.7 * len(models)),
        ),
    ]


def _svg(paint: Callable[[Axes], None], height: float = 4.2) -> bytes:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "da-jax", "font.size": 10}):
        figure = Figure(figsize=(8, height), layout="constrained")
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        paint(axes)
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def _accuracy(axes: Axes, models: Sequence[Mapping[str, Any]]) -> None:
    for model, colour in _coloured(models):
        figures = model["all"]
        for source in figures["sources"]:
            for arm, found in source["arms"].items():
                axes.plot(
                    _at_least_one(found), 100 * found["accuracy"]["value"], _MARKERS[arm],
                    color=colour, alpha=0.2, markersize=5,
                )  # fmt: skip
        for arm in ARMS:
            found = figures["macro"]["arms"].get(arm)
            if found is None:
                continue
            value, low, high = (100 * found["accuracy"][name] for name in ("value", "low", "high"))
            axes.errorbar(
                _at_least_one(found), value, [[value - low], [high - value]], fmt=_MARKERS[arm],
                color=colour, capsize=3, markersize=8, label=_plain(f"{model['name']}: {arm}"),
            )  # fmt: skip
    axes.set(xlabel="attended tokens of a response", ylabel="accuracy, %")
    _logarithmic(axes)
    _legend(axes)


def _lengths(axes: Axes, models: Sequence[Mapping[str, Any]]) -> None:
    for model, colour in _coloured(models):
        points = [
            (one["length"], 100 * (1 - one["compared"]["da/vanilla"]["attended"]))
            for one in model["all"]["lengths"]
            if (one["compared"].get("da/vanilla") or {}).get("attended") is not None
        ]
        if points:
            axes.plot(*zip(*points), "o-", color=colour, label=_plain(model["name"]))
    axes.axhline(0, color="#868e96", linewidth=1)
    axes.set(xlabel="length, tokens", ylabel="attended tokens saved, %")
    _logarithmic(axes)
    lengths = sorted({one["length"] for model in models for one in model["all"]["lengths"]})
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set_xticks([], minor=True)
    _legend(axes)


def _modes(axes: Axes, models: Sequence[Mapping[str, Any]]) -> None:
    bars = []
    for model in models:
        figures = model["all"]["macro"]
        if found := figures["arms"].get("da"):
            for what, words in (("token_share", "generated"), ("attended_share", "attended")):
                shares = [100 * (found["modes"][mode][what] or 0) for mode in MODES]
                bars.append((_plain(f"{model['name']}: {words}"), shares))
    for place, (_, shares) in enumerate(bars):
        left = 0.0
        for mode, width in zip(MODES, shares):
            axes.barh(
                place, width, left=left, color=_MODE_COLOURS[mode], label=None if place else mode
            )
            left += width
    axes.set_yticks(range(len(bars)), [label for label, _ in bars])
    axes.invert_yaxis()
    axes.set(xlabel="share, %", xlim=(0, 100))
    _legend(axes)


def _at_least_one(figures: Mapping[str, Any]) -> float:
    """Attended tokens on a logarithmic axis: a response of one token attends none."""
    return max(figures["attended"], 1.0)


def _logarithmic(axes: Axes) -> None:
    from matplotlib.ticker import EngFormatter

    axes.set_xscale("log")
    for formatted in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        formatted(EngFormatter(sep=""))


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _coloured(models: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], str]]:
    return [(model, _COLOURS[place % len(_COLOURS)]) for place, model in enumerate(models)]


def _plain(text: str) -> str:
    """Text in which matplotlib sees no formula, and which it shows in a legend."""
    return text.replace("$", r"\$").removeprefix("_") or "model"
