"""A picture of the grid: time with declarations by time without, over context and batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from da_jax.roofline.grid import Row

FORMATS = (".png", ".svg", ".pdf")


def check(path: Path) -> None:
    """Refuses what could not be written, before anything is computed.

    Raises:
      ValueError: another format, no such folder, or matplotlib is not installed.
    """
    if path.suffix not in FORMATS:
        raise ValueError(f"--plot {path}: the name must end in {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise ValueError(f"--plot: the folder {path.parent} does not exist")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install 'da-jax[plot]'") from error


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Writes the picture: a line for each arm and batch, hollow where memory does not suffice."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for arm, batch in dict.fromkeys((row.arm, row.batch) for row in rows):
        line = sorted(
            (row for row in rows if (row.arm, row.batch) == (arm, batch)),
            key=lambda row: row.context,
        )
        label = f"batch {batch}" if arm is None else f"{arm}, batch {batch}"
        contexts = [row.context for row in line]
        for axis, ratios in (
            (axes[0], [row.step_ratio for row in line]),
            (axes[1], [row.response_ratio for row in line]),
        ):
            (drawn,) = axis.plot(contexts, ratios, label=label)
            for row, ratio in zip(line, ratios):
                fill = drawn.get_color() if row.fits else "white"
                axis.plot(
                    [row.context], [ratio], "o", color=drawn.get_color(), markerfacecolor=fill
                )
    for axis, what in zip(axes, ("a step", "a response (it has more steps)")):
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_xlabel("tokens of context (hollow: does not fit)")
        axis.set_title(f"time of {what}")
    axes[0].set_ylabel("with declarations / everything visible")
    axes[0].legend()
    figure.suptitle(title)
    figure.savefig(path)
