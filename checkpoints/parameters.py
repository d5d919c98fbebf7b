"""The parameters of a model by dotted path, and where they come from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from da_jax.checkpoints.sources import Cast, Int8, Scales, Source

Shardings = Callable[[str, tuple[int, ...]], jax.sharding.Sharding]  # of a path and its shape


def one_device(path: str, shape: tuple[int, ...]) -> jax.sharding.Sharding:
    """Everything on the first device."""
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def flat_parameters(model: nnx.Module) -> dict[str, nnx.Variable]:
    """The parameters of a model by dotted path, for example `layers.0.attention.q.kernel`."""
    state = nnx.state(model, nnx.Param)
    return {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}


def assign(model: nnx.Module, values: Mapping[str, jax.Array]) -> None:
    """Sets the parameters of a model from {dotted path: array}."""
    parameters = flat_parameters(model)
    for path, value in values.items():
        parameters[path].set_value(value)
    keys = (tuple(int(k) if k.isdigit() else k for k in path.split(".")) for path in parameters)
    nnx.update(model, nnx.from_flat_state(list(zip(keys, parameters.values()))))


def wanted(
    stored: Mapping[str, Source],
    parameters: Mapping[str, nnx.Variable],
    as_stored: Collection[str] = (),
) -> dict[str, Source]:
    """Sources of a model's parameters in the dtypes that it has them in.

    Args:
      stored: floating point sources of all matrices, norms and so on.
      parameters: the model's, abstract. One that is int8 has its scales beside it, under its own
        path and `_scale`; both are computed from the stored one.
      as_stored: paths of parameters that keep the dtype of the file.

    Reading raises a CheckpointError for a number that its dtype cannot hold.
    """
    leaves = {path: leaf.get_value() for path, leaf in parameters.items()}
    out: dict[str, Source] = {}
    for path in (path for path, leaf in leaves.items() if leaf.dtype == jnp.int8):
        # The embedding is looked up by row; all others are products over the axis before last.
        scales = Scales(stored[path], axis=-1 if path == "embedding" else -2, name=path)
        out[path], out[f"{path}_scale"] = Int8(scales), scales
    for path in (path for path in leaves if path not in out):  # in the order of the model
        kept = path in as_stored
        out[path] = stored[path] if kept else Cast(stored[path], leaves[path].dtype, name=path)
    return out
