"""A table that stays in host memory while a program of the device reads rows of it.

The per-layer embeddings of Gemma 4 E2B and E4B are 5 GB, of which a step reads one row a token. An
accelerator of 16 GB has better use for its memory, and the tokens of a burst are known to the
device alone. So the table is pinned in host memory and the device fetches the rows itself: on a TPU
by DMA, on a GPU by a kernel that reads over PCIe. The host is not asked, the burst goes on.

Where an array lies is part of its type, `bfloat16<host>[V,W]`. So `rows` sees while a program is
traced what to do, and a model that calls it works with a table in either memory. The table may be
narrower than what the model computes in: rows can be cast, and a cast of the whole is never made.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MEMORY = "pinned_host"
_WORD = 4  # bytes; a TPU packs rows of narrower numbers into words and cannot fetch a part of one
_AT_ONCE = 16  # rows on their way at a time
_REMEDY = "keep the table in device memory: per_layer_embeddings='device'"
_TPU_WIDTH = 128  # XLA for TPU cannot compile the fetch of shorter rows


class HostMemoryError(RuntimeError):
    """A device cannot read host memory, or not such a table in it."""


def place(table: np.ndarray | jax.Array, device: jax.Device | None = None) -> jax.Array:
    """Puts a table into host memory that a device can read.

    Args:
      table: [V, W] of any dtype. Give a NumPy array where there is a choice: it never passes
        through the memory of the device.
      device: which will read it; the first one by default.

    Returns:
      The table, for `rows`.

    Raises:
      HostMemoryError: the device cannot read host memory, or not this table in it.
      ValueError: the table is no matrix, or its rows cannot be told apart in words of 4 bytes.
    """
    device = jax.devices()[0] if device is None else device
    _check(table.shape, table.dtype, device)
    # Only a NamedSharding makes the memory a part of the type.
    there = NamedSharding(Mesh(np.array([device]), ("device",)), PartitionSpec())
    return jax.device_put(table, there.with_memory_kind(MEMORY))


def sharding(shape: tuple[int, ...], dtype: np.dtype, there: NamedSharding) -> NamedSharding:
    """Where a table goes that devices read from host memory, all of it or some rows each.

    Args:
      shape: [V, W].
      dtype: of the table.
      there: how it is spread over devices, in whatever memory.

    Raises:
      HostMemoryError, ValueError: as `place`.
    """
    _check(there.shard_shape(shape), dtype, there.mesh.local_devices[0])
    return there.with_memory_kind(MEMORY)


def _check(shape: tuple[int, ...], dtype: np.dtype, device: jax.Device) -> None:
    _check_shape(shape, dtype)
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if MEMORY not in kinds:
        raise HostMemoryError(
            f"{device.device_kind} ({device.platform}) cannot read host memory: JAX gives it "
            f"{', '.join(kinds) or 'no memories'}, not {MEMORY}; {_REMEDY}"
        )
    if device.platform == "tpu" and shape[1] < _TPU_WIDTH:
        raise HostMemoryError(
            f"a TPU fetches rows of at least {_TPU_WIDTH} numbers from host memory, not of "
            f"{shape[1]}; {_REMEDY}"
        )


def on_host(table: jax.Array) -> bool:
    """Whether a table is one from `place`, also while a program is traced."""
    return jax.typeof(table).memory_space == jax.memory.Space.Host


def rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows of a table, in device memory.

    Args:
      table: [V, W], from `place` or in device memory.
      ids: integers [...]; those out of range take the nearest row.

    Returns:
      [..., W] of the dtype of the table.
    """
    if not on_host(table):
        return jnp.take(table, ids, axis=0, mode="clip")
    _check_shape(table.shape, table.dtype)
    flat = jnp.clip(ids.reshape(-1), 0, table.shape[0] - 1)
    fetch = lambda _, index: (None, _fetch(table, index))
    _, found = jax.lax.scan(fetch, None, flat, unroll=_AT_ONCE)
    return found.reshape(*ids.shape, table.shape[1])


def _fetch(table: jax.Array, index: jax.Array) -> jax.Array:
    """One row [W]: fetches the aligned group of rows that share words, and takes it from there.

    The slice must go to the device as it is: anything else done to it XLA would leave to the host.
    """
    size = _rows_of_word(table.dtype)
    first = index & -size  # a power of two: so the compiler sees that the group is aligned
    group = jax.lax.dynamic_slice_in_dim(table, first, size)
    group = jax.device_put(group, jax.memory.Space.Device)
    return jax.lax.dynamic_index_in_dim(group, index - first, keepdims=False)


def _rows_of_word(dtype: np.dtype) -> int:
    return max(1, _WORD // jnp.dtype(dtype).itemsize)


def _check_shape(shape: tuple[int, ...], dtype: np.dtype) -> None:
    if len(shape) != 2:
        raise ValueError(f"a table in host memory has shape [V, W], not {list(shape)}")
    if shape[0] % _rows_of_word(dtype):
        raise ValueError(
            f"a table of {dtype} in host memory needs a multiple of {_rows_of_word(dtype)} rows, "
            f"not {shape[0]}: append a row of zeros, or keep it in device memory"
        )
