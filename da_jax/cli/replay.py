"""`da-jax replay`: what recorded responses of any system would have attended."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Table
from rich.text import Text

from da_jax.checkpoints import hub, paths
from da_jax.cli.options import read_style
from da_jax.engine.llm import load_tokenizer, stop_token_ids
from da_jax.evals import replay
from da_jax.protocol.modes import AnswerMode, Arm, Declaration, Mode
from da_jax.protocol.prompt import PromptRenderer
from da_jax.protocol.recorded import read
from da_jax.protocol.visibility import Scaffold


@dataclasses.dataclass(frozen=True)
class Options:
    """Arguments of the command."""

    files: Sequence[Path]
    model: str
    style: str
    thinking: bool
    arm: str
    page_size: int
    scaffold: str
    answer_mode: str
    initial: str | None
    json: bool


def run(options: Options) -> None:
    """Replays all responses, then prints them and their sums.

    Raises:
      ValueError: an argument or a recorded response that is not valid; nothing was printed.
    """
    for name, known in (("scaffold", Scaffold), ("answer_mode", AnswerMode)):
        if getattr(options, name) not in get_args(known):
            raise ValueError(
                f"--{name.replace('_', '-')} is {getattr(options, name)!r}; choose one of "
                f"{', '.join(get_args(known))}"
            )
    initial = None if options.initial is None else Declaration.of(options.initial)
    recorded = [one for path in options.files for one in read(path, Arm(options.arm))]
    folder = paths.local_metadata(hub.resolve(options.model, weights=False))
    tokenizer = load_tokenizer(folder)
    replayer = replay.Replayer(
        tokenizer,
        PromptRenderer(tokenizer, read_style(options.style), thinking=options.thinking),
        stop_token_ids(folder, tokenizer),
        page_size=options.page_size,
        scaffold=options.scaffold,  # type: ignore[arg-type]
        answer_mode=options.answer_mode,  # type: ignore[arg-type]
        initial=initial,
    )
    found = [replayer.replay(one) for one in recorded]
    sums = replay.sums(found)
    if options.json:
        names = ("model", "page_size", "scaffold", "answer_mode", "initial")
        settings = {name: getattr(options, name) for name in names}
        print(json.dumps({**settings, "arms": sums}))
        return
    for one in found:
        print(one.to_json())
    console = Console(stderr=True)
    console.print(_table(sums, options.page_size))
    if anew := sum(not one.recorded.exact for one in found):
        note = (
            f"{anew:,} of {len(found):,} responses came as text: their tokens are those of this "
            "model's tokenizer, which approximates the recorded ones"
        )
        console.print(Text(note), soft_wrap=True)


def _table(sums: Mapping[str, Mapping[str, Any]], page_size: int) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for arm in sums:
        table.add_column(arm, justify="right")

    def row(name: str, value: Callable[[Mapping[str, Any]], str]) -> None:
        table.add_row(name, *(Text(value(account)) for account in sums.values()))

    row("responses", lambda a: f"{a['responses']:,}")
    row("response tokens", lambda a: f"{a['tokens']['total']:,}")
    for mode in Mode:
        row(f"attended in {mode.value}", lambda a, m=mode.value: f"{a['attended'][m]:,}")  # type: ignore[misc]
    row("attended", lambda a: f"{a['attended']['total']:,}")
    row(f"read, pages of {page_size}", lambda a: f"{a['read']['total']:,}")
    row("everything visible", lambda a: f"{a['attended_vanilla']:,}")
    row("reduction", lambda a: f"{a['reduction']:.1%}")
    row("focus honoured", lambda a: f"{a['focus']['successes']:,} of {a['focus']['attempts']:,}")
    for reason in sorted({reason for a in sums.values() for reason in a["declines"]}):
        row(f"declined: {reason}", lambda a, r=reason: f"{a['declines'].get(r, 0):,}")  # type: ignore[misc]
    row("format correct", lambda a: f"{a['format_correct']:,}")
    if any(a["scored"] for a in sums.values()):
        row("mean score", lambda a: "" if not a["scored"] else f"{a['mean_score']:.1%}")
    return table
