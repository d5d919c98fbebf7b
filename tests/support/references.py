"""Tiny random checkpoints, and what transformers (torch) computes on them.

Weights come from NumPy seeds, so a checkpoint is made anywhere. The logits that torch gives are
committed in `tests/data/references.npz` (every 8th position); where torch is installed they are
computed afresh, which also checks the committed ones. `python tests/support/references.py` rewrites
the file.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

HAS_TORCH = importlib.util.find_spec("torch") is not None
STORED = Path(__file__).parents[1] / "data" / "references.npz"
VOCAB, LENGTH, STRIDE = 512, 80, 8
MASK_FROM, HIDDEN = 60, (10, 50)  # queries from position 60 on cannot see keys 10 .. 49

_QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
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
CASES = {
    "qwen3": _QWEN3,
    "qwen3_untied": _QWEN3 | {"tie_word_embeddings": False, "num_key_value_heads": 4},
    "qwen3_yarn": _QWEN3 | {"rope_scaling": _YARN, "max_position_embeddings": 128},
    "qwen3_linear": _QWEN3 | {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "llama": _LLAMA,
    "llama_llama3": _LLAMA
    | {"tie_word_embeddings": False, "rope_parameters": _LLAMA3 | {"rope_theta": 1e4}},
}


def tensors(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights under their Hugging Face names; no norm weight is left at 1."""
    rng = np.random.default_rng(seed)
    hidden, inner, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d

    def matrix(rows: int, columns: int, scale: float | None = None) -> np.ndarray:
        scale = columns**-0.5 if scale is None else scale
        return (rng.standard_normal((rows, columns)) * scale).astype(np.float32)

    def norm(size: int) -> np.ndarray:
        return (1 + 0.3 * rng.standard_normal(size)).astype(np.float32)

    out = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden, 0.5)}
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        for name, shape in {
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }.items():
            out[f"{prefix}{name}.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            out[f"{prefix}{name}.weight"] = norm(hidden)
        if config["model_type"] == "qwen3":
            for name in ("q_norm", "k_norm"):
                out[f"{prefix}self_attn.{name}.weight"] = norm(d)
    out["model.norm.weight"] = norm(hidden)
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    return out


def write_folder(case: str, folder: Path) -> Path:
    """Writes the checkpoint of a case as a Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CASES[case]))
    save_file(tensors(CASES[case]), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def token_ids() -> np.ndarray:
    """int64 [2, LENGTH] random tokens."""
    return np.random.default_rng(0).integers(3, 490, size=(2, LENGTH))


def visible_mask(length: int = LENGTH) -> np.ndarray:
    """bool [length, length]: causal, and late queries see no key of the hidden range."""
    i, j = np.arange(length)[:, None], np.arange(length)[None]
    return (j <= i) & ~((i >= MASK_FROM) & (j >= HIDDEN[0]) & (j < HIDDEN[1]))


def torch_logits(folder: Path, mask: np.ndarray | None = None) -> np.ndarray:
    """float32 [2, LENGTH, V] logits of transformers, eager attention, with an optional 4-D mask."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    extra = {}
    if mask is not None:
        additive = torch.where(torch.from_numpy(mask), 0.0, torch.finfo(torch.float32).min)
        additive = additive[None, None].expand(2, 1, *mask.shape)
        dense = model.config.model_type != "qwen3"
        extra["attention_mask"] = additive if dense else {"full_attention": additive}
    with torch.no_grad():
        return model(
            input_ids=torch.from_numpy(token_ids()), use_cache=False, **extra
        ).logits.numpy()


@functools.cache
def _stored() -> dict[str, np.ndarray]:
    with np.load(STORED) as data:
        return dict(data)


def expected(case: str, folder: Path, *, masked: bool) -> tuple[np.ndarray, np.ndarray]:
    """(positions, logits [2, len(positions), V]) of a case; with torch, of every position."""
    stored = _stored()[f"{case}{'_masked' if masked else ''}"]
    if not HAS_TORCH:
        return np.arange(0, LENGTH, STRIDE), stored
    logits = torch_logits(folder, visible_mask() if masked else None)
    np.testing.assert_allclose(logits[:, ::STRIDE], stored, atol=2e-4, err_msg="stale references")
    return np.arange(LENGTH), logits


def main() -> None:
    """Rewrites the committed logits."""
    import tempfile

    out = {}
    with tempfile.TemporaryDirectory() as temporary:
        for case in CASES:
            folder = write_folder(case, Path(temporary) / case)
            out[case] = torch_logits(folder)[:, ::STRIDE]
            out[f"{case}_masked"] = torch_logits(folder, visible_mask())[:, ::STRIDE]
    np.savez_compressed(STORED, **out)
    print({name: (value.shape, float(np.abs(value).max())) for name, value in out.items()})


if __name__ == "__main__":
    main()
