"""`da-jax roofline`: the paper's estimate, and ours over contexts and batches."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from da_jax.checkpoints import known
from da_jax.cli.options import DEFAULT
from da_jax.evals import folder
from da_jax.evals.records import Record
from da_jax.kernels import chips
from da_jax.protocol.modes import Mode
from da_jax.roofline import grid, paper, plot
from da_jax.roofline import workload as load
from da_jax.roofline.step import Machine

CONVENTIONS = ("paper", "measured")
_CONTEXTS = (8_192, 32_768, 131_072)
_BATCHES = (1, 8, 32)
_ARMS = ("da", "unmasked", "vanilla")


@dataclasses.dataclass(frozen=True)
class Options:
    """Arguments of the command, see its help."""

    model: str | None
    chip: str
    convention: str
    steps: float | None
    attended: float | None
    context: list[int] | None
    batch: list[int] | None
    trace: Path | None
    records: Path | None
    mix: str | None
    seen: str | None
    more_steps: float
    tensor_parallel: int
    page_size: int | None
    weights: str
    kv_dtype: str
    mfu: float
    mbu: float
    plot: Path | None
    json: bool


def run(options: Options) -> None:
    """Computes and prints.

    Raises:
      ValueError: arguments that do not go together or are out of range.
    """
    amounts: dict[str, Sequence[float | None]] = {
        "--steps": [options.steps], "--attended": [options.attended],
        "--more-steps": [options.more_steps], "--context": options.context or [],
    }  # fmt: skip
    for name, values in amounts.items():
        for value in values:
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value:g}; it must be above 0, and finite")
    if options.convention == "paper":
        _paper(options)
    elif options.convention == "measured":
        _measured(options)
    else:
        known_ones = ", ".join(CONVENTIONS)
        raise ValueError(f"--convention is {options.convention!r}; choose from {known_ones}")


def _paper(options: Options) -> None:
    if (options.steps is None) != (options.attended is None):
        raise ValueError("--steps and --attended belong together; give both, or neither of them")
    chip = chips.named(options.chip)
    if options.steps is None or options.attended is None:
        if options.model is not None:
            raise ValueError(
                f"--model {options.model}: give --steps and --attended of its response, or "
                "--convention measured for a mix of modes"
            )
        cells = list(paper.TABLE)
    else:
        cells = [
            paper.Cell(model, "", options.steps, options.attended)  # type: ignore[arg-type]
            for model in ([options.model] if options.model else paper.NOMINAL)
        ]
    rows = [_paper_row(cell, chip, options) for cell in cells]
    if options.json:
        print(json.dumps(rows[0] if len(rows) == 1 else {"rows": rows}, indent=2))
        return
    table = Table(
        title=f"Milliseconds of one response's decode on a {chip.name}, as the paper counts: "
        f"{options.mfu:.0%} of peak operations, {options.mbu:.0%} of bandwidth",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in ("model", "arm"):
        table.add_column(name, no_wrap=True)
    for name in ("steps", "attended", "matmul", "global", "local", "total", "ratio"):
        table.add_column(name, justify="right")
    first: dict[str, float] = {}
    for row in rows:
        base = first.setdefault(row["model"], row["total_ms"])
        table.add_row(
            Text(row["model"]), row["arm"], f"{row['steps']:,.0f}",
            f"{row['attended'] / 1e6:,.2f} M",
            *(f"{row[f'{part}_ms']:,.1f}" for part in ("matmul", "global", "local", "total")),
            f"{row['total_ms'] / base:.2f}",
        )  # fmt: skip
    Console().print(table)


def _paper_row(cell: paper.Cell, chip: chips.Chip, options: Options) -> dict[str, Any]:
    found = known.find(cell.model)
    parameters = next(
        (count for name, count in paper.NOMINAL.items() if found.source.endswith(f" {name}")), None
    )
    estimate = paper.estimate(
        found.config, chip, steps=cell.steps, attended=cell.attended, parameters=parameters,
        mfu=options.mfu, mbu=options.mbu,
    )  # fmt: skip
    return {
        "model": cell.model,
        "arm": cell.arm,
        "chip": chip.name,
        "convention": "paper",
        "steps": cell.steps,
        "attended": cell.attended,
        **dataclasses.asdict(estimate),
        "total_ms": estimate.total_ms,
    }


def _measured(options: Options) -> None:
    if options.weights not in ("auto", "int8"):
        raise ValueError(f"--weights is {options.weights!r}; it must be auto or int8")
    if options.plot:
        plot.check(options.plot)
    page_size = _page_size(options)
    model = options.model or "gemma-4-31B"
    found = known.find(model)
    machine = Machine(
        found.config, chips.named(options.chip), devices=options.tensor_parallel,
        page_size=page_size, int8=options.weights == "int8" or found.int8,
        kv_dtype=options.kv_dtype, mfu=options.mfu, mbu=options.mbu,
    )  # fmt: skip
    batches = options.batch or list(_BATCHES)
    if options.records:
        rows, told = _of_records(options.records, machine, batches)
    else:
        rows, told = _of_workload(options, machine, batches)
    told += grid.findings(rows)
    if options.json:
        print(json.dumps(_json(options, model, machine, rows, told), indent=2))
    else:
        _print(model, machine, rows, told)
    if options.plot:
        title = f"{model} on {options.tensor_parallel} x {machine.chip.name}, estimated"
        plot.draw(rows, title, options.plot)


def _of_workload(
    options: Options, machine: Machine, batches: list[int]
) -> tuple[list[grid.Row], list[str]]:
    """Rows of a trace, of sums, or of a mix of modes, and what they stand for."""
    page = machine.page_size
    if options.trace:
        response = load.from_trace(options.trace, page)
        rows = [grid.row(dataclasses.replace(machine, batch=batch), response) for batch in batches]
        return rows, [f"The steps of {options.trace} against the same with everything visible."]
    contexts = options.context or list(_CONTEXTS)
    if options.attended is not None:
        if options.steps is None or options.context is None:
            raise ValueError(
                "--attended needs the --steps that attended so many tokens, and their --context"
            )
        steps, attended = options.steps, options.attended
        of_sums = lambda context: load.from_sums(steps, attended, context, page)
        words = f"{steps:,.0f} steps that attend {attended:,.0f} tokens, against as many steps "
        return grid.rows(machine, contexts, batches, of_sums), [words + "with everything visible."]
    shares, seen = _shares(options.mix, load.SHARES), _shares(options.seen, load.SEEN)
    steps = (options.steps or load.STEPS) * options.more_steps
    of_mix = lambda context: load.from_mix(steps, context, page, shares, seen)
    words = ", ".join(
        f"{share:.0%} of the steps in {mode.value} see {seen[mode]:.0%} of the context"
        for mode, share in shares.items()
    )
    told = f"{words}; {options.more_steps:.2f} times the steps of a response without declarations."
    gains = [
        grid.gains_from(dataclasses.replace(machine, batch=batch), of_mix, options.more_steps)
        for batch in batches
    ]
    return grid.rows(machine, contexts, batches, of_mix, options.more_steps), [told, *gains]


def _page_size(options: Options) -> int:
    """Tokens of a page: those of the run that a trace or records come from, else what is given.

    Raises:
      ValueError: another number is given, or the folder or trace is none.
    """
    known, path = None, options.trace or options.records
    if options.trace:
        known = load.page_size_of_trace(options.trace)
    elif options.records:
        settings, _ = folder.read_settings(options.records)
        known = settings.get("engine", {}).get("page_size")
    given = options.page_size
    if given is not None and known not in (None, given):
        raise ValueError(
            f"--page-size is {given}, but the pages of {path} have {known} tokens; leave it out"
        )
    return known or given or DEFAULT.page_size


def _of_records(
    path: Path, machine: Machine, batches: list[int]
) -> tuple[list[grid.Row], list[str]]:
    """Rows of the mean response of each arm of an evaluation, and what they stand for.

    A response is compared with that of the arm `vanilla`, over the examples that both arms have.
    """
    found: dict[str, dict[Any, Record]] = {arm: {} for arm in _ARMS}
    for record in folder.read_records(path):
        found[record.arm][record.key[:3]] = record
    by_arm = {arm: records for arm, records in found.items() if records}
    if not by_arm:
        raise ValueError(f"{path} holds no records of an evaluation")
    told = [f"Mean responses of {path}, each against the one of the arm vanilla."]
    if "vanilla" not in by_arm:
        told = [f"Mean responses of {path}, each against the same with everything visible."]
    elif folder.read_settings(path)[0].get("style", {}).get("da_only"):
        told.append("The checkpoint knows only the DA prompt: its arm vanilla is the unmasked one.")
    rows: list[grid.Row] = []
    for arm, records in by_arm.items():
        common = [key for key in records if key in by_arm.get("vanilla", records)]
        if not common:
            raise ValueError(f"{path}: the arms {arm} and vanilla have no example in common")
        if len(common) < len(records):
            told.append(
                f"Of {arm} {len(common)} of {len(records)} responses, those vanilla has too."
            )
        mean = lambda of, common=common: load.from_records(
            [of[key] for key in common], machine.page_size
        )
        own, vanilla = mean(records), mean(by_arm["vanilla"]) if "vanilla" in by_arm else None
        for batch in batches:
            many = dataclasses.replace(machine, batch=batch)
            rows.append(grid.row(many, own, vanilla=vanilla, arm=arm))
    return rows, told


def _shares(text: str | None, usual: Any) -> dict[Mode, float]:
    """Reads such as `global=0.3,focus=0.2,local=0.5`; what is not named stays as usual.

    Raises:
      ValueError: the text is not like this.
    """
    shares = dict(usual)
    for item in filter(None, (text or "").split(",")):
        name, _, value = item.partition("=")
        try:
            shares[Mode(name.strip())] = float(value)
        except ValueError as error:
            raise ValueError(f"{item!r}: write shares as global=0.3,focus=0.2,local=0.5") from error
    return shares


def _json(
    options: Options, model: str, machine: Machine, rows: list[grid.Row], told: list[str]
) -> dict[str, Any]:
    return {
        "model": model,
        "chip": machine.chip.name,
        "convention": "measured",
        "tensor_parallel": machine.devices,
        "page_size": machine.page_size,
        "weights": "int8" if machine.int8 else "bfloat16",
        "kv_dtype": machine.kv_dtype,
        "mfu": machine.mfu,
        "mbu": machine.mbu,
        "total_ms": rows[0].declared_ms,
        "rows": [dataclasses.asdict(row) for row in rows],
        "notes": told,
    }


def _print(model: str, machine: Machine, rows: list[grid.Row], told: list[str]) -> None:
    devices = f"{machine.devices} x " if machine.devices > 1 else ""
    arms = any(row.arm for row in rows)
    table = Table(
        title=f"{model} on {devices}{machine.chip.name}, estimated with {machine.mfu:.0%} of peak "
        f"operations and {machine.mbu:.0%} of bandwidth.\nA decode step in milliseconds, all "
        "visible and with declarations; ratios of a step and of a response.",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 0 if arms else 1, 0, 0),  # 80 columns hold all of them
    )
    if arms:
        table.add_column("arm", no_wrap=True)
    for name in (
        "context", "batch", "visible", "declared", "step", "response", "at best", "bound", "fits"
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            *([row.arm] if arms else []), f"{row.context:,.0f}", f"{row.batch}",
            f"{row.visible_step_ms:,.2f}",
            f"{row.declared_step_ms:,.2f}", f"{row.step_ratio:.2f}", f"{row.response_ratio:.2f}",
            f"{1 - row.most:.2f}", row.bound, "yes" if row.fits else "no",
        )  # fmt: skip
    console = Console()
    console.print(table)
    for line in told:
        console.print(Text(line))
    if machine.devices > 1:
        console.print(Text("What passes between the devices is not counted."))
