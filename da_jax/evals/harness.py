"""Runs tasks of EleutherAI's lm-evaluation-harness in several arms on the same examples."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from da_jax.engine.llm import LLM
from da_jax.evals.harness_model import ARMS, Account, HarnessModel, Split, split_prompt

RULER_LEAST = 4096  # generators of some versions never end below: lm-evaluation-harness issue 2963


@dataclasses.dataclass(frozen=True)
class HarnessOptions:
    """How `evaluate` runs tasks.

    Attributes:
      limit: examples of each task; None for all.
      seed: of the examples that a task draws, of few-shot examples and of sampling.
      lengths: lengths in tokens of synthetic tasks (RULER); None for the task's own.
      num_fewshot: examples before the question; None for the task's own.
      min_gen_toks: see `HarnessModel`; the same in every arm.
      truncate: see `HarnessModel`.
      chat: whether the arm `vanilla` gets the model's chat template, as the other arms do.
      include_path: folder with task files of your own.
      split: see `HarnessModel`.
    """

    limit: int | None = None
    seed: int = 0
    lengths: tuple[int, ...] | None = None
    num_fewshot: int | None = None
    min_gen_toks: int = 512
    truncate: bool = False
    chat: bool = True
    include_path: str | Path | None = None
    split: Split = split_prompt


def evaluate(
    llm: LLM,
    tasks: Sequence[str | Mapping[str, Any]],
    *,
    arms: Sequence[str] = ARMS,
    out: str | Path | None = None,
    samples: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Runs tasks of the harness in several arms on the same examples.

    Args:
      llm: the model.
      tasks: names of tasks, groups or tags, or configurations of tasks.
      arms: the arms, in the order in which they run.
      out: folder for `lm_eval.json`; nothing is written without it.
      samples: write `lm_eval_samples_ARM_TASK.jsonl` there too: prompts, responses and metrics.
      **options: fields of `HarnessOptions`.

    Returns:
      What is written to `lm_eval.json`: ``harness`` (its version), ``tasks``, ``settings``, and
      ``arms``. Each arm has ``results``, ``versions`` and ``n-samples`` as the harness gives them,
      ``model`` (`HarnessModel.get_model_info`), and ``cost``, by task: ``responses``,
      ``prompt_tokens``, ``completion_tokens``, ``attended`` (KV positions of all decode steps),
      ``read`` (of whole pages), ``unfinished`` (responses that their cap cut off) and
      ``format_correct``. Costs are means over responses, apart from counts.

    Raises:
      ValueError: an unknown arm or task, a length below what a task can make, or a task scored by
        log-likelihood in another arm than `vanilla`; all before anything is computed.
      ContextTooLong: see `HarnessModel`.
    """
    import lm_eval

    settings = HarnessOptions(**options)
    loaded = _load(llm, tasks, arms, settings)
    report: dict[str, Any] = {
        "harness": lm_eval.__version__,
        "tasks": [task if isinstance(task, str) else task["task"] for task in tasks],
        "settings": {
            name: value if isinstance(value, int | tuple | None) else str(value)
            for name, value in vars(settings).items()
            if name != "split"
        },
        "arms": {},
    }
    folder = None if out is None else Path(out)
    for arm in arms:
        model = HarnessModel(
            llm, arm=arm, min_gen_toks=settings.min_gen_toks, truncate=settings.truncate,
            seed=settings.seed, split=settings.split,
        )  # fmt: skip
        results = _simple_evaluate(model, loaded, settings)
        report["arms"][arm] = {
            **{name: results[name] for name in ("results", "versions", "n-samples")},
            "model": model.get_model_info(),
            "cost": _costs(model.accounts),
        }
        if folder is not None:
            _write(folder, report, results["samples"] if samples else {}, arm)
    return report


