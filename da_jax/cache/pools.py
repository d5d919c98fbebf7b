"""What sequences keep on the device between steps, and the plan of its size.

Each kind of layer has its own kind of cache: a full-attention layer pages, which are handed out as
a sequence needs them; a sliding layer a ring of pages for each slot, as long as its window and a
step; a recurrent layer a state for each slot. A running sequence holds one slot.

One donated buffer a layer is updated in place; a single stacked buffer would be copied by a scan.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from da_jax.cache.rings import ring_blocks
from da_jax.kernels.paged_attention import KVPages, Layout, empty_pages, layout
from da_jax.models import sharding
from da_jax.models.config import Attention, GatedDelta, ModelConfig
from da_jax.models.layers import DeltaState


class Caches(NamedTuple):
    """The caches of all layers that own one, by the index of the layer; a pytree.

    Attributes:
      pages: pages of each full-attention layer.
      rings: pages of each sliding layer; slot s owns the same number of them from s times that on.
      states: state of each recurrent layer. The leading axis is the slot; within a program, see
        `states.take`, it is the row.
    """

    pages: dict[int, KVPages]
    rings: dict[int, KVPages]
    states: dict[int, DeltaState]


@dataclasses.dataclass(frozen=True)
class CachePlan:
    """How much of each kind there is, and what it costs a device.

    Attributes:
      page_size: tokens a page, of a ring too.
      num_pages: pages that sequences share; every full-attention layer has as many.
      num_slots: rings and states: those of the sequences that can run at once, and snapshots.
      snapshots: how many of the slots, the last ones, are for copies at page borders.
      dtype: name of the dtype of the model.
      kv_dtype: name of the dtype of keys and values.
      pages, rings: layout of the pages of each layer, on each device: with the heads that it has.
      states: shapes and dtypes of the state of each recurrent layer on each device, slots first.
      devices: how many share the model, see `models.sharding`.
    """

    page_size: int
    num_pages: int
    num_slots: int
    snapshots: int
    dtype: str
    kv_dtype: str
    pages: Mapping[int, Layout]
    rings: Mapping[int, Layout]
    states: Mapping[int, DeltaState]
    devices: int = 1

    def ring_blocks(self, layer: int) -> int:
        """Pages of one slot's ring."""
        return self.rings[layer].num_pages // self.num_slots

    @property
    def sequences(self) -> int:
        """Sequences that can run at once."""
        return self.num_slots - self.snapshots

    @property
    def snapshot_bytes(self) -> int:
        """Device bytes of the snapshots, which are among those of rings and states."""
        return self.snapshots * (self.ring_bytes + self.state_bytes) // self.num_slots

    @property
    def page_bytes(self) -> int:
        """Device bytes of all pages."""
        return sum(form.num_pages * form.page_bytes for form in self.pages.values())

    @property
    def ring_bytes(self) -> int:
        """Device bytes of all rings."""
        return sum(form.num_pages * form.page_bytes for form in self.rings.values())

    @property
    def state_bytes(self) -> int:
        """Device bytes of all recurrent states."""
        return _nbytes(dict(self.states))

    @property
    def bytes(self) -> int:
        """Device bytes of everything."""
        return self.page_bytes + self.ring_bytes + self.state_bytes


class PlanError(ValueError):
    """The budget does not hold the slots and one whole sequence; says what would fit.

    Attributes:
      least_bytes: the smallest budget that does.
    """

    def __init__(self, words: str, least_bytes: int):
        super().__init__(words)
        self.least_bytes = least_bytes


