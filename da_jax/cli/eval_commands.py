"""The commands about evaluation, and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
    given,
)

Html = Annotated[
    bool, typer.Option(help="Write report.html, whose plots need matplotlib: 'da-jax[eval]'.")
]


_NOT_OF_HARNESS = (
    "temperature", "top_k", "top_p", "presence_penalty", "sampling_seed", "guided", "system",
    "html", "data", "allow_download", "accept", "judge", "judge_url", "judge_key_env",
    "judge_max_tokens", "judge_temperature",
)  # fmt: skip


def evaluate(
    arguments: typer.Context,
    suite: Annotated[
        list[str],
        typer.Option(
            help="offline15, controls, paper15, compact, compact_short, a task or lm_eval:TASK; "
            "may be repeated, or several with commas."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the run; one that is there goes on.")],
    model: Model = "tiny",
    arms: Annotated[str, typer.Option(help="Of vanilla, unmasked, da.")] = "vanilla,unmasked,da",
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Most tokens of document and question, with commas; 4096,8192 by default. Public "
            "data is asked once, at the least length that it fits. Of lm_eval tasks one, which "
            "only those have that make their examples (RULER)."
        ),
    ] = None,
    n: Annotated[int, typer.Option(help="Examples of each task and length.")] = 32,
    seed: Annotated[int, typer.Option(help="Which examples.")] = 0,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Most tokens of a response, by default what its task says (of lm_eval tasks at "
            "least 512)."
        ),
    ] = None,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    sampling_seed: Annotated[int, typer.Option(help="Makes sampling reproducible.")] = 0,
    guided: Guided = False,
    thinking: Thinking = False,
    style: StyleName = "auto",
    system: System = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(help="Longest prompt and response; by default what the examples need."),
    ] = None,
    max_num_seqs: Annotated[
        int, typer.Option(help="Most sequences that decode at once.")
    ] = DEFAULT.max_num_seqs,
    page_size: PageSize = DEFAULT.page_size,
    prefill_chunk: PrefillChunk = DEFAULT.prefill_chunk,
    dtype: Dtype = DEFAULT.dtype,
    weights: Weights = DEFAULT.weights,
    kv_dtype: KvDtype = DEFAULT.kv_dtype,
    kv_cache_bytes: KvCacheBytes = None,
    memory_fraction: MemoryFraction = DEFAULT.memory_fraction,
    attention: Attention = None,
    tensor_parallel: TensorParallel = DEFAULT.tensor_parallel,
    data_parallel: Annotated[
        int, typer.Option(help="Copies of the model, each on devices of its own.")
    ] = DEFAULT.data_parallel,
    data: Annotated[
        Path, typer.Option(help="Folder of public data, with one folder for each source.")
    ] = Path("data"),
    allow_download: Annotated[
        bool, typer.Option("--allow-download", help="Fetch public data that is missing.")
    ] = False,
    accept: Annotated[
        list[str] | None,
        typer.Option(help="Source whose licence you accept, where it is asked; may be repeated."),
    ] = None,
    judge: Annotated[
        str | None, typer.Option(help="Model that judges free-form answers of public tasks.")
    ] = None,
    judge_url: Annotated[
        str, typer.Option(help="Its endpoint, of the OpenAI chat form.")
    ] = "https://api.openai.com/v1",
    judge_key_env: Annotated[
        str, typer.Option(help="Environment variable that holds its key.")
    ] = "OPENAI_API_KEY",
    judge_max_tokens: Annotated[
        str,
        typer.Option(
            help="Most tokens of its reply, thoughts too; none where its endpoint refuses that."
        ),
    ] = "1024",
    judge_temperature: Annotated[
        str, typer.Option(help="Its temperature; none where its endpoint refuses that.")
    ] = "0",
    html: Html = True,
    json_: Json = False,
) -> None:
    """Evaluate a model on tasks: accuracy and attended tokens of the three arms.

    A run that was interrupted goes on with the same command, on the same kind of device and with
    the same JAX. More lengths, arms or examples may be asked for in the same folder (of public data
    only greater lengths); any other setting needs another one, also other tasks. Tasks of
    lm-evaluation-harness (lm_eval:TASK) have its metrics and no resumption.
    """
    from da_jax.cli import eval as command

    foreign = any(name.strip().startswith("lm_eval:") for name in ",".join(suite).split(","))
    if foreign and (wrong := given(arguments, *_NOT_OF_HARNESS)):
        raise ValueError(
            f"{wrong}: tasks of lm-evaluation-harness set how they are sampled, and have data, "
            "metrics and a report of their own; leave it out"
        )
    command.execute(
        command.Options(
            model=model, suite=suite, arms=arms, lengths=lengths, n=n, seed=seed, out=out,
            style=style, system=system, thinking=thinking, max_tokens=max_tokens,
            sampling_seed=sampling_seed, max_model_len=max_model_len, json=json_, page=html,
            public=command.Public(
                data=data, allow_download=allow_download, accepted=frozenset(accept or ()),
                judge=judge, judge_url=judge_url, judge_key_env=judge_key_env,
                judge_max_tokens=judge_max_tokens, judge_temperature=judge_temperature,
            ),
            sampling=dict(
                temperature=temperature, top_k=top_k, top_p=top_p,
                presence_penalty=presence_penalty, guided=guided,
            ),
            engine=dict(
                max_num_seqs=max_num_seqs, page_size=page_size, prefill_chunk=prefill_chunk,
                dtype=dtype, weights=weights, kv_dtype=kv_dtype, kv_cache_bytes=kv_cache_bytes,
                memory_fraction=memory_fraction, attention=attention,
                tensor_parallel=tensor_parallel, data_parallel=data_parallel,
                max_waiting=2 * max(max_num_seqs, 1),
            ),
        )
    )  # fmt: skip


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(help="Folders that `eval` wrote; several are shown side by side."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the report; of one run, by default its own.")
    ] = None,
    html: Html = True,
    json_: Json = False,
) -> None:
    """Write the report of one or several runs: report.json, report.md and report.html."""
    from da_jax.cli import report as command

    command.run(folders, out, html, json_)


def roofline(
    arguments: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(help="Named as for `info`; the two of the paper, or gemma-4-31B, by default."),
    ] = None,
    chip: Annotated[str, typer.Option(help="Such as B200, H100, L4, v5e, TPU7x.")] = "B200",
    convention: Annotated[
        str,
        typer.Option(
            help="paper: its own sums, without batch; measured: every byte and operation of a step."
        ),
    ] = "paper",
    steps: Annotated[
        float | None,
        typer.Option(help="Decode steps of a response; of one without declarations for a mix."),
    ] = None,
    attended: Annotated[
        float | None, typer.Option(help="Tokens that all of its steps attend, such as 6.45e6.")
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(help="measured: tokens, 8192, 32768 and 131072; may be repeated."),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(help="measured: sequences at once, 1, 8 and 32; may be repeated."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="measured: what `da-jax generate --trace` wrote.")
    ] = None,
    records: Annotated[
        Path | None, typer.Option(help="measured: the folder of a `da-jax eval`.")
    ] = None,
    mix: Annotated[
        str | None,
        typer.Option(help="measured: shares of the steps; global=0.27,focus=0.25,local=0.48."),
    ] = None,
    seen: Annotated[
        str | None,
        typer.Option(help="measured: shares of the context; global=1,focus=0.12,local=0.06."),
    ] = None,
    more_steps: Annotated[
        float, typer.Option(help="measured: times as many steps with declarations, for a mix.")
    ] = 1.35,
    tensor_parallel: Annotated[
        int, typer.Option(help="measured: chips that share the model.")
    ] = DEFAULT.tensor_parallel,
    page_size: Annotated[
        int | None,
        typer.Option(help="measured: tokens of a KV page; of a trace or records theirs, else 64."),
    ] = None,
    weights: Weights = DEFAULT.weights,
    kv_dtype: KvDtype = DEFAULT.kv_dtype,
    mfu: Annotated[float, typer.Option(help="Share of peak operations: an assumption.")] = 0.4,
    mbu: Annotated[float, typer.Option(help="Share of peak bandwidth: an assumption.")] = 0.7,
    plot: Annotated[
        Path | None, typer.Option(help="measured: picture to write, .png, .svg or .pdf.")
    ] = None,
    json_: Json = False,
) -> None:
    """Estimate decode times by arithmetic. Without arguments: the paper's table."""
    from da_jax.cli import roofline as command

    if convention == "paper" and (wrong := given(arguments, *_NOT_OF_PAPER)):
        raise ValueError(f"{wrong}: the paper's sums have no such thing; add --convention measured")
    sources = given(arguments, "trace", "records", "attended", "mix")
    if "," in sources:
        raise ValueError(f"{sources}: each says what the steps see; give one of them")
    command.run(
        command.Options(
            model=model, chip=chip, convention=convention, steps=steps, attended=attended,
            context=context, batch=batch, trace=trace, records=records, mix=mix, seen=seen,
            more_steps=more_steps, tensor_parallel=tensor_parallel, page_size=page_size,
            weights=weights, kv_dtype=kv_dtype, mfu=mfu, mbu=mbu, plot=plot, json=json_,
        )
    )  # fmt: skip


