"""Replicas behind one front: each request runs on one of them, and its result is the same."""

import itertools

import pytest

from da_jax import LLM, Done
from da_jax.engine import detokenize
from da_jax.engine.engine import Engine
from da_jax.engine.llm import load_model
from da_jax.engine.replicas import Replicas
from da_jax.engine.scheduler import QueueFull

pytestmark = pytest.mark.long

CHUNKS = [f"part {letter}: " + letter * 12 for letter in "abcd"]


@pytest.fixture(scope="module")
def pair(random_llm, tiny_folder):
    """Two engines on one device, which is enough to see who gets what."""
    engine, ids = random_llm.engine, itertools.count()
    model = load_model(tiny_folder, engine.config)
    engines = [Engine(model, engine.table, frozenset(), engine.config, ids=ids) for _ in range(2)]
    replicas = Replicas(engines)
    replicas.warm_up()
    return replicas


def finish(loop):
    events = []
    while not loop.idle:
        events += loop.step()
    return {e.request_id: e.response for e in events if isinstance(e, Done)}


def test_requests_are_shared_out_and_answered_alike(random_llm, pair):
    requests = [
        random_llm.request(CHUNKS, "?" * i, forced="<local>a", max_tokens=20, ignore_eos=True)
        for i in range(1, 13)
    ]
    alone = [e.response for e in random_llm.engine.run(requests) if isinstance(e, Done)]
    alone = {r.prompt_tokens: r for r in alone}
    numbers = [pair.add(request) for request in requests]
    assert numbers == sorted(set(numbers))
    assert min(engine.scheduler.load for engine in pair.engines) >= 4
    done = finish(pair)
    assert sorted(done) == numbers
    for response in done.values():
        assert response.token_ids == alone[response.prompt_tokens].token_ids


def test_a_document_is_asked_where_it_is_cached(random_llm, pair):
    document = [f"a document of its own {letter} " * 3 for letter in "xyz"]
    first = pair.add(random_llm.request(document, "one?", max_tokens=2))
    home = next(e for e in pair.engines if e.scheduler.find(first))
    finish(pair)
    for question in ("two?", "three?"):
        number = pair.add(random_llm.request(document, question, max_tokens=2))
        assert home.scheduler.find(number)
    finish(pair)


def test_a_run_over_replicas_ends_or_is_abandoned_without_a_trace(random_llm, pair, monkeypatch):
    for engine in pair.engines:
        monkeypatch.setattr(engine.scheduler, "_max_waiting", 2)
    requests = (random_llm.request(CHUNKS, "?" * i, max_tokens=3) for i in range(1, 31))
    assert sum(isinstance(event, Done) for event in pair.run(requests)) == 30
    stream = pair.run([random_llm.request(CHUNKS, "?", max_tokens=90, ignore_eos=True)])
    next(stream)
    stream.close()
    assert pair.idle
    for _ in range(4):
        pair.add(random_llm.request(CHUNKS, "?", max_tokens=2))
    with pytest.raises(QueueFull, match="each of 2 replicas"):
        pair.add(random_llm.request(CHUNKS, "?", max_tokens=2))
    pair.cancel(next(iter(pair.engines[0].scheduler._waiting)))
    reasons = [r.finish_reason for r in finish(pair).values()]
    assert sorted(reasons) == ["cancelled", "length", "length", "length"]


def test_the_vocabulary_is_read_once_for_all_guided_responses(random_llm, pair, monkeypatch):
    made = []

    class Spy(detokenize.Guides):
        def __init__(self, *arguments):
            made.append(arguments)
            super().__init__(*arguments)

    monkeypatch.setattr(detokenize, "Guides", Spy)
    table = detokenize.TokenTable.from_tokenizer(random_llm.tokenizer)
    for engine in pair.engines:
        monkeypatch.setattr(engine, "table", table)
    requests = [
        random_llm.request(CHUNKS, "?" * i, forced="<focus", max_tokens=60, guided=True)
        for i in range(1, 5)
    ]
    alone = [e.response for e in random_llm.engine.run(requests) if isinstance(e, Done)]
    alone = {r.prompt_tokens: r.token_ids for r in alone}
    made.clear()  # those of `random_llm`
    for request in requests:
        pair.add(request)
    assert all(engine.scheduler.load == 2 for engine in pair.engines)
    done = finish(pair)
    assert len(done) == 4 and len(made) == 1
    assert {r.prompt_tokens: r.token_ids for r in done.values()} == alone


def test_more_replicas_than_devices_are_refused(tiny_folder):
    with pytest.raises(ValueError, match="data_parallel is 2"):
        LLM.from_pretrained(tiny_folder, data_parallel=2)
