"""Decode of models of 4 billion parameters, random weights, on the accelerator that is here.

    python -P -m da_jax.bench.device --out FILE

Prompts are not prefilled: their pages hold random numbers, which no time depends on. What was
measured is written after each case, so that a run that is cut short leaves what it has.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from da_jax.bench import drive
from da_jax.bench.transcript import mix_of, synthetic
from da_jax.engine import compilations
from da_jax.kernels.bench import machine
from da_jax.kernels.chips import current_target
from da_jax.kernels.paged_attention import BackendError
from da_jax.models import hf_config, registry, sizes
from da_jax.models.catalog import hf_config as published
from da_jax.models.config import ModelConfig
from da_jax.protocol.modes import Arm

Row = dict[str, Any]
MODELS = ("Qwen3-4B-2507", "gemma-4-E4B")
_LAYERS = ["sliding_attention", "full_attention"] * 2
_TINY: dict[str, dict[str, Any]] = {
    "Qwen3-4B-2507": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64,
                      "vocab_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
                      "head_dim": 32},
    "gemma-4-E4B": {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 64,
                    "vocab_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
                    "head_dim": 32, "global_head_dim": 32, "layer_types": _LAYERS,
                    "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
                    "vocab_size_per_layer_input": 512, "sliding_window": 64},
}  # fmt: skip
_BUILD_SECONDS = 60.0  # a guess, until one was measured


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
      minutes: after which no further case is begun.
      contexts: prompt and response, in tokens.
      batches: sequences.
      new_tokens: of each response.
      tiny: models of the same layers, but so small that a CPU runs them; for tests.
    """

    minutes: float = 6.0
    contexts: Sequence[int] = (32_768, 131_072)
    batches: Sequence[int] = (1, 8)
    new_tokens: int = 200
    tiny: bool = False

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise ValueError(f"minutes is {self.minutes}; it must be above 0")

    def config(self, name: str) -> ModelConfig:
        """The configuration of one of `MODELS`."""
        return hf_config.parse(published(name) | (_TINY[name] if self.tiny else {}))


def tiny() -> Plan:
    """The plan of `--tiny`."""
    return Plan(contexts=(256, 512), batches=(1, 2), new_tokens=60, tiny=True)


def rows(plan: Plan) -> Iterator[Row]:
    """Measures every case.

    Yields:
      For each model, context and batch a row of system `vanilla` and of `da` on the same forced
      transcript: `ms_per_step` of the device, `ms_per_token` (of every sequence; paused rows
      included), `tok_s`, `predicted_ms` (the bytes that a step moves over the chip's bandwidth;
      None where that is unknown) and `roof_share` of the time, `ratio` and `predicted_ratio` to
      vanilla. A case that does not fit, fails or comes too late has `skipped`, the reason.
    """
    compilations.keep()
    start, longest = time.monotonic(), 0.0 if plan.tiny else _BUILD_SECONDS
    for name in MODELS:
        config, model = plan.config(name), None
        for batch in plan.batches:
            about = {"model": name, "batch": batch}
            fit = list[int]()
            for context in plan.contexts:
                if reason := _too_large(config, batch, context, plan):
                    yield about | {"context": context, "skipped": reason}
                else:
                    fit.append(context)
            if not fit:
                continue
            began = time.monotonic()
            if began - start + longest > 60 * plan.minutes:
                yield about | {"skipped": f"{plan.minutes} minutes are over"}
                continue
            engine: drive.Engine | None = None
            for context in fit:
                try:
                    if engine is None:
                        model = model or _random(name, config, plan)
                        engine = drive.build(
                            model, batch, max(fit), prefill=False, prefix_cache=False
                        )
                        longest = max(0.0 if plan.tiny else longest, time.monotonic() - began)
                    assert model is not None
                    yield from _case(engine, model, context, plan, about | {"context": context})
                except (jax.errors.JaxRuntimeError, BackendError, ValueError) as error:
                    reason = f"{type(error).__name__}: {str(error)[:500]}"
                    yield about | {"context": context, "skipped": reason}
                    if engine is None:
                        break  # nor would the next one be built
            engine = None
            gc.collect()  # the caches of the last engine, before those of the next


def _random(name: str, config: ModelConfig, plan: Plan) -> drive.Model:
    table, words = synthetic(config.vocab_size)
    cpu = jax.devices()[0].platform == "cpu"
    network = registry.build(config, dtype=jnp.dtype("float32" if cpu else "bfloat16"))
    return drive.Model(name, network, table, frozenset(), words)


