"""GGUF files to Hugging Face folders: `python -m da_jax.checkpoints.gguf SOURCE FOLDER`.

Handles Llama-type models without biases and Gemma 3 (text). Weights are dequantised to bfloat16. A
byte-level or a SentencePiece BPE vocabulary becomes `tokenizer.json`. Needs the package `gguf`
(`pip install 'da-jax[gguf]'`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

_SHARED = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
}
_NAMES = {
    "llama": _SHARED | {"ffn_norm": "post_attention_layernorm"},
    "gemma3": _SHARED
    | {
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6  # token types of GGUF
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
    architecture = fields["general.architecture"]
    if architecture not in _NAMES:
        raise ValueError(
            f"{source} is of architecture {architecture!r}; handled are {', '.join(_NAMES)}"
        )
    config = {"llama": _llama, "gemma3": _gemma3}[architecture](fields)
    tokenizer, special = _tokenizer(fields)
    tensors = dict(_tensor(tensor, architecture, config) for tensor in reader.tensors)
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    eos = fields["tokenizer.ggml.eos_token_id"]
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", {"eos_token_id": eos})
    _write(folder / "tokenizer.json", tokenizer)
    _write(folder / "tokenizer_config.json", special)


def _config(fields: dict[str, Any], name: str) -> dict[str, Any]:
    """What both architectures have in their configuration; `name` is that in GGUF."""

    def field(key: str) -> Any:
        return fields[f"{name}.{key}"]

    heads = field("attention.head_count")
    return {
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": field("embedding_length"),
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv"),
        "head_dim": fields.get(f"{name}.attention.key_length", field("embedding_length") // heads),
        "max_position_embeddings": field("context_length"),
        "rms_norm_eps": round(field("attention.layer_norm_rms_epsilon"), 12),
        "rope_theta": field("rope.freq_base"),
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "dtype": "bfloat16",
    }


def _scaling(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that stretch RoPE, without their prefix."""
    found = (key.partition(".rope.scaling.") for key in fields)
    return {key: fields[name + dot + key] for name, dot, key in found if dot}


def _llama(fields: dict[str, Any]) -> dict[str, Any]:
    if scaling := sorted(_scaling(fields)):
        raise ValueError(
            f"rope.scaling fields {scaling} are not handled; convert the Hugging Face checkpoint"
        )
    config = _config(fields, "llama")
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    return kind | config


def _gemma3(fields: dict[str, Any]) -> dict[str, Any]:
    config = _config(fields, "gemma3")
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    scaling = {"type": "none"} | _scaling(fields)
    known = {"none": {"type"}, "linear": {"type", "factor"}}.get(scaling["type"], set())
    if scaling.keys() - known:
        raise ValueError(f"rope.scaling is {scaling}; handled is linear with a factor, or none")
    # GGUF names neither: the 27B (62 layers) alone scales scores by hidden size over heads.
    scalar = config["hidden_size"] // heads if layers == 62 else config["head_dim"]
    full = [(layer + 1) % 6 == 0 for layer in range(layers)]
    return config | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": None
        if scaling["type"] == "none"
        else {"rope_type": "linear", "factor": scaling["factor"]},
        "sliding_window": fields["gemma3.attention.sliding_window"],
        "layer_types": ["full_attention" if f else "sliding_attention" for f in full],
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
    }


