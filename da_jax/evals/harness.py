"""Runs tasks of EleutherAI's lm-evaluation-harness in several arms on the same examples."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from da_jax import __version__
from da_jax.engine.llm import LLM
from da_jax.evals import stats
from da_jax.evals.harness_model import ARMS, Account, HarnessModel
from da_jax.evals.harness_split import Split, split_prompt
from da_jax.kernels.chips import current_target
from da_jax.kernels.paged_attention import choose
from da_jax.protocol.modes import Arm

RULER_LEAST = 1024
"""Least length of those tasks of RULER whose generators do not end where nothing fits."""
# In 0.4.13 they try the smallest example again for ever; niah_* and ruler_qa_* say what is wrong
# (lm-evaluation-harness issue 2963). Groups and tags that hold them are named too.
_ENDLESS = ("ruler", "longcxt", "ruler_vt", "ruler_cwe", "ruler_fwe")
_TRACING = ("ruler", "longcxt", "ruler_vt")
_TRACING_ROOM = 470  # tokens for its example of its own, whatever the length
_TRACING_TEXT = 10 * (  # about as long as that example at its smallest
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
)


@dataclasses.dataclass(frozen=True)
class HarnessOptions:
    """How `evaluate` runs tasks.

    Attributes:
      limit: examples of each task; None for all.
      seed: of the examples that a task draws, of few-shot examples and of sampling.
      lengths: lengths in tokens of synthetic tasks (RULER); None for the task's own.
      num_fewshot: examples before the question; None for the task's own.
      min_gen_toks, max_tokens: see `HarnessModel`; the same in every arm.
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
    max_tokens: int | None = None
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
    about: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Runs tasks of the harness in several arms on the same examples.

    Args:
      llm: the model.
      tasks: names of tasks, groups or tags, or configurations of tasks.
      arms: the arms, in the order in which they run.
      out: folder for `lm_eval.json`; nothing is written without it.
      samples: write `lm_eval_samples_ARM_TASK.jsonl` there too: prompts, responses and metrics.
      about: what else `lm_eval.json` shall say of the model, such as its name.
      **options: fields of `HarnessOptions`.

    Returns:
      What is written to `lm_eval.json`: ``harness`` and ``da_jax`` (their versions), ``model``
      (`about`, the folder of the tokenizer, device, dtypes and settings of the engine), ``tasks``,
      ``settings``, ``arms`` and ``differences``.

      Each arm has ``results``, ``versions`` and ``n-samples`` as the harness gives them, ``model``
      (`HarnessModel.get_model_info`), and ``cost``, by task: ``responses``, ``prompt_tokens``,
      ``completion_tokens``, ``attended`` (KV positions of all decode steps), ``read`` (of whole
      pages), ``unfinished`` (responses that their cap cut off) and ``format_correct``. Costs are
      means over responses, apart from counts.

      The differences are those of an arm less `vanilla` on the same examples, by task, metric and
      arm: ``value``, ``low`` and ``high`` (95 %, see `stats.paired_bootstrap`) and ``n``, of the
      metrics that are means over examples.

    Raises:
      ValueError: an unknown arm or task, a length below what a task can make, several lengths with
        a limit, or a task scored by log-likelihood in another arm than `vanilla`; all before
        anything is computed.
      ContextTooLong: see `HarnessModel`.
    """
    import lm_eval

    settings = HarnessOptions(**options)
    manager, loaded = _load(llm, tasks, arms, settings)
    report: dict[str, Any] = {
        "harness": lm_eval.__version__,
        "da_jax": __version__,
        "model": {**(about or {}), **_about(llm)},
        "tasks": [task if isinstance(task, str) else task["task"] for task in tasks],
        "settings": {
            name: value if isinstance(value, int | tuple | None) else str(value)
            for name, value in vars(settings).items()
            if name != "split"
        },
        "arms": {},
        "differences": {},
    }
    scores: dict[str, dict[tuple[str, str], dict[int, float]]] = {}
    folder = None if out is None else Path(out)
    for arm in arms:
        model = HarnessModel(
            llm, arm=arm, min_gen_toks=settings.min_gen_toks, max_tokens=settings.max_tokens,
            truncate=settings.truncate, seed=settings.seed, split=settings.split,
        )  # fmt: skip
        results = _simple_evaluate(model, loaded, manager, settings)
        report["arms"][arm] = {
            **{name: results[name] for name in ("results", "versions", "n-samples")},
            "model": model.get_model_info(),
            "cost": _costs(model.accounts),
        }
        scores[arm] = _scores(results)
        report["differences"] = _differences(scores)
        if folder is not None:
            _write(folder, report, results["samples"] if samples else {}, arm)
    return report


def _load(
    llm: LLM, tasks: Sequence[str | Mapping[str, Any]], arms: Sequence[str], options: HarnessOptions
) -> tuple[Any, list[Any]]:
    """The harness's manager of tasks; and tasks and groups, checked."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    check(tasks, arms, options)
    metadata: dict[str, Any] = {"tokenizer": str(llm.tokenizer.name_or_path)}
    if options.lengths:
        metadata["max_seq_lengths"] = list(options.lengths)
    _check_tokenizer(tasks, llm.tokenizer)
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
        with contextlib.redirect_stdout(sys.stderr):  # generators of RULER print
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
    return manager, loaded


