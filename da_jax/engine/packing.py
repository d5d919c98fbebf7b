"""Many small inputs of a program as one array: moving each by itself costs more than the rest.

Leaves are int32, uint32, float32 or bool; each element takes one int32.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def pack(tree: Any) -> np.ndarray:
    """int32 [N] that holds every leaf of a pytree of host arrays, one after the other."""
    return np.concatenate([_as_int32(leaf) for leaf in jax.tree.leaves(tree)])


def unpack(flat: jax.Array, like: Any) -> Any:
    """The pytree that `pack` was given, from its array [N]; `like` has its shapes and dtypes."""
    leaves, structure = jax.tree.flatten(like)
    found, start = [], 0
    for leaf in leaves:
        end = start + math.prod(leaf.shape)
        part = flat[start:end].reshape(leaf.shape)
        if leaf.dtype == bool:
            part = part != 0
        elif leaf.dtype != np.int32:
            part = jax.lax.bitcast_convert_type(part, jnp.dtype(leaf.dtype))
        found.append(part)
        start = end
    return jax.tree.unflatten(structure, found)


def _as_int32(leaf: np.ndarray) -> np.ndarray:
    flat = np.ascontiguousarray(leaf).reshape(-1)
    return flat.astype(np.int32) if flat.dtype == bool else flat.view(np.int32)
