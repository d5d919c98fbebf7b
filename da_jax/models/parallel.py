"""A model on several devices: the mesh, where parameters go, and what devices tell each other.

A device program runs inside `jax.shard_map`: on every device the same, with the parts of parameters
and caches that `sharding` gives it. Layers see from the shapes of their parameters what they have.
All that passes between devices is below: `total` after the last product of a layer and after a look
into an embedding, and `gathered` for the logits. Outside of such a program both do nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from da_jax.models import sharding
from da_jax.models.config import ModelConfig

AXIS = "tensor"


def mesh(devices: int, replica: int = 0) -> Mesh:
    """A mesh of the devices of one replica, one axis `tensor`.

    Args:
      devices: how many share the model.
      replica: which of the groups of so many devices, from 0.

    Raises:
      ValueError: when there are fewer, or some of a process that takes part would stay out.
    """
    there = jax.devices()
    first, end = replica * devices, (replica + 1) * devices
    if end > len(there):
        raise ValueError(
            f"tensor_parallel is {devices} and data_parallel is {replica + 1}, but JAX sees "
            f"{len(there)} {there[0].platform} device(s); lower them, or start JAX where there are "
            "as many"
        )
    if jax.process_count() > 1 and devices != len(there):
        raise ValueError(
            f"tensor_parallel is {devices}, but the {jax.process_count()} processes have "
            f"{len(there)} devices together; with several processes it must be all of them"
        )
    if devices == len(there) > 1:  # in an order in which neighbours are connected
        auto = (jax.sharding.AxisType.Auto,)
        return jax.make_mesh((devices,), (AXIS,), axis_types=auto)
    return Mesh(np.array(there[first:end]), (AXIS,))


def spec(config: ModelConfig, path: str, devices: int) -> PartitionSpec:
    """How a parameter of a dotted path is divided; see `sharding.divided_axis`."""
    axis = sharding.divided_axis(config, path, devices)
    return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, AXIS)


def mesh_of(array: jax.Array | jax.ShapeDtypeStruct) -> Mesh:
    """The mesh over which a parameter is spread; that of the one device for one that is not."""
    where = array.sharding
    if isinstance(where, NamedSharding) and isinstance(where.mesh, Mesh):
        return where.mesh
    device = jax.devices()[0] if where is None else next(iter(where.device_set))
    return Mesh(np.array([device]), (AXIS,))


def shards() -> int:
    """Devices that run the program at hand together, 1 outside of `jax.shard_map`."""
    return jax.sharding.get_abstract_mesh().shape.get(AXIS, 1)


def index() -> jax.Array | int:
    """Which of the `shards` this device is."""
    return jax.lax.axis_index(AXIS) if shards() > 1 else 0


def total(x: jax.Array) -> jax.Array:
    """The sum of x over the devices."""
    return jax.lax.psum(x, AXIS) if shards() > 1 else x


def gathered(x: jax.Array) -> jax.Array:
    """[..., N * shards], the parts [..., N] of all devices in order."""
    return jax.lax.all_gather(x, AXIS, axis=x.ndim - 1, tiled=True) if shards() > 1 else x


def own_rows(ids: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Indices into this device's part of a table that is divided by rows.

    Args:
      ids: integers [...], rows of the whole table.
      rows: rows of this part.

    Returns:
      (indices [...] within the part, bool [...] whether the row is in it).
    """
    local = ids - index() * rows
    here = (local >= 0) & (local < rows)
    return jnp.where(here, local, 0), here
