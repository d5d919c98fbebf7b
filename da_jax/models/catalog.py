"""Published model sizes by name, as the `config.json` they come with.

An entry holds what tells one size of a family from another and expands to the text part of the
published file, so `hf_config.parse` stays the only reader. With it `da-jax info` plans for a model
that was never downloaded. Sizes whose layout is not public are left out.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import Any

HfConfig = dict[str, Any]


def names() -> tuple[str, ...]:
    """The names of all sizes, as their authors spell them, grouped by family."""
    return tuple(_SIZES)


def find(name: str) -> str | None:
    """The catalogue's spelling of a name or hub id, None where there is no such size.

    The owner, upper and lower case, and endings that do not change the shape do not matter:
    `google/gemma-3-27b-it` is `gemma-3-27b`. Paths, such as `/models/gemma-3-27b`, are no names.
    """
    if not _NAME.fullmatch(name):
        return None
    key = _last(name).replace("_", "-").removeprefix("meta-")
    key = re.sub(r"-(instruct|thinking)(?=-2507$)", "", key)
    while key not in _SPELLING:
        shorter = re.sub(_ENDINGS, "", key)
        if shorter == key:
            return None
        key = shorter
    return _SPELLING[key]


def hf_config(name: str) -> HfConfig:
    """The text configuration of a size, as its `config.json` would say it.

    Args:
      name: as for `find`.

    Raises:
      ValueError: for a name that is not here; it tells the nearest ones.
    """
    spelling = find(name)
    if spelling is None:
        raise ValueError(unknown(name))
    return _SIZES[spelling]()


def unknown(name: str) -> str:
    """What to say about a name that is not here: the nearest ones, or all."""
    key = _last(name)
    near = [_SPELLING[k] for k in difflib.get_close_matches(key, _SPELLING, n=3, cutoff=0.5)]
    return f"unknown model {name!r}; " + (
        f"the nearest are {', '.join(near)}" if near else f"known are {', '.join(_SIZES)}"
    )


def _last(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1].lower()


_NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*/?")  # `name` or `owner/name`
_ENDINGS = r"-(it|pt|base|instruct|thinking|chat|hf|text)$"
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"


def _pattern(layers: int, every: int, other: str) -> list[str]:
    return [_FULL if (i + 1) % every == 0 else other for i in range(layers)]


def _dense(*sizes: int) -> HfConfig:
    hidden, layers, mlp, heads, kv_heads, head_dim = sizes
    return {
        "hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": mlp,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
    }  # fmt: skip


def _gemma4(
    hidden: int, layers: int, mlp: int, heads: int, kv_heads: int, full_kv_heads: int | None,
    *, every: int = 6, window: int = 1024, positions: int = 262_144, **more: Any,
) -> HfConfig:  # fmt: skip
    return {
        "model_type": "gemma4_text",
        **_dense(hidden, layers, mlp, heads, kv_heads, 256),
        "vocab_size": 262_144,
        "max_position_embeddings": positions,
        "global_head_dim": 512,
        "num_global_key_value_heads": full_kv_heads,
        "attention_k_eq_v": full_kv_heads is not None,
        "sliding_window": window,
        "layer_types": _pattern(layers, every, _SLIDING),
        "rope_parameters": {
            _FULL: {
                "rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25,
            },
            _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        },
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        **more,
    }  # fmt: skip


def _gemma4_small(
    hidden: int, layers: int, mlp: int, heads: int, kv_heads: int,
    *, shared: int, every: int, wide: bool,
) -> HfConfig:  # fmt: skip
    return _gemma4(
        hidden, layers, mlp, heads, kv_heads, None, every=every, window=512, positions=131_072,
        hidden_size_per_layer_input=256, vocab_size_per_layer_input=262_144,
        num_kv_shared_layers=shared, use_double_wide_mlp=wide,
    )  # fmt: skip


def _gemma3(
    hidden: int, layers: int, mlp: int, heads: int, kv_heads: int, head_dim: int = 256,
    *, scalar: int = 256, window: int = 1024, positions: int = 131_072, vocab: int = 262_208,
    factor: float | None = 8.0,
) -> HfConfig:  # fmt: skip
    far = {"rope_type": "linear", "factor": factor} if factor else {"rope_type": "default"}
    return {
        "model_type": "gemma3_text",
        **_dense(hidden, layers, mlp, heads, kv_heads, head_dim),
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "query_pre_attn_scalar": scalar,
        "sliding_window": window,
        "layer_types": _pattern(layers, 6, _SLIDING),
        "rope_parameters": {
            _FULL: {**far, "rope_theta": 1e6},
            _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        },
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }


def _gemma3_small(*sizes: int) -> HfConfig:
    return _gemma3(*sizes, window=512, positions=32_768, vocab=262_144, factor=None)


def _qwen3(
    *sizes: int, tied: bool = False, theta: float = 1e6, positions: int = 40_960, **more: Any
) -> HfConfig:
    return {
        "model_type": "qwen3",
        **_dense(*sizes, 128),
        "vocab_size": 151_936,
        "max_position_embeddings": positions,
        "rope_theta": theta,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        **more,
    }


def _qwen3_moe(*sizes: int, experts: int, theta: float = 1e6, positions: int = 40_960) -> HfConfig:
    return _qwen3(
        *sizes, theta=theta, positions=positions, model_type="qwen3_moe",
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=experts,
        norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
    )  # fmt: skip


def _qwen3_5(*sizes: int, value_heads: int, tied: bool = False, **more: Any) -> HfConfig:
    layers = sizes[1]
    return {
        "model_type": "qwen3_5_text",
        **_dense(*sizes, 256),
        "vocab_size": 248_320,
        "max_position_embeddings": 262_144,
        "layer_types": _pattern(layers, 4, _LINEAR),
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
            "mrope_interleaved": True, "mrope_section": [11, 11, 10],
        },
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        **more,
    }  # fmt: skip


def _qwen3_5_moe(
    hidden: int, layers: int, heads: int, *, value_heads: int, count: int, top_k: int, width: int
) -> HfConfig:
    config = _qwen3_5(
        hidden, layers, 0, heads, 2, value_heads=value_heads, model_type="qwen3_5_moe_text",
        num_experts=count, num_experts_per_tok=top_k, moe_intermediate_size=width,
        shared_expert_intermediate_size=width,
    )  # fmt: skip
    del config["intermediate_size"]
    return config


def _qwen3_next() -> HfConfig:
    return {
        **_qwen3_5_moe(2048, 48, 16, value_heads=32, count=512, top_k=10, width=512),
        "model_type": "qwen3_next",
        "vocab_size": 151_936,
        "intermediate_size": 5120,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
        },
    }  # fmt: skip


def _llama(
    *sizes: int, vocab: int = 128_256, theta: float = 5e5, positions: int = 131_072,
    factor: float | None = 8.0, tied: bool = False,
) -> HfConfig:  # fmt: skip
    scaling = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    return {
        "model_type": "llama",
        **_dense(*sizes),
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "rope_theta": theta,
        "rope_scaling": scaling if factor else None,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
    }


def _smollm2(*sizes: int, theta: float = 1e5) -> HfConfig:
    return _llama(*sizes, 64, vocab=49_152, theta=theta, positions=8192, factor=None, tied=True)


# [sec]: known from secondary pages or training recipes, not from a copy of the published file.
_SIZES: dict[str, Callable[[], HfConfig]] = {
    "gemma-4-31B": lambda: _gemma4(5376, 60, 21_504, 32, 16, 4),
    "gemma-4-26B-A4B": lambda: _gemma4(
        2816, 30, 2112, 16, 8, 2,
        enable_moe_block=True, num_experts=128, top_k_experts=8, moe_intermediate_size=704,
    ),
    "gemma-4-12B": lambda: _gemma4(3840, 48, 15_360, 16, 8, 1, model_type="gemma4_unified_text"),
    "gemma-4-E4B": lambda: _gemma4_small(2560, 42, 10_240, 8, 2, shared=18, every=6, wide=False),
    "gemma-4-E2B": lambda: _gemma4_small(1536, 35, 6144, 8, 1, shared=20, every=5, wide=True),
    "gemma-3-27b": lambda: _gemma3(5376, 62, 21_504, 32, 16, 128, scalar=168),
    "gemma-3-12b": lambda: _gemma3(3840, 48, 15_360, 16, 8),
    "gemma-3-4b": lambda: _gemma3(2560, 34, 10_240, 8, 4),
    "gemma-3-1b": lambda: _gemma3_small(1152, 26, 6912, 4, 1),
    "gemma-3-270m": lambda: _gemma3_small(640, 18, 2048, 4, 1),  # [sec]
    "Qwen3-0.6B": lambda: _qwen3(1024, 28, 3072, 16, 8, tied=True),
    "Qwen3-1.7B": lambda: _qwen3(2048, 28, 6144, 16, 8, tied=True),
    "Qwen3-4B": lambda: _qwen3(2560, 36, 9728, 32, 8, tied=True),
    "Qwen3-4B-2507": lambda: _qwen3(
        2560, 36, 9728, 32, 8, tied=True, theta=5e6, positions=262_144,  # [sec]
    ),
    "Qwen3-8B": lambda: _qwen3(4096, 36, 12_288, 32, 8),
    "Qwen3-14B": lambda: _qwen3(5120, 40, 17_408, 40, 8),
    "Qwen3-32B": lambda: _qwen3(5120, 64, 25_600, 64, 8),
    "Qwen3-30B-A3B": lambda: _qwen3_moe(2048, 48, 6144, 32, 4, experts=768),  # [sec]
    "Qwen3-30B-A3B-2507": lambda: _qwen3_moe(
        2048, 48, 6144, 32, 4, experts=768, theta=1e7, positions=262_144,  # [sec]
    ),
    "Qwen3-235B-A22B": lambda: _qwen3_moe(4096, 94, 12_288, 64, 4, experts=1536),  # [sec]
    "Qwen3-235B-A22B-2507": lambda: _qwen3_moe(
        4096, 94, 12_288, 64, 4, experts=1536, theta=5e6, positions=262_144,  # [sec]
    ),
    "Qwen3.5-0.8B": lambda: _qwen3_5(1024, 24, 3584, 8, 2, value_heads=16, tied=True),  # [sec]
    "Qwen3.5-2B": lambda: _qwen3_5(2048, 24, 6144, 8, 2, value_heads=16, tied=True),  # [sec]
    "Qwen3.5-4B": lambda: _qwen3_5(2560, 32, 9216, 16, 4, value_heads=32, tied=True),
    "Qwen3.5-9B": lambda: _qwen3_5(4096, 32, 12_288, 16, 4, value_heads=32),
    "Qwen3.5-27B": lambda: _qwen3_5(5120, 64, 17_408, 24, 4, value_heads=48),
    "Qwen3.5-35B-A3B": lambda: _qwen3_5_moe(
        2048, 40, 16, value_heads=32, count=256, top_k=8, width=512,
    ),
    "Qwen3.5-122B-A10B": lambda: _qwen3_5_moe(
        3072, 48, 32, value_heads=64, count=256, top_k=8, width=1024,  # [sec]
    ),
    "Qwen3.5-397B-A17B": lambda: _qwen3_5_moe(
        4096, 60, 32, value_heads=64, count=512, top_k=10, width=1024,
    ),
    "Qwen3.6-27B": lambda: hf_config("Qwen3.5-27B"),
    "Qwen3.6-35B-A3B": lambda: hf_config("Qwen3.5-35B-A3B"),
    "Qwen3.8-27B": lambda: hf_config("Qwen3.5-27B"),
    "Qwen3-Next-80B-A3B": _qwen3_next,
    "Llama-3.2-1B": lambda: _llama(2048, 16, 8192, 32, 8, 64, factor=32.0, tied=True),
    "Llama-3.2-3B": lambda: _llama(3072, 28, 8192, 24, 8, 128, factor=32.0, tied=True),
    "Llama-3.1-8B": lambda: _llama(4096, 32, 14_336, 32, 8, 128),
    "Llama-3.1-70B": lambda: _llama(8192, 80, 28_672, 64, 8, 128),
    "Llama-3.3-70B": lambda: _llama(8192, 80, 28_672, 64, 8, 128),
    "SmolLM2-135M": lambda: _smollm2(576, 30, 1536, 9, 3),
    "SmolLM2-360M": lambda: _smollm2(960, 32, 2560, 15, 5),
    "SmolLM2-1.7B": lambda: _smollm2(2048, 24, 8192, 32, 32, theta=1.3e5),
}  # fmt: skip
_SPELLING = {name.lower(): name for name in _SIZES}
