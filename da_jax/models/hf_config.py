"""Model configurations from a Hugging Face `config.json`, as published or as transformers 5 saves.

A configuration that this library would compute differently from the checkpoint's authors is
refused: every field that changes the arithmetic is either understood or an error.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from da_jax.models import hf_fields
from da_jax.models.config import (
    Attention,
    ConfigError,
    Experts,
    Family,
    GatedDelta,
    Layer,
    ModelConfig,
    PerLayerInputs,
    RopeConfig,
)

FAMILIES: dict[str, Family] = {
    "llama": "llama",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "qwen3_next": "qwen3_next",
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
    "gemma4": "gemma4",
    "gemma4_text": "gemma4",
    "gemma4_unified": "gemma4",
    "gemma4_unified_text": "gemma4",
}
_FULL, _SLIDING, _RECURRENT = "full_attention", "sliding_attention", "linear_attention"
# Options that would change the arithmetic, and the only value of each that is computed here.
_FIXED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "pretraining_tp": (1,),
    "attn_output_gate": (True,),
    "output_gate_type": ("swish", "silu"),
}
# Fields that published files leave out because they are transformers' defaults.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
    "gemma4_text": {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144},
}
_ACTIVATIONS = {"gemma3": "gelu_pytorch_tanh", "gemma4": "gelu_pytorch_tanh"}


def read(folder: Path) -> ModelConfig:
    """Reads `folder/config.json`.

    Raises:
      ConfigError: for a missing or broken file, a model type or an option not computed here.
    """
    return parse(read_json(folder / "config.json"))


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """The model that a parsed `config.json` describes; the text part of a multimodal one.

    Raises:
      ConfigError: for a model type or an option that is not computed here, or a value that cannot
        be, such as a text for a number.
    """
    hf_fields.check(config)
    outer = config.get("model_type")
    if outer not in FAMILIES:
        raise ConfigError(
            f"model_type {outer!r} is not supported; known: {', '.join(FAMILIES)} (Llama-type "
            "without biases, such as SmolLM2)"
        )
    text = _text_part(config)
    family = FAMILIES[text["model_type"]]
    if quantized := config.get("quantization_config") or text.get("quantization_config"):
        raise ConfigError(
            f"the checkpoint is quantised ({quantized.get('quant_method', quantized)}); only "
            "bfloat16, float16 and float32 weights are read. Take the original repository, and "
            "quantise to int8 here if it must be small"
        )
    for option, allowed in _FIXED.items():
        if text.get(option) is not None and text[option] not in allowed:
            raise ConfigError(
                f"{option}={text[option]!r} is not supported for {family} (only {allowed[0]!r})"
            )
    act = text.get("hidden_activation") or text.get("hidden_act")
    if act not in (None, _ACTIVATIONS.get(family, "silu")):
        raise ConfigError(
            f"activation {act!r} is not supported for {family} (only "
            f"{_ACTIVATIONS.get(family, 'silu')!r})"
        )
    return ModelConfig(
        family=family,
        vocab_size=_need(text, "vocab_size"),
        hidden_size=_need(text, "hidden_size"),
        layers=_LAYERS[family](text),
        max_positions=_need(text, "max_position_embeddings"),
        rms_eps=_need(text, "rms_norm_eps"),
        tie_embeddings=_tied(config, text, family),
        softcap=text.get("final_logit_softcapping") if family in _ACTIVATIONS else None,
        per_layer_inputs=_per_layer_inputs(text) if family == "gemma4" else None,
    )


def rope(config: Mapping[str, Any], parameters: Mapping[str, Any] | None = None) -> RopeConfig:
    """Rotary embedding of a configuration.

    Args:
      config: the text configuration; read for both spellings, `rope_parameters`, and `rope_theta`
        with `rope_scaling`.
      parameters: RoPE parameters of one kind of layer, where each has its own.
    """
    if parameters is None:
        parameters = _rope_parameters(config)
    values = {key: value for key, value in parameters.items() if value is not None}
    kind = values.pop("rope_type", None) or values.pop("type", None) or "default"
    values.pop("type", None)
    for name in ("mrope_interleaved", "mrope_section"):
        values.pop(name, None)  # for text all three rows of positions are equal
    theta = values.pop("rope_theta", None) or config.get("rope_theta") or RopeConfig.theta
    partial = values.pop("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
    if kind not in ("default", "linear", "yarn", "llama3", "proportional"):
        raise ConfigError(
            f"rope_type {kind!r} is not supported; known: default, linear, yarn, llama3, "
            "proportional"
        )
    original = values.pop("original_max_position_embeddings", None)
    own = {"theta", "kind", "partial", "original_max_positions"}  # ours, under other names there
    known = {f.name for f in dataclasses.fields(RopeConfig)} - own
    if unknown := sorted(values.keys() - known):
        raise ConfigError(
            f"unknown RoPE parameters {unknown} (rope_type {kind!r}): this library would "
            "ignore them and compute other positions than the checkpoint's authors"
        )
    if kind in ("yarn", "llama3"):
        first = config.get("original_max_position_embeddings")  # at the top it goes before
        values["original_max_positions"] = (
            first or original or config.get("max_position_embeddings")
        )
    if kind in ("linear", "yarn", "llama3") and "factor" not in values:
        raise ConfigError(f"rope_type {kind!r} needs a factor; the configuration has none")
    return RopeConfig(theta=float(theta), kind=kind, partial=float(partial), **values)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object; a missing or broken file is a ConfigError that names it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; is {path.parent} a model folder?") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} is no valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value


def _rope_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """`rope_parameters` or, as older files call it, `rope_scaling`."""
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if new and old and old != new:
        raise ConfigError(
            f"both rope_parameters {dict(new)} and rope_scaling {dict(old)} are there; put all of "
            "it into rope_parameters and remove rope_scaling"
        )
    return new or old


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config") or config
    if text.get("model_type") not in FAMILIES:
        raise ConfigError(
            f"text_config.model_type {text.get('model_type')!r} is not supported; known: "
            f"{', '.join(FAMILIES)}"
        )
    return _DEFAULTS.get(text["model_type"], {}) | dict(text)


def _tied(config: Mapping[str, Any], text: Mapping[str, Any], family: Family) -> bool:
    default = family in ("gemma3", "gemma4")
    for source in (config, text):
        if source.get("tie_word_embeddings") is not None:
            return bool(source["tie_word_embeddings"])
    return default


def _need(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise ConfigError(
            f"config.json lacks {key}; is it the file of a {config.get('model_type')}?"
        )
    return config[key]


def _layer_types(config: Mapping[str, Any], default: Any, known: tuple[str, ...]) -> list[str]:
    """The kind of each layer: `layer_types`, or what `default(index)` says."""
    count = _need(config, "num_hidden_layers")
    types = list(config.get("layer_types") or map(default, range(count)))
    if len(types) != count:
        raise ConfigError(f"layer_types names {len(types)} layers of num_hidden_layers {count}")
    if strange := sorted(set(types) - set(known)):
        raise ConfigError(
            f"layer_types {strange} are not supported for {config.get('model_type')}; known: "
            f"{', '.join(known)}"
        )
    return types


def _attention(config: Mapping[str, Any], **changes: Any) -> Attention:
    """The attention of models where all layers have one shape."""
    heads = _need(config, "num_attention_heads")
    head_dim = config.get("head_dim") or _need(config, "hidden_size") // heads
    return Attention(
        **dict(
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
        )
        | changes
    )


def _dense(config: Mapping[str, Any]) -> tuple[Layer, ...]:
    """Qwen 3 and Llama-type models."""
    types = _layer_types(config, lambda i: _FULL, (_FULL,))
    mixer = _attention(config, rope=_whole_rope(config))
    layer = Layer(mixer, _need(config, "intermediate_size"))
    return (layer,) * len(types)


def _whole_rope(config: Mapping[str, Any]) -> RopeConfig:
    """The rotary embedding of models where all of a head rotates."""
    embedding = rope(config)
    if embedding.partial != 1:
        raise ConfigError(
            f"partial_rotary_factor {embedding.partial} is not supported for "
            f"{config['model_type']} (only 1)"
        )
    return embedding


def _experts(config: Mapping[str, Any], *, normalize: bool) -> Experts:
    return Experts(
        count=config.get("num_local_experts") or _need(config, "num_experts"),
        top_k=_need(config, "num_experts_per_tok"),
        hidden=_need(config, "moe_intermediate_size"),
        shared=config.get("shared_expert_intermediate_size") or 0,
        normalize=normalize,
    )


def _has_experts(config: Mapping[str, Any], index: int) -> bool:
    step = config.get("decoder_sparse_step") or 1
    dense = config.get("mlp_only_layers") or ()
    experts = config.get("num_local_experts") or config.get("num_experts")
    return bool(experts) and index not in dense and (index + 1) % step == 0


def _qwen3_moe(config: Mapping[str, Any]) -> tuple[Layer, ...]:
    types = _layer_types(config, lambda i: _FULL, (_FULL,))
    mixer = _attention(config, rope=_whole_rope(config))
    dense = Layer(mixer, config.get("intermediate_size") or 0)
    normalize = bool(config.get("norm_topk_prob", False))
    sparse = Layer(mixer, 0, _experts(config, normalize=normalize))
    return tuple(sparse if _has_experts(config, i) else dense for i in range(len(types)))


def _hybrid(config: Mapping[str, Any]) -> tuple[Layer, ...]:
    """Qwen3-Next and Qwen 3.5 / 3.6 / 3.8: three Gated DeltaNet layers to one of attention."""
    every = config.get("full_attention_interval") or 4
    types = _layer_types(
        config, lambda i: _RECURRENT if (i + 1) % every else _FULL, (_RECURRENT, _FULL)
    )
    embedding = rope(config)
    if "partial_rotary_factor" not in {**config, **(config.get("rope_parameters") or {})}:
        embedding = dataclasses.replace(embedding, partial=0.25)
    mixers: dict[str, Attention | GatedDelta] = {
        _FULL: _attention(config, rope=embedding, output_gate=True),
        _RECURRENT: GatedDelta(
            key_heads=_need(config, "linear_num_key_heads"),
            value_heads=_need(config, "linear_num_value_heads"),
            key_dim=_need(config, "linear_key_head_dim"),
            value_dim=_need(config, "linear_value_head_dim"),
            conv_width=_need(config, "linear_conv_kernel_dim"),
        ),
    }
    # Only Qwen3-Next asks; the others always do.
    asks = FAMILIES[config["model_type"]] == "qwen3_next"
    normalize = bool(config.get("norm_topk_prob", True)) if asks else True
    layers = []
    for i, kind in enumerate(types):
        if _has_experts(config, i):
            layers.append(Layer(mixers[kind], 0, _experts(config, normalize=normalize)))
        else:
            layers.append(Layer(mixers[kind], _need(config, "intermediate_size")))
    return tuple(layers)


def _ropes(config: Mapping[str, Any], defaults: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Rotary embeddings of full and of sliding layers: `rope_parameters`, or the old fields.

    As in transformers a theta inside goes before the one at the top, and that before the default.
    """
    given = _rope_parameters(config)
    if _FULL not in given and _SLIDING not in given:
        given = {_FULL: given}
    top = {_FULL: config.get("rope_theta"), _SLIDING: config.get("rope_local_base_freq")}
    ropes = {}
    for kind, default in defaults.items():
        own = given.get(kind) or default
        theta = (given.get(kind) or {}).get("rope_theta") or top[kind] or default["rope_theta"]
        ropes[kind] = rope(config, {**own, "rope_theta": theta})
    return ropes