def _too_large(config: ModelConfig, batch: int, context: int, plan: Plan) -> str:
    """Why a case does not fit the device, or nothing."""
    device = jax.devices()[0]
    chip = current_target().chip
    stats = device.memory_stats() if device.platform != "cpu" else None
    capacity = (stats or {}).get("bytes_limit") or (chip.memory if chip else None)
    if capacity is None:
        if plan.tiny:
            return ""
        return f"the memory of {device.device_kind} is not known; --tiny runs everywhere"
    usable = int(capacity * sizes.USABLE_SHARE)
    need = sizes.memory(config, sizes.Use(batch=batch, context=context)).total
    if need <= usable:
        return ""
    return f"needs {need / 2**30:.1f} GiB of {usable / 2**30:.1f} that are usable"


def _case(
    engine: drive.Engine, model: drive.Model, context: int, plan: Plan, about: Row
) -> list[Row]:
    """Both arms on the same transcripts, each once to warm up."""
    batch, prompt_tokens = about["batch"], context - plan.new_tokens
    found = {}
    for arm in (Arm.VANILLA, Arm.DA):
        requests = drive.transcripts(model, arm, batch, prompt_tokens, plan.new_tokens)
        drive.run(engine, requests)
        found[arm] = drive.run(engine, requests)
    vanilla = found[Arm.VANILLA]
    result = []
    for arm, measured in found.items():
        predicted, of_all = (_bytes(model.network.config, m, batch) for m in (measured, vanilla))
        mix = mix_of(
            (step for response in measured.responses for step in response.steps),
            (i for response in measured.responses for i in response.token_ids),
            model.table,
        )
        chip = current_target().chip
        ms = predicted / chip.bandwidth * 1e3 if chip else None
        result.append(
            {"system": arm.value}
            | about
            | {
                "ms_per_step": round(measured.seconds / measured.steps * 1e3, 3),
                "ms_per_token": round(measured.per_token * 1e3, 3),
                "tok_s": round(measured.rate, 1),
                "predicted_ms": round(ms, 3) if ms else None,
                "roof_share": round(ms / (measured.per_token * 1e3), 3) if ms else None,
                "ratio": round(measured.per_token / vanilla.per_token, 3),
                "predicted_ratio": round(predicted / of_all, 3),
                "steps_per_token": round(measured.steps_per_token, 3),
                "host_us_per_token": round(measured.host_us(measured.host), 1),
                "exposed_us_per_token": round(measured.host_us(measured.exposed), 1),
                "attended_share": round(measured.attended / vanilla.attended, 3),
            }
            | {f"{mode.value}_share": round(share, 3) for mode, share in mix.modes.items()}
        )
    return result


def _bytes(config: ModelConfig, measured: drive.Measured, batch: int) -> float:
    """What a decode step moves, with the pages that the tokens read on average."""
    mean = [r.prompt_tokens + r.completion_tokens // 2 for r in measured.responses]
    itemsize = 4 if jax.devices()[0].platform == "cpu" else 2
    moved = sizes.traffic(config, batch=batch, context=int(np.mean(mean)), itemsize=itemsize)
    full = sizes.kv_bytes_per_token(config, "full", itemsize=itemsize, read=True)
    return moved.total - moved.full + full * batch * measured.read / measured.tokens


def measure(plan: Plan, out: Path, tell: Callable[[str], None] = print) -> list[Row]:
    """Measures, tells every row as JSON as it comes, and writes all of them to a JSON file."""
    found: list[Row] = []
    out.parent.mkdir(parents=True, exist_ok=True)
    for row in rows(plan):
        found.append(row)
        tell(json.dumps(row))
        out.write_text(json.dumps({"machine": machine(), "rows": found}, indent=1) + "\n")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `python -P -m da_jax.bench.device`."""
    parser = argparse.ArgumentParser(description="Decode of 4B models with random weights.")
    parser.add_argument("--minutes", type=float, default=Plan.minutes)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--tiny", action="store_true", help="small models, on any machine")
    given = parser.parse_args(arguments)
    measure(dataclasses.replace(tiny() if given.tiny else Plan(), minutes=given.minutes), given.out)


if __name__ == "__main__":
    main()
