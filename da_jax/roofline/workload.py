"""What the decode steps of a response see: from sums, a trace, records, or a mix of modes."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from da_jax.evals.records import Record
from da_jax.protocol.modes import Mode
from da_jax.roofline.step import Machine, Times

T = TypeVar("T")

SHARES = {Mode.GLOBAL: 0.27, Mode.FOCUS: 0.25, Mode.LOCAL: 0.48}
"""Of the decode steps, by mode. The paper reports 27 % in GLOBAL for Gemma; how the rest divides
between FOCUS and LOCAL is a guess of ours."""

SEEN = {Mode.GLOBAL: 1.0, Mode.FOCUS: 0.12, Mode.LOCAL: 0.06}
"""Of the context, by mode: what the paper reports for Gemma."""

STEPS = 332
"""Decode steps of a response without declarations: the paper's mean for Gemma-4-31B."""

MORE_STEPS = 448 / 332
"""How many times as many steps a response with declarations takes: the paper, Gemma-4-31B."""

_LOOSE_PAGES = {Mode.GLOBAL: 0.5, Mode.FOCUS: 2.5, Mode.LOCAL: 1.5}
# Pages that are read for tokens they hide, on average: half of one at each end of a visible span
# that lies within a page; the prompt begins a page.


class Part(NamedTuple):
    """Decode steps that are alike.

    Attributes:
      steps: how many.
      context: tokens of prompt and response, on average.
      read: positions of the pages that they read, on average.
      visible: positions of the pages that they would read with everything visible, on average; None
        is those of `context`.
    """

    steps: float
    context: float
    read: float
    visible: float | None = None


Workload = Sequence[Part]


def everything(workload: Workload, page_size: int) -> Workload:
    """The same steps with everything visible."""
    return [
        part._replace(
            read=_pages(part.context, page_size) if part.visible is None else part.visible
        )
        for part in workload
    ]


def time(machine: Machine, workload: Workload) -> Times:
    """Seconds of all steps of a response, with `machine.batch` alike at once."""
    times = [(part.steps, machine.step(part.context, part.read)) for part in workload]
    return Times(
        *(
            sum(steps * getattr(step, field.name) for steps, step in times)
            for field in dataclasses.fields(Times)
        )
    )


def steps_of(workload: Workload) -> float:
    """Decode steps of the response."""
    return sum(part.steps for part in workload)


def from_sums(steps: float, attended: float, context: float, page_size: int) -> Workload:
    """Steps that attend `attended` tokens together, with so many tokens of context.

    Raises:
      ValueError: more than there are.
    """
    seen = attended / steps
    if seen > context:
        raise ValueError(
            f"{attended:g} attended tokens in {steps:g} steps are {seen:,.0f} a step, but the "
            f"context has {context:,.0f}; raise --context"
        )
    loose = _LOOSE_PAGES[Mode.FOCUS] * page_size
    return [Part(steps, context, min(seen + loose, _pages(context, page_size)))]


def from_mix(
    steps: float,
    context: float,
    page_size: int,
    shares: Mapping[Mode, float] = SHARES,
    seen: Mapping[Mode, float] = SEEN,
) -> Workload:
    """Steps in a mix of modes, in each of which a share of the context is visible.

    Raises:
      ValueError: shares that do not add up to 1, or are not between 0 and 1.
    """
    for values in (shares, seen):
        for mode, value in values.items():
            if not 0 <= value <= 1:
                raise ValueError(f"{mode.value}={value}: a share is from 0 to 1")
    if not math.isclose(sum(shares.values()), 1, abs_tol=1e-6):
        raise ValueError(f"the shares of the modes add up to {sum(shares.values()):g}, not 1")
    whole = _pages(context, page_size)
    read = {mode: part * context + _LOOSE_PAGES[mode] * page_size for mode, part in seen.items()}
    return [
        Part(steps * share, context, whole if seen[mode] == 1 else min(read[mode], whole))
        for mode, share in shares.items()
        if share
    ]


def page_size_of_trace(path: Path) -> int | None:
    """Tokens of a page in the run that wrote a trace; None where the trace does not say.

    Raises:
      ValueError: the file is no such trace.
      OSError: it cannot be read.
    """

    def read(found: Mapping[str, Any]) -> int | None:
        size = found.get("page_size")
        if size is not None and (not isinstance(size, int) or size < 1):
            raise ValueError(f"its page_size is {size!r}")
        return size

    return _trace(path, read)


def from_trace(path: Path, page_size: int) -> Workload:
    """The steps that `da-jax generate --trace` wrote.

    Args:
      page_size: tokens of a page in the run that wrote it.

    Raises:
      ValueError: the file is no such trace, has no decode step, or has other pages.
      OSError: it cannot be read.
    """
    workload = _trace(
        path, lambda found: [Part(1, step["vanilla"], step["read"]) for step in found["steps"]]
    )
    if not workload:
        raise ValueError(f"{path} has no decode step; the response has one token only")
    if any(part.read % page_size for part in workload):
        raise ValueError(
            f"{path} has steps that read no whole pages of {page_size} tokens; give the "
            "--page-size that it was made with"
        )
    return workload


def _trace(path: Path, of: Callable[[Any], T]) -> T:
    try:
        return of(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is no trace of `da-jax generate --trace` ({type(error).__name__}: {error})"
        ) from error


def from_records(records: Iterable[Record], page_size: int) -> Workload:
    """The mean response of some records: their steps put together, each counted as its share.

    Args:
      page_size: tokens of a page in the run that wrote them.

    Raises:
      ValueError: there is no decode step among them.
    """
    parts: list[Part] = []
    count = 0
    for record in records:
        count += 1
        at = record.prompt_tokens
        for _, steps, _, read in record.trace:
            # Step t of a response has the prompt and t tokens behind it.
            visible = sum(_pages(at + t, page_size) for t in range(1, steps + 1))
            parts.append(Part(steps, at + (steps + 1) / 2, read / steps, visible / steps))
            at += steps
    if not parts:
        raise ValueError("the records have no decode step")
    return [part._replace(steps=part.steps / count) for part in parts]


def _pages(context: float, page_size: int) -> float:
    """Positions of the pages that hold so many tokens."""
    return math.ceil(context / page_size) * page_size