def _load(
    llm: LLM, tasks: Sequence[str | Mapping[str, Any]], arms: Sequence[str], options: HarnessOptions
) -> list[Any]:
    """Tasks and groups of the harness, checked."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    unknown = [arm for arm in arms if arm not in ARMS]
    if unknown or not arms:
        raise ValueError(f"arms {unknown or list(arms)!r}: choose among {', '.join(ARMS)}")
    metadata: dict[str, Any] = {"tokenizer": str(llm.tokenizer.name_or_path)}
    if options.lengths:
        metadata["max_seq_lengths"] = list(options.lengths)
        small = min(options.lengths)
        if small < RULER_LEAST and any(str(t).startswith("ruler") for t in tasks):
            raise ValueError(
                f"length {small} is too short for RULER: in some versions of the harness its "
                f"generators never end below {RULER_LEAST} tokens; give a greater one"
            )
    random.seed(options.seed)  # synthetic tasks draw when they are loaded
    np.random.seed(options.seed)
    manager = TaskManager(
        include_path=None if options.include_path is None else str(options.include_path),
        include_defaults=any(isinstance(task, str) for task in tasks),  # reading them takes seconds
        metadata=metadata,
    )
    loaded: list[Any] = []
    for task in tasks:
        if isinstance(task, str) and task not in manager.all_tasks:
            raise ValueError(
                f"lm-evaluation-harness {lm_eval.__version__} has no task {task!r}; "
                "`lm_eval ls tasks` lists them"
            )
        found = manager.load([task if isinstance(task, str) else dict(task)])
        scored = [
            name
            for name, one in found["tasks"].items()
            if one.get_config("output_type") != "generate_until"
        ]
        if scored and set(arms) - {"vanilla"}:
            raise ValueError(
                f"{', '.join(scored)}: scored by log-likelihood, which lets nothing be declared; "
                "run it in the arm 'vanilla' alone"
            )
        whole = isinstance(task, str) and task in found["groups"]
        loaded += [found["groups"][task]] if whole else list(found["tasks"].values())
    return loaded


def _simple_evaluate(model: HarnessModel, loaded: list[Any], options: HarnessOptions) -> Any:
    import lm_eval

    seeds = {f"{name}_random_seed": options.seed for name in ("numpy", "torch", "fewshot")}
    return lm_eval.simple_evaluate(
        model=model,
        tasks=loaded,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        apply_chat_template=options.chat and not model.renders,
        bootstrap_iters=1000,
        random_seed=options.seed,
        **seeds,
    )


def _costs(accounts: Sequence[Account]) -> dict[str, dict[str, float]]:
    """Means over the responses of each task."""
    costs = {}
    for task in dict.fromkeys(account.task for account in accounts):
        responses = [account.response for account in accounts if account.task == task]
        summaries = [response.summary for response in responses]
        columns = {
            "prompt_tokens": [r.prompt_tokens for r in responses],
            "completion_tokens": [r.completion_tokens for r in responses],
            "attended": [s["attended"]["total"] for s in summaries],
            "read": [s["read"]["total"] for s in summaries],
            "format_correct": [s["format_correct"] for s in summaries],
        }
        costs[task] = {
            "responses": len(responses),
            "unfinished": sum(r.finish_reason == "length" for r in responses),
            **{name: float(np.mean(values)) for name, values in columns.items()},
        }
    return costs


def _write(folder: Path, report: Mapping[str, Any], samples: Mapping[str, Any], arm: str) -> None:
    from lm_eval.utils import handle_non_serializable

    folder.mkdir(parents=True, exist_ok=True)

    def dump(value: Any, **options: Any) -> str:
        return json.dumps(value, default=handle_non_serializable, ensure_ascii=False, **options)

    for task, lines in samples.items():
        path = folder / f"lm_eval_samples_{arm}_{task}.jsonl"
        path.write_text("".join(dump(line) + "\n" for line in lines), encoding="utf-8")
    partial = folder / "lm_eval.json.partial"
    partial.write_text(dump(report, indent=2) + "\n", encoding="utf-8")
    partial.replace(folder / "lm_eval.json")
