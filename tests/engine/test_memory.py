"""The memory plan: what it counts, what it refuses, and that what it says fits."""

import dataclasses
import functools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny
from support.references import CASES

from da_jax import LLM, EngineConfig, Style
from da_jax.engine import engine, memory
from da_jax.models import catalog, sizes
from da_jax.models.dtypes import KV_DTYPES
from da_jax.models.hf_config import parse

pytestmark = pytest.mark.long

NAMES = ("qwen3", "gemma3_1b", "gemma4_e2b", "gemma4_31b", "qwen3_5")
MIB = 2**20


@functools.cache
def model_of(name):
    return parse(CASES[name] if name in CASES else catalog.hf_config(name))


def room_of(memory_bytes, weights=0, workspace=0, others=0, fraction=1.0):
    return memory.Room("chip", memory_bytes, fraction, weights, others, workspace)


def planned(name, config, room, max_len, most=None):
    forms = engine.shapes(config, max_len, 1)
    kv_dtype = KV_DTYPES[config.kv_dtype] or "float32"
    return memory.plan_for(
        model_of(name), config, room, forms, max_len, dtype="float32", kv_dtype=kv_dtype, most=most
    )


CONFIGS = st.builds(
    EngineConfig,
    page_size=st.integers(1, 200),
    max_num_seqs=st.integers(1, 20),
    prefill_chunk=st.integers(1, 600),
    kv_cache_bytes=st.none() | st.integers(1, 64 * MIB),
    memory_fraction=st.floats(0.1, 1.0),
    kv_dtype=st.sampled_from(list(KV_DTYPES)),
    prefix_snapshots=st.integers(0, 4),
    prefix_cache=st.booleans(),
)


def needs(name, config, max_len):
    """Bytes of all slots and one whole sequence, by the arithmetic of `sizes`."""
    model = model_of(name)
    copies = config.prefix_snapshots if config.prefix_cache else 0
    kinds = {layer.mixer.kind for layer in model.layers}
    slots = config.max_num_seqs + (copies if kinds != {"full"} else 0)
    use = sizes.Use(
        context=max_len, dtype="float32", kv_dtype=config.kv_dtype, page_size=config.page_size,
        prefill_chunk=config.prefill_chunk,
    )  # fmt: skip
    one = sizes.memory(model, use)
    all_slots = sizes.memory(model, dataclasses.replace(use, batch=slots))
    return one.pages + all_slots.rings + all_slots.states


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(NAMES), CONFIGS, st.integers(2, 3000), st.integers(0, 200 * MIB),
    st.integers(0, 20 * MIB), st.integers(0, 20 * MIB), st.integers(0, 5 * MIB),
)  # fmt: skip
def test_a_plan_fits_and_is_refused_only_if_one_sequence_does_not(
    name, config, max_len, size, weights, workspace, others
):
    room = room_of(size, weights, workspace, others, config.memory_fraction)
    budget = min(room.free, config.kv_cache_bytes or room.free)
    try:
        plan, caches = planned(name, config, room, max_len)
    except ValueError as error:
        assert needs(name, config, max_len) > budget
        check_remedy(str(error), name, config, room, max_len)
        return
    assert needs(name, config, max_len) <= budget
    assert plan.caches == caches.bytes <= budget
    used = plan.caches + weights + workspace + others
    assert used <= size * config.memory_fraction
    assert plan.page_tokens >= max_len and plan.whole_sequences >= 1
    assert (plan.sequences, plan.max_model_len) == (config.max_num_seqs, max_len)
    page = caches.page_bytes // caches.num_pages
    most = caches.num_slots * -(-max_len // config.page_size)
    assert caches.num_pages == most or plan.caches + page > budget  # nothing is left unused


def check_remedy(words, name, config, room, max_len):
    """What the message says would fit does, and no more of it would."""
    found = re.search(r"; (prefix_snapshots|max_num_seqs|max_model_len)=(\d+) fits", words)
    if not found:
        assert "not even a page fits" in words
        return
    setting, value = found[1], int(found[2])
    if "without prefix_snapshots" in words or "prefix_snapshots=0" in words:
        config = dataclasses.replace(config, prefix_snapshots=0)
    if "with max_num_seqs=1" in words:
        config = dataclasses.replace(config, max_num_seqs=1)

    def attempt(number):
        if setting == "max_model_len":
            return planned(name, config, room, number)
        return planned(name, dataclasses.replace(config, **{setting: number}), room, max_len)

    attempt(value)
    with pytest.raises(ValueError, match="the budget is"):
        attempt(value + 1)


def test_a_refusal_of_too_many_sequences_says_how_many_fit():
    config = EngineConfig(max_num_seqs=8, max_model_len=32_768)
    forms = engine.shapes(config, 32_768, 1)
    model = model_of("gemma-4-31B")
    weights = sizes.weight_bytes(model, itemsize=2, int8=True)
    room = room_of(40_960 * MIB, weights, fraction=0.9)
    plan = functools.partial(
        memory.plan_for, model, room=room, shapes=forms, max_len=32_768, dtype="bfloat16",
        kv_dtype="bfloat16",
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"; max_num_seqs=\d+ fits") as refused:
        plan(config)
    words = str(refused.value)
    assert "of sliding windows" in words and "of recurrent states" in words
    assert "90% of the 40.00 GiB of chip less 28" in words and "kv_dtype='int8'" in words
    count = int(re.search(r"max_num_seqs=(\d+)", words)[1])
    found, _ = plan(dataclasses.replace(config, max_num_seqs=count, prefix_snapshots=0))
    assert found.sequences == count < 8


def test_what_limits_is_what_the_message_names():
    small = EngineConfig(kv_cache_bytes=1000)
    with pytest.raises(ValueError, match=r"or raise kv_cache_bytes$"):
        planned("qwen3", small, room_of(2**40), 512)
    with pytest.raises(
        ValueError, match=r"not even a page fits; the budget is 100% of the 1\.0 MiB"
    ):
        planned("qwen3", EngineConfig(), room_of(MIB, weights=MIB), 512)
    with pytest.raises(ValueError, match="nobody knows how much memory chip has; set kv_cache_byt"):
        planned("qwen3", EngineConfig(), room_of(None), 512)
    assert planned("qwen3", EngineConfig(kv_cache_bytes=2**30), room_of(None), 512)


def test_a_limit_of_the_platform_gives_way_to_kv_cache_bytes():
    page = 64 * 3 * 2 * 128 * 4
    few, _ = planned("qwen3", EngineConfig(), room_of(2**40), 512, most=10 * page)
    assert few.page_tokens == 640
    more, _ = planned(
        "qwen3", EngineConfig(kv_cache_bytes=20 * page), room_of(2**40), 512, most=10 * page
    )
    assert more.page_tokens == 1280


@pytest.mark.parametrize("name", NAMES)
def test_a_limit_of_the_platform_gives_way_to_one_whole_sequence(name):
    config = EngineConfig()
    plan, caches = planned(name, config, room_of(2**40), 3000, most=1)
    assert plan.caches == caches.bytes == needs(name, config, 3000)
    assert plan.page_tokens == 3008  # whole pages of 64
    room = room_of(plan.caches - 1)
    with pytest.raises(ValueError, match=r" fits.*; the budget is 100% of the") as refused:
        planned(name, config, room, 3000, most=1)
    check_remedy(str(refused.value), name, config, room, 3000)


def test_copies_of_the_caches_that_programs_make_are_left_room_for():
    room = dataclasses.replace(room_of(400 * MIB), copies=3.0)
    assert room.free == 100 * MIB
    plan, _ = planned("qwen3", EngineConfig(), room, 512)
    assert plan.workspace == 3 * plan.caches <= 300 * MIB
    share = lambda kv_dtype, platform: memory.copied_share(
        model_of("Qwen3-0.6B"), EngineConfig(), kv_dtype, platform
    )
    assert share("bfloat16", "tpu") == share("float32", "cpu") == 0
    assert share("float8_e4m3fn", "cpu") == share("bfloat16", "cpu") == 3
    assert share("int8", "tpu") == 2 * 8 * 128 * 4 / (2 * 8 * 64 * 128 + 2 * 8 * 128 * 4)


class Device:
    """A device as far as the plan looks at it."""

    def __init__(self, platform, kind, stats=None):
        self.platform, self.device_kind, self._stats = platform, kind, stats

    def memory_stats(self):
        return self._stats


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (Device("tpu", "TPU v5 lite", {"bytes_limit": 123}), 123),
        (Device("tpu", "TPU v5 lite"), 16 * 2**30),
        (Device("gpu", "NVIDIA L4", {}), 23_034 * MIB),
        (Device("gpu", "something new"), None),
    ],
)
def test_memory_is_what_the_runtime_says_else_what_the_chip_has(device, expected):
    assert memory.device_memory(device) == expected


