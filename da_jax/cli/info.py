"""`da-jax info`: what a model is made of, what it costs, and where it fits.

JAX is not needed, and the network for a folder on `gs://` alone: all is arithmetic on the
configuration.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from da_jax.checkpoints import known
from da_jax.models import dtypes, sharding, sizes
from da_jax.models.config import Attention, Kind, ModelConfig

_CONTEXTS = (8_192, 32_768, 131_072, 262_144)
_VISIBLE = 0.1  # of the context, for the bound on the speed-up


def run(
    model: str, as_json: bool, *, batch: int, context: int | None, dtype: str, weights: str,
    kv_dtype: str, page_size: int, prefill_chunk: int, mesh: int,
) -> None:  # fmt: skip
    """Prints what is known of a model; the arguments are those of the command.

    Raises:
      ValueError: for a model that is not known, or an argument out of range.
    """
    if weights not in ("auto", "int8"):
        raise ValueError(
            f"--weights is {weights!r}; it must be int8, or auto: what the checkpoint says, int8 "
            "or --dtype"
        )
    if mesh < 1:
        raise ValueError(f"--mesh is {mesh}; it must be at least 1")
    found = known.find(model)
    sharding.check(found.config, mesh)
    use = sizes.Use(
        batch=batch,
        context=min(32_768, found.config.max_positions) if context is None else context,
        dtype=dtype,
        int8=weights == "int8" or found.int8,
        kv_dtype=kv_dtype,
        page_size=page_size,
        prefill_chunk=prefill_chunk,
        devices=mesh,
    )
    facts = collect(model, found.source, found.config, use)
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts)


def collect(model: str, source: str, config: ModelConfig, use: sizes.Use) -> dict[str, Any]:
    """All facts, under the names of the JSON output."""
    memory = sizes.memory(config, use)
    traffic = _traffic(config, use, use.context)
    return {
        "model": model,
        "source": source,
        "family": config.family,
        "parameters": sizes.parameters(config),
        "parameters_read_per_step": round(sizes.parameters_read(config, use.batch)),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "max_positions": config.max_positions,
        **_layers(config),
        "dtype": use.dtype,
        "weights": "int8" if use.int8 else use.dtype,
        "kv_dtype": dtypes.KV_DTYPES[use.kv_dtype] or use.dtype,
        "batch": use.batch,
        "context_tokens": use.context,
        "page_size_tokens": use.page_size,
        "prefill_chunk_tokens": use.prefill_chunk,
        **_kv_bytes(config, use),
        "state_bytes_per_sequence": sizes.state_bytes_per_sequence(config, itemsize=use.itemsize),
        "devices": use.devices,
        **_device_bytes(config, use),
        "memory_bytes": memory.total,
        "memory_bytes_weights": memory.weights,
        "memory_bytes_pages": memory.pages,
        "memory_bytes_rings": memory.rings,
        "memory_bytes_states": memory.states,
        "memory_bytes_workspace": memory.workspace,
        "per_layer_embedding_bytes": sizes.per_layer_embedding_bytes(config, use.itemsize),
        "read_bytes_per_step": round(traffic.total),
        "read_bytes_per_step_weights": round(traffic.weights),
        "read_bytes_per_step_full": traffic.full,
        "read_bytes_per_step_sliding": traffic.sliding,
        "read_bytes_per_step_states": traffic.states,
        "savable_share_kv": traffic.savable_share_kv,
        "savable_share_all": traffic.savable_share_all,
        "contexts": _contexts(config, use),
        "fits": [_fit(fit) for fit in sizes.fits(config, use)],
        "notes": _notes(config, use),
    }


def _traffic(config: ModelConfig, use: sizes.Use, context: int) -> sizes.Traffic:
    return sizes.traffic(
        config, batch=use.batch, context=context, itemsize=use.itemsize, int8=use.int8,
        kv_quantized=use.kv_quantized,
    )  # fmt: skip


def _layers(config: ModelConfig) -> dict[str, Any]:
    """Layers by kind; those with shared keys and values count in their kind too."""
    mixers = [layer.mixer for layer in config.layers]
    shared = [m for m in mixers if isinstance(m, Attention) and m.donor is not None]
    windows = [m.window for m in mixers if isinstance(m, Attention) and m.window is not None]
    counts = {
        f"layers_{kind}": sum(m.kind == kind for m in mixers)
        for kind in ("full", "sliding", "recurrent")
    }
    return counts | {
        "layers_shared_kv": len(shared),
        "layers_full_shared_kv": sum(m.kind == "full" for m in shared),
        "layers_sliding_shared_kv": sum(m.kind == "sliding" for m in shared),
        "layers_with_experts": sum(layer.experts is not None for layer in config.layers),
        "window_tokens": max(windows, default=None),
    }


def _kv_bytes(config: ModelConfig, use: sizes.Use) -> dict[str, int]:
    kinds: tuple[Kind, ...] = ("full", "sliding")
    return {
        f"kv_{'read_' if read else ''}bytes_per_token_{kind}": sizes.kv_bytes_per_token(
            config, kind, itemsize=use.itemsize, quantized=use.kv_quantized, read=read
        )
        for read in (False, True)
        for kind in kinds
    }


def _device_bytes(config: ModelConfig, use: sizes.Use) -> dict[str, int]:
    """What each device keeps of a token and of a sequence, where several share the model."""
    part = sharding.part(config, use.devices)
    state = sizes.state_bytes_per_sequence(part, itemsize=use.itemsize)
    return {
        **{f"device_{name}": value for name, value in _kv_bytes(part, use).items()},
        "device_state_bytes_per_sequence": state,
    }


def _contexts(config: ModelConfig, use: sizes.Use) -> list[dict[str, Any]]:
    rows = []
    for context in sorted({*_CONTEXTS, use.context}):
        if context > config.max_positions and context != use.context:
            continue
        traffic = _traffic(config, use, context)
        rows.append(
            {
                "context_tokens": context,
                "read_bytes_per_step": round(traffic.total),
                "savable_share_kv": traffic.savable_share_kv,
                "savable_share_all": traffic.savable_share_all,
                "speedup_bound_at_tenth_visible": traffic.speedup(_VISIBLE),
            }
        )
    return rows


def _fit(fit: sizes.Fit) -> dict[str, Any]:
    return {
        "chip": fit.chip,
        "chip_memory_bytes": fit.memory,
        "dtype": fit.dtype,
        "context_tokens": fit.context,
        "note": fit.note,
    }


def _notes(config: ModelConfig, use: sizes.Use) -> list[str]:
    notes = []
    if use.devices > 1:
        notes.append(
            f"memory is that of each of {use.devices} devices; bytes read are those of all together"
        )
    if table := sizes.per_layer_embedding_bytes(config, use.itemsize):
        notes.append(
            f"{_size(table)} of the weights are per-layer embeddings, kept in {use.dtype}, of "
            "which a step reads one row a token"
            + ("; they stay on the host" if use.per_layer_on_host else "")
        )
    if use.context > config.max_positions:
        notes.append(
            f"a context of {use.context:,} is beyond the {config.max_positions:,} positions that "
            "the checkpoint declares; arithmetic only"
        )
    if use.dtype == "float16" and config.family in ("gemma3", "gemma4"):
        notes.append("activations of Gemma leave float16's range; use bfloat16 or float32")
    return notes


def _print(facts: dict[str, Any]) -> None:
    console = Console()
    for table in (_overview(facts), _memory(facts), _savings(facts), _chips(facts)):
        console.print(table)
    for note in facts["notes"]:
        console.print(Text(f"note: {note}"))


def _overview(facts: dict[str, Any]) -> Table:
    def bytes_of(name: str) -> str:
        stored = facts[f"kv_bytes_per_token_{name}"]
        read = facts[f"kv_read_bytes_per_token_{name}"]
        words = f"{stored:,} B" + (f", {read:,} B read" if read != stored else "")
        return words + each(f"{facts[f'device_kv_bytes_per_token_{name}']:,} B")

    def each(size: str) -> str:
        return f", {size} on each device" if facts["devices"] > 1 else ""

    table = Table(title=facts["model"], title_justify="left", show_header=False, box=None)
    table.add_row("source", Text(facts["source"]))
    table.add_row("family", facts["family"])
    table.add_row("layers", _layer_words(facts))
    table.add_row("parameters", f"{facts['parameters'] / 1e9:.2f} B")
    table.add_row(
        f"read by a step of {facts['batch']}", f"{facts['parameters_read_per_step'] / 1e9:.2f} B"
    )
    table.add_row("vocabulary", f"{facts['vocab_size']:,}")
    table.add_row("positions", f"{facts['max_positions']:,}")
    for kind in ("full", "sliding"):
        if facts[f"layers_{kind}"]:
            table.add_row(f"KV of a token, {kind}", bytes_of(kind))
    if facts["layers_recurrent"]:
        state = each(_size(facts["device_state_bytes_per_sequence"]))
        table.add_row("state of a sequence", _size(facts["state_bytes_per_sequence"]) + state)
    return table


def _layer_words(facts: dict[str, Any]) -> str:
    words = []
    for kind in ("full", "sliding", "recurrent"):
        shared = facts.get(f"layers_{kind}_shared_kv", 0)
        if count := facts[f"layers_{kind}"]:
            words.append(f"{count} {kind}" + (f" ({shared} read another's KV)" if shared else ""))
    if facts["window_tokens"]:
        words.append(f"window {facts['window_tokens']:,}")
    return ", ".join(words)


def _memory(facts: dict[str, Any]) -> Table:
    table = _table(
        f"Memory, {facts['batch']} x {facts['context_tokens']:,} tokens, {facts['dtype']}"
        + (", int8 weights" if facts["weights"] == "int8" else "")
        + (f", {facts['kv_dtype']} KV" if facts["kv_dtype"] != facts["dtype"] else "")
        + (f", on each of {facts['devices']} devices" if facts["devices"] > 1 else ""),
        ("", "GB"),
    )
    rows = {
        "weights": "weights",
        "pages": "pages of full layers",
        "rings": "rings of sliding layers",
        "states": "recurrent states",
        "workspace": "workspace, estimated",
    }
    for name, words in rows.items():
        if value := facts[f"memory_bytes_{name}"]:
            table.add_row(words, _gb(value))
    table.add_row("total", _gb(facts["memory_bytes"]), style="bold")
    return table


def _savings(facts: dict[str, Any]) -> Table:
    table = _table(
        f"What declarations can save of a decode step, batch {facts['batch']}",
        ("context", "read GB", "of KV", "of all", "bound at 10 % visible"),
    )
    for row in facts["contexts"]:
        table.add_row(
            f"{row['context_tokens']:,}",
            _gb(row["read_bytes_per_step"]),
            f"{row['savable_share_kv']:.1%}",
            f"{row['savable_share_all']:.1%}",
            f"{row['speedup_bound_at_tenth_visible']:.2f}x",
        )
    return table


def _chips(facts: dict[str, Any]) -> Table:
    devices = facts["devices"]
    table = _table(
        f"Longest context on {'one device' if devices == 1 else f'{devices} devices'}, "
        f"batch {facts['batch']}",
        ("device", "GiB", "dtype", "tokens", "note"),
    )
    for fit in facts["fits"]:
        table.add_row(
            fit["chip"],
            f"{fit['chip_memory_bytes'] / 2**30:.0f}",
            fit["dtype"],
            f"{fit['context_tokens']:,}" if fit["context_tokens"] else "-",
            Text(fit["note"]),
        )
    return table


def _table(title: str, columns: Iterable[str]) -> Table:
    table = Table(
        title=title, title_justify="left", box=None, header_style="dim", min_width=len(title)
    )
    for i, column in enumerate(columns):
        left = i == 0 or column in ("dtype", "note")
        table.add_column(column, justify="left" if left else "right")
    return table


def _gb(value: float) -> str:
    return f"{value / 1e9:.2f}"


def _size(value: float) -> str:
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.1f} MB"