def plan(
    config: ModelConfig,
    *,
    page_size: int,
    max_tokens: int,
    sequences: int,
    longest_step: int,
    dtype: DTypeLike,
    budget_bytes: int,
    kv_dtype: DTypeLike | None = None,
    snapshots: int = 0,
    devices: int = 1,
) -> CachePlan:
    """Rings and states for all slots, and as many pages as the budget holds.

    There are never more pages than `max_tokens` for each slot.

    Args:
      config: the model.
      page_size: tokens a page.
      max_tokens: longest sequence.
      sequences: most sequences at once.
      longest_step: most tokens that one forward pass adds to a sequence.
      dtype: of the model: of what the convolutions keep.
      budget_bytes: bytes for all of it on each device.
      kv_dtype: of keys and values, int8 and float8_e4m3fn with scales; None is `dtype`.
      snapshots: copies of rings and states that are kept besides those of the sequences.
      devices: how many share the model.

    Raises:
      PlanError: when not even one sequence of `max_tokens` fits besides all slots.
    """
    kind = dtype if kv_dtype is None else kv_dtype
    sizes = _Sizes(sharding.part(config, devices), page_size, longest_step, dtype, kind)
    blocks, slots = -(-max_tokens // page_size), sequences + snapshots
    free = budget_bytes - slots * sizes.slot_bytes(blocks)
    num_pages = blocks * slots
    if sizes.page_bytes:
        num_pages = min(num_pages, max(free, 0) // sizes.page_bytes)
    if num_pages < blocks or free < 0:
        raise _too_small(sizes, max_tokens, sequences, snapshots, budget_bytes)
    return CachePlan(
        page_size=page_size,
        num_pages=num_pages,
        num_slots=slots,
        snapshots=snapshots,
        dtype=jnp.dtype(dtype).name,
        kv_dtype=jnp.dtype(sizes.kv_dtype).name,
        pages={layer: sizes.form(layer, num_pages) for layer in config.layers_of("full")},
        rings={
            layer: sizes.form(layer, slots * sizes.ring_blocks(layer, blocks))
            for layer in config.layers_of("sliding")
        },
        states={layer: sizes.state(layer, slots) for layer in config.layers_of("recurrent")},
        devices=devices,
    )


def allocate(plan: CachePlan) -> Caches:
    """Zeroed caches of one device; `cache.sharding.allocate` makes those of all."""
    return Caches(
        pages={layer: empty_pages(form) for layer, form in plan.pages.items()},
        rings={layer: empty_pages(form) for layer, form in plan.rings.items()},
        states=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), dict(plan.states)),
    )


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """What one page and one slot take on each device, whose part of the model `config` is."""

    config: ModelConfig
    page_size: int
    longest_step: int
    dtype: DTypeLike
    kv_dtype: DTypeLike

    def form(self, layer: int, num_pages: int) -> Layout:
        """Layout of so many pages of a layer."""
        mixer = self._attention(layer)
        return layout(num_pages, mixer.num_kv_heads, self.page_size, mixer.head_dim, self.kv_dtype)

    def ring_blocks(self, layer: int, blocks: int) -> int:
        """Pages of a slot's ring: no more than the longest sequence has."""
        window = self._attention(layer).window
        assert window is not None
        return min(ring_blocks(window, self.longest_step, self.page_size), blocks)

    def state(self, layer: int, slots: int) -> DeltaState:
        """Shapes of the states of a layer."""
        mixer = self.config.layers[layer].mixer
        assert isinstance(mixer, GatedDelta)
        conv = (slots, mixer.conv_width - 1, mixer.channels)
        memory = (slots, mixer.value_heads, mixer.key_dim, mixer.value_dim)
        zeros = lambda: DeltaState(jnp.zeros(conv, self.dtype), jnp.zeros(memory, jnp.float32))
        return jax.eval_shape(zeros)

    @functools.cached_property
    def page_bytes(self) -> int:
        """Bytes of one page in all full layers."""
        return sum(self.form(layer, 1).page_bytes for layer in self.config.layers_of("full"))

    @functools.cached_property
    def state_bytes(self) -> int:
        """Bytes of the states of one slot."""
        return sum(_nbytes(self.state(i, 1)) for i in self.config.layers_of("recurrent"))

    def ring_bytes(self, blocks: int) -> int:
        """Bytes of the rings of one slot."""
        return sum(
            self.ring_blocks(layer, blocks) * self.form(layer, 1).page_bytes
            for layer in self.config.layers_of("sliding")
        )

    def slot_bytes(self, blocks: int) -> int:
        """Bytes of one slot for sequences of so many blocks."""
        return self.ring_bytes(blocks) + self.state_bytes

    def _attention(self, layer: int) -> Attention:
        mixer = self.config.layers[layer].mixer
        assert isinstance(mixer, Attention)
        return mixer


def _nbytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _too_small(
    sizes: _Sizes, tokens: int, sequences: int, snapshots: int, budget: int
) -> PlanError:
    mib = lambda size: f"{size / 2**20:,.1f} MiB"
    blocks = -(-tokens // sizes.page_size)
    pages, slots = blocks * sizes.page_bytes, sequences + snapshots
    total = pages + slots * sizes.slot_bytes(blocks)
    parts = [f"one sequence of {tokens:,} tokens takes {mib(pages)} of pages"]
    if sizes.slot_bytes(blocks):
        parts.append(
            f"{sequences} sequence{'s' * (sequences > 1)} at once"
            + (f" and {snapshots} snapshots" if snapshots else "")
            + f" keep {mib(slots * sizes.ring_bytes(blocks))} of sliding windows and "
            f"{mib(slots * sizes.state_bytes)} of recurrent states"
        )
    return PlanError(
        f"{mib(total)} of cache are needed, the budget is {mib(max(budget, 0))}: "
        f"{', and '.join(parts)}; {_what_fits(sizes, tokens, sequences, snapshots, budget)}",
        total,
    )


def _what_fits(sizes: _Sizes, tokens: int, sequences: int, snapshots: int, budget: int) -> str:
    """The setting that would do: fewer snapshots, else fewer sequences, else shorter ones."""
    blocks = -(-tokens // sizes.page_size)
    if slot := sizes.slot_bytes(blocks):
        slots = (budget - blocks * sizes.page_bytes) // slot
        if sequences <= slots:
            return f"prefix_snapshots={slots - sequences} fits"
        if slots > 0:
            without = " without prefix_snapshots" if snapshots else ""
            return f"max_num_seqs={slots} fits{without}"
    need = lambda n: n * sizes.page_bytes + sizes.slot_bytes(n)
    fit = bisect.bisect_right(range(1, blocks), budget, key=need)
    if fit * sizes.page_size >= 2:
        fewer = ["max_num_seqs=1"] * (sequences > 1) + ["prefix_snapshots=0"] * (snapshots > 0)
        alone = f" with {' and '.join(fewer)}" if fewer and sizes.slot_bytes(1) else ""
        return f"max_model_len={fit * sizes.page_size} fits{alone}"
    return "not even a page fits"
