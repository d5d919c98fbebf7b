"""`da-jax train`: its options. Heavy imports wait until it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from da_jax.cli.options import DEFAULT, Json, Model, StyleName, Thinking


def train(
    data: Annotated[
        Path, typer.Option(help="JSON lines of recorded responses.", show_default=False)
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for the trained model; one with saves of the same command goes on.",
            show_default=False,
        ),
    ],
    model: Model = "tiny",
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 1000,
    batch: Annotated[int, typer.Option(help="Examples a step; a multiple of the devices.")] = 8,
    lr: Annotated[float, typer.Option(help="Highest learning rate of AdamW.")] = 1e-5,
    warmup: Annotated[float, typer.Option(help="Share of the steps over which it rises.")] = 0.05,
    weight_decay: Annotated[float, typer.Option(help="Of matrices.")] = 0.01,
    clip: Annotated[float, typer.Option(help="Largest norm of the gradient.")] = 1.0,
    masked: Annotated[
        float, typer.Option(help="Share of examples under their declared masks.")
    ] = 0.75,
    length: Annotated[
        int | None,
        typer.Option(help="Most tokens of an example; 32768 or what the model has."),
    ] = None,
    style: StyleName = "auto",
    thinking: Thinking = False,
    dtype: Annotated[
        str, typer.Option(help="auto, float32 or bfloat16, to compute in.")
    ] = DEFAULT.dtype,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Keep less for the backward pass: slower, smaller.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Decides the order of the examples.")] = 0,
    save_every: Annotated[
        int | None, typer.Option(help="Steps between two saves, to go on from.")
    ] = None,
    json_: Json = False,
) -> None:
    """Fine-tune a model on recorded responses, under the masks that they declare.

    The file is one that da-jax replay reads: see its help. Of prompts the text is needed.
    """
    from da_jax.cli import train as command

    command.run(
        model=model, examples=data, out=out, style=style, json_=json_,
        settings=dict(
            steps=steps, rate=lr, warmup=warmup, weight_decay=weight_decay, clip=clip,
            recompute=recompute,
        ),
        job=dict(
            batch=batch, longest=length, masked=masked, thinking=thinking, dtype=dtype, seed=seed,
            save_every=save_every,
        ),
    )  # fmt: skip
