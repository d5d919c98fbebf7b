"""A random model with a real tokenizer: small, and free to be told what to write (`forced`)."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from da_jax.engine.config import EngineConfig
from support import references

SPECIAL = ("<pad>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

ENGINE = EngineConfig(
    page_size=16, max_model_len=512, max_num_seqs=2, prefill_chunk=48, burst=8,
    kv_cache_bytes=2**30,
)  # fmt: skip


def byte_tokenizer() -> Tokenizer:
    """Byte-level BPE with no merges but `">`, so that one token ends a tag and more."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    vocabulary['">'] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[('"', ">")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, normalized=False) for s in SPECIAL])
    return tokenizer


def write_folder(folder: Path, case: str = "qwen3", **changes: object) -> Path:
    """A Hugging Face folder with weights of a reference case, tokenizer and chat template."""
    references.write_folder(case, folder)
    if changes:
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))
    tokenizer = byte_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|im_end|>",
                "pad_token": "<pad>",
                "chat_template": TEMPLATE,
            }
        )
    )
    return folder


STYLE = {
    "name": "test",
    "rendering": "plain",
    "preamble": "Read the numbered parts and answer.",
    "chunk": "[{n}] {text}",
    "separator": "\n",
    "question": "Q: {question}",
    "vanilla_question": "Q: {question}",
}
