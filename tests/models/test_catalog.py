"""The catalogue: which names it knows, and that its entries are the published shapes."""

import pytest

from da_jax.models import catalog, hf_config, sizes
from da_jax.models.config import Attention

# Parameters of the text model that transformers 5.24 builds from the same configuration.
PARAMETERS = {
    "gemma-4-31B": 30_697_345_340,
    "gemma-4-26B-A4B": 25_233_141_790,
    "gemma-4-12B": 11_907_350_320,
    "gemma-4-E4B": 7_463_013_418,
    "gemma-4-E2B": 4_628_569_379,
    "gemma-3-27b": 27_009_346_304,
    "gemma-3-12b": 11_766_034_176,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-1b": 999_885_952,
    "gemma-3-270m": 268_098_176,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-4B-2507": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-30B-A3B-2507": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Qwen3-235B-A22B-2507": 235_093_634_560,
    "Qwen3.5-0.8B": 752_393_024,
    "Qwen3.5-2B": 1_881_825_088,
    "Qwen3.5-4B": 4_205_751_296,
    "Qwen3.5-9B": 8_953_803_264,
    "Qwen3.5-27B": 26_895_998_464,
    "Qwen3.5-35B-A3B": 34_660_610_688,
    "Qwen3.5-122B-A10B": 122_111_526_912,
    "Qwen3.5-397B-A17B": 396_346_350_336,
    "Qwen3.6-27B": 26_895_998_464,
    "Qwen3.6-35B-A3B": 34_660_610_688,
    "Qwen3.8-27B": 26_895_998_464,
    "Qwen3-Next-80B-A3B": 79_674_391_296,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.3-70B": 70_553_706_496,
    "SmolLM2-135M": 134_515_008,
    "SmolLM2-360M": 361_821_120,
    "SmolLM2-1.7B": 1_711_376_384,
}


def test_parameters_are_those_that_transformers_builds():
    found = {
        name: sizes.parameters(hf_config.parse(catalog.hf_config(name))) for name in catalog.names()
    }
    assert found == PARAMETERS


@pytest.mark.parametrize(
    ("name", "spelling"),
    [
        ("gemma-4-31B", "gemma-4-31B"),
        ("GEMMA-4-31b", "gemma-4-31B"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("google/gemma-3-27b-pt", "gemma-3-27b"),
        ("google/gemma_4_e2b_it", "gemma-4-E2B"),
        ("Qwen/Qwen3.6-27B", "Qwen3.6-27B"),
        ("Qwen/Qwen3.5-4B-Base", "Qwen3.5-4B"),
        ("Qwen/Qwen3-4B-Instruct-2507", "Qwen3-4B-2507"),
        ("Qwen/Qwen3-4B-Thinking-2507", "Qwen3-4B-2507"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen3-30B-A3B-2507"),
        ("Qwen/Qwen3-235B-A22B-Thinking-2507", "Qwen3-235B-A22B-2507"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen3-Next-80B-A3B"),
        ("Qwen/Qwen3-Next-80B-A3B-Thinking", "Qwen3-Next-80B-A3B"),
        ("Qwen/Qwen3-8B/", "Qwen3-8B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "SmolLM2-135M"),
    ],
)
def test_names_and_hub_ids_of_one_shape_find_it(name, spelling):
    assert catalog.find(name) == spelling
    assert catalog.hf_config(name) == catalog.hf_config(spelling)


@pytest.mark.parametrize("name", ["gemma-31b", "Qwen3-27B", "qwen/Qwen3.6-27B-FP8", "", "x/y",
                                  "/models/Qwen3-8B", "gs://bucket/Qwen3-8B", "a/b/Qwen3-8B",
                                  "./Qwen3-8B", "~/Qwen3-8B"])  # fmt: skip
def test_other_names_are_not_guessed(name):
    assert catalog.find(name) is None
    with pytest.raises(ValueError, match=f"unknown model '{name}'"):
        catalog.hf_config(name)


def test_an_unknown_name_tells_the_nearest_or_all():
    assert catalog.unknown("gemma-4-31").startswith(
        "unknown model 'gemma-4-31'; the nearest are gemma-4-31B, "
    )
    assert all(name in catalog.unknown("zzz") for name in catalog.names())


def test_generations_share_shapes_and_calls_share_nothing():
    assert catalog.hf_config("Qwen3.6-27B") == catalog.hf_config("Qwen3.8-27B")
    catalog.hf_config("Qwen3.6-27B")["hidden_size"] = 0
    assert catalog.hf_config("Qwen3.6-27B")["hidden_size"] == 5120


def test_ropes_scales_and_shapes_of_gemma():
    gemma = hf_config.parse(catalog.hf_config("gemma-3-27b"))
    sliding, full = gemma.layers[0].mixer, gemma.layers[5].mixer
    assert isinstance(sliding, Attention) and isinstance(full, Attention)
    assert (sliding.window, sliding.rope.theta, sliding.rope.kind) == (1024, 1e4, "default")
    assert (full.window, full.rope.theta, full.rope.kind, full.rope.factor) == (
        None, 1e6, "linear", 8,
    )  # fmt: skip
    assert sliding.scale == full.scale == 168**-0.5
    assert gemma.layers[-1].mixer.kind == "sliding"
    small = hf_config.parse(catalog.hf_config("gemma-3-1b")).layers[5].mixer
    assert isinstance(small, Attention) and small.rope.kind == "default"
    e2b = hf_config.parse(catalog.hf_config("gemma-4-E2B"))
    assert {getattr(layer.mixer, "donor", None) for layer in e2b.layers[15:]} == {13, 14}
    assert [layer.mlp for layer in e2b.layers[14:16]] == [6144, 12_288]
    large = hf_config.parse(catalog.hf_config("gemma-4-31B")).layers
    assert [getattr(large[i].mixer, "k_eq_v", None) for i in (4, 5)] == [False, True]
    assert [getattr(large[i].mixer, "head_dim", None) for i in (4, 5)] == [256, 512]


def test_ropes_of_qwen_and_llama():
    long = hf_config.parse(catalog.hf_config("Qwen3-4B-2507"))
    assert long.max_positions == 262_144 and long.layers[0].mixer.rope.theta == 5e6
    experts = hf_config.parse(catalog.hf_config("Qwen3-30B-A3B-2507"))
    assert experts.max_positions == 262_144 and experts.layers[0].mixer.rope.theta == 1e7
    hybrid = hf_config.parse(catalog.hf_config("Qwen3.6-27B")).layers[3].mixer
    assert isinstance(hybrid, Attention) and hybrid.output_gate
    assert (hybrid.rope.theta, hybrid.rope.partial) == (1e7, 0.25)
    llama = hf_config.parse(catalog.hf_config("Llama-3.2-1B")).layers[0].mixer
    assert (llama.rope.kind, llama.rope.factor) == ("llama3", 32)
