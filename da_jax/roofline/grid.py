"""What declarations gain over contexts and batches, and where they gain nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from da_jax.roofline import workload as load
from da_jax.roofline.step import Machine
from da_jax.roofline.workload import Workload

LITTLE = 0.05
"""A gain below this is called none: it is less than what the estimate leaves out."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One context and batch.

    Attributes:
      context: tokens of each sequence.
      batch: sequences at once.
      visible_step_ms: a decode step with everything visible.
      declared_step_ms: a mean step with declarations.
      step_ratio: the second by the first.
      visible_ms, declared_ms: the response that it is compared with, and the response itself, all
        of their steps.
      response_ratio: the second by the first; above 1 the additional steps cost more than is saved.
      most: share of a step with everything visible that declarations can save at most.
      bound: what takes most of that step: `weights`, `full` or `rest`.
      fits: whether the chip holds it.
      arm: of the records that it is made from; None where it is made from none.
    """

    context: float
    batch: int
    visible_step_ms: float
    declared_step_ms: float
    step_ratio: float
    visible_ms: float
    declared_ms: float
    response_ratio: float
    most: float
    bound: str
    fits: bool
    arm: str | None = None


def row(
    machine: Machine,
    declared: Workload,
    more_steps: float = 1.0,
    *,
    vanilla: Workload | None = None,
    arm: str | None = None,
) -> Row:
    """Compares a response with the one that saw everything, in `1 / more_steps` as many steps.

    Args:
      vanilla: the response that saw everything, where it is known; a step is compared with the same
        step with everything visible all the same.
      arm: see `Row`.
    """
    visible = load.everything(declared, machine.page_size)
    steps = load.steps_of(declared)
    ours, theirs = load.time(machine, declared), load.time(machine, visible)
    phases = {field.name: getattr(theirs, field.name) for field in dataclasses.fields(theirs)}
    response = theirs.total / more_steps
    if vanilla is not None:
        response = load.time(machine, vanilla).total
    context = max(part.context for part in declared)
    return Row(
        context=context,
        batch=machine.batch,
        visible_step_ms=1e3 * theirs.total / steps,
        declared_step_ms=1e3 * ours.total / steps,
        step_ratio=ours.total / theirs.total,
        visible_ms=1e3 * response,
        declared_ms=1e3 * ours.total,
        response_ratio=ours.total / response,
        most=theirs.full / theirs.total,
        bound=max(phases, key=lambda name: phases[name]),
        fits=machine.fits(round(context)),
        arm=arm,
    )


def rows(
    machine: Machine,
    contexts: Iterable[int],
    batches: Sequence[int],
    declared: Callable[[int], Workload],
    more_steps: float = 1.0,
) -> list[Row]:
    """Every context with every batch; `declared` gives the response at a context."""
    return [
        row(dataclasses.replace(machine, batch=batch), declared(context), more_steps)
        for context in contexts
        for batch in batches
    ]


def gains_from(
    machine: Machine, declared: Callable[[int], Workload], more_steps: float = 1.0
) -> str:
    """From which context on a step, and a response, gain something, in a sentence."""
    most = machine.config.max_positions
    contexts = [2**n for n in range(10, 31) if 2**n <= most] or [most]
    found = rows(machine, contexts, [machine.batch], declared, more_steps)
    first = {
        "a step": next((row.context for row in found if row.step_ratio <= 1 - LITTLE), None),
        "a response": next((row.context for row in found if row.response_ratio < 1), None),
    }
    words = " and ".join(
        f"{what} {'gains nowhere' if n is None else f'gains from {n:,.0f} tokens on'}"
        for what, n in first.items()
    )
    return f"At batch {machine.batch} {words} (powers of two up to {contexts[-1]:,})."


def findings(found: Sequence[Row]) -> list[str]:
    """Where declarations gain nothing, in sentences."""
    said = []
    for row in found:
        if row.arm not in (None, "da"):  # no declaration acts in the others
            continue
        where = f"At {row.context:,.0f} tokens and batch {row.batch}"
        if row.most < LITTLE:
            said.append(
                f"{where} declarations gain nothing: all that they could save is "
                f"{row.most:.1%} of a step; {_BOUND[row.bound]}."
            )
        elif row.step_ratio > 1 - LITTLE:
            said.append(
                f"{where} these declarations gain nothing: a step takes {row.step_ratio:.3f} of "
                f"the time, and could take {1 - row.most:.3f} at best; {_BOUND[row.bound]}."
            )
        elif row.response_ratio >= 1:
            said.append(
                f"{where} a step takes {row.step_ratio:.2f} of the time, but a response "
                f"{row.response_ratio:.2f}, for it has more steps."
            )
    if missing := [row for row in found if not row.fits]:
        which = "; ".join(
            f"{f'{row.arm}, ' if row.arm else ''}{row.context:,.0f} tokens, batch {row.batch}"
            for row in missing
        )
        said.append(f"Does not fit in the memory of the chip: {which}.")
    return said


_BOUND = {
    "weights": "the weights take the most",
    "full": "full attention takes the most",
    "rest": "sliding windows and recurrent states take the most",
}
