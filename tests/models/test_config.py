import copy
import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.references import CASES
from transformers import Gemma3TextConfig

from da_jax.models import hf_fields
from da_jax.models.config import Attention, ConfigError, Experts, GatedDelta, Layer, RopeConfig
from da_jax.models.hf_config import parse, read_json, rope


def test_both_spellings_of_rope_read_the_same():
    old = {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0}}
    assert rope(old) == rope(new) == RopeConfig(1e6, "linear", factor=2.0)


def test_head_dim_follows_from_the_width_when_it_is_not_given():
    config = {k: v for k, v in CASES["llama"].items() if k != "head_dim"}
    assert parse(config).layers[0].mixer.head_dim == 64 // 8


@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        ("qwen3", {"model_type": "mamba"}, "mamba"),
        ("qwen3", {"attention_bias": True}, "attention_bias=True"),
        ("qwen3", {"hidden_act": "gelu"}, "activation 'gelu'"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention", "x"]}, "sliding_att"),
        ("qwen3", {"layer_types": ["full_attention"]}, "names 1 layers"),
        ("qwen3", {"num_attention_heads": 3}, "num_attention_heads 3"),
        ("qwen3", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ("qwen3", {"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        ("qwen3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "w": 1}}, r"\['w'\]"),
        ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, r"quantised \(fp8\)"),
        ("qwen3_moe", {"num_experts_per_tok": 99}, "99 experts"),
        ("qwen3_5", {"linear_num_value_heads": 3}, "linear_num_value_heads 3"),
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate"),
        ("qwen3_5", {"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid'.* 'swish'"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional"),
        ("gemma3_text", {"hidden_activation": "gelu"}, "only 'gelu_pytorch_tanh'"),
        ("gemma4_e2b", {"num_kv_shared_layers": 9}, "shares keys and values"),
        ("gemma4_31b", {"sliding_window": None}, "sliding_window"),
        ("qwen3_moe", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ("qwen3", {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ("qwen3", {"rope_parameters": {"kind": "yarn"}}, r"\['kind'\]"),
        ("qwen3_5", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "both rope_parameters"),
        ("gemma3_text", {"rope_scaling": {"factor": 2.0}}, "both rope_parameters"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(case, change, words):
    with pytest.raises(ConfigError, match=words):
        parse(CASES[case] | change)


@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        ("qwen3", {"quantization_config": "fp8"}, "^quantization_config is 'fp8' .* JSON object"),
        ("qwen3", {"rope_parameters": [1]}, r"^rope_parameters is \[1\] .* JSON object"),
        ("qwen3", {"rope_scaling": "yarn"}, "^rope_scaling is 'yarn'"),
        ("qwen3", {"text_config": [1]}, r"^text_config is \[1\]"),
        ("qwen3", {"model_type": ["qwen3"]}, r"^model_type is \['qwen3'\] .* a text"),
        ("qwen3", {"num_hidden_layers": "4"}, "^num_hidden_layers is '4' .* whole number"),
        ("qwen3", {"num_hidden_layers": 2.5}, "^num_hidden_layers is 2.5"),
        ("qwen3", {"num_hidden_layers": True}, "^num_hidden_layers is True"),
        ("qwen3", {"num_attention_heads": 0}, "^num_attention_heads is 0 .* at least 1"),
        ("qwen3", {"rms_norm_eps": "x"}, "^rms_norm_eps is 'x' .* number above 0"),
        ("qwen3", {"rope_theta": "1e6"}, "^rope_theta is '1e6'"),
        ("qwen3", {"layer_types": "full_attention"}, "^layer_types is 'full_attention'"),
        ("qwen3", {"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor is '2'"),
        ("qwen3_5", {"linear_num_key_heads": 0}, "^linear_num_key_heads is 0"),
        ("gemma4_31b", {"per_layer_config": [1]}, r"^per_layer_config is \[1\]"),
        ("gemma4_31b", {"per_layer_config": {"x": {}}}, "^per_layer_config has 'x'"),
        ("gemma4_31b", {"per_layer_config": {"01": 3}}, r"^per_layer_config\.01 is 3"),
        (
            "gemma4_31b", {"per_layer_config": {"01": {"head_dim": "8"}}},
            r"^per_layer_config\.01\.head_dim is '8'",
        ),
        (
            "gemma3_text", {"rope_parameters": {"full_attention": 3}},
            r"^rope_parameters\.full_attention is 3",
        ),
        (
            "gemma3_text", {"rope_parameters": {"sliding_attention": {"rope_theta": -1}}},
            r"^rope_parameters\.sliding_attention\.rope_theta is -1",
        ),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_named_with_its_field(case, change, words):
    with pytest.raises(ConfigError, match=words):
        parse(CASES[case] | change)
    if change.keys() & {"text_config", "model_type"}:
        return
    outer = CASES[case] | {"text_config": CASES[case] | change}
    with pytest.raises(ConfigError, match=words.replace("^", r"^text_config\.")):
        parse(outer)


@settings(max_examples=300)
@given(
    st.sampled_from(["qwen3", "qwen3_moe", "qwen3_5", "gemma3_text", "gemma4_31b", "gemma4_e2b"]),
    st.data(),
)
def test_whatever_a_field_holds_it_is_read_or_refused(case, data):
    name = data.draw(st.sampled_from(sorted(hf_fields._FIELDS)))
    json_value = st.recursive(
        st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from([*hf_fields._ROPE, "1"]), inner, max_size=3)
        ),
        max_leaves=4,
    )
    try:
        parse(CASES[case] | {name: data.draw(json_value)})
    except ConfigError as error:
        assert str(error)


def test_a_theta_of_null_is_the_default():
    assert rope({"rope_theta": None}) == RopeConfig()


def test_the_original_context_at_the_top_goes_before_the_one_inside():
    inner = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    config = {"rope_parameters": inner, "max_position_embeddings": 512}
    assert rope(config).original_max_positions == 64
    assert rope(config | {"original_max_position_embeddings": 128}).original_max_positions == 128


def test_only_gemma_bounds_its_logits():
    assert parse(CASES["llama"] | {"final_logit_softcapping": 3.0}).softcap is None
    assert parse(CASES["gemma4_31b"]).softcap == 30.0


def test_the_last_layer_of_gemma_4_is_full_whatever_the_file_says():
    types = ["sliding_attention"] * 6
    assert parse(CASES["gemma4_31b"] | {"layer_types": types}).layers_of("full") == (5,)


def test_a_missing_field_is_named():
    config = {k: v for k, v in CASES["qwen3"].items() if k != "vocab_size"}
    with pytest.raises(ConfigError, match="vocab_size"):
        parse(config)


def test_broken_json_names_the_file(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(ConfigError, match="does not exist"):
        read_json(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is no valid JSON"):
        read_json(path)
    path.write_text(json.dumps([1]))
    with pytest.raises(ConfigError, match="a list"):
        read_json(path)


GEMMA_3_4B = {  # the published file leaves out what transformers has as its default
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}


def test_gemma_3_alternates_two_kinds_of_layers():
    config = parse(GEMMA_3_4B)
    assert config.layers_of("full") == (5, 11, 17, 23, 29)
    assert config.vocab_size == 262_208 and config.tie_embeddings
    full, sliding = config.layers[5].mixer, config.layers[33].mixer
    assert full.rope == RopeConfig(1e6, "linear", factor=8.0) and full.window is None
    assert sliding.rope == RopeConfig(1e4) and sliding.window == 1024
    assert (full.num_heads, full.num_kv_heads, full.head_dim) == (8, 4, 256)


def test_fields_of_old_gemma_3_files_are_read():
    text = GEMMA_3_4B["text_config"] | {
        "sliding_window_pattern": 3, "rope_theta": 5e5, "rope_local_base_freq": 2e4,
        "query_pre_attn_scalar": 168,
    }  # fmt: skip
    config = parse(GEMMA_3_4B | {"text_config": text})
    assert config.layers_of("full")[:2] == (2, 5)
    assert config.layers[2].mixer.rope == RopeConfig(5e5, "linear", factor=8.0)
    assert config.layers[0].mixer.rope == RopeConfig(2e4)
    assert config.layers[0].mixer.scale == 168**-0.5


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"rope_theta": 5e5, "rope_local_base_freq": 2e4},
        {"rope_local_base_freq": 2e4, "rope_parameters": {"full_attention": {"rope_theta": 3e5}}},
        {
            "rope_theta": 5e5, "rope_local_base_freq": 2e4,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0},
                "sliding_attention": {"rope_type": "default"},
            },
        },
        {
            "rope_theta": 5e5, "rope_local_base_freq": 2e4,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 7e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
            },
        },
    ],
)  # fmt: skip
def test_the_theta_of_gemma_3_is_the_one_that_transformers_takes(change):
    base = {k: v for k, v in CASES["gemma3_text"].items() if k != "rope_parameters"}
    layers = parse(base | change).layers
    theirs = Gemma3TextConfig(**copy.deepcopy(base | change)).rope_parameters
    for kind, name in (("full", "full_attention"), ("sliding", "sliding_attention")):
        (ours,) = {layer.mixer.rope for layer in layers if layer.mixer.kind == kind}
        assert ours.theta == theirs[name]["rope_theta"]
        assert ours.kind == theirs[name]["rope_type"]


def test_gemma_4_shapes_come_published_or_as_transformers_writes_them():
    published = CASES["gemma4_31b"]
    per_layer = {"05": {"head_dim": 32, "num_key_value_heads": 1}}
    saved = {k: v for k, v in published.items() if "global" not in k}
    assert parse(published) == parse(saved | {"per_layer_config": per_layer})
    full, sliding = parse(published).layers[5].mixer, parse(published).layers[4].mixer
    assert (full.head_dim, full.num_kv_heads, full.k_eq_v) == (32, 1, True)
    assert (sliding.head_dim, sliding.num_kv_heads, sliding.k_eq_v) == (16, 2, False)
    assert full.scale == sliding.scale == 1.0


def test_kv_heads_of_full_layers_differ_only_with_a_shared_projection():
    config = CASES["gemma4_31b"] | {"attention_k_eq_v": False}
    assert parse(config).layers[5].mixer.num_kv_heads == 2


def test_the_last_layers_of_e2b_read_the_last_own_layer_of_their_kind():
    config = parse(CASES["gemma4_e2b"])
    assert [layer.mixer.donor for layer in config.layers] == [None] * 5 + [3, 3, 3, 3, 4]
    assert [layer.mlp for layer in config.layers] == [96] * 5 + [192] * 5
    assert config.layers_of("full") == (4,) and config.layers_of("sliding") == (0, 1, 2, 3)
    assert config.per_layer_inputs is not None


def test_qwen_3_5_is_three_recurrent_layers_to_one():
    config = parse({k: v for k, v in CASES["qwen3_5"].items() if k != "layer_types"})
    assert config.layers_of("recurrent") == (0, 1, 2) and config.layers_of("full") == (3,)
    assert config.layers[0].mixer == GatedDelta(2, 6, 16, 16, 4)
    assert config.layers[3].mixer.output_gate and config.layers[3].mixer.rope.partial == 0.25


@pytest.mark.parametrize(("value", "normalize"), [(True, True), (False, False), (None, False)])
def test_qwen_3_moe_normalizes_only_when_told(value, normalize):
    config = {k: v for k, v in CASES["qwen3_moe"].items() if k != "norm_topk_prob"}
    if value is not None:
        config["norm_topk_prob"] = value
    assert parse(config).layers[0].experts.normalize is normalize


def test_dense_layers_among_sparse_ones():
    config = CASES["qwen3_moe"] | {"mlp_only_layers": [1]}
    assert [layer.experts is None for layer in parse(config).layers] == [False, True, False]
    config = CASES["qwen3_moe"] | {"decoder_sparse_step": 2}
    assert [layer.experts is None for layer in parse(config).layers] == [True, False, True]


def test_a_donor_must_have_what_is_read():
    own = Attention(2, 1, 8, RopeConfig(), 1.0)
    other = Attention(2, 2, 8, RopeConfig(), 1.0, donor=0)
    layers = (Layer(own, 8), Layer(other, 8, Experts(2, 1, 4)))
    with pytest.raises(ConfigError, match="layer 1 reads the keys and values of layer 0"):
        dataclasses.replace(parse(CASES["qwen3"]), layers=layers)
