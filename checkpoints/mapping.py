"""Which tensors of a Hugging Face file make up a parameter, for every family.

Names are without the prefix that files put before them (`strip`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from da_jax.models.config import Attention, Experts, GatedDelta, Layer, ModelConfig

PREFIXES = ("model.language_model.", "language_model.model.", "model.", "language_model.")
_SKIPPED = (
    "vision_tower.", "visual.", "vision_embedder.", "embed_vision.", "multi_modal_projector.",
    "audio_tower.", "embed_audio.", "mtp.",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Part:
    """A tensor of the file, or some rows of it.

    Attributes:
      name: its name, without prefix.
      transpose: whether it is stored [.., out, in] and needed [.., in, out].
      rows: entries of one axis, and in what order; None for all.
      size: length of that axis in the file where `rows` is given.
      axis: which axis that is in the file; negative.
    """

    name: str
    transpose: bool = False
    rows: np.ndarray | None = None
    size: int = 0
    axis: int = -2

    def file_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the whole tensor in the file, where its part here has `shape`."""
        if self.transpose:
            shape = (*shape[:-2], shape[-1], shape[-2])
        if self.rows is None:
            return shape
        at = len(shape) + self.axis
        return (*shape[:at], self.size, *shape[at + 1 :])

    def index(self) -> tuple[Any, ...]:
        """Where the part stands in the tensor of the file."""
        if self.rows is None:
            return (...,)
        return (..., self.rows, *[slice(None)] * (-1 - self.axis))


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A parameter: one part, or parts stacked along a new first axis."""

    parts: tuple[Part, ...]
    stacked: bool = False


Recipes = dict[str, tuple[Recipe, ...]]  # {path: the ways in which files store it}


def strip(name: str) -> str:
    """A tensor's name without the prefix of its file."""
    return next((name.removeprefix(p) for p in PREFIXES if name.startswith(p)), name)


def ignored(name: str, config: ModelConfig) -> bool:
    """Whether a text model leaves out a tensor, given without prefix.

    These are vision, audio and multi-token prediction, what follows from other tensors, and keys
    and values of layers that read those of another layer.
    """
    if name.startswith(_SKIPPED) or name.endswith("rotary_emb.inv_freq"):
        return True
    if name == "lm_head.weight":
        return config.tie_embeddings
    parts = name.split(".")
    if len(parts) == 5 and parts[0] == "layers" and parts[1].isdigit() and parts[2] == "self_attn":
        layer = int(parts[1])
        mixer = config.layers[layer].mixer if layer < len(config.layers) else None
        shares = isinstance(mixer, Attention) and mixer.donor is not None
        return shares and parts[3] in ("k_proj", "v_proj", "k_norm")
    return False


def recipes(config: ModelConfig) -> Recipes:
    """The recipes of every parameter, by its dotted path."""
    out = {"embedding": _plain("embed_tokens.weight"), "norm.scale": _plain("norm.weight")}
    if not config.tie_embeddings:
        out["head.kernel"] = _kernel("lm_head.weight")
    if config.per_layer_inputs is not None:
        out["per_layer_embedding"] = _plain("embed_tokens_per_layer.weight")
        out["per_layer_projection.kernel"] = _kernel("per_layer_model_projection.weight")
        out["per_layer_norm.scale"] = _plain("per_layer_projection_norm.weight")
    for i, layer in enumerate(config.layers):
        for path, ways in _layer(config, layer).items():
            out[f"layers.{i}.{path}"] = tuple(_under(f"layers.{i}.", way) for way in ways)
    return out


def _under(prefix: str, recipe: Recipe) -> Recipe:
    parts = tuple(dataclasses.replace(part, name=prefix + part.name) for part in recipe.parts)
    return Recipe(parts, recipe.stacked)


def _plain(name: str) -> tuple[Recipe, ...]:
    return (Recipe((Part(name),)),)


def _kernel(name: str) -> tuple[Recipe, ...]:
    return (Recipe((Part(name, transpose=True),)),)


def _layer(config: ModelConfig, layer: Layer) -> Recipes:
    gemma = config.family in ("gemma3", "gemma4")
    out = {"input_norm.scale": _plain("input_layernorm.weight")}
    if isinstance(layer.mixer, GatedDelta):
        out |= _delta(layer.mixer, fused=config.family == "qwen3_next")
    else:
        out |= _attention(layer.mixer, norms=config.family != "llama")
    if gemma:
        out["post_attention_norm.scale"] = _plain("post_attention_layernorm.weight")
        out["pre_mlp_norm.scale"] = _plain("pre_feedforward_layernorm.weight")
        out["post_mlp_norm.scale"] = _plain("post_feedforward_layernorm.weight")
    else:
        out["post_norm.scale"] = _plain("post_attention_layernorm.weight")
    if layer.mlp:
        out |= _mlp("mlp", "mlp")
    if config.family == "gemma4":
        out |= _gemma4(config, layer)
    elif layer.experts is not None:
        out |= _qwen_experts(layer.experts)
    return out


def _attention(mixer: Attention, *, norms: bool) -> Recipes:
    used = "qo" if mixer.donor is not None else "qko" if mixer.k_eq_v else "qkvo"
    out = {f"attention.{x}.kernel": _kernel(f"self_attn.{x}_proj.weight") for x in used}
    if norms:
        for x in "q" if mixer.donor is not None else "qk":
            out[f"attention.{x}_norm.scale"] = _plain(f"self_attn.{x}_norm.weight")
    return out