def check(
    tasks: Sequence[str | Mapping[str, Any]], arms: Sequence[str], options: HarnessOptions
) -> None:
    """Refuses what is wrong whatever the model.

    Raises:
      ValueError: see `evaluate`.
    """
    if unknown := [arm for arm in arms if arm not in ARMS]:
        raise ValueError(f"unknown arms {unknown}: choose among {', '.join(ARMS)}")
    if not arms:
        raise ValueError(f"no arm is named; choose among {', '.join(ARMS)}")
    for name in ("limit", "max_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    lengths = options.lengths or ()
    if options.limit is not None and len(set(lengths)) > 1:
        raise ValueError(
            f"lengths {', '.join(map(str, lengths))} with the limit {options.limit}: the harness "
            "takes the first examples, which all have the first length; give one length"
        )
    endless = [task for task in tasks if task in _ENDLESS]
    if endless and lengths and min(lengths) < RULER_LEAST:
        raise ValueError(
            f"length {min(lengths)} is too short for {endless[0]}: generators of RULER that do not "
            f"end where nothing fits are among it; give {RULER_LEAST} or more"
        )


def _check_tokenizer(tasks: Sequence[str | Mapping[str, Any]], tokenizer: Any) -> None:
    """Refuses what would never end with a tokenizer, whatever the length.

    Raises:
      ValueError: that is so.
    """
    if tracing := [task for task in tasks if task in _TRACING]:
        tokens = len(tokenizer.encode(_TRACING_TEXT, add_special_tokens=False))
        if tokens > _TRACING_ROOM:
            raise ValueError(
                f"{tracing[0]} would never end with this tokenizer: ruler_vt makes an example of "
                f"500 tokens first, and {len(_TRACING_TEXT)} characters of English are {tokens} "
                "tokens; name the other tasks of RULER one by one"
            )


def _about(llm: LLM) -> dict[str, Any]:
    """What results depend on besides the checkpoint's name."""
    runner, config = llm.engine.runner, llm.engine.config
    model = runner.model(runner.weights)
    return {
        "folder": str(llm.tokenizer.name_or_path),
        "device": current_target().kind,
        "jax": jax.__version__,
        "dtype": model.dtype.name,
        "weights": "int8" if model.quantized else model.dtype.name,
        "kv_dtype": llm.memory.kv_dtype,
        "attention": choose(config.attention).name,
        "page_size": config.page_size,
        "tensor_parallel": config.tensor_parallel,
        "data_parallel": config.data_parallel,
        "thinking": llm.renderer.template_kwargs["enable_thinking"],
    }


def _simple_evaluate(
    model: HarnessModel, loaded: list[Any], manager: Any, options: HarnessOptions
) -> Any:
    import lm_eval

    seeds = {f"{name}_random_seed": options.seed for name in ("numpy", "torch", "fewshot")}
    return lm_eval.simple_evaluate(
        model=model,
        tasks=loaded,
        task_manager=manager,  # else it reads the configurations of all tasks again
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        apply_chat_template=options.chat and not model.renders,
        bootstrap_iters=1000,
        random_seed=options.seed,
        **seeds,
    )


def _scores(results: Mapping[str, Any]) -> dict[tuple[str, str], dict[int, float]]:
    """By task and metric the scores of examples, where what is reported is their mean.

    RULER writes -1 where an example has another length than the metric.
    """
    scores: dict[tuple[str, str], dict[int, float]] = {}
    for task, samples in results["samples"].items():
        for sample in samples:
            for metric in sample["metrics"]:
                value = sample[metric]
                if isinstance(value, int | float) and value != -1:
                    key = (task, f"{metric},{sample['filter']}")
                    scores.setdefault(key, {})[sample["doc_id"]] = float(value)
    return {
        (task, metric): found
        for (task, metric), found in scores.items()
        if np.isclose(np.mean([*found.values()]), results["results"][task].get(metric, np.nan))
    }


def _differences(
    scores: Mapping[str, Mapping[tuple[str, str], Mapping[int, float]]],
) -> dict[str, Any]:
    """Of each arm less `vanilla`, by task, metric and arm."""
    found: dict[str, Any] = {}
    plain = scores.get(Arm.VANILLA.value, {})
    for arm in [arm for arm in scores if arm != Arm.VANILLA.value]:
        for (task, metric), ours in scores[arm].items():
            theirs = plain.get((task, metric), {})
            if both := sorted(ours.keys() & theirs.keys()):
                drawn = stats.paired_bootstrap([np.array([ours[i] - theirs[i] for i in both])])
                entry = {**drawn._asdict(), "n": len(both)}
                found.setdefault(task, {}).setdefault(metric, {})[arm] = entry
    return found


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
