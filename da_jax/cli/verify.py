"""`da-jax verify`: checks of the mask on a checkpoint."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from da_jax.checkpoints import convert, paths
from da_jax.cli.eval import progress
from da_jax.cli.options import read_style
from da_jax.engine.config import EngineConfig
from da_jax.engine.llm import LLM
from da_jax.evals import verify
from da_jax.kernels.chips import current_target
from da_jax.kernels.paged_attention import choose
from da_jax.models import dtypes, hf_config

LONGEST = 4096
"""`--max-model-len` by default, in tokens, or what the checkpoint declares if that is less."""
SEQUENCES = 4
"""Sequences that decode at once: enough for programs of three batch sizes."""
_COLOURS = {
    verify.Status.PASS: "green", verify.Status.FAIL: "bold red", verify.Status.NOT_RUN: "bold red",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options:
    """Arguments of the command; `engine` is passed on as it is."""

    model: str
    style: str
    max_model_len: int | None
    json: bool
    engine: dict[str, Any]


def run(options: Options) -> None:
    """Loads, verifies, prints; exit status 1 unless every check ran and passed.

    Raises:
      ValueError: what is wrong with the arguments, or a model that declarations cannot reach;
        before it is loaded.
    """
    folder = convert.resolve(options.model)
    model = hf_config.read(paths.absolute(folder))
    verify.check_model(model)
    config = EngineConfig(
        **options.engine, max_num_seqs=SEQUENCES,
        max_model_len=options.max_model_len or min(LONGEST, model.max_positions),
    )  # fmt: skip
    with progress() as bars:
        llm = LLM.from_pretrained(
            folder, style=read_style(options.style), config=config, progress=bars
        )
    target = current_target()
    dtype = dtypes.resolve(config.dtype, model.family, target)
    checks = verify.verify(llm, dtype)
    settings = {
        "model": options.model,
        "device": target.kind,
        "attention": choose(config.attention).name,
        "dtype": dtype,
        "kv_dtype": llm.memory.kv_dtype,
        "tensor_parallel": config.tensor_parallel,
        "page_size": config.page_size,
        "full_attention_layers": len(model.layers_of("full")),
        "layers": len(model.layers),
    }
    _show(checks, settings, options.json)
    if verify.failed(checks):
        sys.exit(1)


def _show(checks: list[verify.Check], settings: dict[str, Any], as_json: bool) -> None:
    failed = verify.failed(checks)
    if as_json:
        found = [dataclasses.asdict(check) for check in checks]
        result = {"passed": not failed, "settings": settings, "checks": found}
        print(json.dumps(result, allow_nan=False))
        return
    console = Console()
    print_ = lambda text: console.print(text, soft_wrap=True)
    print_(Text(", ".join(f"{name} {value}" for name, value in settings.items()), style="dim"))
    for check in checks:
        shown = Text(f"{check.status.upper():<8}", style=_COLOURS[check.status])
        print_(shown + Text(f"{check.name}: {check.words}"))
    verdict = f"failed or not run: {', '.join(failed)}" if failed else "all checks passed"
    print_(Text(verdict, style="bold red" if failed else "bold green"))
