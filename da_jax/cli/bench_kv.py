"""`da-jax bench kv`: what keys and values in 8 bits cost in likelihood.

The engine scores given tokens as if it wrote them, by decode steps over its own caches, and so
everything that it keeps counts: pages and sliding windows.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np

from da_jax.cli.bench import Row, machine, show
from da_jax.engine.llm import LLM
from da_jax.engine.request import Done, Request, SamplingParams
from da_jax.models.dtypes import KV_DTYPES
from da_jax.protocol.modes import Arm
from da_jax.protocol.prompt import PromptMap

_SEED = 0  # of the questions of the shipped checkpoint
_LONGEST_QUESTION = 4_096  # tokens, with its document


def run(
    models: list[str],
    kv_dtypes: list[str] | None,
    text: Path | None,
    *,
    windows: int,
    prompt_tokens: int,
    new_tokens: int,
    dtype: str,
    as_json: bool,
) -> None:
    """Prints a row for each model and dtype; the arguments are those of the command.

    Raises:
      ValueError: an argument out of range, or a text too short.
    """
    if min(windows, prompt_tokens, new_tokens) < 1:
        raise ValueError("--windows, --prompt-tokens and --new-tokens must be at least 1")
    kv_dtypes = kv_dtypes or list(KV_DTYPES)
    rows = []
    for model in models:
        base: np.ndarray | None = None
        for kv_dtype in kv_dtypes:
            load = functools.partial(
                LLM.from_pretrained, model, dtype=dtype, kv_dtype=kv_dtype, max_num_seqs=4
            )
            if model == "tiny":
                llm = load(max_model_len=_LONGEST_QUESTION)
                nll = score_questions(llm, windows)
            else:
                llm = load(max_model_len=prompt_tokens + new_tokens)
                pieces = _pieces(llm, text, windows, prompt_tokens + new_tokens)
                nll = score_text(llm, pieces, prompt_tokens)
            base = nll if base is None else base
            rows.append(_row(llm, model, nll, base))
            del llm  # before the next one is loaded
    show(rows, as_json, f"nats a token; {machine()}")


def score_text(llm: LLM, pieces: list[np.ndarray], prompt_tokens: int) -> np.ndarray:
    """Negative log-likelihood of the tokens of each piece after the first `prompt_tokens`.

    Returns:
      float64 [n], of all pieces.
    """
    requests = []
    for ids in pieces:
        ids, rest = ids[:prompt_tokens], tuple(ids[prompt_tokens:].tolist())
        prompt = PromptMap(ids, (), ((0, len(ids)),), "", (), (), (), Arm.VANILLA)
        params = SamplingParams(max_tokens=len(rest), logprobs=0, ignore_eos=True)
        requests.append(Request(prompt, params, Arm.VANILLA, forced=rest))
    done = {e.request_id: e.response for e in llm.engine.run(requests) if isinstance(e, Done)}
    scored = [entry.logprob for _, r in sorted(done.items()) for entry in r.logprobs]
    return -np.array(scored, np.float64)


def score_questions(llm: LLM, count: int) -> np.ndarray:
    """The same for the right responses to held-out questions of the shipped checkpoint.

    They declare what they read, and the declarations act.
    """
    from da_jax.checkpoints.tiny.evaluate import CHUNKS, cases

    scores = [
        llm.score(case.document.text, case.question.text, case.text)
        for case in cases(_SEED, count, CHUNKS)
    ]
    return -np.concatenate(scores).astype(np.float64)


def kv_bytes_per_token(llm: LLM) -> float:
    """Device bytes of one token in all pages and, while it is in the window, all rings."""
    plan = llm.engine.runner.plan
    forms = [*plan.pages.values(), *plan.rings.values()]
    return sum(form.page_bytes for form in forms) / plan.page_size


def _row(llm: LLM, model: str, nll: np.ndarray, base: np.ndarray) -> Row:
    delta = nll - base
    return {
        "model": Path(model).name,
        "kv_dtype": llm.memory.kv_dtype,
        "tokens": len(nll),
        "nll": round(float(nll.mean()), 5),
        "delta": round(float(delta.mean()), 5),
        "delta_standard_error": round(float(delta.std() / len(delta) ** 0.5), 5),
        "kv_bytes_per_token": round(kv_bytes_per_token(llm)),
    }


def _pieces(llm: LLM, path: Path | None, count: int, size: int) -> list[np.ndarray]:
    """The first tokens of equal parts of a text: int32 [size] each."""
    if path is None:
        from pydoc_data.topics import topics

        text = "\n\n".join(topics[name] for name in sorted(topics))
    else:
        text = path.read_text(encoding="utf-8")
    ids = np.array(llm.tokenizer.encode(text, add_special_tokens=False), np.int32)
    step = len(ids) // count
    if step < size:
        raise ValueError(
            f"the text has {len(ids):,} tokens, {count} pieces of {size} need {count * size:,}; "
            "give a longer --text or fewer --windows"
        )
    # A text begins with what the tokenizer puts there, if anything.
    first = llm.tokenizer.encode("")
    parts = [ids[i * step : i * step + size - len(first)] for i in range(count)]
    return [np.array([*first, *part], np.int32) for part in parts]