def _gemma3(config: Mapping[str, Any]) -> tuple[Layer, ...]:
    """Five sliding layers to one full; the last one need not be full."""
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    types = _layer_types(
        config, lambda i: _SLIDING if (i + 1) % every else _FULL, (_SLIDING, _FULL)
    )
    ropes = _ropes(config, {_FULL: {"rope_theta": 1e6}, _SLIDING: {"rope_theta": 1e4}})
    _refuse_bidirectional(config)
    scale = _need(config, "query_pre_attn_scalar") ** -0.5
    window = _need(config, "sliding_window")
    mixers = {
        _FULL: _attention(config, rope=ropes[_FULL], scale=scale),
        _SLIDING: _attention(config, rope=ropes[_SLIDING], scale=scale, window=window),
    }
    return tuple(Layer(mixers[kind], _need(config, "intermediate_size")) for kind in types)


def _refuse_bidirectional(config: Mapping[str, Any]) -> None:
    if config.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise ConfigError(
            f"use_bidirectional_attention={config['use_bidirectional_attention']!r} is not "
            "supported; only causal text models (None or 'vision') are computed here"
        )


def _gemma4(config: Mapping[str, Any]) -> tuple[Layer, ...]:
    """Sliding and full layers of different shapes, shared keys and values, experts."""
    _refuse_bidirectional(config)
    count = _need(config, "num_hidden_layers")
    types = _layer_types(
        config,
        lambda i: _FULL if (i + 1) % 6 == 0 or i == count - 1 else _SLIDING,
        (_SLIDING, _FULL),
    )
    types[-1] = _FULL  # transformers makes it so, whatever the file says
    ropes = _ropes(
        config,
        {
            _FULL: {
                "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6,
            },
            _SLIDING: {"rope_theta": 1e4},
        },
    )  # fmt: skip
    shapes = _gemma4_shapes(config, types)
    first_shared = count - (config.get("num_kv_shared_layers") or 0)
    last = {kind: i for i, kind in enumerate(types[:first_shared])}
    experts = None
    if config.get("enable_moe_block"):
        experts = Experts(
            count=_need(config, "num_experts"),
            top_k=_need(config, "top_k_experts"),
            hidden=_need(config, "moe_intermediate_size"),
        )
    layers = []
    for i, kind in enumerate(types):
        shared = i >= first_shared
        if shared and kind not in last:
            raise ConfigError(
                f"layer {i} ({kind}) shares keys and values, but no {kind} layer before "
                f"{first_shared} has any (num_kv_shared_layers {config['num_kv_shared_layers']})"
            )
        head_dim, kv_heads = shapes[i]
        mixer = Attention(
            num_heads=_need(config, "num_attention_heads"),
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rope=ropes[kind],
            scale=1.0,
            window=_need(config, "sliding_window") if kind == _SLIDING else None,
            donor=last[kind] if shared else None,
            k_eq_v=bool(config.get("attention_k_eq_v")) and kind == _FULL and not shared,
        )
        wide = 2 if shared and config.get("use_double_wide_mlp") else 1
        layers.append(Layer(mixer, wide * _need(config, "intermediate_size"), experts))
    return tuple(layers)


