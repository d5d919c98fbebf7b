"""The engine with every kind of cache: rings, donors, experts, recurrent states."""

import itertools

import jax
import pytest
from support import tiny

from da_jax import LLM, Done, EngineConfig, Style
from da_jax.checkpoints import convert
from da_jax.models import host_table

pytestmark = pytest.mark.long

SMALL = EngineConfig(page_size=16, max_model_len=512, max_num_seqs=1, prefill_chunk=64)
CHUNKS = [f"part {letter}: " + letter * 12 for letter in "abcd"]
SLOW = ("qwen3_moe", "qwen3_next", "qwen3_5_moe", "gemma3_1b", "gemma4_31b", "gemma4_26b_moe")


@pytest.fixture(
    params=["gemma4_e2b", "qwen3_5", *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)]
)
def llm(request, family_llm):
    llm, _ = family_llm(request.param)
    compiled = llm.compilations_after_warmup
    yield llm
    scheduler, config = llm.engine.scheduler, llm.engine.config
    assert llm.engine.idle and scheduler._pool.num_free == scheduler._pool.num_pages
    assert sorted(scheduler._slots) == list(range(config.max_num_seqs))  # nothing leaks, ever
    assert llm.compilations_after_warmup == compiled


def requests_of(llm):
    """Seven for two slots, of mixed lengths and modes, one of them sampled."""
    scripts = ("<local>abc", 'x<focus magic_chunks="2,3">yy</focus>z', "", "plain <local>a</local>")
    return [
        llm.request(
            CHUNKS[: 1 + i % 4], "q" * (1 + 40 * (i % 3)), forced=scripts[i % 4],
            max_tokens=45 + 3 * i, ignore_eos=True, temperature=i // 6, seed=i,
        )
        for i in range(7)
    ]  # fmt: skip


def responses(llm, requests):
    done = [event for event in llm.engine.run(requests) if isinstance(event, Done)]
    return [event.response for event in sorted(done, key=lambda event: event.request_id)]


def test_a_batch_gives_what_each_request_gives_alone(llm):
    requests = requests_of(llm)
    alone = [responses(llm, [request])[0] for request in requests]
    together = responses(llm, requests)
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    assert [r.summary for r in together] == [r.summary for r in alone]
    assert len({r.token_ids for r in alone}) == len(alone)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_slot_that_a_cancelled_request_leaves_serves_the_next(llm, steps):
    first, *others = requests_of(llm)[:3]
    expected = responses(llm, others)
    goes = llm.engine.add(first)
    numbers = [llm.engine.add(request) for request in others]
    for _ in range(steps):
        llm.engine.step()
    llm.engine.cancel(goes)
    done, events = {}, []
    while not llm.engine.idle:
        events += llm.engine.step()
    done = {event.request_id: event.response for event in events if isinstance(event, Done)}
    assert done[goes].finish_reason == "cancelled"
    assert [done[number].token_ids for number in numbers] == [r.token_ids for r in expected]


@pytest.mark.parametrize("weights", ["int8", pytest.param("auto", marks=pytest.mark.slow)])
def test_per_layer_embeddings_on_the_host_change_nothing(tmp_path, weights):
    folder = tiny.write_folder(tmp_path / "model", "gemma4_e2b")
    found = {}
    for where in ("device", "host"):
        llm = LLM.from_pretrained(
            folder, style=Style(**tiny.STYLE), config=SMALL, weights=weights,
            per_layer_embeddings=where,
        )  # fmt: skip
        found[where] = [response.token_ids for response in responses(llm, requests_of(llm)[:3])]
        assert llm.compilations_after_warmup == 0
        table = llm.engine.runner.model(llm.engine.runner.weights).per_layer_embedding.get_value()
        assert host_table.on_host(table) == (where == "host")
    assert found["device"] == found["host"]


def test_only_models_with_per_layer_embeddings_can_leave_them_on_the_host(tmp_path):
    folder = tiny.write_folder(tmp_path / "model", "gemma4_31b")
    with pytest.raises(ValueError, match="per_layer_embeddings is 'host', but this gemma4 has non"):
        LLM.from_pretrained(folder, per_layer_embeddings="host", max_model_len=512)


def test_an_int8_checkpoint_answers_as_its_source_made_int8_at_load(tmp_path):
    folder = tiny.write_folder(tmp_path / "model", "qwen3_5_moe")
    convert.convert(folder, tmp_path / "int8", dtype="float32", quantize="int8")
    found = []
    for path, weights in ((folder, "int8"), (tmp_path / "int8", "auto")):
        llm = LLM.from_pretrained(path, style=Style(**tiny.STYLE), config=SMALL, weights=weights)
        found.append([response.token_ids for response in responses(llm, requests_of(llm)[:2])])
    assert found[0] == found[1]


def test_a_dtype_that_leaves_the_range_of_activations_is_refused(tmp_path):
    folder = tiny.write_folder(tmp_path / "model", "gemma3_text")
    with pytest.raises(ValueError, match="dtype float16: activations of gemma3"):
        LLM.from_pretrained(folder, dtype="float16", max_model_len=512)


@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_an_interrupted_step_is_taken_up_again(llm, step, monkeypatch):
    """The device has moved on with a chunk or a burst; recurrent states cannot do it twice."""
    requests = requests_of(llm)[:2]
    expected = [response.token_ids for response in responses(llm, requests)]
    numbers = [llm.engine.add(request) for request in requests]
    get, done, count = jax.device_get, {}, itertools.count(1)

    def interrupted(choices):
        if next(count) == step:
            raise KeyboardInterrupt
        return get(choices)

    monkeypatch.setattr(jax, "device_get", interrupted)
    while not llm.engine.idle:
        try:
            events = llm.engine.step()
        except KeyboardInterrupt:
            continue
        done |= {e.request_id: e.response for e in events if isinstance(e, Done)}
    assert [done[number].token_ids for number in numbers] == expected
