"""Sections as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from da_jax.evals.report.document import Section, Table

_SPECIAL = {character: f"\\{character}" for character in "\\`*_{}[]<>#|~"}
_SPECIAL |= {"&": "&amp;", "\n": " ", "\r": " "}
_ESCAPES = str.maketrans(_SPECIAL)


def render(sections: Sequence[Section]) -> str:
    """The whole text. Nothing that a model wrote acts as Markdown or HTML."""
    return "\n\n".join(block for section in sections for block in _blocks(section)) + "\n"


def escape(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return text.translate(_ESCAPES)


def _blocks(section: Section) -> list[str]:
    blocks = [f"{'#' * section.level} {escape(section.title)}"]
    blocks += [escape(paragraph) for paragraph in section.paragraphs]
    if section.points:
        blocks.append("\n".join(f"* {escape(point)}" for point in section.points))
    if section.table is not None:
        blocks.append(_table(section.table))
    return blocks


def _table(table: Table) -> str:
    if not table.rows:
        return "(nothing)"
    borders = ["---"] * table.words + ["---:"] * (len(table.columns) - table.words)
    lines = [_line([escape(column) for column in table.columns]), _line(borders)]
    lines += [_line([escape(cell) for cell in row]) for row in table.rows]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
