"""`da-jax convert`: a Hugging Face checkpoint to Orbax, and the check of one."""

from __future__ import annotations

import os
import sys
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from da_jax.protocol.styles import Style


def run(
    source: str,
    destination: str | None,
    *,
    dtype: str,
    quantize: str | None,
    revision: str | None,
    verify: bool,
    verify_only: bool,
) -> None:
    """Converts `source`, or checks it with `verify_only`, and prints what was done.

    Raises:
      ValueError: for options that do not go together.
      OSError, CheckpointError, ConfigError: what went wrong.
    """
    import jax.numpy as jnp

    from da_jax.checkpoints import convert, paths

    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"--dtype is {dtype!r}; it must be float32, bfloat16 or float16")
    if quantize not in (None, "int8"):
        raise ValueError(f"--quantize is {quantize!r}; it can only be int8")
    console = Console(stderr=True)
    if verify_only:
        if destination is not None:
            raise ValueError("--verify-only takes one folder, the converted one")
        with _bar(console) as bar:
            checksums = convert.verify(source, _report(bar))
        print(f"{source}: {len(checksums)} parameters are as they were written")
        return
    if destination is None:
        raise ValueError("name the folder to write, after the source")
    how: Literal["int8"] | None = "int8" if quantize else None
    convert.check_destination(destination)  # before anything is downloaded
    folder = convert.resolve(source, revision=revision)
    if not paths.has_tokenizer(paths.absolute(folder)):
        print(
            f"da-jax: warning: {folder} has no tokenizer.json or tokenizer.model; what is written "
            "cannot generate text until one is copied beside it",
            file=sys.stderr,
        )
    style = _style(folder)
    with _bar(console) as bar:
        size = convert.convert(
            folder,
            destination,
            dtype=jnp.dtype(dtype),
            quantize=how,
            style=style,
            progress=_report(bar),
            verify=verify,
        )
    checked = "verified" if verify else "not verified"
    print(f"wrote {destination}: {size / 1e9:.2f} GB as {quantize or dtype}, {checked}")


def _style(folder: str | os.PathLike[str]) -> Style | None:
    """The prompt style that `auto` means for a checkpoint; None where it has no chat template.

    Written beside the weights, so that the folder means the same prompts in later versions too.
    """
    from da_jax.checkpoints import paths
    from da_jax.engine.llm import load_tokenizer
    from da_jax.protocol.prompt import PromptRenderer

    local = paths.local_metadata(folder)
    if not paths.has_tokenizer(paths.absolute(local)):
        return None
    tokenizer = load_tokenizer(local)
    if not tokenizer.chat_template:
        return None
    try:
        return PromptRenderer(tokenizer).style
    except (TypeError, ValueError) as error:
        print(f"da-jax: warning: no prompt style is written: {error}", file=sys.stderr)
        return None


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def _report(bar: Progress):
    tasks = {}

    def report(stage: str, done: int, total: int) -> None:
        if stage == "starting over":
            bar.console.print("an earlier conversion did not finish; starting over")
            return
        if stage not in tasks:
            tasks[stage] = bar.add_task(stage, total=total)
        bar.update(tasks[stage], completed=done)

    return report
