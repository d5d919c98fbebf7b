"""Every parameter of a model, from its configuration alone: path, shape, and how it is read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal

from da_jax.models.config import Attention, GatedDelta, Layer, ModelConfig


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A parameter of the model.

    Attributes:
      path: its place in the model.
      shape: its shape.
      scales: how many float32 scales come with it as int8, 0 where it stays as it is.
      read: whether a decode step reads all of it, only the rows of its tokens (`gather`), or the
        experts that its tokens chose (`routed`).
    """

    path: str
    shape: tuple[int, ...]
    scales: int = 0
    read: Literal["step", "gather", "routed"] = "step"

    @property
    def size(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)


def tensors(config: ModelConfig) -> Iterator[Tensor]:
    """Every parameter of the model, scales of quantised ones not counted."""
    width, rows = config.hidden_size, config.vocab_size
    yield Tensor(
        "embedding", (rows, width), rows, read="step" if config.tie_embeddings else "gather"
    )
    yield Tensor("norm.scale", (width,))
    if not config.tie_embeddings:
        yield _linear("head", width, rows)
    if inputs := config.per_layer_inputs:
        numbers = len(config.layers) * inputs.size
        yield Tensor("per_layer_embedding", (inputs.vocab_size, numbers), read="gather")
        yield _linear("per_layer_projection", width, numbers)
        yield Tensor("per_layer_norm.scale", (inputs.size,))
    for i, layer in enumerate(config.layers):
        for tensor in _layer(config, layer):
            yield dataclasses.replace(tensor, path=f"layers.{i}.{tensor.path}")


def _linear(name: str, inputs: int, outputs: int) -> Tensor:
    return Tensor(f"{name}.kernel", (inputs, outputs), outputs)


def _norm(name: str, width: int) -> Tensor:
    return Tensor(f"{name}.scale", (width,))


def _layer(config: ModelConfig, layer: Layer) -> Iterator[Tensor]:
    """The parameters of a layer, with paths inside it."""
    width, gemma = config.hidden_size, config.family in ("gemma3", "gemma4")
    norms = ["input_norm", "post_attention_norm", "pre_mlp_norm", "post_mlp_norm"]
    for name in norms if gemma else ["input_norm", "post_norm"]:
        yield _norm(name, width)
    if isinstance(layer.mixer, GatedDelta):
        yield from _delta(width, layer.mixer)
    else:
        yield from _attention(width, layer.mixer, qk_norm=config.family != "llama")
    if layer.mlp:
        yield from _mlp("mlp", width, layer.mlp)
    if layer.experts:
        yield from _experts(config, layer)
    if config.family == "gemma4":
        yield Tensor("scalar", (1,))
    if inputs := config.per_layer_inputs:
        yield _linear("per_layer_gate", width, inputs.size)
        yield _linear("per_layer_out", inputs.size, width)
        yield _norm("per_layer_norm", width)


def _attention(width: int, mixer: Attention, *, qk_norm: bool) -> Iterator[Tensor]:
    queries, keys = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
    yield _linear("attention.q", width, queries * (2 if mixer.output_gate else 1))
    yield _linear("attention.o", queries, width)
    if qk_norm:
        yield _norm("attention.q_norm", mixer.head_dim)
    if mixer.donor is not None:
        return
    yield _linear("attention.k", width, keys)
    if not mixer.k_eq_v:
        yield _linear("attention.v", width, keys)
    if qk_norm:
        yield _norm("attention.k_norm", mixer.head_dim)


def _delta(width: int, mixer: GatedDelta) -> Iterator[Tensor]:
    values = mixer.value_heads * mixer.value_dim
    yield _linear("delta.qkv_by_head", width, mixer.channels)
    yield _linear("delta.z", width, values)
    yield _linear("delta.out", values, width)
    for name in ("delta.b", "delta.a"):
        yield Tensor(f"{name}.kernel", (width, mixer.value_heads))
    yield Tensor("delta.conv", (mixer.channels, 1, mixer.conv_width))
    yield Tensor("delta.a_log", (mixer.value_heads,))
    yield Tensor("delta.dt_bias", (mixer.value_heads,))
    yield _norm("delta.norm", mixer.value_dim)


def _mlp(name: str, width: int, hidden: int) -> Iterator[Tensor]:
    yield _linear(f"{name}.gate", width, hidden)
    yield _linear(f"{name}.up", width, hidden)
    yield _linear(f"{name}.down", hidden, width)


def _experts(config: ModelConfig, layer: Layer) -> Iterator[Tensor]:
    width, experts = config.hidden_size, layer.experts
    assert experts is not None
    count, hidden = experts.count, experts.hidden
    yield Tensor("moe.router.kernel", (width, count))
    yield Tensor("moe.gate", (count, width, hidden), count * hidden, "routed")
    yield Tensor("moe.up", (count, width, hidden), count * hidden, "routed")
    yield Tensor("moe.down", (count, hidden, width), count * width, "routed")
    if experts.shared:
        yield from _mlp("moe.shared", width, experts.shared)
        yield Tensor("moe.shared_gate.kernel", (width, 1))
    if config.family == "gemma4":
        yield Tensor("moe.router_scale", (width,))
        yield Tensor("moe.expert_scale", (count,))
        for name in ("post_dense_norm", "pre_moe_norm", "post_moe_norm"):
            yield _norm(name, width)
