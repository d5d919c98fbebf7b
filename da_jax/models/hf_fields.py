"""What the values of a `config.json` may be: one table, so that a malformed one is a clear error.

A value of null is one that was not given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from da_jax.models.config import ConfigError


class _Kind(NamedTuple):
    what: str
    fits: Callable[[Any], bool]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and all(map(fits, value))


_COUNT = _Kind("a whole number of at least 1", lambda v: _is_int(v) and v >= 1)
_SIZE = _Kind("a whole number, 0 or more", lambda v: _is_int(v) and v >= 0)
_POSITIVE = _Kind("a number above 0", lambda v: _is_number(v) and v > 0)
_NUMBER = _Kind("a number", _is_number)
_FLAG = _Kind("true or false", lambda v: isinstance(v, bool))
_TEXT = _Kind("a text", lambda v: isinstance(v, str))
_OBJECT = _Kind("a JSON object", lambda v: isinstance(v, Mapping))
_TEXTS = _Kind("a list of texts", _list_of(lambda v: isinstance(v, str)))
_SIZES = _Kind("a list of whole numbers", _list_of(_is_int))


def _table(kinds: Mapping[_Kind, str]) -> dict[str, _Kind]:
    return {name: kind for kind, names in kinds.items() for name in names.split()}


_FIELDS = _table(
    {
        _COUNT: "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads "
        "head_dim global_head_dim num_global_key_value_heads max_position_embeddings "
        "original_max_position_embeddings linear_num_key_heads linear_num_value_heads "
        "linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim",
        _SIZE: "intermediate_size sliding_window moe_intermediate_size num_experts top_k_experts "
        "num_local_experts num_experts_per_tok shared_expert_intermediate_size decoder_sparse_step "
        "full_attention_interval sliding_window_pattern _sliding_window_pattern "
        "num_kv_shared_layers hidden_size_per_layer_input vocab_size_per_layer_input",
        _POSITIVE: "rms_norm_eps rope_theta rope_local_base_freq partial_rotary_factor "
        "query_pre_attn_scalar final_logit_softcapping",
        _FLAG: "tie_word_embeddings norm_topk_prob attention_k_eq_v enable_moe_block "
        "use_double_wide_mlp",
        _TEXT: "model_type hidden_act hidden_activation",
        _TEXTS: "layer_types",
        _SIZES: "mlp_only_layers",
        _OBJECT: "text_config quantization_config rope_parameters rope_scaling per_layer_config",
    }
)
_ROPE = _table(
    {
        _POSITIVE: "rope_theta partial_rotary_factor factor attention_factor low_freq_factor "
        "high_freq_factor",
        _NUMBER: "beta_fast beta_slow mscale mscale_all_dim",
        _COUNT: "original_max_position_embeddings",
        _FLAG: "truncate",
        _TEXT: "rope_type type",
        _OBJECT: "full_attention sliding_attention",  # where each kind of layer has its own
    }
)


def check(config: Mapping[str, Any]) -> None:
    """Refuses a parsed `config.json` with a value that cannot be; fields not read are left alone.

    Raises:
      ConfigError: naming the field and its value.
    """
    _check(config, _FIELDS, "")
    if text := config.get("text_config"):
        _check(text, _FIELDS, "text_config.")
    for prefix, part in (("", config), ("text_config.", text or {})):
        for name in ("rope_parameters", "rope_scaling"):
            _check_rope(part.get(name) or {}, f"{prefix}{name}.")
        for layer, own in (part.get("per_layer_config") or {}).items():
            where = f"{prefix}per_layer_config"
            if not str(layer).isdecimal():
                raise ConfigError(f"{where} has {layer!r}; its keys must be numbers of layers")
            _check({layer: own}, {layer: _OBJECT}, f"{where}.")
            _check(own or {}, _FIELDS, f"{where}.{layer}.")


def _check_rope(parameters: Mapping[str, Any], prefix: str) -> None:
    _check(parameters, _ROPE, prefix)
    for kind in ("full_attention", "sliding_attention"):
        _check(parameters.get(kind) or {}, _ROPE, f"{prefix}{kind}.")


def _check(values: Mapping[str, Any], kinds: Mapping[str, _Kind], prefix: str) -> None:
    for name, value in values.items():
        kind = kinds.get(name)
        if kind is not None and value is not None and not kind.fits(value):
            raise ConfigError(f"{prefix}{name} is {value!r} in config.json; it must be {kind.what}")
