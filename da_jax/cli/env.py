"""`da-jax env`: what runs here, and why the rest does not."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_PACKAGES = (
    "da-jax", "jax", "jaxlib", "flax", "orbax-checkpoint", "transformers", "tokenizers",
    "safetensors", "huggingface-hub", "numpy", "libtpu", "jax-cuda13-plugin",
)  # fmt: skip


def collect() -> dict[str, Any]:
    """Versions, devices and attention backends of this machine."""
    import jax

    from da_jax.kernels.paged_attention import backends, choose

    rows, default = backends(), choose().name
    before = [row.name for row in rows if not row.available]
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "platform": jax.default_backend(),
        "devices": [device.device_kind for device in jax.devices()],
        "attention": [row._asdict() for row in rows],
        "attention_default": default,
        "attention_why": f"first of {', '.join(row.name for row in rows)} that runs here"
        + (f"; {', '.join(before)} cannot" if before else ""),
    }


def run(as_json: bool) -> None:
    """Prints `collect`."""
    facts = collect()
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    table = Table(show_header=False, box=None)
    table.add_row("python", facts["python"])
    for name, version in facts["packages"].items():
        table.add_row(name, version or "[dim]not installed[/]")
    table.add_row("devices", f"{facts['platform']}: {', '.join(facts['devices'])}")
    table.add_row("attention", Text(f"{facts['attention_default']}: {facts['attention_why']}"))
    for row in facts["attention"]:
        note = f"available, pages of {', '.join(row['pages'])}"
        table.add_row(f"  {row['name']}", Text(note if row["available"] else row["reason"]))
    Console().print(table)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
