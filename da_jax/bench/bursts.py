"""What it costs that a declaration acts at the very next step: ways to get there, compared."""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from da_jax.bench import drive
from da_jax.bench.ahead import Ahead
from da_jax.bench.simulated import ChipTiming, FixedPatience, Simulated
from da_jax.engine.config import EngineConfig
from da_jax.engine.engine import Engine
from da_jax.engine.request import Request
from da_jax.engine.timing import Timing
from da_jax.kernels import chips
from da_jax.models import hf_config, sizes
from da_jax.models.catalog import hf_config as published
from da_jax.models.config import ModelConfig
from da_jax.protocol.modes import Arm

Row = dict[str, Any]
BURSTS = (1, 2, 4, 8, 16)
CHIPS = ("TPU v5e", "H100")
CHIP_MODEL = "Qwen3-4B"
_SAME = 2e-3  # log-probabilities of a token; strategies differ in the order of sums at most


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
      batches: sequences that decode at once.
      context: prompt and response of each, in tokens.
      new_tokens: of each response.
      bursts: fixed bursts to compare.
    """

    batches: Sequence[int] = (1, 8, 32)
    context: int = 1024
    new_tokens: int = 200
    bursts: Sequence[int] = BURSTS

    def __post_init__(self) -> None:
        for name in ("batches", "bursts"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise ValueError(f"{name} are {getattr(self, name)}; give numbers of at least 1")
        if self.new_tokens < 2:
            raise ValueError(f"new_tokens is {self.new_tokens}; it must be at least 2")
        if self.prompt_tokens < drive.SHORTEST_PROMPT:
            raise ValueError(
                f"context is {self.context}; for responses of {self.new_tokens} tokens it must be "
                f"at least {self.new_tokens + drive.SHORTEST_PROMPT}"
            )

    @property
    def prompt_tokens(self) -> int:
        """Tokens of a prompt."""
        return self.context - self.new_tokens


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A way to get a declaration into force.

    Attributes:
      name: how rows name it.
      burst: most steps of a burst.
      timing: makes what decides on a burst's end; None runs one step ahead.
    """

    name: str
    burst: int
    timing: Callable[[], Timing] | None

    @property
    def full_name(self) -> str:
        """With the burst."""
        return f"{self.name} {self.burst}" if self.name == "pause, fixed burst" else self.name


def strategies(bursts: Sequence[int], model: ModelConfig) -> list[Strategy]:
    """Pausing with fixed bursts, pausing as the engine does, and running ahead where it can."""
    found = [
        Strategy("pause, fixed burst", burst, lambda: FixedPatience(math.inf)) for burst in bursts
    ]
    found.append(Strategy("pause, measured patience", EngineConfig().burst, Timing))
    if not model.layers_of("recurrent"):
        found.append(Strategy("one step ahead, redo", 1, None))
    return found


def rows(
    model: drive.Model, plan: Plan, progress: Callable[[str], None] = lambda words: None
) -> Iterator[Row]:
    """Measures every strategy on the same transcripts, and foretells chips.

    Yields:
      For each batch and strategy a row `strategy, chip, batch, steps_per_token` (decode steps of
      the device for one token of every sequence), `tok_s` (of the batch), `host_us_per_token`,
      `exposed_us_per_token` (of it, while the device has nothing to do), `attended_tokens`, `best`.
      Then the same for chips that are not there, with the host of this machine and a step as long
      as the weights take to be read, and `host_share_of_step`.

    Raises:
      RuntimeError: strategies differ in what was attended, or in log-probabilities.
    """
    ahead: dict[int, float] = {}
    for batch in plan.batches:
        found: dict[str, drive.Measured] = {}
        several = strategies(plan.bursts, model.network.config)
        for burst in sorted({s.burst for s in several}):  # strategies with the same share programs
            engine = drive.build(
                model, batch, plan.context, burst=burst, prefix_cache=False, prefill=False
            )
            for strategy in several:
                if strategy.burst == burst:
                    progress(f"batch {batch}: {strategy.full_name}")
                    found[strategy.full_name] = _measure(engine, strategy, model, plan)
                    if strategy.timing is None:
                        ahead[batch] = found[strategy.full_name].steps_per_token
            del engine
            gc.collect()  # its caches, before those of the next
        _check_equal(found)
        names = [strategy.full_name for strategy in several]
        yield from _with_best([_row(model, plan, batch, name, found[name]) for name in names])
    for chip in CHIPS:
        for batch in plan.batches:
            progress(f"{chip}, batch {batch}, simulated")
            yield from _with_best(foretold(model, plan, batch, chip, ahead.get(batch)))


def _measure(engine: Engine, strategy: Strategy, model: drive.Model, plan: Plan) -> drive.Measured:
    """Decodes the transcripts once to warm up, for the patience too, and once for the record."""
    batch = engine.shapes.batches[0]
    requests = drive.transcripts(model, Arm.DA, batch, plan.prompt_tokens, plan.new_tokens)
    if strategy.timing is None:
        ahead = Ahead(engine)
        ahead.run(requests)
        return ahead.run(requests)
    engine.timing = strategy.timing()
    drive.run(engine, requests)
    return drive.run(engine, requests)


