"""Prefill and decode of the engine: against transformers, and of declarations against none."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from da_jax.bench import drive
from da_jax.bench.peer import Transformers
from da_jax.bench.transcript import mix_of
from da_jax.engine.engine import Engine
from da_jax.engine.request import Request, SamplingParams
from da_jax.protocol.modes import Arm, Mode

Row = dict[str, Any]
DEFAULT_CASES = ((1, 2048), (8, 2048), (32, 2048), (1, 7936))
"""(batch, context): the longest is what a model of 8,192 positions has, and some room."""
_SMALL = 8  # the context at which what does not depend on the context is measured is so much less
_PROFILED_STEPS = 32


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
      cases: (batch, context); the context is prompt and response together, in tokens.
      new_tokens: of each response, when everything is visible.
      transcript_tokens: of each forced response with declarations.
      repeats: how often everything is measured, turn by turn.
      transformers: measure transformers on the same folder too.
      profile: folder for JAX profiles of the decode steps, one a case.
    """

    cases: Sequence[tuple[int, int]] = DEFAULT_CASES
    new_tokens: int = 64
    transcript_tokens: int = 200
    repeats: int = 2
    transformers: bool = False
    profile: Path | None = None

    def __post_init__(self) -> None:
        for name, least in (("new_tokens", 2), ("transcript_tokens", 2), ("repeats", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        longest = max(self.new_tokens, self.transcript_tokens)
        for batch, context in self.cases:
            if batch < 1:
                raise ValueError(f"batch is {batch}; it must be at least 1")
            if context < longest + drive.SHORTEST_PROMPT:
                raise ValueError(
                    f"context is {context}; it holds prompt and response, so it must be at least "
                    f"{longest + drive.SHORTEST_PROMPT} for responses of {longest} tokens"
                )


def rows(
    model: drive.Model, plan: Plan, progress: Callable[[str], None] = lambda words: None
) -> Iterator[Row]:
    """Measures every case.

    Yields:
      For each case a row of system `da-jax`, of `transformers` if asked for, of `unmasked` and of
      `da`. Of the first two: `prefill_tok_s`, `decode_tok_s`, `ratio` and `prefill_ratio` (our
      speed in terms of theirs), `ttft_s` (mean over the batch), `decode_ms_per_step`,
      `host_us_per_token`, `exposed_us_per_token`; tokens a second are those of the whole batch. Of
      the last two: a forced transcript without and with its declarations in force, `ratio` (time
      with declarations over time without), `predicted_ratio` (what the pages that they read
      predict), `read_share` of those pages, `attended_share`, `steps_per_token`, and the mix of
      modes that there was.

    Raises:
      ValueError: a case that the model cannot have, or transformers without torch.
    """
    most = model.network.config.max_positions
    if too_long := sorted({c for _, c in plan.cases if c > most}):
        raise ValueError(f"context is {too_long[0]}; this checkpoint declares {most} positions")
    peer = None
    if plan.transformers:
        if model.folder is None:
            raise ValueError(f"{model.name} has no folder that transformers could load")
        peer = Transformers(model.folder, model.network.dtype.name)
    for batch, context in plan.cases:
        progress(f"batch {batch}, context {context}")
        engine = drive.build(model, batch, context)
        about = {"model": model.name, "batch": batch, "context": context}
        about["dtype"] = engine.runner.plan.dtype
        yield from _plain(engine, peer, model, plan, about)
        yield from _declared(engine, model, plan, about)
        if plan.profile is not None:
            _profile(engine, model, plan, plan.profile / f"batch{batch}_context{context}")
        del engine
        gc.collect()  # its caches, before those of the next


@dataclasses.dataclass
class _Times:
    """What was measured of one system."""

    prefill: list[float] = dataclasses.field(default_factory=list)
    first: list[float] = dataclasses.field(default_factory=list)
    step: list[float] = dataclasses.field(default_factory=list)
    host: float = 0.0
    exposed: float = 0.0
    steps: int = 0

    def row(self, batch: int, prompt_tokens: int) -> Row:
        step = float(np.median(self.step))
        return {
            "prefill_tok_s": round(batch * prompt_tokens / float(np.median(self.prefill)), 1),
            "decode_tok_s": round(batch / step, 1),
            "ttft_s": round(float(np.median(self.first)), 3),
            "decode_ms_per_step": round(step * 1e3, 3),
        }


def _plain(
    engine: Engine, peer: Transformers | None, model: drive.Model, plan: Plan, about: Row
) -> list[Row]:
    """Everything visible: our engine and transformers, turn by turn, a burst of steps each."""
    batch, prompt_tokens = about["batch"], about["context"] - plan.new_tokens
    ours, theirs = _Times(), _Times()
    params = SamplingParams(max_tokens=plan.new_tokens, ignore_eos=True)
    for repeat in range(plan.repeats):
        rng = np.random.default_rng(repeat)
        prompts = [
            drive.random_prompt(rng, model.vocabulary, prompt_tokens, 0) for _ in range(batch)
        ]
        _prefill(engine, [Request(prompt, params, Arm.VANILLA) for prompt in prompts], ours)
        if peer:
            theirs.prefill.append(peer.prefill(np.stack([prompt.ids for prompt in prompts])))
        with drive.Probe(engine) as probe:
            left = plan.new_tokens - 1
            while left:
                steps = min(engine.shapes.burst, left)
                before = probe.seconds
                probe.step()
                probe.block()
                ours.step.append((probe.seconds - before) / steps)
                if peer:
                    theirs.step.append(peer.decode(steps) / steps)
                left -= steps
            while not engine.idle:
                probe.step()
        if peer:
            peer.forget()
        ours.host, ours.exposed = ours.host + probe.host, ours.exposed + probe.exposed
        ours.steps += probe.steps
    mine = ours.row(batch, prompt_tokens)
    tokens = ours.steps * batch
    mine["host_us_per_token"] = round(ours.host / tokens * 1e6, 1)
    mine["exposed_us_per_token"] = round(ours.exposed / tokens * 1e6, 1)
    if peer is None:
        return [{"system": "da-jax"} | about | mine]
    theirs.first = theirs.prefill  # it computes the batch at once
    other = theirs.row(batch, prompt_tokens)
    for name, rate in (("ratio", "decode_tok_s"), ("prefill_ratio", "prefill_tok_s")):
        mine[name] = round(mine[rate] / other[rate], 3)
    other |= {"threads": peer.threads} | peer.versions
    return [{"system": "da-jax"} | about | mine, {"system": "transformers"} | about | other]


def _prefill(engine: Engine, requests: list[Request], times: _Times) -> None:
    """Prefills all; a first token counts when it is on the host."""
    sequences, first = [], dict[int, float]()
    for request in requests:
        sequence = engine.scheduler.find(engine.add(request))
        assert sequence is not None
        sequences.append(sequence)
    start = time.perf_counter()
    while len(first) < len(sequences):
        engine.prefill_step()
        for sequence in sequences:
            if sequence.length > sequence.prompt_len:
                first.setdefault(sequence.request_id, time.perf_counter() - start)
    times.prefill.append(max(first.values()))
    times.first.append(float(np.mean(list(first.values()))))


def _declared(engine: Engine, model: drive.Model, plan: Plan, about: Row) -> list[Row]:
    """A forced transcript with its declarations in force and without, turn by turn."""
    batch, context = about["batch"], about["context"]
    count = plan.transcript_tokens
    prompt_tokens = context - count
    small = max(prompt_tokens // _SMALL, drive.SHORTEST_PROMPT)
    settings = {
        "small": (Arm.UNMASKED, small),
        "unmasked": (Arm.UNMASKED, prompt_tokens),
        "da": (Arm.DA, prompt_tokens),
    }
    found: dict[str, list[drive.Measured]] = {name: [] for name in settings}
    for repeat in range(plan.repeats):
        for name, (arm, length) in settings.items():
            requests = drive.transcripts(model, arm, batch, length, count, seed=repeat)
            found[name].append(drive.run(engine, requests))
    step = {name: _per_token(several) for name, several in found.items()}
    read = {name: _positions(several) for name, several in found.items()}
    # Time grows with the pages that are read: a line through the two contexts.
    slope = (step["unmasked"] - step["small"]) / (read["unmasked"] - read["small"])
    slope = min(max(slope, 0.0), step["unmasked"] / read["unmasked"])  # measured, so anything
    fixed = step["unmasked"] - slope * read["unmasked"]
    predicted = (fixed + slope * read["da"]) / (fixed + slope * read["unmasked"])
    result = []
    for name in ("unmasked", "da"):
        result.append(
            {"system": name}
            | about
            | {
                "decode_tok_s": round(batch / step[name], 1),
                "decode_ms_per_step": round(step[name] * 1e3, 3),
                "ratio": round(step[name] / step["unmasked"], 3),
                "predicted_ratio": round(predicted if name == "da" else 1.0, 3),
                "fixed_ms_per_step": round(fixed * 1e3, 3),
                "read_share": round(read[name] / read["unmasked"], 3),
            }
            | _details(found[name], found["unmasked"], model)
        )
    return result


def _details(several: list[drive.Measured], whole: list[drive.Measured], model: drive.Model) -> Row:
    """Share of the attended positions, costs of the host, and the mix of modes that there was."""
    tokens = sum(one.tokens for one in several)
    responses = [response for one in several for response in one.responses]
    mix = mix_of(
        (step for response in responses for step in response.steps),
        (i for response in responses for i in response.token_ids),
        model.table,
    )
    return {
        "attended_share": round(
            sum(one.attended for one in several) / sum(one.attended for one in whole), 3
        ),
        "steps_per_token": round(float(np.mean([one.steps_per_token for one in several])), 3),
        "host_us_per_token": round(sum(one.host for one in several) / tokens * 1e6, 1),
        "exposed_us_per_token": round(sum(one.exposed for one in several) / tokens * 1e6, 1),
        **{f"{mode.value}_share": round(mix.modes[mode], 3) for mode in Mode},
        "tag_share": round(mix.tags, 4),
    }


def _per_token(several: list[drive.Measured]) -> float:
    """Seconds of a token of every sequence."""
    return float(np.median([one.per_token for one in several]))


def _positions(several: list[drive.Measured]) -> float:
    """Positions that a sequence reads for a token, on average."""
    return float(np.mean([one.read / one.tokens for one in several]))


def _profile(engine: Engine, model: drive.Model, plan: Plan, folder: Path) -> None:
    """Writes a JAX profile of decode steps of the transcript, declarations in force."""
    context = engine.max_len
    count = min(_PROFILED_STEPS, plan.transcript_tokens)
    batch = engine.shapes.batches[0]
    requests = drive.transcripts(model, Arm.DA, batch, context - plan.transcript_tokens, count)
    folder.mkdir(parents=True, exist_ok=True)
    with jax.profiler.trace(str(folder)):
        drive.run(engine, requests)