_NOT_OF_PAPER = (
    "context", "batch", "trace", "records", "mix", "seen", "more_steps", "tensor_parallel",
    "page_size", "weights", "kv_dtype", "plot",
)  # fmt: skip


def replay(
    files: Annotated[
        list[Path], typer.Argument(help="JSON lines, or a JSON array, of recorded responses.")
    ],
    model: Annotated[
        str, typer.Option(help="Whose tokenizer and chat template: folder, hub id, or 'tiny'.")
    ] = "tiny",
    style: StyleName = "auto",
    thinking: Thinking = False,
    arm: Annotated[str, typer.Option(help="Arm of responses that name none.")] = "da",
    page_size: PageSize = DEFAULT.page_size,
    scaffold: Annotated[
        str, typer.Option(help="What stays visible besides chunks: all, or paper.")
    ] = "all",
    answer_mode: Annotated[
        str, typer.Option(help="What <answer> does: local, keep or global.")
    ] = "local",
    initial: Initial = None,
    json_: Json = False,
) -> None:
    """Compute what recorded responses of any system would have attended. No weights are needed.

    Each response is an object with its prompt, in one of four forms, and what was written:

    - question; optionally document (a text to cut, or a list of chunks), system and history

    - messages: a conversation whose user turns may have chunks; optionally documents

    - prompt: rendered text; its chunks stand as style and template write them, headers 1 to N

    - prompt_tokens and chunk_spans: numbers alone, the start and end of each chunk in a list

    and response_token_ids or, approximately, the text as response; a stop token counts if it is
    given. Optionally: id, task, arm, score (0 to 1) and finish_reason.

    Prints a line of JSON for each, and the sums to standard error; with --json the sums alone.
    """
    from da_jax.cli import replay as command

    command.run(
        command.Options(
            files=files, model=model, style=style, thinking=thinking, arm=arm,
            page_size=page_size, scaffold=scaffold, answer_mode=answer_mode, initial=initial,
            json=json_,
        )
    )  # fmt: skip


