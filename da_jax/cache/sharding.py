"""How caches are spread over the devices that share a model: by heads, see `models.sharding`."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from da_jax.cache import pools
from da_jax.cache.pools import CachePlan, Caches
from da_jax.kernels.paged_attention import KVPages, Layout, QuantizedPages
from da_jax.models import sharding
from da_jax.models.config import Attention, GatedDelta, ModelConfig
from da_jax.models.layers import DeltaState
from da_jax.models.parallel import AXIS

_WHOLE = PartitionSpec()
_HEADS = PartitionSpec(None, None, AXIS)  # of pages and of their scales


def specs(config: ModelConfig, plan: CachePlan) -> Caches:
    """A `PartitionSpec` for every array of the caches.

    A KV head that several devices need counts once for each: the whole array has
    `devices * heads of a device` heads.
    """

    def pages(layer: int, form: Layout) -> KVPages:
        mixer = config.layers[layer].mixer
        assert isinstance(mixer, Attention)
        spec = _HEADS if sharding.attention_shards(mixer, plan.devices) > 1 else _WHOLE
        return QuantizedPages(spec, spec) if form.quantized else spec

    def state(layer: int) -> DeltaState:
        mixer = config.layers[layer].mixer
        assert isinstance(mixer, GatedDelta)
        if sharding.delta_shards(mixer, plan.devices) == 1:
            return DeltaState(_WHOLE, _WHOLE)  # type: ignore[arg-type]
        conv, memory = PartitionSpec(None, None, AXIS), PartitionSpec(None, AXIS)
        return DeltaState(conv, memory)  # type: ignore[arg-type]

    return Caches(
        pages={layer: pages(layer, form) for layer, form in plan.pages.items()},
        rings={layer: pages(layer, form) for layer, form in plan.rings.items()},
        states={layer: state(layer) for layer in plan.states},
    )


def shardings(config: ModelConfig, plan: CachePlan, mesh: Mesh) -> Caches:
    """A `NamedSharding` for every array of the caches."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(config, plan))


def allocate(config: ModelConfig, plan: CachePlan, mesh: Mesh) -> Caches:
    """Zeroed caches; each device makes its own part and no more."""
    make = _made_by(config, plan, mesh)
    return jax.jit(make, out_shardings=shardings(config, plan, mesh))()


def described(config: ModelConfig, plan: CachePlan, mesh: Mesh) -> Caches:
    """What `allocate` would make, as `jax.ShapeDtypeStruct` with shardings."""
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        jax.eval_shape(_made_by(config, plan, mesh)),
        shardings(config, plan, mesh),
    )


def _made_by(config: ModelConfig, plan: CachePlan, mesh: Mesh) -> Callable[[], Caches]:
    make = lambda: pools.allocate(plan)
    if mesh.size == 1:
        return make
    return jax.shard_map(
        make, mesh=mesh, in_specs=(), out_specs=specs(config, plan), check_vma=False
    )
