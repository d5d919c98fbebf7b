"""The memory plan: what is on the device, and how many tokens that leaves room for.

Each device has `memory_fraction` of its memory for weights, for what programs need while they run
(`sizes.workspace_bytes`), for what else the process keeps there, and for the caches. All caches are
allocated when the engine starts and none grows, so an engine that started does not run out.

What JAX takes of a GPU's memory at all `XLA_PYTHON_CLIENT_MEM_FRACTION` says; `memory_fraction` is
of that.
"""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from da_jax.cache import pools
from da_jax.engine.config import EngineConfig
from da_jax.engine.rows import Shapes
from da_jax.kernels.chips import chip_of, current_target
from da_jax.kernels.paged_attention import layout
from da_jax.models import dtypes, host_table, sharding, sizes
from da_jax.models.config import Attention, ModelConfig
from da_jax.models.decoder import Decoder

CPU_CACHE = 4 * 2**30
"""Bytes of caches on a CPU unless `kv_cache_bytes` says otherwise: others need memory there too.
They are more if one whole sequence needs more."""


@dataclasses.dataclass(frozen=True)
class Room:
    """What a device has, before any cache.

    Attributes:
      device: its name.
      memory: bytes of its memory, None where nobody knows.
      fraction: share of it that may be used.
      weights: bytes of the parameters on it.
      others: bytes of other arrays of this process on it.
      workspace: bytes that programs need while they run, estimated.
      copies: bytes that programs copy of the caches while they run, as a share of the caches.
    """

    device: str
    memory: int | None
    fraction: float
    weights: int
    others: int
    workspace: int
    copies: float = 0.0

    @property
    def free(self) -> int | None:
        """Bytes left for caches, negative where not even the rest fits."""
        if self.memory is None:
            return None
        used = self.weights + self.others + self.workspace
        return int((int(self.memory * self.fraction) - used) / (1 + self.copies))


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """What is on the device, in bytes, and what it holds.

    Attributes:
      room: the device, and what is on it besides the caches.
      pages: keys and values of full-attention layers.
      rings, states: sliding windows and recurrent states of `sequences` sequences.
      snapshots: copies of rings and states.
      kv_dtype: dtype of keys and values.
      page_tokens: tokens that all pages hold together.
      page_size: tokens of a page.
      sequences: most sequences at once.
      max_model_len: longest sequence in tokens.
    """

    room: Room
    pages: int
    rings: int
    states: int
    snapshots: int
    kv_dtype: str
    page_tokens: int
    page_size: int
    sequences: int
    max_model_len: int

    @property
    def caches(self) -> int:
        """Bytes of all caches."""
        return self.pages + self.rings + self.states + self.snapshots

    @property
    def workspace(self) -> int:
        """Bytes that programs need while they run, copies of caches included."""
        return self.room.workspace + int(self.room.copies * self.caches)

    @property
    def whole_sequences(self) -> int:
        """Sequences of `max_model_len` tokens that run at once; of shorter ones more do."""
        each = -(-self.max_model_len // self.page_size)
        return min(self.sequences, self.page_tokens // self.page_size // each)

    def describe(self) -> list[str]:
        """The plan in a few lines for people."""
        room = self.room
        whole = "unknown" if room.memory is None else _size(room.memory)
        caches = {
            "pages": self.pages, "sliding windows": self.rings, "recurrent states": self.states,
            "snapshots": self.snapshots,
        }  # fmt: skip
        parts = ", ".join(f"{name} {_size(value)}" for name, value in caches.items() if value)
        others = f", others {_size(room.others)}" if room.others else ""
        return [
            f"{room.device}: memory {whole}, {100 * room.fraction:g}% usable; weights "
            f"{_size(room.weights)}, workspace {_size(self.workspace)}{others}",
            f"caches {_size(self.caches)} in {self.kv_dtype}: {parts}",
            f"{self.page_tokens:,} tokens of context in all: {self.whole_sequences} of "
            f"{self.sequences} sequences at {self.max_model_len:,} tokens",
        ]

    def as_dict(self) -> dict[str, Any]:
        """The plan for JSON, with units in the names."""
        room = self.room
        sizes_of = {
            "device_memory": room.memory, "weights": room.weights, "others": room.others,
            "workspace": self.workspace, "pages": self.pages, "rings": self.rings,
            "states": self.states, "snapshots": self.snapshots, "caches": self.caches,
        }  # fmt: skip
        return {
            "device": room.device,
            "memory_fraction": room.fraction,
            **{f"{name}_bytes": value for name, value in sizes_of.items()},
            "kv_dtype": self.kv_dtype,
            "page_tokens": self.page_tokens,
            "sequences": self.sequences,
            "max_model_len_tokens": self.max_model_len,
            "whole_sequences": self.whole_sequences,
        }


def plan(
    model: Decoder, config: EngineConfig, shapes: Shapes, max_len: int
) -> tuple[MemoryPlan, pools.CachePlan]:
    """Plans the device that the model is on; where several share it, each of them.

    Args:
      model: its weights are loaded.
      config: settings.
      shapes: of the programs.
      max_len: longest sequence in tokens.

    Raises:
      ValueError: the device does not hold the model and one sequence; says what would fit.
    """
    device = next(iter(jax.tree.leaves(nnx.state(model))[0].sharding.addressable_devices))
    weights = weight_bytes(model)
    kv_dtype = dtypes.resolve_kv(config.kv_dtype, model.dtype.name, current_target())
    # Processes that share a model must plan alike.
    alone = jax.process_count() == 1
    in_use = (device.memory_stats() or {}).get("bytes_in_use", 0) if alone else 0
    count = config.tensor_parallel
    room = Room(
        device=device.device_kind if count == 1 else f"each of {count} {device.device_kind}",
        memory=device_memory(device),
        fraction=config.memory_fraction,
        weights=weights,
        others=max(in_use - weights, 0),
        workspace=workspace(model.config, model.dtype.name, shapes, config.tensor_parallel),
        copies=copied_share(model.config, config, kv_dtype, device.platform),
    )
    return plan_for(
        model.config, config, room, shapes, max_len, dtype=model.dtype.name, kv_dtype=kv_dtype,
        most=CPU_CACHE // jax.local_device_count() if device.platform == "cpu" else None,
    )  # fmt: skip


def plan_for(
    model: ModelConfig,
    config: EngineConfig,
    room: Room,
    shapes: Shapes,
    max_len: int,
    *,
    dtype: str,
    kv_dtype: str,
    most: int | None = None,
) -> tuple[MemoryPlan, pools.CachePlan]:
    """Plans the caches in a room.

    Args:
      model, config, room, shapes, max_len: as in `plan`.
      dtype, kv_dtype: names of the dtypes of the model and of keys and values.
      most: bytes of caches where `config.kv_cache_bytes` is None, more if one sequence needs it;
        None for all there is.

    Raises:
      ValueError: one sequence does not fit; says what would.
    """
    needs: dict[str, Any] = dict(
        page_size=config.page_size, max_tokens=max_len, sequences=config.max_num_seqs,
        longest_step=max(shapes.chunks), dtype=dtype, kv_dtype=kv_dtype,
        snapshots=_snapshots(config, model), devices=config.tensor_parallel,
    )  # fmt: skip
    limit = most if config.kv_cache_bytes is None else config.kv_cache_bytes
    known = [size for size in (limit, room.free) if size is not None]
    if not known:
        raise ValueError(
            f"nobody knows how much memory {room.device} has; set kv_cache_bytes, the bytes for "
            "what sequences keep"
        )
    try:
        caches = pools.plan(model, budget_bytes=min(known), **needs)
    except pools.PlanError as error:
        if config.kv_cache_bytes is None and most is not None and most < error.least_bytes:
            return plan_for(
                model, config, room, shapes, max_len, dtype=dtype, kv_dtype=kv_dtype,
                most=error.least_bytes,
            )  # fmt: skip
        limited = room.free is None or (limit is not None and limit < room.free)
        raise ValueError(f"{error}; {_remedy(room, config, limited)}") from error
    of_sequences = lambda size: size * caches.sequences // caches.num_slots
    return MemoryPlan(
        room=room,
        pages=caches.page_bytes,
        rings=of_sequences(caches.ring_bytes),
        states=of_sequences(caches.state_bytes),
        snapshots=caches.snapshot_bytes,
        kv_dtype=caches.kv_dtype,
        page_tokens=caches.num_pages * caches.page_size,
        page_size=caches.page_size,
        sequences=caches.sequences,
        max_model_len=max_len,
    ), caches


def device_memory(device: jax.Device) -> int | None:
    """Bytes of a device's memory, None where nobody knows.

    What the runtime says that it may use, else what is known of the chip. A CPU has the memory of
    the host, or what a container may use of it.
    """
    if device.platform == "cpu":
        host = _host_memory()
        return host and host // jax.local_device_count()  # several are simulated on one host
    chip = chip_of(device.device_kind)
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return limit or (chip.memory if chip else None)


def weight_bytes(model: Decoder) -> int:
    """Bytes of a model's parameters on each device, without those in host memory."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(nnx.state(model))
        if leaf.sharding.memory_kind != host_table.MEMORY
    )


def workspace(model: ModelConfig, dtype: str, shapes: Shapes, devices: int) -> int:
    """Bytes that the programs of an engine need on each device, estimated from above."""
    use = sizes.Use(batch=max(shapes.batches), prefill_chunk=max(shapes.chunks), dtype=dtype)
    return sizes.workspace_bytes(sharding.part(model, devices), use)


def copied_share(model: ModelConfig, config: EngineConfig, kv_dtype: str, platform: str) -> float:
    """What programs copy of the caches while they run, as a share of the caches.

    XLA on a CPU widens pages of 16-bit and of 8-bit floats, all of them at every step. On a TPU it
    copies the scales of 8-bit pages where a prefill writes to them.
    """
    if platform == "cpu" and kv_dtype not in ("float32", "int8"):
        return 3.0
    shares = [0.0]
    for layer in sharding.part(model, config.tensor_parallel).layers:
        if isinstance(mixer := layer.mixer, Attention):
            heads = mixer.num_kv_heads
            form = layout(1, heads, config.page_size, mixer.head_dim, kv_dtype)
            scales = 4 * math.prod(form.scales_shape) if form.quantized else 0
            shares.append(scales / form.page_bytes)
    return max(shares)


def _snapshots(config: EngineConfig, model: ModelConfig) -> int:
    """Slots for copies of rings and states."""
    needs = model.layers_of("sliding") or model.layers_of("recurrent")
    return config.prefix_snapshots if needs and config.prefix_cache else 0


def _remedy(room: Room, config: EngineConfig, limited: bool) -> str:
    """What else helps than the setting that fits."""
    if limited:
        return "or raise kv_cache_bytes"
    assert room.memory is not None
    less = [f"{name}='int8'" for name in ("kv_dtype", "weights") if getattr(config, name) == "auto"]
    return (
        f"the budget is {100 * room.fraction:g}% of the {_size(room.memory)} of {room.device} "
        f"less {_size(room.weights)} of weights, {_size(room.workspace)} that programs need and "
        f"{_size(room.others)} of other arrays"
        + (f"; {' and '.join(less)} take less" if less else "")
    )


def _host_memory() -> int | None:
    """Bytes of the host's memory, or of what the container may have of it."""
    if not hasattr(os, "sysconf"):
        return None  # Windows
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if Path(path).is_file() and (text := Path(path).read_text().strip()).isdigit():
            limits.append(int(text))
    return min(limits)


def _size(value: int) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"
