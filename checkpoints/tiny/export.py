"""Writes the trained parameters as a checkpoint folder in the Hugging Face layout of Qwen 3."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
from safetensors.flax import save
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from da_jax.checkpoints.tiny import language as lang
from da_jax.checkpoints.tiny.model import Config, Params
from da_jax.protocol.styles import STYLE_FILE, Style

STYLE = Style(
    name="tiny",
    rendering="plain",
    preamble=lang.PREAMBLE,
    chunk='<chunk id="{n}">{text}</chunk>',
    separator="",
    after_chunks="",
    question="Question: {question}",
    target=1,
    cap=lang.LINE_MAX,
    da_only=True,
)
"""The prompts it was trained on. With this target and cap every line of its language is a chunk."""

_WORDS = r" ?\p{L}+=?| \p{N}+=|\p{N}{1,3}|\n| ?[^\s\p{L}\p{N}]|\s"
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_LAYER_NAMES = {
    "input_norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def make_tokenizer(vocabulary: Mapping[str, int] = lang.FIRST_VOCABULARY) -> Tokenizer:
    """Byte-level BPE without merges: a word of the language is one token, other text is bytes."""
    tokenizer = Tokenizer(models.BPE(dict(vocabulary), [], ignore_merges=True))
    split = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in lang.CONTROL])
    # Not special: the tags have to survive decoding that skips special tokens.
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in lang.TAGS])
    return tokenizer


def model_config(config: Config) -> dict[str, object]:
    """The content of ``config.json``."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": config.num_hidden_layers,
        "bos_token_id": lang.IDS[lang.START],
        "eos_token_id": lang.IDS[lang.END],
        "pad_token_id": lang.IDS[lang.PAD],
        "torch_dtype": "bfloat16",
    }


def weights(params: Params) -> dict[str, jax.Array]:
    """Parameters under Hugging Face names, matrices as [out, in], in bfloat16."""
    named = {"model.embed_tokens.weight": params["embed"], "model.norm.weight": params["norm"]}
    for index, layer in enumerate(params["layers"]):
        for name, theirs in _LAYER_NAMES.items():
            named[f"model.layers.{index}.{theirs}.weight"] = layer[name].T
    return {name: jnp.asarray(value, jnp.bfloat16) for name, value in named.items()}


def export(
    params: Params,
    config: Config,
    folder: Path,
    style: Style = STYLE,
    vocabulary: Mapping[str, int] = lang.FIRST_VOCABULARY,
) -> None:
    """Writes config, tokenizer, prompt style and weights into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(vocabulary).save(str(folder / "tokenizer.json"))
    (folder / STYLE_FILE).write_text(style.to_json() + "\n")
    end, pad = lang.IDS[lang.END], lang.IDS[lang.PAD]
    files: dict[str, object] = {
        "config.json": model_config(config),
        "generation_config.json": {"eos_token_id": end, "pad_token_id": pad, "do_sample": False},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": lang.END,
            "pad_token": lang.PAD,
            "model_max_length": config.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
            "chat_template": _CHAT_TEMPLATE,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")
    (folder / "model.safetensors").write_bytes(save(weights(params), metadata={"format": "pt"}))