def verify(
    model: Model = "tiny",
    style: StyleName = "auto",
    dtype: Dtype = DEFAULT.dtype,
    weights: Weights = DEFAULT.weights,
    kv_dtype: KvDtype = DEFAULT.kv_dtype,
    attention: Attention = None,
    page_size: PageSize = DEFAULT.page_size,
    prefill_chunk: PrefillChunk = DEFAULT.prefill_chunk,
    max_model_len: Annotated[
        int | None,
        typer.Option(help="Longest prompt and response; 4096 by default, or what the model has."),
    ] = None,
    tensor_parallel: TensorParallel = DEFAULT.tensor_parallel,
    json_: Json = False,
) -> None:
    """Check on a checkpoint that what is hidden is not read, what is visible is, and what it costs.

    Likelihoods under three prompts, and the same by dense forward passes without the engine; NaN
    in all hidden slots, and in one visible slot at a time; the pages that attention visits; and
    programs compiled after warm-up. The prefix cache is on, as elsewhere.

    Not proven: what several sequences that decode at once see, other prompts and lengths, and,
    where numbers are rounded to 16 or 8 bits, slots inside of a page that are not among those
    tried and whose loss moves likelihoods less than rounding does.

    The exit status is 1 unless every check ran and passed.
    """
    from da_jax.cli import verify as command

    command.run(
        command.Options(
            model=model, style=style, max_model_len=max_model_len, json=json_,
            engine=dict(
                dtype=dtype, weights=weights, kv_dtype=kv_dtype, attention=attention,
                page_size=page_size, prefill_chunk=prefill_chunk, tensor_parallel=tensor_parallel,
            ),
        )
    )  # fmt: skip
