"""Thousands of requests come, are cancelled, time out and give way: none is lost, nothing kept."""

import collections
import dataclasses
import gc
import random
import resource

import numpy as np
import pytest

from da_jax import LLM, Arm, Done, EngineConfig
from da_jax.engine.request import Request, SamplingParams
from da_jax.engine.sequence import Sequence
from da_jax.protocol.prompt import PromptMap

pytestmark = pytest.mark.long

CONFIG = EngineConfig(
    page_size=16, max_model_len=256, max_num_seqs=16, prefill_chunk=64, burst=8,
    max_waiting=64, kv_cache_bytes=14 * 2**20,
)  # fmt: skip
TAGS = ("<local>", '<focus magic_chunks="1">', '<focus magic_chunks="2,3">', "<global>", "")


class Clock:
    """One second a step."""

    now = 0.0

    def __call__(self):
        return self.now


def requests_of(llm, count, rng):
    """Short prompts of three chunks, a third of them with a beginning that others have too."""
    vocabulary = len(llm.engine.table)
    documents = [[rng.randrange(20, 200) for _ in range(130)] for _ in range(5)]
    tags = [tuple(llm.tokenizer.encode(tag)) for tag in TAGS]
    assert vocabulary > 200
    for _ in range(count):
        length = rng.randrange(8, 130)
        ids = rng.choice(documents)[:length]
        if rng.random() < 0.7:
            ids = [rng.randrange(20, 200) for _ in range(length)]
        ids += [rng.randrange(20, 200) for _ in range(rng.randrange(1, 20))]
        a, b = length // 3, 2 * length // 3
        chunks = ((0, a), (a, b), (b, length))
        prompt = PromptMap(
            np.array(ids, np.int32), chunks, ((length, len(ids)),), "", (), (), (), Arm.DA
        )
        forced = rng.choice(tags)
        params = SamplingParams(
            max_tokens=len(forced) + min(1 + int(rng.expovariate(0.12)), 90), ignore_eos=True,
            temperature=rng.choice((0, 0, 1.0)), seed=rng.randrange(2**32), logprobs=2,
            stop=rng.choice(((), (), ("e",))),
        )  # fmt: skip
        yield Request(
            prompt, params, rng.choice((Arm.DA, Arm.DA, Arm.UNMASKED)), forced,
            priority=rng.choice((0, 0, 1)),
            deadline=rng.choice((None, None, None, rng.uniform(1, 60))),
        )  # fmt: skip


def check_same(response, alone):
    """Equal, or apart from a token on whose choice the rounding of a batch may decide."""
    for index, (left, right) in enumerate(zip(response.token_ids, alone.token_ids)):
        if left != right:
            (_, best), (_, second) = alone.logprobs[index].top
            assert best - second <= 1e-3
            return
    assert response.token_ids == alone.token_ids
    assert (response.text, response.summary) == (alone.text, alone.summary)


@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_every_request_ends_once_and_nothing_is_kept(count, monkeypatch):
    llm = LLM.from_pretrained("tiny", config=CONFIG)
    engine, rng, clock = llm.engine, random.Random(count), Clock()
    monkeypatch.setattr(engine, "_clock", clock)
    scheduler, pool = engine.scheduler, engine.scheduler.prefix.pool
    given, ended, memory = {}, collections.Counter(), []
    responses = {}
    requests = requests_of(llm, count, rng)
    more = True
    while more or not engine.idle:
        clock.now += 1
        while more and scheduler.room and rng.random() < 0.8:
            request = next(requests, None)
            more = request is not None
            if more:
                given[engine.add(request)] = request
        if rng.random() < 0.15 and (everyone := scheduler.everyone):
            engine.cancel(rng.choice(everyone).request_id)
        if rng.random() < 0.05 and scheduler.running:
            engine._pending += engine._preempt(rng.choice(scheduler.running))
        for event in engine.step():
            if isinstance(event, Done):
                ended[event.request_id] += 1
                if len(responses) < 2 * 200 + count // 8:
                    responses[event.request_id] = event.response
        held = {page for s in scheduler.running for page in s.pages.tolist()}
        assert pool.num_free == pool.num_pages - len(held)
        if len(ended) // (count // 8) > len(memory):
            memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert ended == dict.fromkeys(given, 1)
    assert scheduler.preemptions > count // 100
    assert pool.num_free == pool.num_pages and pool.num_idle <= pool.num_pages
    assert sorted(scheduler._slots) == list(range(CONFIG.max_num_seqs))
    assert llm.compilations_after_warmup == 0
    reasons = collections.Counter(r.finish_reason for r in responses.values())
    assert set(reasons) == {"length", "stop", "cancelled", "deadline"}
    whole = [n for n, r in responses.items() if r.finish_reason in ("length", "stop")]
    for number in rng.sample(whole, min(200, len(whole) // 2)):
        again = dataclasses.replace(given[number], deadline=None)
        (done,) = [e for e in engine.run([again]) if isinstance(e, Done)]
        check_same(responses[number], done.response)
    assert memory[-1] - memory[1] < 64 * 1024  # KiB
    given.clear()
    del held, everyone
    gc.collect()
    assert not any(type(thing) is Sequence for thing in gc.get_objects())
