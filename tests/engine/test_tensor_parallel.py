"""One model on several devices, against transformers and against one device."""

import numpy as np
import pytest
from support import cases, devices, references, tiny

from da_jax import LLM
from da_jax.models import sharding, sizes
from da_jax.models.config import Attention, GatedDelta, RopeConfig
from da_jax.models.hf_config import parse

pytestmark = pytest.mark.long

# One for each kind of cache and layer, and each way in which heads divide; the rest is slow.
QUICK = (
    "qwen3:2", "llama:8", "qwen3_5:2", "gemma3_1b:4", "gemma4_26b_moe:2", "gemma4_e2b:4",
    "qwen3:8", "wide_qwen3_5_moe:1", "wide_qwen3_5_moe:8",
)  # fmt: skip
EVERY = [f"{case}:{n}" for case in references.MODELS for n in (1, 2, 4, 8)]
SLOW = [job for job in (*EVERY, "wide_qwen3_5_moe:4") if job not in QUICK]
ENGINE = "qwen3_5"  # not one with experts: where their scores nearly tie, rounding decides
WHOLE = {
    "qwen3:2": [],
    "wide_qwen3_5_moe:8": ["attention.k.kernel", "attention.v.kernel"],  # 4 KV heads
    "gemma4_e2b:4": ["attention.k.kernel", "attention.v.kernel", "per_layer_projection.kernel"],
}
JOBS = [*QUICK, *(pytest.param(job, marks=pytest.mark.slow) for job in SLOW)]


@pytest.fixture(scope="module")
def measured(request):
    """What `devices.measure` found for every job that was asked for."""
    asked = [keys(item)["job"] for item in request.session.items if "job" in keys(item)]
    engine = [f"engine:{ENGINE}:{n}" for n in (1, 2)] + [f"replicas:{ENGINE}:2"]
    child = devices.start(*dict.fromkeys([*asked, *WHOLE, *engine]))
    return {found["job"]: found for found in devices.results(child, timeout=3000)}


def keys(item):
    return item.callspec.params if hasattr(item, "callspec") else {}


@pytest.fixture(params=JOBS)
def job(request):
    return request.param


def divided(config, count):
    """(kinds of work that the devices divide in each layer, whether the vocabulary is)."""
    layers = []
    for layer in config.layers:
        mixer, found = layer.mixer, []
        if isinstance(mixer, GatedDelta):
            found += ["mixer"] * (mixer.key_heads % count == 0)
        else:
            heads = mixer.num_kv_heads
            whole = heads % count == 0 or count % heads == 0
            found += ["mixer"] * (mixer.num_heads % count == 0 and whole)
        found += ["mlp"] * bool(layer.mlp and layer.mlp % count == 0)
        if experts := layer.experts:
            found += ["experts"] * (experts.hidden % count == 0)
            found += ["shared"] * bool(experts.shared and experts.shared % count == 0)
        layers.append(found)
    return layers, config.vocab_size % count == 0


def test_logits_bytes_and_what_passes_between_devices(job, measured):
    """Ragged prefill, then single steps under another mask; caches begin full of NaN."""
    case, count = job.split(":")
    config, count, found = parse(cases.CASES[case]), int(count), measured[job]
    tolerance = references.tolerance(case)
    assert found.get("error", 0) < tolerance and found["changed"] < tolerance
    assert found["weights"] == [
        sizes.weight_bytes(config, itemsize=4, int8=False, devices=count)
    ] * count  # fmt: skip
    assert found["caches"] == [found["planned"]] * count
    layers, vocabulary = divided(config, count)
    assert not found["attention"]
    if count == 1:
        assert found["sums"] == found["gathers"] == 0 and not found["compiled"]
        return
    tables = vocabulary * (1 + (config.per_layer_inputs is not None))
    assert found["sums"] == sum(map(len, layers)) + tables
    assert found["gathers"] == vocabulary
    assert found["compiled"].keys() <= {"all-reduce", "all-gather"}
    assert found["compiled"]["all-reduce"] <= found["sums"]
    assert found["compiled"].get("all-gather", 0) == found["gathers"]


