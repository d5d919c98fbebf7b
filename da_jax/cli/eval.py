"""`da-jax eval`: tasks in several arms, resumable, with a report at the end."""

from __future__ import annotations

import dataclasses
import datetime
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from da_jax import __version__
from da_jax.checkpoints import convert, paths
from da_jax.cli import eval_harness
from da_jax.cli import report as report_command
from da_jax.cli.options import read_style
from da_jax.engine.config import EngineConfig
from da_jax.engine.llm import LLM, load_tokenizer, stop_token_ids
from da_jax.engine.request import SamplingParams
from da_jax.evals import identity, planning, run, suites
from da_jax.evals.folder import RunFolder, open_folder
from da_jax.evals.judge import Judge
from da_jax.evals.planning import Plan, Prompts, Selection
from da_jax.evals.report import plots
from da_jax.kernels.chips import current_target
from da_jax.kernels.paged_attention import choose
from da_jax.models import dtypes, hf_config
from da_jax.protocol.modes import Arm
from da_jax.protocol.prompt import PromptRenderer

LENGTHS = "4096,8192"
"""What `--lengths` is by default."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""
_SECONDS_A_LINE = 60  # of progress, where there is no terminal


@dataclasses.dataclass(frozen=True)
class Public:
    """Arguments about public data and its judge."""

    data: Path
    allow_download: bool
    accepted: frozenset[str]
    judge: str | None
    judge_url: str
    judge_key_env: str
    judge_max_tokens: str
    judge_temperature: str


@dataclasses.dataclass(frozen=True)
class Options:
    """Arguments of the command; `sampling` and `engine` are passed on as they are."""

    model: str
    suite: list[str]
    arms: str
    lengths: str | None
    n: int
    seed: int
    out: Path
    style: str
    system: str | None
    thinking: bool
    max_tokens: int | None
    sampling_seed: int
    max_model_len: int | None
    json: bool
    page: bool
    public: Public
    sampling: dict[str, Any]
    engine: dict[str, Any]


def execute(options: Options) -> None:
    """Runs tasks of da-jax, or of lm-evaluation-harness.

    Raises:
      ValueError: what is wrong with the arguments, or does not fit; before anything runs.
    """
    names = suites.split(options.suite)
    if all(name.startswith(suites.LM_EVAL) for name in names):
        _harness(options, [name.removeprefix(suites.LM_EVAL) for name in names])
    else:
        _own(options)


def _harness(options: Options, tasks: list[str]) -> None:
    eval_harness.run(
        eval_harness.Options(
            model=options.model,
            tasks=tasks,
            arms=[arm.strip() for arm in options.arms.split(",")],
            lengths=None if options.lengths is None else numbers("--lengths", options.lengths),
            n=options.n,
            seed=options.seed,
            max_tokens=options.max_tokens,
            out=options.out,
            style=read_style(options.style),
            thinking=options.thinking,
            json=options.json,
            config=EngineConfig(**options.engine, max_model_len=options.max_model_len),
        ),
        progress,
    )


@dataclasses.dataclass(frozen=True)
class _Setup:
    """All that is known before a model is loaded."""

    folder: Any
    selection: Selection
    prompts: Prompts
    sampling: SamplingParams
    config: EngineConfig
    positions: int
    judge: Judge | None
    settings: dict[str, Any]


def _own(options: Options) -> None:
    """Plans, asks, reports."""
    if options.page:
        plots.require()
    setup = _prepare(options)
    about = {
        "model": options.model,
        "suites": options.suite,
        "sources": planning.sources(setup.selection),
        "begun": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    with open_folder(options.out, setup.settings, about) as kept:
        for note in kept.notes:
            print(f"da-jax: {note}", file=sys.stderr)
        with progress() as bars:
            plan = planning.make(
                setup.selection, setup.prompts, lambda d, t: bars("checking prompts", d, t)
            )
            length = planning.max_model_len(plan, options.max_model_len, setup.positions)
            planning.check_prompts(plan, kept.prompts)
            missing = any(key not in kept.prompts for key in plan.prompts)
            unscored = _ask(options, setup, plan, length, kept, bars) if missing else 0
    _finish(options, plan, unscored, kept.reason)


def _judge(options: Options) -> Judge | None:
    """The judge that is named, or None."""
    most = _number("--judge-max-tokens", options.public.judge_max_tokens)
    if most is not None and most != int(most):
        raise ValueError(f"--judge-max-tokens is {most}; give a whole number, or none")
    temperature = _number("--judge-temperature", options.public.judge_temperature)
    if options.public.judge is None:
        return None
    return Judge(
        model=options.public.judge,
        url=options.public.judge_url,
        key_env=options.public.judge_key_env,
        cache=options.out / "verdicts",
        max_tokens=None if most is None else int(most),
        temperature=temperature,
    )


def _number(name: str, text: str) -> float | None:
    """A finite number, or None where the text says `none`.

    Raises:
      ValueError: for anything else.
    """
    if text.strip().lower() == "none":
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{name} is {text!r}; give a number, or none to leave it out")
    return value


def _public(options: Options, judge: Judge | None) -> Any:
    """Where public data is, and who judges."""
    from da_jax.evals.public import PublicOptions

    told: set[str] = set()

    def show(licence: str) -> None:
        if licence not in told:  # data is read twice, before and while it is answered
            told.add(licence)
            print(licence, file=sys.stderr)

    return PublicOptions(
        folder=options.public.data,
        allow_download=options.public.allow_download,
        accepted=options.public.accepted,
        judge=judge,
        show=show,
    )


def _prepare(options: Options) -> _Setup:
    lengths, judge = numbers("--lengths", options.lengths or LENGTHS), _judge(options)
    selection = Selection(
        tasks=tuple(suites.load(options.suite, _public(options, judge))),
        lengths=lengths,
        n=options.n,
        seed=options.seed,
        arms=tuple(Arm(name.strip()) for name in options.arms.split(",")),
        max_tokens=options.max_tokens,
    )
    sampling, config = SamplingParams(**options.sampling), EngineConfig(**options.engine)
    folder = convert.resolve(options.model)
    local = paths.local_metadata(folder)
    tokenizer = load_tokenizer(local)
    renderer = PromptRenderer(tokenizer, read_style(options.style), thinking=options.thinking)
    prompts = Prompts(renderer, tokenizer, options.system)
    model = hf_config.read(paths.absolute(folder))
    settings = {
        "version": __version__,
        "checkpoint": identity.checkpoint(folder),
        "tokenizer": identity.tokenizer(local),
        "stop_token_ids": sorted(stop_token_ids(local, tokenizer)),
        "device": current_target().kind,
        "jax": jax.__version__,
        "engine": _engine_settings(config, folder, model.family),
        "sampling": _sampling_settings(sampling, options.sampling_seed),
        "thinking": options.thinking,
        "judge": None if judge is None else judge.identity,
        **planning.settings(selection, prompts),
    }
    positions = model.max_positions
    return _Setup(folder, selection, prompts, sampling, config, positions, judge, settings)


def _ask(
    options: Options,
    setup: _Setup,
    plan: Plan,
    length: int,
    kept: RunFolder,
    bars: Callable[..., None],
) -> int:
    """Answers and scores what is left; returns how many responses are unscored.

    The model is loaded only if a response is missing, not if only scores are.
    """

    def watch(kept: RunFolder, done: int) -> None:
        means = {arm: total / count for arm, (total, count) in sorted(kept.scores.items())}
        shown = ", ".join(f"{arm} {mean:.0%}" for arm, mean in means.items())
        if kept.reason:
            shown += f", {len(kept.unscored)} unscored: {kept.reason}"
        bars("answering", done, len(plan.prompts), shown)

    try:
        llm = None
        if run.unanswered(plan, kept):
            llm = LLM.from_pretrained(
                setup.folder, style=setup.prompts.renderer.style, thinking=options.thinking,
                config=dataclasses.replace(setup.config, max_model_len=length), progress=bars,
            )  # fmt: skip
        return run.evaluate(
            llm, setup.selection, plan, setup.prompts, kept, sampling=setup.sampling,
            sampling_seed=options.sampling_seed, watch=watch,
        )  # fmt: skip
    except KeyboardInterrupt:
        if setup.judge is not None:
            setup.judge.stop()
        done = sum(key in kept.prompts for key in plan.prompts)
        print(
            f"\nda-jax: interrupted; {done} of {len(plan.prompts)} responses are in {options.out}. "
            "The same command goes on from there",
            file=sys.stderr,
        )
        sys.exit(INTERRUPTED)


def _finish(options: Options, plan: Plan, unscored: int, reason: str) -> None:
    """Reports; a run with unscored responses ends with exit status 1."""
    if unscored < len(plan.prompts):
        report_command.show([options.out], options.out, options.page, options.json)
    if unscored:
        print(
            f"da-jax: {unscored} of {len(plan.prompts)} responses could not be scored; they are "
            f"kept in {options.out / 'unscored.jsonl'} with the reason. The same command scores "
            f"them again{f'. The last reason: {reason}' if reason else ''}",
            file=sys.stderr,
        )
        sys.exit(1)


def numbers(name: str, text: str) -> tuple[int, ...]:
    """Whole numbers with commas between.

    Raises:
      ValueError: for anything else.
    """
    parts = [part.strip().replace("_", "") for part in text.split(",") if part.strip()]
    if not parts or not all(part.isascii() and part.isdigit() for part in parts):
        raise ValueError(f"{name} is {text!r}; give whole numbers with commas, such as 4096,8192")
    return tuple(int(part) for part in parts)


def _engine_settings(config: EngineConfig, folder: Any, family: str) -> dict[str, Any]:
    """What of the engine responses and their account depend on, as it is here.

    How much is computed at once (`max_num_seqs`, `prefill_chunk`, `data_parallel`) is not among it:
    it changes rounding alone, as do the other requests that a response happens to decode beside,
    which an interruption changes anyway.
    """
    target = current_target()
    dtype = dtypes.resolve(config.dtype, family, target)
    int8 = config.weights == "int8" or convert.is_int8(folder)
    return {
        "dtype": dtype,
        "weights": "int8" if int8 else dtype,
        "kv_dtype": dtypes.resolve_kv(config.kv_dtype, dtype, target),
        "attention": choose(config.attention).name,
        "page_size": config.page_size,
        "tensor_parallel": config.tensor_parallel,
    }


def _sampling_settings(sampling: SamplingParams, seed: int) -> dict[str, Any]:
    names = ("temperature", "top_k", "top_p", "presence_penalty", "guided")
    return {name: getattr(sampling, name) for name in names} | {
        "seed": seed if sampling.temperature else None
    }


@contextmanager
def progress() -> Iterator[Callable[..., None]]:
    """Bars on a terminal; into a file a line now and then."""
    columns = (
        TextColumn("{task.description}"), BarColumn(bar_width=12), MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[note]}", markup=False),
    )  # fmt: skip
    console = Console(stderr=True)
    # Responses differ much in length: the time left is estimated from the last half hour.
    shown = Progress(
        *columns, console=console, speed_estimate_period=1800, transient=True,
        disable=not console.is_terminal,
    )  # fmt: skip
    with shown:
        tasks: dict[str, Any] = {}
        said = time.monotonic()

        def report(stage: str, done: int, total: int, note: str = "") -> None:
            nonlocal said
            if stage not in tasks:
                tasks[stage] = shown.add_task(stage, total=total, note="")
            shown.update(tasks[stage], completed=done, total=total, note=note)
            if not console.is_terminal and time.monotonic() - said >= _SECONDS_A_LINE:
                said = time.monotonic()
                print(f"{stage} {done} of {total} {note}", file=sys.stderr, flush=True)

        yield report
