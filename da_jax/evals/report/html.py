"""Sections and plots as one HTML page that needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

from da_jax.evals.report.document import Section, Table
from da_jax.evals.report.plots import Plot

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.5rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.88rem; }
th, td { padding: 0.25rem 0.7rem; border-bottom: 1px solid #8886; vertical-align: top; }
th { text-align: left; border-bottom-color: currentColor; }
.number { text-align: right; white-space: nowrap; }
figure { margin: 1.5rem 0; }
img { max-width: 100%; background: #fff; border-radius: 6px; padding: 0.5rem; }
figcaption { font-size: 0.88rem; opacity: 0.8; }
"""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_PLOTS_AFTER = 2  # sections: the mean figures and what to know about them come first


def render(sections: Sequence[Section], plots: Sequence[Plot]) -> str:
    """The page. All text is escaped, and its policy lets no script run."""
    parts = [_section(section) for section in sections]
    parts.insert(_PLOTS_AFTER + 1, "\n".join(map(_plot, plots)))
    title = escape(sections[0].title)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _section(section: Section) -> str:
    parts = [f"<h{section.level}>{escape(section.title)}</h{section.level}>"]
    parts += [f"<p>{escape(paragraph)}</p>" for paragraph in section.paragraphs]
    if section.points:
        points = "".join(f"<li>{escape(point)}</li>" for point in section.points)
        parts.append(f"<ul>{points}</ul>")
    if section.table is not None:
        parts.append(_table(section.table))
    return "\n".join(parts)


def _table(table: Table) -> str:
    head = _cells("th", table.columns, table.words)
    body = "\n".join(_cells("td", row, table.words) for row in table.rows)
    return (
        f'<div class="wide"><table>\n<thead>{head}</thead>\n<tbody>\n{body}\n</tbody>\n'
        "</table></div>"
    )


def _cells(tag: str, cells: Sequence[str], words: int) -> str:
    shown = (
        f"<{tag}>{escape(cell)}</{tag}>"
        if place < words
        else f'<{tag} class="number">{escape(cell)}</{tag}>'
        for place, cell in enumerate(cells)
    )
    return f"<tr>{''.join(shown)}</tr>"


def _plot(plot: Plot) -> str:
    # An image runs no script, and its identifiers meet no others.
    data = base64.b64encode(plot.svg).decode("ascii")
    return (
        f'<figure><img alt="{escape(plot.title)}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{escape(plot.caption)}</figcaption></figure>"
    )
