"""`da-jax bench`: speed of this machine, never asserted by a test."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from da_jax.kernels.bench import Shape

Row = dict[str, Any]


def shape(
    q_heads: int, kv_heads: int, head_dim: int, page_size: int, dtype: str, kv_dtype: str | None
) -> Shape:
    """The layer to time.

    Raises:
        ValueError: sizes that make no layer, or a dtype that pages or queries cannot have.
    """
    import jax

    from da_jax.kernels import bench
    from da_jax.kernels.paged_attention.mask import MAX_PAGE_SIZE
    from da_jax.kernels.paged_attention.pool import DTYPES
    from da_jax.kernels.paged_attention.support import Q_DTYPES

    sizes = (q_heads, kv_heads, head_dim, page_size)
    if min(sizes) < 1 or q_heads % kv_heads:
        raise ValueError(
            f"--q-heads {q_heads}, --kv-heads {kv_heads}, --head-dim {head_dim}, --page-size "
            f"{page_size}: all must be positive, and the query heads a multiple of the KV heads"
        )
    if page_size > MAX_PAGE_SIZE:
        raise ValueError(f"--page-size {page_size}: give at most {MAX_PAGE_SIZE}")
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    for name, value, allowed in (
        ("--dtype", dtype, Q_DTYPES),
        ("--kv-dtype", kv_dtype or dtype, DTYPES),
    ):
        if value not in allowed:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
    return bench.Shape(*sizes, dtype, kv_dtype)


def attention(
    contexts: list[int] | None,
    batches: list[int] | None,
    backends: list[str] | None,
    heads: Shape,
    as_json: bool,
) -> None:
    """Times the attention operation."""
    from da_jax.kernels import bench

    _check_positive(contexts, batches)
    given = {"contexts": contexts, "batches": batches, "backends": backends}
    rows = bench.attention_rows(shape=heads, **{k: value for k, value in given.items() if value})
    show(rows, as_json, machine())


def tune(
    contexts: list[int] | None,
    batches: list[int] | None,
    backends: list[str] | None,
    heads: Shape,
    as_json: bool,
) -> None:
    """Measures the settings of kernels and stores the best of each."""
    from da_jax.kernels import bench
    from da_jax.kernels.paged_attention import tuning

    _check_positive(contexts, batches)
    names: list[str | None] = [*backends] if backends else [None]
    rows = [
        {"context": context, "batch": batch} | row
        for context in contexts or [32768]
        for batch in batches or [1]
        for backend in names
        for row in bench.tune(context, batch, backend, heads)
    ]
    show(rows, as_json, f"{machine()}; kept in {tuning.path()}")


def _check_positive(contexts: list[int] | None, batches: list[int] | None) -> None:
    for name, values in (("--context", contexts), ("--batch", batches)):
        if values and min(values) < 1:
            raise ValueError(f"{name} is {min(values)}; it must be at least 1")


def scanner(as_json: bool) -> None:
    """Times the tag scanner."""
    from da_jax.protocol.bench import scanner_throughput

    rows = [row._asdict() | {"chars_per_s": round(row.chars_per_s)} for row in scanner_throughput()]
    show(rows, as_json, machine())


def decode(
    model: str,
    batches: list[int],
    prompt_tokens: int,
    new_tokens: int,
    dtype: str,
    with_transformers: bool,
    as_json: bool,
) -> None:
    """Times the engine, and transformers on the same folder when asked."""
    from da_jax.checkpoints.convert import resolve
    from da_jax.models import hf_config

    if new_tokens < 2 or prompt_tokens < 1 or min(batches) < 1:
        raise ValueError("--new-tokens must be at least 2, --prompt-tokens and --batch at least 1")
    vocabulary = hf_config.read(resolve(model)).vocab_size
    rows = []
    for batch in batches:
        rng = np.random.default_rng(0)
        size = (batch, prompt_tokens)
        prompts = rng.integers(vocabulary // 4, vocabulary // 2, size, dtype=np.int32)
        rows.append(_engine_row(model, prompts, new_tokens, dtype))
        if with_transformers:
            rows.append(_transformers_row(model, prompts, new_tokens, rows[-1]))
    show(rows, as_json, machine())


def _engine_row(model: str, prompts: np.ndarray, new_tokens: int, dtype: str) -> Row:
    from da_jax.engine.llm import LLM
    from da_jax.engine.request import Request, SamplingParams
    from da_jax.protocol.modes import Arm
    from da_jax.protocol.prompt import PromptMap

    batch, prompt_tokens = prompts.shape
    llm = LLM.from_pretrained(
        model,
        dtype=dtype,
        max_num_seqs=batch,
        max_model_len=prompt_tokens + new_tokens,
        kv_cache_bytes=2**62,  # whatever the device has
    )
    engine = llm.engine
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    for ids in prompts:
        prompt = PromptMap(ids, (), ((0, len(ids)),), "", (), (), (), Arm.VANILLA)
        engine.add(Request(prompt, params, Arm.VANILLA))
    start = time.perf_counter()
    engine.prefill_step()
    while any(not s.decoding for s in engine.scheduler.everyone):
        engine.prefill_step()
    prefilled = time.perf_counter()
    while not engine.idle:
        engine.step()
    done = time.perf_counter()
    steps = new_tokens - 1  # the first token comes from the prefill
    return {
        "engine": "da-jax",
        "dtype": engine.runner.plan.dtype,
        "batch": batch,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "prefill_tokens_per_s": round(batch * prompt_tokens / (prefilled - start), 1),
        "decode_tokens_per_s": round(batch * steps / (done - prefilled), 1),
        "decode_ms_per_step": round((done - prefilled) / steps * 1e3, 2),
    }


def _transformers_row(model: str, prompts: np.ndarray, new_tokens: int, ours: Row) -> Row:
    try:
        import torch
    except ImportError:
        raise ValueError("--transformers needs torch; install it in this environment") from None
    from transformers import AutoModelForCausalLM

    from da_jax.checkpoints.convert import resolve

    network = AutoModelForCausalLM.from_pretrained(
        resolve(model), dtype=getattr(torch, ours["dtype"])
    ).eval()
    batch, prompt_tokens = prompts.shape
    ids = torch.from_numpy(prompts.astype(np.int64))
    with torch.inference_mode():
        network(input_ids=ids[:, :8])  # first-call costs
        start = time.perf_counter()
        out = network(input_ids=ids, use_cache=True, logits_to_keep=1)
        prefilled = time.perf_counter()
        for _ in range(new_tokens - 1):
            token = out.logits[:, -1:].argmax(-1)
            out = network(input_ids=token, past_key_values=out.past_key_values, use_cache=True)
        done = time.perf_counter()
    steps = new_tokens - 1
    decode_rate = batch * steps / (done - prefilled)
    return ours | {
        "engine": f"transformers (torch {torch.__version__}, {torch.get_num_threads()} threads)",
        "prefill_tokens_per_s": round(batch * prompt_tokens / (prefilled - start), 1),
        "decode_tokens_per_s": round(decode_rate, 1),
        "decode_ms_per_step": round((done - prefilled) / steps * 1e3, 2),
        "da_jax_decode_ratio": round(ours["decode_tokens_per_s"] / decode_rate, 2),
    }


def machine() -> str:
    """Device and versions."""
    from da_jax.kernels import bench

    return ", ".join(f"{name} {value}" for name, value in bench.machine().items())


def show(rows: list[Row], as_json: bool, title: str) -> None:
    """Prints rows as a table, or as JSON."""
    if as_json:
        print(json.dumps(rows))
        return
    table = Table(title=title or None, title_justify="left")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(Text(str(row.get(column, ""))) for column in columns))
    width = None if Console().is_terminal else 200  # a file wants the whole table
    Console(width=width).print(table)