def _check_equal(found: dict[str, drive.Measured]) -> None:
    """Refuses strategies that do not see the same or do not say the same.

    What the device read is compared too, so that what the host believes is not enough.
    """
    page = {m.read // max(m.entries, 1) for m in found.values()}
    seen = {(m.attended, m.read, m.entries) for m in found.values()}
    words = {name: _logprobs(m) for name, m in found.items()}
    first = next(iter(words.values()))
    apart = {
        name: float(np.abs(theirs - first).max())
        for name, theirs in words.items()
        if np.abs(theirs - first).max() > _SAME
    }
    if len(seen) > 1 or len(page) > 1 or apart:
        raise RuntimeError(
            f"strategies differ: (attended, read, entries) {sorted(seen)}, log-probabilities "
            f"{apart}; one of them does not decode exactly"
        )


def _logprobs(measured: drive.Measured) -> np.ndarray:
    """Log-probabilities of the tokens that decode steps gave."""
    return np.array([e.logprob for r in measured.responses for e in r.logprobs[1:]])


def _row(model: drive.Model, plan: Plan, batch: int, name: str, measured: drive.Measured) -> Row:
    return {
        "strategy": name,
        "chip": jax.devices()[0].device_kind,
        "model": model.name,
        "batch": batch,
        "context": plan.context,
        "steps_per_token": round(measured.steps_per_token, 3),
        "tok_s": round(measured.rate, 1),
        "host_us_per_token": round(measured.host_us(measured.host), 1),
        "exposed_us_per_token": round(measured.host_us(measured.exposed), 1),
        "tokens_per_burst": round(measured.tokens / measured.bursts, 2),
        "attended_tokens": measured.attended,
    }


def foretold(
    model: drive.Model, plan: Plan, batch: int, chip_name: str, ahead: float | None
) -> list[Row]:
    """What the strategies would give with a model of 4 billion parameters on a chip.

    The host's work is done and timed here, with this machine's processor and the vocabulary of
    `model`. The device's is not done: a step takes as long as the chip needs to read the weights.

    Args:
      model: whose tokens are used.
      plan: what is decoded.
      batch: sequences.
      chip_name: as in `kernels.chips`.
      ahead: decode steps a token of running one step ahead, None to leave that out.
    """
    chip = next(chip for chip in chips.CHIPS if chip.name == chip_name)
    weights = sizes.traffic(
        hf_config.parse(published(CHIP_MODEL)), batch=batch, context=1, itemsize=2
    ).weights
    step, tokens = weights / chip.bandwidth, (plan.new_tokens - 1) * batch
    requests = drive.transcripts(model, Arm.DA, batch, plan.prompt_tokens, plan.new_tokens)

    about = {"chip": f"{chip_name}, simulated", "model": CHIP_MODEL, "batch": batch}
    result, of_a_launch = list[Row](), 0.0
    for strategy in strategies(plan.bursts, model.network.config):
        if strategy.timing is None:
            if ahead is None or not of_a_launch:
                continue
            steps = round(ahead * (plan.new_tokens - 1))
            host = of_a_launch * steps  # a launch of few rows takes as much
            taken = _Taken(steps, steps, host, max(host - steps * step, 0.0))
        else:
            engine = drive.build(
                model, batch, plan.context, compiled=False, prefill=False, burst=strategy.burst,
                prefix_cache=False,
            )  # fmt: skip
            simulated = Simulated(engine)
            measures = strategy.timing is Timing
            engine.timing = ChipTiming(step, simulated) if measures else strategy.timing()
            _simulate(engine, simulated, requests)  # to warm up
            taken = _simulate(engine, simulated, requests)
            if strategy.burst == 1:
                of_a_launch = taken.host / taken.bursts
            del engine, simulated
            gc.collect()  # its caches, before those of the next
        row = {"strategy": strategy.full_name, **about, "context": plan.context}
        result.append(row | _foretold_columns(taken, tokens, batch, step))
    return result


def _foretold_columns(taken: _Taken, tokens: int, batch: int, step: float) -> Row:
    return {
        "steps_per_token": round(taken.steps * batch / tokens, 3),
        "tok_s": round(tokens / (taken.steps * step + taken.exposed), 1),
        "host_us_per_token": round(taken.host / tokens * 1e6, 1),
        "exposed_us_per_token": round(taken.exposed / tokens * 1e6, 1),
        "tokens_per_burst": round(tokens / taken.bursts, 2),
        "step_ms": round(step * 1e3, 3),
        "host_share_of_step": round(taken.host / tokens * batch / step, 3),
    }


class _Taken(NamedTuple):
    """What a simulated run took: steps and bursts of the device, seconds of the host."""

    steps: int
    bursts: int
    host: float
    exposed: float


def _simulate(engine: Engine, simulated: Simulated, requests: Sequence[Request]) -> _Taken:
    simulated.steps, simulated.bursts, simulated.seconds = 0, 0, 0.0
    drive.seat(engine, requests)
    with drive.Probe(engine) as probe:
        while not engine.idle:
            probe.step()
    own = simulated.seconds
    return _Taken(simulated.steps, simulated.bursts, probe.host - own, probe.exposed - own)


def _with_best(rows: list[Row]) -> list[Row]:
    """Rows that say which is the fastest."""
    fastest = max(row["tok_s"] for row in rows)
    return [row | {"best": row["tok_s"] == fastest} for row in rows]
