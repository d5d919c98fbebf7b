"""`da-jax bench`: its commands and their options. Heavy imports wait until a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from da_jax.cli.options import DEFAULT, Dtype, Json, Model, fail, given

bench = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True)


@bench.command()
def attention(
    context: Annotated[
        list[int] | None, typer.Option(help="Tokens, 32768 by default; may be repeated.")
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(help="Sequences, 1 by default; may be repeated.")
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(help="mosaic_tpu, mosaic_gpu, triton, xla, reference; may be repeated."),
    ] = None,
    q_heads: Annotated[int, typer.Option(help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(help="KV heads.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Size of a head.")] = 128,
    page_size: Annotated[int, typer.Option(help="Tokens a page.")] = 64,
    dtype: Annotated[
        str, typer.Option(help="Of the queries: float32, bfloat16, float16; auto by device.")
    ] = "auto",
    kv_dtype: Annotated[
        str,
        typer.Option(help="Of the pages: auto (that of the queries), another of these, int8, fp8."),
    ] = DEFAULT.kv_dtype,
    tune: Annotated[
        bool,
        typer.Option(
            help="Measure the settings of the kernel and keep the best in ~/.cache/da-jax."
        ),
    ] = False,
    json_: Json = False,
) -> None:
    """Time the attention operation against the share of visible pages."""
    from da_jax.cli import bench as command

    heads = command.shape(q_heads, kv_heads, head_dim, page_size, dtype, kv_dtype)
    work = command.tune if tune else command.attention
    work(context, batch, backend, heads, json_)


@bench.command()
def aot(
    arguments: typer.Context,
    target: Annotated[
        list[str] | None, typer.Option(help="Chip such as H200, A100, v5e, TPU7x; may be repeated.")
    ] = None,
    backend: Annotated[
        list[str] | None, typer.Option(help="Without --model: backend; may be repeated.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Without --model: the whole matrix; many minutes.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(help="Compile prefill and decode of a model instead, named as for `info`."),
    ] = None,
    batch: Annotated[int, typer.Option(help="With --model: sequences.")] = 8,
    context: Annotated[int, typer.Option(help="With --model: tokens of a sequence.")] = 32_768,
    weights: Annotated[
        str, typer.Option(help="With --model: auto, or int8 for matrices in 8 bits.")
    ] = DEFAULT.weights,
    tensor_parallel: Annotated[
        int, typer.Option(help="With --model: devices that share it, 8 TPUs or 4 GPUs at most.")
    ] = 1,
    kv_dtype: Annotated[
        str, typer.Option(help="With --model: keys and values, auto, int8 or fp8.")
    ] = DEFAULT.kv_dtype,
    json_: Json = False,
) -> None:
    """Compile for TPUs and GPUs that are not there: the attention kernels, or a whole model."""
    from da_jax.cli import aot as command

    of_model = ("batch", "context", "weights", "tensor_parallel", "kv_dtype")
    if model is None and (wrong := given(arguments, *of_model)):
        raise ValueError(f"{wrong}: kernels have no such option; name a --model, or leave it out")
    if model is not None and (wrong := given(arguments, "backend", "full")):
        raise ValueError(f"{wrong}: only without --model, whose backend is that of the target")
    if model is None:
        command.run(target, backend, full, json_)
    else:
        command.run_model(
            model, target, batch=batch, context=context, weights=weights, kv_dtype=kv_dtype,
            tensor_parallel=tensor_parallel, as_json=json_,
        )  # fmt: skip


@bench.command()
def scanner(json_: Json = False) -> None:
    """Characters a second through the tag scanner, in deltas of four."""
    from da_jax.cli import bench as command

    command.scanner(json_)


@bench.command()
def engine(
    model: Model = "tiny",
    batch: Annotated[
        list[int] | None, typer.Option(help="Sequences; may be repeated. 1, 8, 32 by default.")
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(
            help="Prompt and response in tokens; may be repeated. 2048, and 7936 for batch 1."
        ),
    ] = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens of a response, all visible.")] = 64,
    transcript_tokens: Annotated[
        int, typer.Option(help="Tokens of a forced response with declarations.")
    ] = 200,
    repeats: Annotated[int, typer.Option(help="Measure everything so often, by turns.")] = 2,
    dtype: Dtype = "auto",
    transformers: Annotated[
        bool, typer.Option(help="Measure transformers (torch) on the same folder by turns.")
    ] = False,
    profile: Annotated[
        Path | None, typer.Option(help="Folder for JAX profiles of the decode steps.")
    ] = None,
    json_: Json = False,
) -> None:
    """Prefill and decode of the engine; with declarations against what their pages predict."""
    from da_jax.cli import bench as command

    command.engine(
        model, batch, context, new_tokens, transcript_tokens, repeats, dtype, transformers,
        profile, json_,
    )  # fmt: skip


@bench.command()
def bursts(
    model: Model = "tiny",
    batch: Annotated[
        list[int] | None, typer.Option(help="Sequences; may be repeated. 1, 8, 32 by default.")
    ] = None,
    context: Annotated[int, typer.Option(help="Prompt and response in tokens.")] = 1024,
    new_tokens: Annotated[int, typer.Option(help="Tokens of a response.")] = 200,
    burst: Annotated[
        list[int] | None,
        typer.Option(help="Fixed bursts; may be repeated. 1, 2, 4, 8, 16 by default."),
    ] = None,
    json_: Json = False,
) -> None:
    """What exactness costs: pausing by fixed or measured bursts, or running a step ahead."""
    from da_jax.cli import bench as command

    command.bursts(model, batch, context, new_tokens, burst, json_)


@bench.command()
def device(
    out: Annotated[Path, typer.Option(help="JSON file to write, after each case.")],
    minutes: Annotated[float, typer.Option(help="After which no case is begun.")] = 6.0,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Small models of the same kind, on any machine.")
    ] = False,
    json_: Json = False,
) -> None:
    """Decode of Qwen3-4B and Gemma-4-E4B shapes, random weights, on the accelerator here."""
    from da_jax.cli import bench as command

    command.device(minutes, out, tiny, json_)


@bench.command()
def kv(
    model: Annotated[
        list[str] | None,
        typer.Option(help="Folder, hub id, or 'tiny' (the default); may be repeated."),
    ] = None,
    kv_dtype: Annotated[
        list[str] | None,
        typer.Option(help="auto, int8, fp8; all by default. The first one is the baseline."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text file; by default what `pydoc` tells of Python.")
    ] = None,
    windows: Annotated[int, typer.Option(help="Pieces of the text, or questions of 'tiny'.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of a piece before the scored.")] = 1024,
    new_tokens: Annotated[int, typer.Option(help="Tokens of a piece that are scored.")] = 512,
    dtype: Dtype = "auto",
    json_: Json = False,
) -> None:
    """What keys and values in 8 bits cost: negative log-likelihood of text, nats a token."""
    from da_jax.cli import bench_kv as command

    if text is not None and set(model or ["tiny"]) == {"tiny"}:
        fail(ValueError(f"--text {text}: 'tiny' is scored on its own questions; name a --model"))
    command.run(
        model or ["tiny"], kv_dtype, text, windows=windows, prompt_tokens=prompt_tokens,
        new_tokens=new_tokens, dtype=dtype, as_json=json_,
    )  # fmt: skip