def _mlp(ours: str, theirs: str) -> Recipes:
    return {
        f"{ours}.{x}.kernel": _kernel(f"{theirs}.{x}_proj.weight") for x in ("gate", "up", "down")
    }


def _delta(mixer: GatedDelta, *, fused: bool) -> Recipes:
    keys, channels = mixer.key_heads * mixer.key_dim, np.arange(mixer.channels)
    by_head = _by_head(mixer, *np.split(channels, (keys, 2 * keys)))
    conv = Part("linear_attn.conv1d.weight", rows=by_head, size=mixer.channels, axis=-3)
    out = {
        "delta.conv": (Recipe((conv,)),),
        "delta.a_log": _plain("linear_attn.A_log"),
        "delta.dt_bias": _plain("linear_attn.dt_bias"),
        "delta.norm.scale": _plain("linear_attn.norm.weight"),
        "delta.out.kernel": _kernel("linear_attn.out_proj.weight"),
    }
    if not fused:
        for x in "zba":
            out[f"delta.{x}.kernel"] = _kernel(f"linear_attn.in_proj_{x}.weight")
        qkv = Part("linear_attn.in_proj_qkv.weight", True, by_head, mixer.channels)
        out["delta.qkv_by_head.kernel"] = (Recipe((qkv,)),)
        return out
    # Qwen3-Next stores [key heads, q | k | v | z] and [key heads, b | a] of its value heads.
    ratio = mixer.value_heads // mixer.key_heads
    values = ratio * mixer.value_dim
    widths = [mixer.key_dim, mixer.key_dim, values, values]
    q, k, v, z = _grouped_rows(mixer.key_heads, widths)
    b, a = _grouped_rows(mixer.key_heads, [ratio, ratio])
    for name, rows, file in (
        ("qkv_by_head", _by_head(mixer, q, k, v), "qkvz"), ("z", z, "qkvz"), ("b", b, "ba"),
        ("a", a, "ba"),
    ):  # fmt: skip
        size = mixer.key_heads * (sum(widths) if file == "qkvz" else 2 * ratio)
        part = Part(f"linear_attn.in_proj_{file}.weight", True, rows, size)
        out[f"delta.{name}.kernel"] = (Recipe((part,)),)
    return out


def _by_head(mixer: GatedDelta, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Channels as the model has them: of each key head [q | k | v]."""
    parts = [x.reshape(mixer.key_heads, -1) for x in (q, k, v)]
    return np.concatenate(parts, axis=1).reshape(-1)


def _grouped_rows(groups: int, widths: list[int]) -> list[np.ndarray]:
    """Rows of each kind in a matrix whose rows are [groups, kinds of these widths]."""
    rows = np.arange(groups * sum(widths)).reshape(groups, -1)
    return [part.reshape(-1) for part in np.split(rows, np.cumsum(widths)[:-1], axis=1)]


def _qwen_experts(experts: Experts) -> Recipes:
    out = _experts(experts, "mlp.experts")
    out["moe.router.kernel"] = _kernel("mlp.gate.weight")
    if experts.shared:
        out |= _mlp("moe.shared", "mlp.shared_expert")
        out["moe.shared_gate.kernel"] = _kernel("mlp.shared_expert_gate.weight")
    return out


def _experts(experts: Experts, where: str) -> Recipes:
    """Experts in one tensor, [gate; up] fused, or in a tensor for each expert and projection."""

    def apart(x: str) -> Recipe:
        names = (f"{where}.{e}.{x}_proj.weight" for e in range(experts.count))
        return Recipe(tuple(Part(name, transpose=True) for name in names), stacked=True)

    out: Recipes = {}
    for start, x in ((0, "gate"), (experts.hidden, "up")):
        rows = np.arange(start, start + experts.hidden)
        fused = Part(f"{where}.gate_up_proj", True, rows, 2 * experts.hidden)
        out[f"moe.{x}"] = (Recipe((fused,)), apart(x))
    out["moe.down"] = (Recipe((Part(f"{where}.down_proj", True),)), apart("down"))
    return out


def _gemma4(config: ModelConfig, layer: Layer) -> Recipes:
    out = {"scalar": _plain("layer_scalar")}
    if config.per_layer_inputs is not None:
        out["per_layer_gate.kernel"] = _kernel("per_layer_input_gate.weight")
        out["per_layer_out.kernel"] = _kernel("per_layer_projection.weight")
        out["per_layer_norm.scale"] = _plain("post_per_layer_input_norm.weight")
    if layer.experts is not None:
        out |= _experts(layer.experts, "experts")
        out["moe.router.kernel"] = _kernel("router.proj.weight")
        out["moe.router_scale"] = _plain("router.scale")
        out["moe.expert_scale"] = _plain("router.per_expert_scale")
        out["post_dense_norm.scale"] = _plain("post_feedforward_layernorm_1.weight")
        out["pre_moe_norm.scale"] = _plain("pre_feedforward_layernorm_2.weight")
        out["post_moe_norm.scale"] = _plain("post_feedforward_layernorm_2.weight")
    return out