@pytest.mark.parametrize("whole", WHOLE)
def test_no_device_has_all_of_a_matrix_but_those_that_cannot_be_divided(whole, measured):
    assert measured[whole]["whole"] == WHOLE[whole]


def test_two_devices_answer_what_one_answers_whatever_is_declared(measured):
    one, two = (measured[f"engine:{ENGINE}:{n}"] for n in (1, 2))
    assert one["tokens"] == two["tokens"] and one["modes"] == two["modes"]
    assert {mode for modes in one["modes"] for mode in modes} == {"GLOBAL", "FOCUS", "LOCAL"}
    for ours, theirs in zip(two["logprobs"], one["logprobs"]):
        np.testing.assert_allclose(ours, theirs, atol=references.tolerance(ENGINE), rtol=0)
    assert one["compiled"] == two["compiled"] == 0


def test_replicas_have_devices_of_their_own_and_answer_alike(measured):
    one, pair = measured[f"engine:{ENGINE}:2"], measured[f"replicas:{ENGINE}:2"]
    assert pair["tokens"] == one["tokens"] and pair["modes"] == one["modes"]
    (left, chunks), (right, others) = pair["replicas"]
    assert (left, right) == ([0, 1], [2, 3]) and min(chunks, others) > 0
    assert pair["compiled"] == 0


@pytest.mark.slow
def test_per_layer_embeddings_on_the_host_are_shared_too():
    child = devices.start("engine:gemma4_e2b:1", "host:gemma4_e2b:2")
    one, two = devices.results(child)
    assert one["tokens"] == two["tokens"] and one["modes"] == two["modes"]
    assert one["compiled"] == two["compiled"] == 0


def test_more_devices_than_there_are_is_refused(tmp_path):
    folder = tiny.write_folder(tmp_path / "model")
    with pytest.raises(ValueError, match=r"tensor_parallel is 2 .* JAX sees 1 cpu device"):
        LLM.from_pretrained(folder, tensor_parallel=2)
    with pytest.raises(ValueError, match="tensor_parallel is 0; it must be at least 1"):
        LLM.from_pretrained(folder, tensor_parallel=0)


def test_a_number_of_devices_that_divides_nothing_is_refused_with_those_that_do():
    config = parse(cases.CASES["qwen3"])  # 4 heads, MLPs of 128
    with pytest.raises(ValueError, match=r"3 devices cannot share.* choose 1, 2, 4, 8, 16, 32, 64"):
        sharding.check(config, 3)
    for count in (1, 2, 8):
        sharding.check(config, count)


def test_a_parameter_without_a_rule_is_an_error():
    config = parse(cases.CASES["qwen3"])
    for path in ("layers.0.attention.bias", "layers.1.mlp.extra.kernel", "elsewhere"):
        with pytest.raises(KeyError, match="no rule says how to divide"):
            sharding.divided_axis(config, path, 2)


@pytest.mark.parametrize(
    ("path", "axis"),
    [
        ("embedding_scale", 0), ("layers.0.attention.q.kernel_scale", 0),
        ("layers.0.attention.o.kernel_scale", None), ("layers.0.moe.gate_scale", 1),
        ("layers.0.moe.down_scale", None), ("head.kernel_scale", 0),
    ],
)  # fmt: skip
def test_scales_of_int8_follow_the_outputs_of_their_matrix(path, axis):
    assert sharding.divided_axis(parse(cases.CASES["qwen3_moe"]), path, 2) == axis


def test_heads_divide_or_are_kept_by_several_devices_or_stay_whole():
    mixer = lambda heads, keys: Attention(heads, keys, 8, RopeConfig(), 1.0)
    kept = lambda heads, keys, count: (
        sharding.attention_shards(mixer(heads, keys), count),
        sharding.kv_heads(mixer(heads, keys), count),
    )
    assert kept(8, 4, 2) == (2, 2)
    assert kept(8, 2, 8) == (8, 1)  # four devices keep each KV head
    assert kept(8, 8, 16) == (1, 8)  # not a query head for each device
    assert kept(12, 6, 4) == (1, 6)  # a device would need parts of two KV heads
    assert kept(6, 3, 2) == (1, 3)
