"""Options that several commands take, and what they share."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from da_jax.engine.config import EngineConfig

if TYPE_CHECKING:
    from da_jax.protocol.styles import Style

DEFAULT = EngineConfig()
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
KvDtype = Annotated[
    str, typer.Option(help="Of keys and values: auto (that of the model), or 8 bits: int8, fp8.")
]
Weights = Annotated[str, typer.Option(help="auto, or int8 for matrices in 8 bits.")]
Model = Annotated[str, typer.Option(help="Folder, hub id, 'tiny' or 'tiny-2' (shipped).")]
StyleName = Annotated[
    str, typer.Option(help="Prompt style: auto, tool, plain, compact, or a JSON file.")
]
System = Annotated[str | None, typer.Option(help="System message.")]
Initial = Annotated[
    str | None, typer.Option(help="Mode at the start: global, local, or focus:3,7.")
]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="0 is no limit.")]
TopP = Annotated[float, typer.Option(help="Share of probability to sample from.")]
PresencePenalty = Annotated[float, typer.Option(help="From -2 to 2.")]
Guided = Annotated[bool, typer.Option("--guided", help="Write only tags that can be honoured.")]
Thinking = Annotated[
    bool, typer.Option("--thinking", help="Let the model think before it answers.")
]
PageSize = Annotated[int, typer.Option(help="Tokens of a KV page.")]
PrefillChunk = Annotated[int, typer.Option(help="Tokens of a prefill step.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")]
KvCacheBytes = Annotated[
    int | None,
    typer.Option(help="Most bytes of what sequences keep on the device; by default what is left."),
]
MemoryFraction = Annotated[
    float, typer.Option(help="Share of the device's memory that may be used.")
]
Attention = Annotated[str | None, typer.Option(help="Backend, see `da-jax env`.")]
TensorParallel = Annotated[int, typer.Option(help="Devices that share the model.")]


def fail(error: Exception) -> NoReturn:
    """Prints what is wrong, without a traceback, and ends with exit status 1."""
    print(f"da-jax: {error}", file=sys.stderr)
    sys.exit(1)


def given(arguments: typer.Context, *names: str) -> str:
    """Those options of some that are on the command line, for a message."""
    sources = {name: arguments.get_parameter_source(name) for name in names}
    return ", ".join(
        f"--{name.replace('_', '-')}"
        for name, source in sources.items()
        if source is not None and source.name == "COMMANDLINE"
    )


def read_style(style: str) -> Style | str:
    """A style by its name, or from a JSON file.

    Raises:
      ValueError: the file holds none.
    """
    from da_jax.protocol.styles import Style

    if not style.endswith(".json"):
        return style
    try:
        return Style.from_json(Path(style).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{style}: {error}") from error
