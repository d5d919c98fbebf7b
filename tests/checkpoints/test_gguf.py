"""GGUF files: what llama.cpp changed is undone, and the vocabulary splits as SentencePiece does."""

import itertools
import json
import random

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

gguf = pytest.importorskip("gguf", reason="needs da-jax[gguf]")

from da_jax.checkpoints.gguf import convert  # noqa: E402

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP = 32, 4, 2, 16, 48
NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
# What a user defined and control tokens come first, then bytes, then pieces from good to bad.
PIECES = ["ab", "▁a", "abc", "▁ab", "bc", "▁abc", "ca", "cab", "é", "▁▁", "a", "b", "c", "▁"]
TOKENS = [
    ("<pad>", -1000.0, CONTROL),
    ("<eos>", -1000.0, CONTROL),
    ("<bos>", -1000.0, CONTROL),
    ("<unk>", -1000.0, CONTROL),
    ("   ", -1000.0, USER),  # three spaces, as llama.cpp spells a piece of the user's
    *((f"<0x{byte:02X}>", -1000.0, BYTE) for byte in range(256)),
    *((piece, -float(rank), NORMAL) for rank, piece in enumerate(PIECES)),
]


def write(path, architecture, tensors, layers, *, fields=()):
    """A GGUF file with the metadata that llama.cpp's converter writes."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(layers)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(8)
    writer.add_tokenizer_model("llama")
    tokens, scores, types = zip(*TOKENS)
    writer.add_token_list(list(tokens))
    writer.add_token_scores(list(scores))
    writer.add_token_types(list(types))
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    for add, value in fields:
        getattr(writer, add)(value)
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def original(architecture, layers):
    """The tensors of a checkpoint as Hugging Face names them, exact in bfloat16."""
    rng = np.random.default_rng(0)

    def make(*shape):
        return (rng.integers(-64, 64, shape) / 64).astype(np.float32)

    norms = ["input_layernorm", "post_attention_layernorm"]
    if architecture == "gemma3":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    tensors = {"model.embed_tokens.weight": make(len(TOKENS), HIDDEN)}
    tensors["model.norm.weight"] = make(HIDDEN)
    for layer in range(layers):
        at = f"model.layers.{layer}."
        tensors |= {f"{at}{norm}.weight": make(HIDDEN) for norm in norms}
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors[f"{at}self_attn.{name}_proj.weight"] = make(heads * HEAD_DIM, HIDDEN)
        tensors[f"{at}self_attn.o_proj.weight"] = make(HIDDEN, HEADS * HEAD_DIM)
        if architecture == "gemma3":
            for name in ("q_norm", "k_norm"):
                tensors[f"{at}self_attn.{name}.weight"] = make(HEAD_DIM)
        for name in ("gate", "up"):
            tensors[f"{at}mlp.{name}_proj.weight"] = make(MLP, HIDDEN)
        tensors[f"{at}mlp.down_proj.weight"] = make(HIDDEN, MLP)
    return tensors


def as_llama_cpp(architecture, tensors):
    """What llama.cpp's converter makes of them, through the names that `gguf` itself knows."""
    arch = gguf.MODEL_ARCH.GEMMA3 if architecture == "gemma3" else gguf.MODEL_ARCH.LLAMA
    names = gguf.get_tensor_name_map(arch, 8)
    out = {}
    for name, value in tensors.items():
        if architecture == "gemma3" and name.endswith("norm.weight"):
            value = value + 1
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = len(value) // HEAD_DIM  # each pair (i, i + half) becomes neighbours
            halves = value.reshape(heads, 2, HEAD_DIM // 2, HIDDEN)
            value = np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(value.shape)
        out[names.get_name(name, try_suffixes=(".weight",))] = value
    return out


@pytest.mark.parametrize(("architecture", "layers"), [("llama", 1), ("gemma3", 7)])
def test_tensors_are_those_of_the_original(architecture, layers, tmp_path):
    tensors = original(architecture, layers)
    path = write(tmp_path / "m.gguf", architecture, as_llama_cpp(architecture, tensors), layers)
    convert(path, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(found[name].astype(np.float32), value, err_msg=name)


def config_of(tmp_path, layers=1, **options):
    tensors = as_llama_cpp("gemma3", original("gemma3", 1))
    convert(write(tmp_path / "m.gguf", "gemma3", tensors, layers, **options), tmp_path / "out")
    return json.loads((tmp_path / "out" / "config.json").read_text())


def test_the_configuration_of_gemma_3(tmp_path):
    config = config_of(tmp_path, layers=13)
    expected = {
        "model_type": "gemma3_text",
        "vocab_size": len(TOKENS),
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "query_pre_attn_scalar": HEAD_DIM,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": None,
        "sliding_window": 8,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
    }
    assert {key: config[key] for key in expected} == expected
    full = [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
    assert len(config["layer_types"]) == 13 and full == [5, 11]


def test_large_gemma_3_stretches_rope_and_the_27b_scales_scores_otherwise(tmp_path):
    scaling = (
        ("add_rope_scaling_type", gguf.RopeScalingType.LINEAR),
        ("add_rope_scaling_factor", 8.0),
    )
    config = config_of(tmp_path, layers=62, fields=scaling)
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert config["query_pre_attn_scalar"] == HIDDEN // HEADS


def sentence_piece(text):
    """SentencePiece's BPE, word for word: join the neighbours whose union scores best."""
    rank = {t.replace(" ", "▁"): s for t, s, kind in TOKENS if kind == NORMAL}
    rank |= {t.replace(" ", "▁"): 0.0 for t, s, kind in TOKENS if kind == USER}
    ids = {t.replace(" ", "▁"): i for i, (t, _, _) in enumerate(TOKENS)}
    pieces = list(text.replace(" ", "▁"))
    while True:
        joined = [
            (rank[a + b], -i)
            for i, (a, b) in enumerate(itertools.pairwise(pieces))
            if a + b in rank
        ]
        if not joined:
            break
        at = -max(joined)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return [
        i
        for piece in pieces
        for i in ([ids[piece]] if piece in ids else [ids[f"<0x{b:02X}>"] for b in piece.encode()])
    ]


def test_the_vocabulary_splits_as_sentence_piece_does(tmp_path):
    config_of(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    choose = random.Random(0)
    texts = ["", "abc cab", "   a", "naïve 東京", "\n\t a"]
    texts += ["".join(choose.choices("abc  é東\n", k=choose.randrange(1, 24))) for _ in range(300)]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == sentence_piece(text), text
        assert tokenizer.decode(ids) == text
    with_start = tokenizer.encode("a<eos>b").ids
    assert with_start == [2, *sentence_piece("a"), 1, *sentence_piece("b")]
    special = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (special["bos_token"], special["unk_token"]) == ("<bos>", "<unk>")
    assert "chat_template" not in special


def test_what_is_not_handled_is_named(tmp_path):
    tensors = as_llama_cpp("gemma3", original("gemma3", 1))
    with pytest.raises(
        ValueError, match=r"m\.gguf is of architecture 'phi3'; handled are llama, g"
    ):
        convert(write(tmp_path / "m.gguf", "phi3", {}, 1), tmp_path / "out")
    with pytest.raises(ValueError, match=r"tensor 'blk\.0\.attn_q\.bias' is not handled for arch"):
        wrong = tensors | {"blk.0.attn_q.bias": np.zeros(HIDDEN, np.float32)}
        convert(write(tmp_path / "m.gguf", "gemma3", wrong, 1), tmp_path / "out")
    with pytest.raises(ValueError, match=r"rope\.scaling is .*'yarn'.* handled is linear"):
        fields = (("add_rope_scaling_type", gguf.RopeScalingType.YARN),)
        convert(write(tmp_path / "m.gguf", "gemma3", tensors, 1, fields=fields), tmp_path / "out")
    assert not (tmp_path / "out").exists()
