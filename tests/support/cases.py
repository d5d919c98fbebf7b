"""Tiny configurations of every family, worded as in published `config.json` files."""

from __future__ import annotations

VOCAB = 512
_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
}
_QWEN3 = _SMALL | {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 3,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
}
_LLAMA = _QWEN3 | {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 8,
    "head_dim": 16,
    "mlp_bias": False,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-5,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_QWEN3_MOE = _QWEN3 | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "tie_word_embeddings": False,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
}
_DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_QWEN3_NEXT = (
    _QWEN3_MOE
    | _DELTA
    | _EXPERTS
    | {
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "num_hidden_layers": 4,
        "full_attention_interval": 4,
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
    }
)
_QWEN3_5_ROPE = {
    "rope_type": "default",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "mrope_interleaved": True,
    "mrope_section": [2, 1, 1],
}
_QWEN3_5 = (
    _SMALL
    | _DELTA
    | {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "num_hidden_layers": 4,
        "linear_num_value_heads": 6,  # three for each key head
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "rope_parameters": _QWEN3_5_ROPE,
    }
)
_QWEN3_5_MOE = {k: v for k, v in _QWEN3_5.items() if k != "intermediate_size"} | {
    **_EXPERTS,
    "model_type": "qwen3_5_moe_text",
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "linear_num_value_heads": 4,
}
_QWEN3_5_YARN = {k: v for k, v in _QWEN3_5.items() if k != "layer_types"} | {
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "rope_parameters": _QWEN3_5_ROPE | _YARN,
    "tie_word_embeddings": True,
}
_SIX = ["sliding_attention"] * 5 + ["full_attention"]
_GEMMA3 = _SMALL | {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 6,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,  # not head_dim, as in the largest model
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 8,
    "layer_types": _SIX,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
_GEMMA3_1B = {k: v for k, v in _GEMMA3.items() if k not in ("layer_types", "rope_parameters")} | {
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 16,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": None,
    "sliding_window_pattern": 3,
}
# The published multimodal files of Gemma 3 say little more of the text model than this.
_GEMMA3_SPARSE = {
    "model_type": "gemma3_text",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 7,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 8,
}
GEMMA3_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}
_GEMMA4 = _GEMMA3 | {
    "model_type": "gemma4_text",
    "architectures": ["Gemma4ForCausalLM"],
    "tie_word_embeddings": True,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB,
    "use_double_wide_mlp": False,
    "enable_moe_block": False,
    "use_bidirectional_attention": "vision",
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e6,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
_GEMMA4_MOE = _GEMMA4 | {
    "intermediate_size": 48,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
_GEMMA4_E4B = _GEMMA4 | {
    "intermediate_size": 96,
    "num_hidden_layers": 12,
    "layer_types": _SIX * 2,
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 5,
    "use_bidirectional_attention": None,
}
_GEMMA4_E2B = _GEMMA4_E4B | {
    "num_key_value_heads": 1,
    "num_hidden_layers": 10,
    "layer_types": _SIX[1:] * 2,
    "use_double_wide_mlp": True,
}
_NO_PLE = ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block")
_GEMMA4_UNIFIED = {k: v for k, v in _GEMMA4.items() if k not in _NO_PLE} | {
    "model_type": "gemma4_unified_text",
    "architectures": ["Gemma4UnifiedForCausalLM"],
}


def _nested(text: dict, model_type: str, architecture: str, **more: object) -> dict:
    """The configuration of the multimodal model around a text model."""
    text = {key: value for key, value in text.items() if key != "architectures"}
    tied = {"tie_word_embeddings": text.get("tie_word_embeddings", True)}
    top = {"model_type": model_type, "architectures": [architecture], "text_config": text}
    return top | tied | more


_NO_TOWERS = {"vision_config": None, "audio_config": None}
_SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "patch_size": 4,
}
CASES = {
    "qwen3": _QWEN3,
    "qwen3_untied": _QWEN3 | {"tie_word_embeddings": False, "num_key_value_heads": 4},
    "qwen3_yarn": _QWEN3 | {"rope_scaling": _YARN, "max_position_embeddings": 128},
    "qwen3_linear": _QWEN3 | {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "llama": _LLAMA,
    "llama_llama3": _LLAMA
    | {"tie_word_embeddings": False, "rope_parameters": _LLAMA3 | {"rope_theta": 1e4}},
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_moe_mixed": _QWEN3_MOE | {"mlp_only_layers": [0], "norm_topk_prob": False},
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_yarn": _QWEN3_5_YARN,
    "qwen3_5_moe": _QWEN3_5_MOE,
    "qwen3_5_cond": _nested(
        _QWEN3_5, "qwen3_5", "Qwen3_5ForConditionalGeneration", vision_config=_QWEN_VISION
    ),
    "qwen3_5_moe_cond": _nested(
        _QWEN3_5_MOE, "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration",
        vision_config=_QWEN_VISION,
    ),
    "gemma3_text": _GEMMA3,
    "gemma3_1b": _GEMMA3_1B,
    "gemma3_cond": _nested(
        _GEMMA3_SPARSE, "gemma3", "Gemma3ForConditionalGeneration", vision_config=_SIGLIP,
        mm_tokens_per_image=4,
    ),
    "gemma4_31b": _GEMMA4,
    "gemma4_26b_moe": _GEMMA4_MOE,
    "gemma4_e2b": _GEMMA4_E2B,
    "gemma4_e4b": _GEMMA4_E4B,
    "gemma4_31b_cond": _nested(
        _GEMMA4, "gemma4", "Gemma4ForConditionalGeneration", **_NO_TOWERS
    ),
    "gemma4_12b_cond": _nested(
        _GEMMA4_UNIFIED, "gemma4_unified", "Gemma4UnifiedForConditionalGeneration", **_NO_TOWERS
    ),
}  # fmt: skip
# Cases that are another case under other names: the same numbers, hence the same logits.
SAME_AS = {
    "qwen3_5_cond": "qwen3_5",
    "qwen3_5_moe_cond": "qwen3_5_moe",
    "gemma4_31b_cond": "gemma4_31b",
    "gemma4_12b_cond": "gemma4_31b",
}
MODELS = tuple(case for case in CASES if case not in SAME_AS)


def text_config(config: dict) -> dict:
    """The part of a configuration that describes the text model, complete."""
    text = config.get("text_config", config)
    return GEMMA3_DEFAULTS | text if family(text) == "gemma3" else text


def layer_types(config: dict) -> list[str]:
    """`full_attention`, `sliding_attention` or `linear_attention` for each layer."""
    text = text_config(config)
    if "layer_types" in text:
        return text["layer_types"]
    other, interval = "full_attention", 1
    if family(text) == "gemma3":
        other, interval = "sliding_attention", text.get("sliding_window_pattern", 6)
    elif "full_attention_interval" in text:
        other, interval = "linear_attention", text["full_attention_interval"]
    count = text["num_hidden_layers"]
    return ["full_attention" if (i + 1) % interval == 0 else other for i in range(count)]


def has_delta(case: str) -> bool:
    """Whether a case has layers of the gated delta rule."""
    return "linear_attention" in layer_types(CASES[case])


def transformers_config(config: dict) -> dict:
    """A configuration in the words in which transformers 5.24 saves it."""
    if "text_config" in config:
        return config | {"text_config": transformers_config(text_config(config))}
    out = dict(text_config(config)) | {"layer_types": layer_types(config)}
    if family(out) in ("llama", "qwen3_moe"):
        del out["layer_types"]
    rope = dict(out.get("rope_parameters") or out.get("rope_scaling") or {})
    rope.setdefault("rope_type", "default")
    if family(out) == "gemma3" and "rope_parameters" not in out:
        sliding = {"rope_type": "default", "rope_theta": out.get("rope_local_base_freq", 1e4)}
        rope["rope_theta"] = out.get("rope_theta", 1e6)
        rope = {"full_attention": rope, "sliding_attention": sliding}
    elif not family(out).startswith("gemma"):
        rope.setdefault("rope_theta", out.get("rope_theta"))
        if "partial_rotary_factor" in out:
            rope["partial_rotary_factor"] = out["partial_rotary_factor"]
    else:
        rope.pop("rope_type")
    out["rope_parameters"] = rope
    if family(out) == "qwen3_moe":
        out["num_local_experts"] = out.pop("num_experts")
    if family(out) == "gemma4":
        out["per_layer_config"] = _per_layer_config(out)
    old = (
        "rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor",
        "sliding_window_pattern", "full_attention_interval", "global_head_dim",
        "num_global_key_value_heads",
    )  # fmt: skip
    return {key: value for key, value in out.items() if key not in old}


def family(text: dict) -> str:
    """The model type without the marks of text models, and of what differs in other parts only."""
    kind = text["model_type"].removesuffix("_text")
    return {"gemma4_unified": "gemma4", "qwen3_5_moe": "qwen3_5"}.get(kind, kind)


def _per_layer_config(text: dict) -> dict[str, dict[str, int]]:
    """What differs in layers of full attention, under their zero-padded indices."""
    override = {"head_dim": text["global_head_dim"]}
    if text["attention_k_eq_v"] and text["num_global_key_value_heads"]:
        override["num_key_value_heads"] = text["num_global_key_value_heads"]
    digits = len(str(text["num_hidden_layers"] - 1))
    full = (i for i, kind in enumerate(layer_types(text)) if kind == "full_attention")
    return {f"{i:0{digits}}": override for i in full}
