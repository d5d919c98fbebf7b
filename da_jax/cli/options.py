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