def _gemma4_shapes(config: Mapping[str, Any], types: list[str]) -> list[tuple[int, int]]:
    """(head_dim, KV heads) of each layer.

    Published files say `global_head_dim` and `num_global_key_value_heads`; transformers 5 writes
    `per_layer_config` instead, with zero-padded keys. The KV heads of full layers differ only where
    keys and values share a projection.
    """
    per_layer = {int(k): v or {} for k, v in (config.get("per_layer_config") or {}).items()}
    head_dim = config.get("head_dim") or 256
    kv_heads = _need(config, "num_key_value_heads")
    full_dim = config.get("global_head_dim") or (head_dim if per_layer else 512)
    full_heads = kv_heads
    if config.get("attention_k_eq_v"):
        full_heads = config.get("num_global_key_value_heads") or kv_heads
    out = []
    for i, kind in enumerate(types):
        dim, heads = (full_dim, full_heads) if kind == _FULL else (head_dim, kv_heads)
        own = per_layer.get(i, {})
        out.append((own.get("head_dim") or dim, own.get("num_key_value_heads") or heads))
    return out


def _per_layer_inputs(config: Mapping[str, Any]) -> PerLayerInputs | None:
    size = config.get("hidden_size_per_layer_input")
    if not size:
        return None
    return PerLayerInputs(size, _need(config, "vocab_size_per_layer_input"))


_LAYERS = {
    "llama": _dense,
    "qwen3": _dense,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _hybrid,
    "qwen3_5": _hybrid,
    "qwen3_5_moe": _hybrid,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
}
