"""The caches as the layers of one forward pass see them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from da_jax.cache.pools import CachePlan, Caches
from da_jax.cache.rings import ring_mask, ring_pages
from da_jax.kernels.paged_attention import BlockMask, paged_attention, write_kv
from da_jax.models import parallel, sharding
from da_jax.models.config import Attention, ModelConfig
from da_jax.models.layers import DeltaState


class _Places(NamedTuple):
    """Where a step's new tokens go [B, T], and what its queries see."""

    page: jax.Array
    mask: BlockMask


class StepCache:
    """What `da_jax.models.layers.Cache` asks for: B sequences that each gain up to T tokens.

    Args:
      config: the model.
      plan: sizes of the caches.
      caches: what the sequences have so far, the states as rows [B].
      block_table: int32 [B, NB], physical page of each logical block; page P drops what is written.
      mask: what full attention sees of each row; entries may reach beyond the current length.
      slot: int32 [B], where rings are; the number of slots drops what is written.
      position: int32 [B], absolute position of the first new token of each row.
      q_lens: int32 [B], new tokens of each row; 0 leaves the row out.
      width: T.
      impl: attention backend.

    Attributes:
      caches: with everything written so far.
      positions: int32 [B, T].
      valid: bool [B, T], False on right padding.
      entries: int32 [B], entries of the mask that full attention reads.
    """

    def __init__(
        self,
        config: ModelConfig,
        plan: CachePlan,
        caches: Caches,
        *,
        block_table: jax.Array | np.ndarray,
        mask: BlockMask,
        slot: jax.Array | np.ndarray,
        position: jax.Array,
        q_lens: jax.Array,
        width: int,
        impl: str | None,
    ):
        self.caches = Caches(*map(dict, caches))
        self._config, self._plan, self._impl = config, plan, impl
        self._slot, self._position, self._q_lens = jnp.asarray(slot), position, q_lens
        steps = jnp.arange(width)
        self.positions = position[:, None] + steps
        self.valid = steps < q_lens[:, None]
        self._lengths = jnp.where(q_lens > 0, position + q_lens, 0)
        block = jnp.minimum(self.positions // plan.page_size, block_table.shape[1] - 1)
        page = jnp.take_along_axis(jnp.asarray(block_table), block, axis=1)
        mask = _visible_entries(mask, plan.page_size, self._lengths)
        self._full = _Places(jnp.where(self.valid, page, plan.num_pages), mask)
        self._rings: dict[int, _Places] = {}  # by window
        self.entries = mask.count

    def attend(
        self, layer: int, q: jax.Array, k: jax.Array | None = None, v: jax.Array | None = None
    ) -> jax.Array:
        """Writes k and v [B, T, HKV, D] into the layer's cache and attends with q [B, T, HQ, D].

        Without k and v the layer reads those of its donor, this step's included.
        """
        mixer = self._config.layers[layer].mixer
        assert isinstance(mixer, Attention)
        if (k is None) != (v is None) or (k is None) != (mixer.donor is not None):
            raise ValueError(
                f"layer {layer} {'reads a donor and has no' if mixer.donor is not None else 'has'} "
                "keys and values of its own"
            )
        owner = layer if mixer.donor is None else mixer.donor
        if mixer.window is None:
            cache, (page, mask) = self.caches.pages, self._full
        else:
            cache, (page, mask) = self.caches.rings, self._ring(owner, mixer.window)
        if k is not None and v is not None:
            heads = sharding.kv_heads(mixer, self._plan.devices)
            cache[owner] = write_kv(
                cache[owner], own_heads(k, heads), own_heads(v, heads), pages=page,
                slots=self.positions % self._plan.page_size,
            )  # fmt: skip
        return paged_attention(
            q, cache[owner], mask, self._lengths, self._q_lens,
            scale=mixer.scale, window=mixer.window, impl=self._impl,
        )  # fmt: skip

    def recall(self, layer: int) -> DeltaState:
        """The layer's state before these tokens, rows first."""
        return self.caches.states[layer]

    def remember(self, layer: int, state: DeltaState) -> None:
        """Keeps the layer's state after the last valid token of each row."""
        self.caches.states[layer] = state

    def _ring(self, owner: int, window: int) -> _Places:
        if window not in self._rings:
            blocks, page_size = self._plan.ring_blocks(owner), self._plan.page_size
            seated = self._slot < self._plan.num_slots
            mask = ring_mask(
                self._slot, self._position, jnp.where(seated, self._q_lens, 0),
                window=window, blocks=blocks, page_size=page_size,
            )  # fmt: skip
            page = ring_pages(self._slot, self.positions, blocks=blocks, page_size=page_size)
            dropped = self._plan.num_slots * blocks
            self._rings[window] = _Places(jnp.where(self.valid, page, dropped), mask)
        return self._rings[window]


def own_heads(x: jax.Array, heads: int) -> jax.Array:
    """The KV heads of this device out of [B, T, HKV, D], where each serves several devices."""
    if x.shape[2] == heads:
        return x
    first = parallel.index() * x.shape[2] // parallel.shards()
    return jax.lax.dynamic_slice_in_dim(x, first, heads, axis=2)


def _visible_entries(mask: BlockMask, page_size: int, lengths: jax.Array) -> BlockMask:
    """The mask without the entries that begin beyond the current lengths [B].

    Entries ascend by position, so those are the last ones: only the count changes.
    """
    first = mask.block * page_size + (mask.span & 0xFFFF)
    used = jnp.arange(mask.page.shape[1]) < mask.count[:, None]
    return mask._replace(count=jnp.sum(used & (first < lengths[:, None]), axis=1, dtype=jnp.int32))
