"""`da-jax`: the commands and their options. Heavy imports wait until a command runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from da_jax import __version__
from da_jax.engine.config import EngineConfig

app = typer.Typer(
    name="da-jax",
    help="Declarative Attention in JAX: a model declares what it reads, the engine skips the rest",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
bench = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
KvDtype = Annotated[
    str, typer.Option(help="Of keys and values: auto (that of the model), or 8 bits: int8, fp8.")
]
Weights = Annotated[str, typer.Option(help="auto, or int8 for matrices in 8 bits.")]
_DEFAULT = EngineConfig()


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
    model: Annotated[str, typer.Option(help="Folder, hub id, or 'tiny' (shipped).")] = "tiny",
    document: Annotated[
        str | None, typer.Option(help="File of the document, '-' for standard input.")
    ] = None,
    question: Annotated[str | None, typer.Option(help="Question about the document.")] = None,
    arm: Annotated[
        str, typer.Option(help="da, unmasked (all visible) or vanilla (plain prompt).")
    ] = "da",
    style: Annotated[
        str, typer.Option(help="Prompt style: auto, tool, plain, compact, or a JSON file.")
    ] = "auto",
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    initial: Annotated[
        str | None, typer.Option(help="Mode at the start: global, local, or focus:3,7.")
    ] = None,
    visible: Annotated[
        str | None,
        typer.Option(help="Chunks that the whole response sees, such as 3,7; or none."),
    ] = None,
    thinking: Annotated[
        bool, typer.Option("--thinking", help="Let the model think before it answers.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of the response.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is no limit.")] = 0,
    top_p: Annotated[float, typer.Option(help="Share of probability to sample from.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="From -2 to 2.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling reproducible.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")] = None,
    guided: Annotated[
        bool, typer.Option("--guided", help="Write only tags that can be honoured.")
    ] = False,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest prompt and response, in tokens.")
    ] = None,
    page_size: Annotated[int, typer.Option(help="Tokens of a KV page.")] = _DEFAULT.page_size,
    prefill_chunk: Annotated[
        int, typer.Option(help="Tokens of a prefill step.")
    ] = _DEFAULT.prefill_chunk,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")] = _DEFAULT.dtype,
    weights: Weights = _DEFAULT.weights,
    kv_dtype: KvDtype = _DEFAULT.kv_dtype,
    kv_cache_bytes: Annotated[
        int | None,
        typer.Option(
            help="Most bytes of what sequences keep on the device; by default what is left."
        ),
    ] = None,
    memory_fraction: Annotated[
        float, typer.Option(help="Share of the device's memory that may be used.")
    ] = _DEFAULT.memory_fraction,
    per_layer_embeddings: Annotated[
        str, typer.Option(help="Where those of Gemma 4 E2B and E4B are: auto, device or host.")
    ] = _DEFAULT.per_layer_embeddings,
    attention: Annotated[str | None, typer.Option(help="Backend, see `da-jax env`.")] = None,
    tensor_parallel: Annotated[
        int, typer.Option(help="Devices that share the model.")
    ] = _DEFAULT.tensor_parallel,
    json_: Json = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write what every decode step saw to this JSON file.")
    ] = None,
) -> None:
    """Answer a question about a document. Without arguments: the shipped example."""
    from da_jax.cli import generate as command

    command.run(
        command.Options(
            model=model, document=document, question=question, arm=arm, style=style,
            system=system, initial=initial, visible=visible, thinking=thinking, json=json_,
            trace=trace,
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
    weights: Weights = _DEFAULT.weights,
    kv_dtype: KvDtype = _DEFAULT.kv_dtype,
    page_size: Annotated[int, typer.Option(help="Tokens of a KV page.")] = _DEFAULT.page_size,
    prefill_chunk: Annotated[
        int, typer.Option(help="Tokens of a prefill step.")
    ] = _DEFAULT.prefill_chunk,
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
    ] = _DEFAULT.kv_dtype,
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
    ] = _DEFAULT.weights,
    tensor_parallel: Annotated[
        int, typer.Option(help="With --model: devices that share it, 8 TPUs or 4 GPUs at most.")
    ] = 1,
    kv_dtype: Annotated[
        str, typer.Option(help="With --model: keys and values, auto, int8 or fp8.")
    ] = _DEFAULT.kv_dtype,
    json_: Json = False,
) -> None:
    """Compile for TPUs and GPUs that are not there: the attention kernels, or a whole model."""
    from da_jax.cli import aot as command

    of_model = ("batch", "context", "weights", "tensor_parallel", "kv_dtype")
    if model is None and (given := _given(arguments, *of_model)):
        raise ValueError(f"{given}: kernels have no such option; name a --model, or leave it out")
    if model is not None and (given := _given(arguments, "backend", "full")):
        raise ValueError(f"{given}: only without --model, whose backend is that of the target")
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
    model: Annotated[str, typer.Option(help="Folder, hub id, or 'tiny'.")] = "tiny",
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
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")] = "auto",
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
    model: Annotated[str, typer.Option(help="Folder, hub id, or 'tiny'.")] = "tiny",
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
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")] = "auto",
    json_: Json = False,
) -> None:
    """What keys and values in 8 bits cost: negative log-likelihood of text, nats a token."""
    from da_jax.cli import bench_kv as command

    if text is not None and set(model or ["tiny"]) == {"tiny"}:
        _fail(ValueError(f"--text {text}: 'tiny' is scored on its own questions; name a --model"))
    command.run(
        model or ["tiny"], kv_dtype, text, windows=windows, prompt_tokens=prompt_tokens,
        new_tokens=new_tokens, dtype=dtype, as_json=json_,
    )  # fmt: skip


def _given(arguments: typer.Context, *names: str) -> str:
    """Those options of some that are on the command line, for a message."""
    sources = {name: arguments.get_parameter_source(name) for name in names}
    return ", ".join(
        f"--{name.replace('_', '-')}"
        for name, source in sources.items()
        if source is not None and source.name == "COMMANDLINE"
    )


def main() -> None:
    """Entry point: errors that say what to do are printed without a traceback."""
    try:
        app()
    except (ValueError, OSError) as error:
        _fail(error)
    except RuntimeError as error:
        from da_jax.kernels.paged_attention import BackendError
        from da_jax.models.host_table import HostMemoryError

        if not isinstance(error, BackendError | HostMemoryError):
            raise
        _fail(error)


def _fail(error: Exception) -> NoReturn:
    print(f"da-jax: {error}", file=sys.stderr)
    sys.exit(1)