def test_a_cpu_has_the_memory_of_the_host():
    with open("/proc/meminfo") as lines:
        total = int(next(line for line in lines if line.startswith("MemTotal")).split()[1]) * 1024
    found = memory.device_memory(Device("cpu", "cpu"))
    assert found is not None and found <= total


def test_the_engine_plans_from_what_is_on_its_device(tmp_path, monkeypatch):
    folder = tiny.write_folder(tmp_path / "model")
    options = dict(style=Style(**tiny.STYLE), max_num_seqs=2, page_size=16, max_model_len=512)
    llm = LLM.from_pretrained(folder, **options)
    assert llm.memory.whole_sequences == llm.memory.sequences == 2
    weights = sizes.weight_bytes(model_of("qwen3"), itemsize=4, int8=False)
    assert llm.memory.room.weights == weights
    assert llm.memory.room.workspace > 0 and llm.memory.room.memory == memory._host_memory()
    # a host with room for weights, programs, and a little more than one sequence
    pages = 48 * 16 * 3 * 2 * 128 * 4
    need = weights + llm.memory.room.workspace + pages
    monkeypatch.setattr(memory, "_host_memory", lambda: need)
    small = LLM.from_pretrained(folder, memory_fraction=1.0, **options)
    assert small.memory.page_tokens == 48 * 16 and small.memory.whole_sequences == 1
    assert small.memory.caches == pages
    with pytest.raises(ValueError, match=r"max_model_len=\d+ fits; the budget is [\d.]+% of the"):
        LLM.from_pretrained(folder, memory_fraction=(need - pages / 2) / need, **options)


def test_a_plan_is_printed_in_three_lines_and_as_json():
    config = EngineConfig(max_num_seqs=4, kv_dtype="int8")
    plan, _ = planned("gemma3_1b", config, room_of(64 * MIB, weights=MIB, others=MIB), 512)
    lines = plan.describe()
    assert len(lines) == 3
    assert (
        "chip: memory 64.0 MiB, 100% usable; weights 1.0 MiB, workspace 0.0 MiB, others 1.0"
        in (lines[0])
    )
    assert "in int8: pages" in lines[1] and "snapshots" in lines[1]
    assert lines[2] == "3,072 tokens of context in all: 4 of 4 sequences at 512 tokens"
    facts = plan.as_dict()
    parts = ("pages_bytes", "rings_bytes", "states_bytes", "snapshots_bytes")
    assert sum(facts[part] for part in parts) == facts["caches_bytes"] == plan.caches
    assert facts["device_memory_bytes"] == 64 * MIB and facts["kv_dtype"] == "int8"
