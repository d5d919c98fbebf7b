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

    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "platform": jax.default_backend(),
        "devices": [device.device_kind for device in jax.devices()],
        "attention": [row._asdict() for row in backends()],
        "attention_default": choose().name,
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
    for row in facts["attention"]:
        note = "default" if row["name"] == facts["attention_default"] else "available"
        note = note if row["available"] else row["reason"]
        table.add_row(f"attention {row['name']}", Text(note))
    Console().print(table)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
