"""Training from files to files: a checkpoint and examples in, a Hugging Face folder out."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from da_jax.checkpoints import convert, hf, paths
from da_jax.engine.llm import load_tokenizer, stop_token_ids
from da_jax.kernels.chips import current_target
from da_jax.models import dtypes, hf_config
from da_jax.models.decoder import Decoder
from da_jax.protocol import recorded
from da_jax.protocol.prompt import PromptRenderer
from da_jax.protocol.styles import STYLE_FILE, Style
from da_jax.train import data, saves, views
from da_jax.train.step import Measured, Settings, Trainer

Report = Callable[[int, Measured], None]


@dataclasses.dataclass(frozen=True)
class Job:
    """What is trained on what.

    Attributes:
      model: folder, hub id or `tiny`.
      examples: file of recorded responses, see `protocol.recorded`.
      out: folder to write; it must not exist, be empty, or hold saves of the same job, which then
        goes on.
      settings: of the optimizer.
      batch: examples a step.
      longest: most tokens of prompt and response; None is what the checkpoint declares, 32,768 at
        most.
      masked: share of draws in which the declarations act.
      dtype: what is computed in: `float32`, `bfloat16`, or `auto` for that of `EngineConfig`, but
        float32 instead of float16. The optimizer's weights are float32.
      style: as in `LLM.from_pretrained`.
      thinking: as in `LLM.from_pretrained`.
      seed: decides the order of the examples.
      save_every: steps between two saves of weights and optimizer; None for none.
    """

    model: str | Path
    examples: str | Path
    out: str | Path
    settings: Settings
    batch: int = 8
    longest: int | None = None
    masked: float = 0.75
    dtype: str = "auto"
    style: Style | str = "auto"
    thinking: bool = False
    seed: int = 0
    save_every: int | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "longest", "save_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.dtype == "float16":
            raise ValueError(
                "dtype is float16, whose range gradients leave; train in bfloat16 or float32"
            )
        if not 0 <= self.masked <= 1:
            raise ValueError(f"masked is {self.masked}; it is a share, from 0 to 1")


def run(job: Job, report: Report = lambda step, measured: None) -> list[Measured]:
    """Trains, and writes the result as a Hugging Face folder with tokenizer and prompt style.

    Saves stand in a folder `training` inside; it is removed when the model is written.

    Args:
      job: what to do.
      report: called after each step, counted from 1.

    Returns:
      What each step measured that was made here.

    Raises:
      ValueError: a setting, an example or a checkpoint that cannot work; before any step.
      FloatingPointError: a loss that is not finite; the last save stays.
      OSError: a file that cannot be read or written.
    """
    out = Path(job.out)
    found = recorded.read(job.examples)
    folder = convert.resolve(job.model)
    with saves.opened(out, _described(job)) as saved:
        encoder = make_encoder(folder, job)
        encoded = [encoder.encode(one) for one in found]
        if len(encoded) < job.batch:
            raise ValueError(
                f"{job.examples} has {len(encoded)} examples, and a batch takes {job.batch}; "
                "choose a smaller batch"
            )
        if job.batch % jax.device_count():
            raise ValueError(
                f"batch is {job.batch}, which {jax.device_count()} devices cannot share; choose a "
                "multiple"
            )
        trainer = Trainer(_load(folder, job.dtype), job.settings)
        drawn = data.batches(encoded, job.batch, masked=job.masked, seed=job.seed)
        measured = _steps(job, trainer, drawn, saved, report)
        save(trainer.model(), folder, out, encoder.renderer.style)
    saves.remove(out)
    return measured


def _steps(
    job: Job, trainer: Trainer, drawn: Iterator[data.Batch], saved: saves.Saves, report: Report
) -> list[Measured]:
    done, measured = saved.step, []
    if done:
        saved.restore(trainer)
    for number, batch in enumerate(itertools.islice(drawn, job.settings.steps), 1):
        if number <= done:
            continue
        try:
            measured.append(trainer.step(batch))
        except FloatingPointError as error:
            raise FloatingPointError(
                f"step {number}: {error}; choose a lower rate, or float32"
            ) from error
        report(number, measured[-1])
        if job.save_every and number % job.save_every == 0 and number < job.settings.steps:
            saved.save(number, trainer)
    return measured


def _described(job: Job) -> dict[str, Any]:
    """What decides the weights, as JSON has it."""
    fields = dataclasses.asdict(job)
    for name in ("out", "save_every", "examples"):
        del fields[name]
    fields |= fields.pop("settings")
    del fields["recompute"]  # the same sums, but for their order
    style = job.style if isinstance(job.style, str) else job.style.to_json()
    data_ = {"model": str(job.model), "style": style, "examples": saves.digest(job.examples)}
    return fields | data_


def _load(folder: str | os.PathLike[str], name: str) -> Decoder:
    """The model, in the dtype to compute in."""
    config, target = hf_config.read(paths.absolute(folder)), current_target()
    dtype = dtypes.resolve(name, config.family, target)
    if convert.is_int8(folder):
        raise ValueError(f"{folder} is int8; train the checkpoint that it was made from")
    return convert.load(folder, dtype=jnp.dtype("float32" if dtype == "float16" else dtype))


def make_encoder(folder: str | os.PathLike[str], job: Job) -> data.Encoder:
    """Tokenizer, prompts and end of turn of a checkpoint.

    Raises:
      ValueError: its chat template cannot write the style, or does not end the model's turn.
      FileNotFoundError: it has no tokenizer.
    """
    local = paths.local_metadata(folder)
    tokenizer = load_tokenizer(local)
    config = hf_config.read(paths.absolute(folder))
    longest = job.longest or min(config.max_positions, 32_768)
    stop_ids = stop_token_ids(local, tokenizer)
    return data.Encoder(
        PromptRenderer(tokenizer, job.style, thinking=job.thinking),
        tokenizer,
        views.token_table(tokenizer),
        end_of_turn(tokenizer, stop_ids),
        stop_ids,
        longest,
    )


def end_of_turn(tokenizer: Any, stop_ids: frozenset[int]) -> int:
    """The stop token that the chat template writes after the model's turn.

    Raises:
      ValueError: it writes none, and the tokenizer's own is none either.
    """
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
    written = tokenizer.apply_chat_template(turns, tokenize=True)
    ids: Mapping | list = written["input_ids"] if isinstance(written, Mapping) else written
    for token in reversed(list(ids)):
        if token in stop_ids:
            return int(token)
    if tokenizer.eos_token_id in stop_ids:
        return int(tokenizer.eos_token_id)
    raise ValueError(
        f"the chat template ends a turn with none of the tokens {sorted(stop_ids)} that end a "
        "response; set eos_token_id in generation_config.json"
    )


def save(
    model: Decoder, source: str | os.PathLike[str], out: Path, style: Style | None = None
) -> None:
    """Writes a model as a Hugging Face folder, with all that stands beside its source's weights.

    Args:
      model: the model.
      source: the checkpoint that it comes from.
      out: the folder; weights that it holds are replaced.
      style: prompts that it was trained on; they are written too.
    """
    out.mkdir(parents=True, exist_ok=True)
    paths.copy_metadata(paths.absolute(source), epath.Path(out))
    config = hf_config.read_json(paths.absolute(source) / "config.json")
    for part in (config, config.get("text_config") or {}):
        for name in ("torch_dtype", "dtype"):
            if name in part:
                part[name] = jnp.dtype(model.dtype).name
    hf.save(model, config, out)
    if style is not None:
        (out / STYLE_FILE).write_text(style.to_json() + "\n", encoding="utf-8")
