"""`da-jax generate`: one question about one document, streamed, with its account."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from da_jax.checkpoints.convert import TINY
from da_jax.cli.options import read_style
from da_jax.engine.config import EngineConfig
from da_jax.engine.llm import LLM
from da_jax.engine.request import (
    Decline,
    Done,
    Event,
    ModeChange,
    PrefillProgress,
    Response,
    SamplingParams,
    TextDelta,
)
from da_jax.protocol import ids
from da_jax.protocol.modes import Arm, Declaration, Mode

COLOURS = {Mode.GLOBAL: "yellow", Mode.FOCUS: "green", Mode.LOCAL: "cyan"}
EXAMPLE = TINY.parent / "example.json"


@dataclasses.dataclass(frozen=True)
class Options:
    """Arguments of the command; `sampling` and `engine` are passed on as they are."""

    model: str
    revision: str | None
    document: str | None
    question: str | None
    arm: str
    style: str
    system: str | None
    initial: str | None
    visible: str | None
    thinking: bool
    json: bool
    trace: Path | None
    sampling: dict[str, Any]
    engine: dict[str, Any]


def run(options: Options) -> None:
    """Loads, answers, prints."""
    # What can be refused is refused before a checkpoint is loaded.
    document, question = read_input(options)
    sampling, arm = SamplingParams(**options.sampling), Arm(options.arm)
    config = EngineConfig(**options.engine)
    initial = None if options.initial is None else Declaration.of(options.initial)
    visible = None if options.visible is None else read_visible(options.visible)
    style = read_style(options.style)
    if options.trace and not options.trace.parent.is_dir():
        raise ValueError(f"--trace: the folder {options.trace.parent} does not exist")
    with _progress() as report:
        llm = LLM.from_pretrained(
            options.model, revision=options.revision, style=style, thinking=options.thinking,
            config=config, progress=report,
        )  # fmt: skip
        events = llm.stream(
            document, question, arm=arm, system=options.system, sampling=sampling,
            initial=initial, visible=visible,
        )  # fmt: skip
        first = _prefill(events, report)
    for line in llm.memory.describe():
        Console(stderr=True).print(Text(line, style="dim"), soft_wrap=True)
    console = Console(stderr=options.json)  # with --json, standard output holds one object only
    response = _show(first, events, console)
    if options.trace:
        write_trace(response, config.page_size, options.trace)
    if options.json:
        print(json.dumps(summary(response, llm.compilations_after_warmup)))
    else:
        console.print(_table(response, arm, llm.renderer.style.da_only))


def read_input(options: Options) -> tuple[str, str]:
    """The document and the question; the shipped example when neither is given.

    Raises:
      ValueError: when only one of them is given, or the file cannot be read as UTF-8 text.
    """
    if options.document is None and options.question is None:
        example = json.loads(EXAMPLE.read_text(encoding="utf-8"))
        return example["document"], example["question"]
    if options.question is None:
        raise ValueError("--document needs a --question")
    if options.document is None:
        raise ValueError("--question needs a --document (a file, or - for standard input)")
    try:
        if options.document == "-":
            return sys.stdin.buffer.read().decode("utf-8"), options.question
        return Path(options.document).read_text(encoding="utf-8"), options.question
    except UnicodeDecodeError as error:
        raise ValueError(f"{options.document} is no UTF-8 text: {error}") from error


def read_visible(text: str) -> tuple[int, ...]:
    """The chunks that `--visible` names."""
    return () if text == "none" else ids.parse("--visible", text)


def summary(response: Response, compilations: int) -> dict[str, Any]:
    """The object that `--json` prints."""
    account = response.summary
    return {
        "text": response.text,
        "answer": response.answer,
        "finish_reason": response.finish_reason,
        "prompt_tokens": response.prompt_tokens,
        "completion_tokens": response.completion_tokens,
        "attended_tokens": account["attended"]["total"],
        "attended_tokens_vanilla": account["attended_vanilla"],
        "reduction": account["reduction"],
        "modes": {
            mode.value: {
                "tokens": account["tokens"][mode.value],
                "attended_tokens": account["attended"][mode.value],
                "read_tokens": account["read"][mode.value],
            }
            for mode in Mode
        },
        "focus": {
            "attempts": account["focus"]["attempts"],
            "successes": account["focus"]["successes"],
            "declines": account["declines"],
        },
        "compilations_after_warmup": compilations,
    }


def write_trace(response: Response, page_size: int, path: Path) -> None:
    """Writes the account of every decode step, and its sums, as one JSON object."""
    steps = [step._asdict() | {"mode": step.mode.value} for step in response.steps]
    written = {"page_size": page_size, "summary": response.summary, "steps": steps}
    path.write_text(json.dumps(written) + "\n")


@contextmanager
def _progress() -> Iterator[Any]:
    with Progress(console=Console(stderr=True), transient=True) as progress:
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done, total=total)

        yield report


def _prefill(events: Iterator[Event], report: Any) -> Event:
    """Reports prefill progress until the first event of the response, which it returns."""
    for event in events:
        if not isinstance(event, PrefillProgress):
            return event
        report("prefill", event.done, event.total)
    raise AssertionError("a response ends with Done")


def _show(first: Event, events: Iterator[Event], console: Console) -> Response:
    """Streams text, coloured by mode, and returns the response."""
    event = first
    while not isinstance(event, Done):
        if isinstance(event, TextDelta):
            console.print(Text(event.text, style=COLOURS[event.mode]), end="", soft_wrap=True)
        elif isinstance(event, Decline):
            console.print(Text(f"[declined: {event.reason}]", style="red"), end="")
        else:
            assert isinstance(event, ModeChange | PrefillProgress)
        event = next(events)
    console.print()
    return event.response


def _table(response: Response, arm: Arm, da_only: bool) -> Table:
    account = response.summary
    title = f"{response.prompt_tokens} prompt tokens, arm {arm}, {response.finish_reason}"
    table = Table(title=title, title_justify="left")
    for column in ("mode", "tokens", "attended", "read (whole pages)"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    for mode in Mode:
        table.add_row(
            Text(mode.value, style=COLOURS[mode]),
            f"{account['tokens'][mode.value]:,}",
            f"{account['attended'][mode.value]:,}",
            f"{account['read'][mode.value]:,}",
        )
    table.add_section()
    totals = (account[key]["total"] for key in ("tokens", "attended", "read"))
    table.add_row("total", *(f"{value:,}" for value in totals))
    table.add_row("everything visible", "", f"{account['attended_vanilla']:,}")
    table.add_row("saved", "", f"{account['reduction']:.1%}")
    focus = account["focus"]
    notes = [f"focus {focus['successes']} of {focus['attempts']} honoured"]
    notes += [f"{count} declined ({reason})" for reason, count in account["declines"].items()]
    if arm is Arm.VANILLA and da_only:
        notes.append("this checkpoint knows only the DA prompt: vanilla is unmasked")
    # Text, not markup: an answer may hold brackets.
    table.caption = Text("; ".join(notes) + f"\nanswer: {response.answer}")
    table.caption_justify = "left"
    return table
