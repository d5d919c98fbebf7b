"""What sequences keep on the device between steps, and the plan of its size.

Each kind of layer has its own kind of cache: a full-attention layer pages, which are handed out as
a sequence needs them; a sliding layer a ring of pages for each slot, as long as its window and a
step; a recurrent layer a state for each slot. A running sequence holds one slot.

One donated buffer a layer is updated in place; a single stacked buffer would be copied by a scan.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

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
      num_slots: sequences that can run at once.
      dtype: name of the dtype of keys and values.
      pages, rings: layout of the pages of each layer, on each device: with the heads that it has.
      states: shapes and dtypes of the state of each recurrent layer on each device, slots first.
      devices: how many share the model, see `models.sharding`.
    """

    page_size: int
    num_pages: int
    num_slots: int
    dtype: str
    pages: Mapping[int, Layout]
    rings: Mapping[int, Layout]
    states: Mapping[int, DeltaState]
    devices: int = 1

    def ring_blocks(self, layer: int) -> int:
        """Pages of one slot's ring."""
        return self.rings[layer].num_pages // self.num_slots

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
        leaves = jax.tree.leaves(dict(self.states))
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)

    @property
    def bytes(self) -> int:
        """Device bytes of everything."""
        return self.page_bytes + self.ring_bytes + self.state_bytes


def plan(
    config: ModelConfig,
    *,
    page_size: int,
    max_tokens: int,
    sequences: int,
    longest_step: int,
    dtype: DTypeLike,
    budget_bytes: int,
    devices: int = 1,
) -> CachePlan:
    """Rings and states for `sequences` sequences, and as many pages as the budget holds.

    Args:
      config: the model.
      page_size: tokens a page.
      max_tokens: longest sequence.
      sequences: most sequences at once.
      longest_step: most tokens that one forward pass adds to a sequence.
      dtype: of keys and values, and of what the convolutions keep.
      budget_bytes: bytes for all of it on each device.
      devices: how many share the model.

    Raises:
      ValueError: when not even one sequence of `max_tokens` fits.
    """

    per_sequence = -(-max_tokens // page_size)

    def form(layer: int, num_pages: int) -> Layout:
        mixer = config.layers[layer].mixer
        assert isinstance(mixer, Attention)
        if mixer.window is not None:
            blocks = ring_blocks(mixer.window, longest_step, page_size)
            num_pages = sequences * min(blocks, per_sequence)
        heads = sharding.kv_heads(mixer, devices)
        return layout(num_pages, heads, page_size, mixer.head_dim, dtype)

    full, states = config.layers_of("full"), config.layers_of("recurrent")
    empty = CachePlan(
        page_size=page_size,
        num_pages=0,
        num_slots=sequences,
        dtype=jnp.dtype(dtype).name,
        pages={},
        rings={layer: form(layer, 0) for layer in config.layers_of("sliding")},
        states={layer: _state(config, layer, sequences, dtype, devices) for layer in states},
        devices=devices,
    )
    page_bytes = sum(form(layer, 1).page_bytes for layer in full)
    num_pages = per_sequence * sequences
    if page_bytes:
        num_pages = min(num_pages, (budget_bytes - empty.bytes) // page_bytes)
    if num_pages < per_sequence or empty.bytes > budget_bytes:
        raise ValueError(_too_small(empty, per_sequence * page_bytes, max_tokens, budget_bytes))
    return dataclasses.replace(
        empty, num_pages=num_pages, pages={layer: form(layer, num_pages) for layer in full}
    )


def allocate(plan: CachePlan) -> Caches:
    """Zeroed caches of one device; `cache.sharding.allocate` makes those of all."""
    return Caches(
        pages={layer: empty_pages(form) for layer, form in plan.pages.items()},
        rings={layer: empty_pages(form) for layer, form in plan.rings.items()},
        states=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), dict(plan.states)),
    )


def _state(
    config: ModelConfig, layer: int, slots: int, dtype: DTypeLike, devices: int
) -> DeltaState:
    mixer = config.layers[layer].mixer
    assert isinstance(mixer, GatedDelta)
    parts = sharding.delta_shards(mixer, devices)
    conv = (slots, mixer.conv_width - 1, mixer.channels // parts)
    memory = (slots, mixer.value_heads // parts, mixer.key_dim, mixer.value_dim)
    zeros = lambda: DeltaState(jnp.zeros(conv, dtype), jnp.zeros(memory, jnp.float32))
    return jax.eval_shape(zeros)


def _too_small(fixed: CachePlan, pages: int, max_tokens: int, budget: int) -> str:
    mib = lambda size: f"{size / 2**20:.1f} MiB"
    if not fixed.bytes:
        return (
            f"one sequence of {max_tokens} tokens needs {mib(pages)} of KV cache, the budget is "
            f"{mib(budget)}; lower max_model_len or raise kv_cache_bytes"
        )
    return (
        f"{mib(fixed.bytes + pages)} of cache are needed, the budget is {mib(budget)}: one "
        f"sequence of {max_tokens} tokens takes {mib(pages)} of pages, and {fixed.num_slots} "
        f"sequences at once keep {mib(fixed.ring_bytes)} of sliding windows and "
        f"{mib(fixed.state_bytes)} of recurrent states; lower max_num_seqs or max_model_len, or "
        "raise kv_cache_bytes"
    )
