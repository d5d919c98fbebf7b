"""Which part of a model each of several devices has: the one table of it, and of the heads.

Every rule asks whether a size divides evenly among the devices; what does not is on all of them.
An attention layer, a Gated DeltaNet, an MLP is divided as a whole or not at all, so each device
computes its part from the residual stream without the others, and the last product of the layer,
over the divided width, is summed across devices. Nothing here imports JAX.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from da_jax.models.config import Attention, GatedDelta, Layer, ModelConfig


def attention_shards(mixer: Attention, devices: int) -> int:
    """Among how many devices the heads of an attention layer are divided: `devices`, or 1.

    Query heads divide evenly. KV heads do too, or each serves a whole number of devices, all of
    which keep a copy of it.
    """
    heads = mixer.num_kv_heads
    divides = heads % devices == 0 or devices % heads == 0
    return devices if divides and mixer.num_heads % devices == 0 else 1


def kv_heads(mixer: Attention, devices: int) -> int:
    """KV heads that each device keeps."""
    return max(1, mixer.num_kv_heads // attention_shards(mixer, devices))


def delta_shards(mixer: GatedDelta, devices: int) -> int:
    """Among how many devices the heads of a Gated DeltaNet are divided: `devices`, or 1.

    A key head stays with the value heads that it serves.
    """
    return devices if mixer.key_heads % devices == 0 else 1


def _divided_keys(layer: Layer, devices: int) -> bool:
    mixer = layer.mixer
    assert isinstance(mixer, Attention)
    return attention_shards(mixer, devices) == devices and mixer.num_kv_heads % devices == 0


def _divided_queries(layer: Layer, devices: int) -> bool:
    assert isinstance(layer.mixer, Attention)
    return attention_shards(layer.mixer, devices) == devices


def _divided_delta(layer: Layer, devices: int) -> bool:
    assert isinstance(layer.mixer, GatedDelta)
    return delta_shards(layer.mixer, devices) == devices


def _divided_mlp(layer: Layer, devices: int) -> bool:
    return layer.mlp % devices == 0


def _divided_experts(layer: Layer, devices: int) -> bool:
    assert layer.experts is not None
    return layer.experts.hidden % devices == 0


def _divided_shared(layer: Layer, devices: int) -> bool:
    assert layer.experts is not None
    return layer.experts.shared % devices == 0


Rule = tuple[int, Callable[[Layer, int], bool]]  # the axis that is divided, and where it is
_LAYER: dict[str, Rule] = {
    "attention.q.kernel": (1, _divided_queries),
    "attention.k.kernel": (1, _divided_keys),
    "attention.v.kernel": (1, _divided_keys),
    "attention.o.kernel": (0, _divided_queries),
    "delta.qkv_by_head.kernel": (1, _divided_delta),
    "delta.z.kernel": (1, _divided_delta),
    "delta.b.kernel": (1, _divided_delta),
    "delta.a.kernel": (1, _divided_delta),
    "delta.conv": (0, _divided_delta),
    "delta.a_log": (0, _divided_delta),
    "delta.dt_bias": (0, _divided_delta),
    "delta.out.kernel": (0, _divided_delta),
    "mlp.gate.kernel": (1, _divided_mlp),
    "mlp.up.kernel": (1, _divided_mlp),
    "mlp.down.kernel": (0, _divided_mlp),
    "moe.gate": (2, _divided_experts),
    "moe.up": (2, _divided_experts),
    "moe.down": (1, _divided_experts),
    "moe.shared.gate.kernel": (1, _divided_shared),
    "moe.shared.up.kernel": (1, _divided_shared),
    "moe.shared.down.kernel": (0, _divided_shared),
}
_VOCABULARY = {"embedding": 0, "head.kernel": 1, "per_layer_embedding": 0}
_WHOLE = re.compile(
    r"(\w+_)?norm\.scale|(attention|delta)\.(\w_)?norm\.scale|scalar"
    r"|per_layer_(projection|gate|out)\.kernel"
    r"|moe\.(router\.kernel|router_scale|expert_scale|shared_gate\.kernel)"
)
"""Small, and wanted whole on every device."""


def divided_axis(config: ModelConfig, path: str, devices: int) -> int | None:
    """The axis along which a parameter is divided among devices, None for one that all have whole.

    Args:
      config: the model.
      path: dotted path of the parameter, as in `checkpoints.parameters`; `_scale` after that of an
        int8 matrix for its scales.
      devices: how many share the model.

    Raises:
      KeyError: there is no rule for such a parameter.
    """
    layer, _, rest = path.removeprefix("layers.").partition(".")
    inside = path.startswith("layers.")
    name = rest if inside else path
    matrix = name.removesuffix("_scale")
    if matrix != name and not _WHOLE.fullmatch(name):
        # A scale for each output: the axis that products sum over is gone.
        axis = divided_axis(config, path.removesuffix("_scale"), devices)
        return axis if axis is None or matrix == "embedding" else _of_scale(matrix, axis)
    if _WHOLE.fullmatch(name) or devices == 1:
        return None
    if inside and name in _LAYER:
        axis, divided = _LAYER[name]
        return axis if divided(config.layers[int(layer)], devices) else None
    if not inside and name in _VOCABULARY:
        inputs = config.per_layer_inputs
        rows = inputs.vocab_size if inputs and name[0] == "p" else config.vocab_size
        return _VOCABULARY[name] if rows % devices == 0 else None
    raise KeyError(f"no rule says how to divide the parameter {path} among devices")


def _of_scale(matrix: str, axis: int) -> int | None:
    summed = 1 if matrix in ("moe.gate", "moe.up", "moe.down") else 0
    return None if axis == summed else axis - 1


def check(config: ModelConfig, devices: int) -> None:
    """Refuses a number of devices of which none would have less of the layers than one alone.

    Raises:
      ValueError: with the numbers that work.
    """
    if devices > 1 and not _divides(config, devices):
        fine = [str(n) for n in range(2, 65) if _divides(config, n)]
        raise ValueError(
            f"{devices} devices cannot share this {config.family}: neither heads nor widths of any "
            f"layer divide by {devices}, so each would do all the work; choose "
            f"{', '.join(['1', *fine])}"
        )


def part(config: ModelConfig, devices: int) -> ModelConfig:
    """The model as each device has it, for what follows from heads and widths: caches, activations.

    The vocabulary stays whole.
    """
    return dataclasses.replace(
        config, layers=tuple(_part_of_layer(layer, devices) for layer in config.layers)
    )


def _part_of_layer(layer: Layer, devices: int) -> Layer:
    mixer, experts = layer.mixer, layer.experts
    if isinstance(mixer, GatedDelta):
        count = delta_shards(mixer, devices)
        mixer = dataclasses.replace(
            mixer, key_heads=mixer.key_heads // count, value_heads=mixer.value_heads // count
        )
    else:
        heads = mixer.num_heads // attention_shards(mixer, devices)
        keys = kv_heads(mixer, devices)
        mixer = dataclasses.replace(mixer, num_heads=heads, num_kv_heads=keys)
    if experts is not None:
        hidden, shared = experts.hidden, experts.shared
        hidden = hidden // devices if _divided_experts(layer, devices) else hidden
        shared = shared // devices if _divided_shared(layer, devices) else shared
        experts = dataclasses.replace(experts, hidden=hidden, shared=shared)
    mlp = layer.mlp // devices if _divided_mlp(layer, devices) else layer.mlp
    return Layer(mixer, mlp, experts)


def _divides(config: ModelConfig, devices: int) -> bool:
    """Whether any layer is divided."""
    for layer in config.layers:
        recurrent = isinstance(layer.mixer, GatedDelta)
        rules = [_divided_delta if recurrent else _divided_queries]
        rules += [_divided_mlp] * bool(layer.mlp)
        rules += [_divided_experts] * bool(layer.experts)
        if any(divided(layer, devices) for divided in rules):
            return True
    return False
