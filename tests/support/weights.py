"""Random weights of the tiny configurations, under the names of Hugging Face files.

A weight follows from its name and a seed alone (NumPy), so a checkpoint is made anywhere, and the
same model under other names (`cases.SAME_AS`, or another form) has the same numbers. No parameter
is near the value that training starts from: a forgotten scale, or w in place of 1 + w, is seen.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Literal

import numpy as np
from safetensors.numpy import save_file

from support.cases import CASES, family, layer_types, text_config, transformers_config

Form = Literal["published", "transformers"]
Shape = tuple[int, ...]


def tensors(
    config: dict, seed: int = 0, *, form: Form = "published", unused: bool = False
) -> dict[str, np.ndarray]:
    """Random float32 weights under their Hugging Face names.

    Args:
      config: one of `CASES`.
      seed: with another seed all numbers differ.
      form: names and experts as in published files, or as transformers 5.24 saves them.
      unused: also what published files hold and a text model does not need: keys and values of
        layers that read those of another layer, vision, audio and multi-token prediction.
    """
    text = text_config(config)
    shapes = _shapes(text)
    if unused:
        shapes |= _shared_kv_shapes(text)
    prefix = _prefix(config)
    apart = family(text) in ("qwen3_moe", "qwen3_next") or (
        form == "transformers" and family(text) == "qwen3_5"
    )
    out = {}
    for name, shape in shapes.items():
        value = _value(name, shape, seed, _centre(text, name))
        named = {name: value}
        if apart and ".experts." in name:
            named = _experts_apart(name, value)
        for short, part in named.items():
            out[short if short.startswith("lm_head") else prefix + short] = part
    if unused:
        out |= {name: _value(name, shape, seed, 0) for name, shape in _tower_shapes(config).items()}
    return out


def write_folder(
    case: str, folder: Path, form: Form = "published", *, unused: bool = False
) -> Path:
    """Writes the checkpoint of a case as a Hugging Face folder; for `unused` see `tensors`."""
    config = CASES[case]
    folder.mkdir(parents=True, exist_ok=True)
    written = config if form == "published" else transformers_config(config)
    (folder / "config.json").write_text(json.dumps(written))
    weights = tensors(config, form=form, unused=unused)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _prefix(config: dict) -> str:
    if "text_config" not in config:
        return "model."
    gemma3 = config["model_type"] == "gemma3"
    return "language_model.model." if gemma3 else "model.language_model."


def _value(name: str, shape: Shape, seed: int, centre: float) -> np.ndarray:
    """Random numbers for a tensor; `centre` is where the weights of a norm are when untrained."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    noise = rng.standard_normal(shape)
    leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if leaf == "A_log":
        value = rng.uniform(-1.0, 2.0, shape)
    elif leaf == "dt_bias":
        value = 0.5 * noise - 2.0
    elif leaf == "layer_scalar":
        value = 1.0 + 0.2 * noise
    elif leaf in ("scale", "per_expert_scale"):
        value = 1.0 + 0.3 * noise
    elif "norm" in leaf:
        value = centre + 0.3 * noise
    elif leaf in ("embed_tokens", "embed_tokens_per_layer", "lm_head"):
        value = 0.25 * noise
    else:
        value = noise * shape[-1] ** -0.5
    return value.astype(np.float32)


def _centre(text: dict, name: str) -> float:
    """0 where a norm multiplies by 1 + w, else 1."""
    one_plus = family(text) in ("gemma3", "qwen3_5", "qwen3_next")
    return 0.0 if one_plus and "linear_attn.norm" not in name else 1.0


def _shapes(text: dict) -> dict[str, Shape]:
    """Shapes of the text model by name after the prefix, experts fused."""
    hidden, vocab, count = text["hidden_size"], text["vocab_size"], text["num_hidden_layers"]
    out: dict[str, Shape] = {"embed_tokens.weight": (vocab, hidden)}
    for i, kind in enumerate(layer_types(text)):
        layer = _norm_shapes(text)
        layer |= _delta_shapes(text) if kind[0] == "l" else _attention_shapes(text, i, kind)
        layer |= _mlp_shapes(text, i)
        if ple := text.get("hidden_size_per_layer_input"):
            layer["per_layer_input_gate.weight"] = (ple, hidden)
            layer["per_layer_projection.weight"] = (hidden, ple)
            layer["post_per_layer_input_norm.weight"] = (hidden,)
        out |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    if ple := text.get("hidden_size_per_layer_input"):
        out["embed_tokens_per_layer.weight"] = (text["vocab_size_per_layer_input"], count * ple)
        out["per_layer_model_projection.weight"] = (count * ple, hidden)
        out["per_layer_projection_norm.weight"] = (ple,)
    out["norm.weight"] = (hidden,)
    if not text.get("tie_word_embeddings", True):
        out["lm_head.weight"] = (vocab, hidden)
    return out


def _norm_shapes(text: dict) -> dict[str, Shape]:
    names = ["input_layernorm", "post_attention_layernorm"]
    if family(text).startswith("gemma"):
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    if text.get("enable_moe_block"):
        names += [
            "post_feedforward_layernorm_1",
            "pre_feedforward_layernorm_2",
            "post_feedforward_layernorm_2",
        ]
    out: dict[str, Shape] = {f"{name}.weight": (text["hidden_size"],) for name in names}
    if family(text) == "gemma4":
        out["layer_scalar"] = (1,)
    return out


def _shares_kv(text: dict, layer: int) -> bool:
    return layer >= text["num_hidden_layers"] - text.get("num_kv_shared_layers", 0)


