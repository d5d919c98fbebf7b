"""GGUF files of Llama-type models to Hugging Face folders: `python -m da_jax.checkpoints.gguf`.

Weights are dequantised to bfloat16. A byte-level BPE vocabulary becomes `tokenizer.json`. Needs the
package `gguf` (`pip install 'da-jax[gguf]'`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_CONTROL, _USER_DEFINED = 3, 4  # token types of special and of other added tokens in GGUF
_SPLITTERS: dict[str, list[dict[str, Any]]] = {
    "smollm": [{"type": "Digits", "individual_digits": True}],
    "gpt-2": [],
}


def convert(source: Path, folder: Path) -> None:
    """Writes the Hugging Face folder of a GGUF file.

    Args:
      source: the GGUF file.
      folder: destination, created.

    Raises:
      ValueError: for an architecture or a tokenizer that is not handled.
    """
    from gguf import GGUFReader

    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama":
        raise ValueError(f"architecture {fields['general.architecture']!r}; only llama is handled")
    if scaling := sorted(name for name in fields if ".rope.scaling." in name):
        raise ValueError(f"{scaling} are not handled; convert the Hugging Face checkpoint instead")
    config = _config(fields)
    tensors = dict(_tensor(tensor, config) for tensor in reader.tensors)
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    tokenizer, special = _tokenizer(fields)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    eos = fields["tokenizer.ggml.eos_token_id"]
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", {"eos_token_id": eos})
    _write(folder / "tokenizer.json", tokenizer)
    _write(folder / "tokenizer_config.json", special)


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    def field(name: str) -> Any:
        return fields[f"llama.{name}"]

    heads = field("attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": field("embedding_length"),
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv"),
        "head_dim": fields.get("llama.attention.key_length", field("embedding_length") // heads),
        "hidden_act": "silu",
        "max_position_embeddings": field("context_length"),
        "rms_norm_eps": round(field("attention.layer_norm_rms_epsilon"), 12),
        "rope_theta": field("rope.freq_base"),
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "dtype": "bfloat16",
    }


def _tensor(tensor: Any, config: dict[str, Any]) -> tuple[str, np.ndarray]:
    from gguf import quants

    layer, name = _place(tensor.name)
    value = quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    value = value.reshape(tuple(int(size) for size in tensor.shape[::-1]))
    if tensor.name in _TOP:
        return _TOP[tensor.name], value.astype(ml_dtypes.bfloat16)
    if name in ("attn_q", "attn_k"):  # llama.cpp interleaves the pairs that RoPE rotates
        heads = config["num_attention_heads" if name == "attn_q" else "num_key_value_heads"]
        pairs = value.reshape(heads, config["head_dim"] // 2, 2, value.shape[-1])
        value = pairs.swapaxes(1, 2).reshape(value.shape)
    return f"model.layers.{layer}.{_NAMES[name]}.weight", value.astype(ml_dtypes.bfloat16)


def _place(name: str) -> tuple[str, str]:
    """(layer, kind) of a tensor, ("", "") for those outside the layers.

    Raises:
      ValueError: for a tensor that a Llama-type model without biases does not have.
    """
    if name in _TOP:
        return "", ""
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in _NAMES or parts[3] != "weight":
        raise ValueError(f"tensor {name!r} is not handled; only Llama-type models without biases")
    return parts[1], parts[2]


def _tokenizer(fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tokenizer.json, tokenizer_config.json) of a byte-level BPE vocabulary."""
    kind, splitter = fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or splitter not in _SPLITTERS:
        raise ValueError(
            f"tokenizer {kind!r} with pre-tokenizer {splitter!r} is not handled; known are gpt2 "
            f"with {sorted(_SPLITTERS)}. Take tokenizer.json from the model's own repository"
        )
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": token, "special": types[index] == _CONTROL, **flags}
            for index, token in enumerate(tokens)
            if types[index] in (_CONTROL, _USER_DEFINED)
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*_SPLITTERS[splitter], level | {"use_regex": True}],
        },
        "post_processor": None,
        "decoder": level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": fields["tokenizer.ggml.merges"],
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
        },
    }
    special = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
    }
    return tokenizer, special


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="GGUF file")
    parser.add_argument("folder", type=Path, help="folder to write")
    arguments = parser.parse_args()
    convert(arguments.source, arguments.folder)
    print(f"wrote {arguments.folder}")


if __name__ == "__main__":
    main()
