"""Tensor names of Qwen 3 and Llama-type checkpoints, as pairs (our path, their name)."""

from __future__ import annotations

from da_jax.models.config import ModelConfig

_LAYER = {
    "attention.q.kernel": "self_attn.q_proj.weight",
    "attention.k.kernel": "self_attn.k_proj.weight",
    "attention.v.kernel": "self_attn.v_proj.weight",
    "attention.o.kernel": "self_attn.o_proj.weight",
    "mlp.gate.kernel": "mlp.gate_proj.weight",
    "mlp.up.kernel": "mlp.up_proj.weight",
    "mlp.down.kernel": "mlp.down_proj.weight",
    "input_norm.scale": "input_layernorm.weight",
    "post_norm.scale": "post_attention_layernorm.weight",
}
_QK_NORM = {
    "attention.q_norm.scale": "self_attn.q_norm.weight",
    "attention.k_norm.scale": "self_attn.k_norm.weight",
}


def tensor_names(config: ModelConfig) -> dict[str, str]:
    """Maps the dotted path of every parameter to its name in the safetensors file.

    A path that ends in `kernel` is stored transposed there ([out, in]).
    """
    names = {"embedding": "model.embed_tokens.weight", "norm.scale": "model.norm.weight"}
    if not config.tie_embeddings:
        names["head.kernel"] = "lm_head.weight"
    layer = _LAYER | (_QK_NORM if config.qk_norm else {})
    for i in range(config.num_layers):
        names |= {
            f"layers.{i}.{ours}": f"model.layers.{i}.{theirs}" for ours, theirs in layer.items()
        }
    return names


def ignored(name: str, config: ModelConfig) -> bool:
    """Whether a tensor of the file may be left out, because it repeats or follows from others."""
    tied_head = name == "lm_head.weight" and config.tie_embeddings
    return tied_head or name.endswith("rotary_emb.inv_freq")