def _tensor(tensor: Any, architecture: str, config: dict[str, Any]) -> tuple[str, np.ndarray]:
    from gguf import quants

    layer, name = _place(tensor.name, architecture)
    value = quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    value = value.reshape(tuple(int(size) for size in tensor.shape[::-1]))
    if architecture == "gemma3" and value.ndim == 1:  # llama.cpp adds the 1 of Gemma's RMSNorm
        value = value - 1
    if tensor.name in _TOP:
        return _TOP[tensor.name], value.astype(ml_dtypes.bfloat16)
    if architecture == "llama" and name in ("attn_q", "attn_k"):  # pairs of RoPE are interleaved
        heads = config["num_attention_heads" if name == "attn_q" else "num_key_value_heads"]
        pairs = value.reshape(heads, config["head_dim"] // 2, 2, value.shape[-1])
        value = pairs.swapaxes(1, 2).reshape(value.shape)
    name = _NAMES[architecture][name]
    return f"model.layers.{layer}.{name}.weight", value.astype(ml_dtypes.bfloat16)


def _place(name: str, architecture: str) -> tuple[str, str]:
    """(layer, kind) of a tensor, ("", "") for those outside the layers.

    Raises:
      ValueError: for a tensor that the architecture does not have.
    """
    if name in _TOP:
        return "", ""
    parts = name.split(".")
    names = _NAMES[architecture]
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in names or parts[3] != "weight":
        raise ValueError(f"tensor {name!r} is not handled for architecture {architecture!r}")
    return parts[1], parts[2]


def _tokenizer(fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tokenizer.json, tokenizer_config.json) of the vocabulary."""
    kind = fields["tokenizer.ggml.model"]
    if kind not in ("gpt2", "llama"):
        raise ValueError(
            f"tokenizer {kind!r} is not handled; known are gpt2 (byte-level) and llama "
            "(SentencePiece). Take tokenizer.json from the model's own repository"
        )
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        **(_byte_level(fields) if kind == "gpt2" else _sentence_piece(fields)),
    }
    tokens = fields["tokenizer.ggml.tokens"]
    special = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for role, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (index := fields.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            special[f"{role}_token"] = tokens[index]
    if template := fields.get("tokenizer.chat_template"):
        special["chat_template"] = template
    return tokenizer, special


def _byte_level(fields: dict[str, Any]) -> dict[str, Any]:
    """What tokenizer.json says of a byte-level BPE vocabulary."""
    splitter = fields.get("tokenizer.ggml.pre", "gpt-2")
    if splitter not in _SPLITTERS:
        raise ValueError(
            f"pre-tokenizer {splitter!r} is not handled; known are {sorted(_SPLITTERS)}. Take "
            "tokenizer.json from the model's own repository"
        )
    tokens = fields["tokenizer.ggml.tokens"]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    level |= {"use_regex": True}
    return {
        "added_tokens": _added(tokens, fields["tokenizer.ggml.token_type"]),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*_SPLITTERS[splitter], level]},
        "decoder": level,
        "model": _bpe(tokens, fields["tokenizer.ggml.merges"]),
    }


def _sentence_piece(fields: dict[str, Any]) -> dict[str, Any]:
    """What tokenizer.json says of a SentencePiece BPE vocabulary.

    SentencePiece joins the two neighbours whose union is the best piece, so each way to cut a piece
    in two is a merge, and its rank follows from the score of the piece. Pieces that a user defined
    come first.
    """
    if fields.get("tokenizer.ggml.add_space_prefix", True):
        raise ValueError(
            "a SentencePiece vocabulary with add_space_prefix is not handled; take tokenizer.json "
            "from the model's own repository"
        )
    tokens = [token.replace(" ", "▁") for token in fields["tokenizer.ggml.tokens"]]
    types, scores = fields["tokenizer.ggml.token_type"], fields["tokenizer.ggml.scores"]
    known = set(tokens)
    merges = []
    for token, kind, score in zip(tokens, types, scores):
        if kind in (_CONTROL, _BYTE):
            continue
        rank = 0.0 if kind == _USER_DEFINED else score
        for cut in range(1, len(token)):
            if token[:cut] in known and token[cut:] in known:
                merges.append((rank, cut, len(token) - cut, token[:cut], token[cut:]))
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    fallback = {"byte_fallback": True, "fuse_unk": True}
    fallback["unk_token"] = tokens[fields["tokenizer.ggml.unknown_token_id"]]
    space = {"String": "▁"}
    decoders = [{"type": "Replace", "pattern": space, "content": " "}]
    decoders += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    start = fields["tokenizer.ggml.bos_token_id"]
    return {
        "added_tokens": _added(tokens, types),
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "post_processor": _start_token(tokens[start], start)
        if fields.get("tokenizer.ggml.add_bos_token")
        else None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(tokens, [[left, right] for *_, left, right in merges]) | fallback,
    }


def _added(tokens: list[str], types: list[int]) -> list[dict[str, Any]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": index, "content": token, "special": kind == _CONTROL, **flags}
        for index, (token, kind) in enumerate(zip(tokens, types))
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _bpe(tokens: list[str], merges: list[Any]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "vocab": {token: index for index, token in enumerate(tokens)},
        "merges": merges,
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
    }


def _start_token(token: str, index: int) -> dict[str, Any]:
    """Puts the beginning-of-text token before a text (where special tokens are asked for)."""
    start = {"SpecialToken": {"id": token, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    second = [
        {"SpecialToken": {"id": token, "type_id": 1}},
        {"Sequence": {"id": "B", "type_id": 1}},
    ]
    return {
        "type": "TemplateProcessing",
        "single": [start, text],
        "pair": [start, text, *second],
        "special_tokens": {token: {"id": token, "ids": [index], "tokens": [token]}},
    }


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
