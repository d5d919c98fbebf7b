import json

import pytest
from support.references import CASES

from da_jax.models.config import ConfigError, ModelConfig, RopeConfig, read_json


def test_both_spellings_of_rope_read_the_same():
    old = {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0}}
    assert RopeConfig.from_hf(old) == RopeConfig.from_hf(new) == RopeConfig(1e6, "linear", 2.0)


def test_head_dim_follows_from_the_width_when_it_is_not_given():
    config = {k: v for k, v in CASES["llama"].items() if k != "head_dim"}
    assert ModelConfig.from_hf(config).head_dim == 64 // 8


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"num_attention_heads": 3}, "num_attention_heads 3"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "wobble": 1}}, "wobble"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(change, words):
    with pytest.raises(ConfigError, match=words):
        ModelConfig.from_hf(CASES["qwen3"] | change)


def test_a_missing_field_is_named():
    config = {k: v for k, v in CASES["qwen3"].items() if k != "vocab_size"}
    with pytest.raises(ConfigError, match="vocab_size"):
        ModelConfig.from_hf(config)


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