def _attention_shapes(
    text: dict, layer: int, kind: str, *, all_kv: bool = False
) -> dict[str, Shape]:
    hidden, d, heads = text["hidden_size"], text["head_dim"], text["num_attention_heads"]
    kv, kin = text["num_key_value_heads"], family(text)
    k_eq_v = text.get("attention_k_eq_v", False) and kind == "full_attention"
    if kin == "gemma4" and kind == "full_attention":
        d = text["global_head_dim"]
        kv = (k_eq_v and text["num_global_key_value_heads"]) or kv
    gated = 2 if kin in ("qwen3_5", "qwen3_next") else 1
    out: dict[str, Shape] = {
        "self_attn.q_proj.weight": (gated * heads * d, hidden),
        "self_attn.o_proj.weight": (hidden, heads * d),
    }
    if kin != "llama":
        out["self_attn.q_norm.weight"] = (d,)
    if all_kv or not _shares_kv(text, layer):
        out["self_attn.k_proj.weight"] = (kv * d, hidden)
        if not k_eq_v:
            out["self_attn.v_proj.weight"] = (kv * d, hidden)
        if kin != "llama":
            out["self_attn.k_norm.weight"] = (d,)
    return out


def _shared_kv_shapes(text: dict) -> dict[str, Shape]:
    return {
        f"layers.{i}.{name}": shape
        for i, kind in enumerate(layer_types(text))
        if _shares_kv(text, i)
        for name, shape in _attention_shapes(text, i, kind, all_kv=True).items()
    }


def _delta_shapes(text: dict) -> dict[str, Shape]:
    hidden, width = text["hidden_size"], text["linear_conv_kernel_dim"]
    values, keys = text["linear_num_value_heads"], text["linear_num_key_heads"]
    dv = text["linear_value_head_dim"]
    k, v = keys * text["linear_key_head_dim"], values * dv
    out = {
        "conv1d.weight": (2 * k + v, 1, width),
        "A_log": (values,),
        "dt_bias": (values,),
        "norm.weight": (dv,),
        "out_proj.weight": (hidden, v),
    }
    if family(text) == "qwen3_next":
        out |= {"in_proj_qkvz.weight": (2 * k + 2 * v, hidden)}
        out |= {"in_proj_ba.weight": (2 * values, hidden)}
    else:
        out |= {"in_proj_qkv.weight": (2 * k + v, hidden), "in_proj_z.weight": (v, hidden)}
        out |= {"in_proj_b.weight": (values, hidden), "in_proj_a.weight": (values, hidden)}
    return {f"linear_attn.{name}": shape for name, shape in out.items()}


def _gated_mlp(prefix: str, hidden: int, inner: int) -> dict[str, Shape]:
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }


def _mlp_shapes(text: dict, layer: int) -> dict[str, Shape]:
    hidden, gemma4 = text["hidden_size"], family(text) == "gemma4"
    sparse = text.get("enable_moe_block", False) if gemma4 else bool(text.get("num_experts"))
    sparse = sparse and layer not in text.get("mlp_only_layers", ())
    out = {}
    if gemma4 or not sparse:
        wide = 2 if text.get("use_double_wide_mlp") and _shares_kv(text, layer) else 1
        out |= _gated_mlp("mlp", hidden, wide * text["intermediate_size"])
    if not sparse:
        return out
    count, inner = text["num_experts"], text["moe_intermediate_size"]
    where = "experts" if gemma4 else "mlp.experts"
    out[f"{where}.gate_up_proj"] = (count, 2 * inner, hidden)
    out[f"{where}.down_proj"] = (count, hidden, inner)
    if gemma4:
        out |= {"router.scale": (hidden,), "router.per_expert_scale": (count,)}
        return out | {"router.proj.weight": (count, hidden)}
    out["mlp.gate.weight"] = (count, hidden)
    if shared := text.get("shared_expert_intermediate_size"):
        out |= _gated_mlp("mlp.shared_expert", hidden, shared)
        out["mlp.shared_expert_gate.weight"] = (1, hidden)
    return out


def _experts_apart(name: str, value: np.ndarray) -> dict[str, np.ndarray]:
    """One tensor for each expert and projection."""
    stem, projection = name.rsplit(".", 1)
    parts = {"down_proj": value}
    if projection == "gate_up_proj":
        parts = dict(zip(("gate_proj", "up_proj"), np.split(value, 2, axis=1)))
    return {
        f"{stem}.{expert}.{part}.weight": np.ascontiguousarray(matrix)
        for part, matrices in parts.items()
        for expert, matrix in enumerate(matrices)
    }


def _tower_shapes(config: dict) -> dict[str, Shape]:
    names = {
        "gemma3": ("vision_tower.vision_model.embeddings.position_embedding.weight",
                   "multi_modal_projector.mm_input_projection_weight"),
        "gemma4": ("model.vision_tower.patch_embedder.input_proj.weight",
                   "model.embed_vision.embedding_projection.weight",
                   "model.audio_tower.output_proj.weight",
                   "model.embed_audio.embedding_projection.weight"),
        "gemma4_unified": ("model.vision_embedder.patch_dense.weight",
                           "model.embed_audio.embedding_projection.weight"),
        "qwen3_5": ("model.visual.blocks.0.attn.qkv.weight", "mtp.fc.weight",
                    "mtp.layers.0.self_attn.q_proj.weight"),
        "qwen3_5_moe": ("model.visual.blocks.0.attn.qkv.weight", "mtp.fc.weight",
                        "mtp.layers.0.mlp.gate.weight"),
        "qwen3_next": ("mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight"),
    }  # fmt: skip
    return dict.fromkeys(names.get(config["model_type"], ()), (4, 4))
