"""`da-jax`: the commands and their options. Heavy imports wait until a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from da_jax import __version__
from da_jax.cli import eval_commands
from da_jax.cli.bench_commands import bench
from da_jax.cli.options import (
    DEFAULT,
    Attention,
    Dtype,
    Guided,
    Initial,
    Json,
    KvCacheBytes,
    KvDtype,
    MemoryFraction,
    Model,
    PageSize,
    PrefillChunk,
    PresencePenalty,
    StyleName,
    System,
    Temperature,
    TensorParallel,
    Thinking,
    TopK,
    TopP,
    Weights,
    fail,
)
from da_jax.cli.train_commands import train

app = typer.Typer(
    name="da-jax",
    help="Declarative Attention in JAX: a model declares what it reads, the engine skips the rest",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(bench, name="bench")
app.command("eval")(eval_commands.evaluate)
app.command("report")(eval_commands.report)
app.command()(eval_commands.roofline)
app.command()(eval_commands.replay)
app.command("verify")(eval_commands.verify)
app.command()(train)


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def generate(
    model: Model = "tiny",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None,
    document: Annotated[
        str | None, typer.Option(help="File of the document, '-' for standard input.")
    ] = None,
    question: Annotated[str | None, typer.Option(help="Question about the document.")] = None,
    arm: Annotated[
        str, typer.Option(help="da, unmasked (all visible) or vanilla (plain prompt).")
    ] = "da",
    style: StyleName = "auto",
    system: System = None,
    initial: Initial = None,
    visible: Annotated[
        str | None,
        typer.Option(help="Chunks that the whole response sees, such as 3,7; or none."),
    ] = None,
    thinking: Thinking = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of the response.")] = 512,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling reproducible.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")] = None,
    guided: Guided = False,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest prompt and response, in tokens.")
    ] = None,
    page_size: PageSize = DEFAULT.page_size,
    prefill_chunk: PrefillChunk = DEFAULT.prefill_chunk,
    dtype: Dtype = DEFAULT.dtype,
    weights: Weights = DEFAULT.weights,
    kv_dtype: KvDtype = DEFAULT.kv_dtype,
    kv_cache_bytes: KvCacheBytes = None,
    memory_fraction: MemoryFraction = DEFAULT.memory_fraction,
    per_layer_embeddings: Annotated[
        str, typer.Option(help="Where those of Gemma 4 E2B and E4B are: auto, device or host.")
    ] = DEFAULT.per_layer_embeddings,
    attention: Attention = None,
    tensor_parallel: TensorParallel = DEFAULT.tensor_parallel,
    json_: Json = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write what every decode step saw to this JSON file.")
    ] = None,
) -> None:
    """Answer a question about a document. Without arguments: the shipped example."""
    from da_jax.cli import generate as command

    command.run(
        command.Options(
            model=model, revision=revision, document=document, question=question, arm=arm,
            style=style, system=system, initial=initial, visible=visible, thinking=thinking,
            json=json_, trace=trace,
            sampling=dict(
                max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
                presence_penalty=presence_penalty, seed=seed, stop=tuple(stop or ()),
                guided=guided,
            ),
            engine=dict(
                max_model_len=max_model_len, page_size=page_size, prefill_chunk=prefill_chunk,
                dtype=dtype, weights=weights, kv_dtype=kv_dtype, kv_cache_bytes=kv_cache_bytes,
                memory_fraction=memory_fraction, attention=attention, max_num_seqs=1,
                prefix_snapshots=0, tensor_parallel=tensor_parallel,
                per_layer_embeddings=per_layer_embeddings,
            ),
        )
    )  # fmt: skip


@app.command()
def convert(
    source: Annotated[
        str, typer.Argument(help="Hugging Face folder or hub id, or an Orbax folder.")
    ],
    destination: Annotated[
        str | None, typer.Argument(help="Folder to write, may be on gs://.", show_default=False)
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    quantize: Annotated[
        str | None, typer.Option(help="int8 stores matrices in 8 bits, with float32 scales.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None,
    verify: Annotated[
        bool, typer.Option(help="Read everything back and compare it with the source.")
    ] = True,
    verify_only: Annotated[
        bool,
        typer.Option("--verify-only", help="Check the Orbax folder SOURCE, write nothing."),
    ] = False,
) -> None:
    """Convert a Hugging Face checkpoint to Orbax, or check a converted one."""
    from da_jax.cli import convert as command

    command.run(
        source, destination, dtype=dtype, quantize=quantize, revision=revision, verify=verify,
        verify_only=verify_only,
    )  # fmt: skip


@app.command()
def env(json_: Json = False) -> None:
    """Print versions, devices, and which attention backends can run here."""
    from da_jax.cli import env as command

    command.run(json_)


@app.command()
def info(
    model: Annotated[
        str,
        typer.Argument(
            help="Size such as gemma-4-31B or Qwen3.6-27B, 'tiny', folder, or hub id.",
            show_default=False,
        ),
    ],
    batch: Annotated[int, typer.Option(help="Sequences that decode at once.")] = 1,
    context: Annotated[
        int | None, typer.Option(help="Tokens of each sequence; 32768 or what the model has.")
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="bfloat16, float16 or float32: of all but what --weights and --kv-dtype say."
        ),
    ] = "bfloat16",
    weights: Weights = DEFAULT.weights,
    kv_dtype: KvDtype = DEFAULT.kv_dtype,
    page_size: PageSize = DEFAULT.page_size,
    prefill_chunk: PrefillChunk = DEFAULT.prefill_chunk,
    mesh: Annotated[
        int, typer.Option(help="Devices that share the model; memory is then of each.")
    ] = 1,
    json_: Json = False,
) -> None:
    """Print a model's layers, what it needs, what declarations can save, and where it fits."""
    from da_jax.cli import info as command

    command.run(
        model, json_, batch=batch, context=context, dtype=dtype, weights=weights,
        kv_dtype=kv_dtype, page_size=page_size, prefill_chunk=prefill_chunk, mesh=mesh,
    )  # fmt: skip


def main() -> None:
    """Entry point: errors that say what to do are printed without a traceback."""
    try:
        app()
    except (ValueError, OSError, FloatingPointError) as error:
        fail(error)
    except RuntimeError as error:
        from da_jax.kernels.paged_attention import BackendError
        from da_jax.models.host_table import HostMemoryError

        if not isinstance(error, BackendError | HostMemoryError):
            raise
        fail(error)
