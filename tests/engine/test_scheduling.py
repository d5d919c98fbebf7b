"""Who runs when, who gives way, and that nobody's result depends on it."""

import contextlib
import dataclasses
import math
import random
import signal

import numpy as np
import pytest
from support import tiny

from da_jax import LLM, Done, EngineConfig, PrefillProgress, RequestError, Style
from da_jax.engine.scheduler import QueueFull

pytestmark = pytest.mark.long

PAGE_BYTES = 16 * 3 * 2 * 128 * 4
CHUNKS = [f"part {letter}: " + letter * 12 for letter in "abcd"]
QUESTION = "which part?"
SCRIPTS = ("<local>abc", 'x<focus magic_chunks="2,3">yy</focus>z', "", "a <local>a</local>b")


class Clock:
    """Time that passes when told to."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def engine(random_llm, monkeypatch):
    engine, clock = random_llm.engine, Clock()
    monkeypatch.setattr(engine, "_clock", clock)
    yield engine
    pool = engine.scheduler.prefix.pool
    assert engine.idle and pool.num_free == pool.num_pages
    assert sorted(engine.scheduler._slots) == [0, 1, 2, 3]


def request(llm, script="", question=QUESTION, **options):
    options = {"ignore_eos": True, "max_tokens": 40, **options}
    return llm.request(CHUNKS, question, forced=script, **options)


def finish(engine, each_step=lambda: []):
    events = []
    while not engine.idle:
        events += engine.step()
        events += each_step()
    return events


def responses(events):
    done = sorted((e for e in events if isinstance(e, Done)), key=lambda e: e.request_id)
    return [event.response for event in done]


def facts(response):
    return response.token_ids, response.text, response.segments, response.summary, response.steps


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "qwen3_5", "gemma4_e2b"])
def test_who_gives_way_at_any_moment_ends_as_if_undisturbed(family_llm, random_llm, name):
    """Text, modes and attended tokens are those of a run of its own."""
    llm = random_llm if name == "qwen3" else family_llm(name)[0]
    engine, rng = llm.engine, random.Random(name)
    requests = [
        request(llm, script, "q" * (1 + 9 * i), max_tokens=45 + i, temperature=i // 4, seed=i)
        for i, script in enumerate([*SCRIPTS, ""])
    ]
    alone = [responses(engine.run([r]))[0] for r in requests]

    def disturb():
        running = engine.scheduler.running
        return engine._preempt(rng.choice(running)) if running and rng.random() < 0.3 else []

    before, compiled = engine.scheduler.preemptions, llm.compilations_after_warmup
    for r in requests:
        engine.add(r)
    together = responses(finish(engine, disturb))
    assert engine.scheduler.preemptions > before + 4
    assert list(map(facts, together)) == list(map(facts, alone))
    assert llm.compilations_after_warmup == compiled


def test_the_first_in_order_is_never_made_to_give_way(random_llm, engine, monkeypatch):
    victims, preempt = [], engine.scheduler.preempt
    monkeypatch.setattr(
        engine.scheduler, "preempt", lambda s: (victims.append(s.request_id), preempt(s))[1]
    )
    numbers = [engine.add(request(random_llm, max_tokens=300)) for _ in range(4)]
    assert all(r.completion_tokens == 300 for r in responses(finish(engine)))
    assert victims and numbers[0] not in victims


def test_priority_goes_before_arrival_and_nobody_waits_for_ever(random_llm, engine):
    started = []
    late = engine.add(request(random_llm, priority=9, max_tokens=2))
    soon = [engine.add(request(random_llm, "", "?" * i, max_tokens=2)) for i in range(1, 31)]
    urgent = engine.add(request(random_llm, priority=-1, max_tokens=2))
    for event in finish(engine):
        if isinstance(event, PrefillProgress) and event.request_id not in started:
            started.append(event.request_id)
    assert set(started) == {late, urgent, *soon}
    assert started.index(urgent) <= 1 and started.index(late) < 12  # in turn, the oldest is first
    rest = [number for number in started if number in soon]  # four at a time, the shortest first
    assert all(abs(rest.index(number) - at) <= 4 for at, number in enumerate(soon))


def test_a_short_prompt_does_not_wait_for_all_of_a_long_one(random_llm, engine, monkeypatch):
    monkeypatch.setattr(engine, "config", dataclasses.replace(engine.config, step_tokens=1))
    # Neither is the one in so many that is admitted, and goes first, because it waited.
    monkeypatch.setattr(engine.scheduler, "_turns", 0)
    long = engine.add(random_llm.request(["z" * 350], QUESTION, max_tokens=2))
    short = engine.add(random_llm.request(["y"], "?", max_tokens=2))
    order = [e.request_id for e in finish(engine) if isinstance(e, Done)]
    assert order == [short, long]


def test_the_queue_is_bounded_and_a_run_holds_its_requests_back(random_llm, engine, monkeypatch):
    monkeypatch.setattr(engine.scheduler, "_max_waiting", 3)
    for _ in range(3):
        engine.add(request(random_llm, max_tokens=1))
    with pytest.raises(QueueFull, match="3 requests wait, and max_waiting is 3"):
        engine.add(request(random_llm))
    finish(engine)
    asked, most = [], 0

    def endless():
        for index in range(25):
            asked.append(index)
            yield request(random_llm, max_tokens=1 + index % 3)

    done = 0
    for event in engine.run(endless()):
        done += isinstance(event, Done)
        most = max(most, len(asked) - done)
    assert done == 25 and most < 13


def test_a_bad_request_of_an_endless_run_stops_it_and_leaves_nothing(random_llm, engine):
    good = request(random_llm, max_tokens=2)
    bad = request(random_llm, max_tokens=2)
    object.__setattr__(bad, "forced", (1,) * 9)
    with pytest.raises(RequestError, match="9 forced tokens do not fit"):
        list(engine.run(iter([good, bad])))
    assert engine.idle


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_a_deadline_ends_a_request_wherever_it_is(random_llm, engine, steps):
    goes = engine.add(request(random_llm, max_tokens=200, deadline=5.0, priority=1))
    stays = engine.add(request(random_llm, max_tokens=30, deadline=50.0))
    events = []
    for _ in range(steps):
        events += engine.step()
    engine._clock.now += 5
    events += finish(engine)
    by_id = {e.request_id: e.response for e in events if isinstance(e, Done)}
    assert by_id[goes].finish_reason == "deadline" and by_id[goes].completion_tokens < 200
    assert by_id[stays].finish_reason == "length"


def test_an_infinite_deadline_never_comes_and_is_not_remembered(random_llm, engine, monkeypatch):
    monkeypatch.setattr(engine, "_deadlines", [])
    number = engine.add(request(random_llm, max_tokens=3, deadline=math.inf))
    assert engine._deadlines == []
    engine._clock.now += 1e300
    (done,) = (event for event in finish(engine) if isinstance(event, Done))
    assert done.request_id == number and done.response.finish_reason == "length"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"deadline": 0}, "deadline is 0"),
        ({"deadline": -1.5}, "deadline is -1.5"),
        ({"deadline": -math.inf}, "deadline is -inf"),
        ({"deadline": math.nan}, "deadline is nan"),
        ({"priority": 1.5}, "priority is 1.5"),
    ],
)
def test_bad_settings_name_the_value(random_llm, options, words):
    with pytest.raises(ValueError, match=words):
        random_llm.request(CHUNKS, QUESTION, **options)


def prefilled(engine, monkeypatch):
    """Tokens that prefill programs were given, from here on."""
    fed, prefill = [], engine.runner.prefill

    def spy(tokens, *arguments, **options):
        fed.append(len(tokens))
        return prefill(tokens, *arguments, **options)

    monkeypatch.setattr(engine.runner, "prefill", spy)
    return fed


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "qwen3_5"])
def test_many_questions_on_one_document_prefill_it_once(family_llm, random_llm, monkeypatch, name):
    llm = random_llm if name == "qwen3" else family_llm(name)[0]
    engine, page = llm.engine, llm.engine.config.page_size
    document = [f"{name} {letter} " * 9 for letter in "uvw"]
    requests = [
        llm.request(document, f"what is {i}?", forced=script, max_tokens=45, ignore_eos=True)
        for i, script in enumerate(SCRIPTS)
    ]
    with monkeypatch.context() as patch:  # each prompt in full
        patch.setattr(engine.scheduler, "find_prefixes", False)
        alone = [responses(engine.run([r]))[0] for r in requests]
    fed = prefilled(engine, monkeypatch)
    assert list(map(facts, responses(engine.run(requests)))) == list(map(facts, alone))
    shared = requests[0].prompt.chunks[-1][1] // page * page
    rest = sum(len(r.prompt) - shared for r in requests)  # of it the pages alone may share more
    assert page < shared < sum(fed) <= shared + rest
    fed.clear()
    assert list(map(facts, responses(engine.run(requests[:1])))) == list(map(facts, alone[:1]))
    assert 1 <= sum(fed) <= len(requests[0].prompt) - shared  # a prompt cached as far as it can be


def test_a_page_written_under_another_view_is_not_shared(random_llm, engine, monkeypatch):
    """The response of one prompt is the beginning of the next: only the prompt's pages are hit."""
    first = request(random_llm, "<local>" + "a" * 60, max_tokens=68)
    (response,) = responses(engine.run([first]))
    ids = np.concatenate([first.prompt.ids, np.array(response.token_ids, np.int32)])
    prompt = type(first.prompt)(ids, (), ((0, len(ids)),), "", (), (), (), first.prompt.arm)
    second = type(first)(prompt, first.params)
    fed = prefilled(engine, monkeypatch)
    responses(engine.run([second]))
    page = engine.config.page_size
    assert sum(fed) == len(ids) - len(first.prompt) // page * page


def test_a_full_cache_forgets_and_still_answers(tiny_folder):
    config = EngineConfig(
        page_size=16, max_model_len=256, max_num_seqs=2, prefill_chunk=64, burst=8,
        kv_cache_bytes=20 * PAGE_BYTES,
    )  # fmt: skip
    llm = LLM.from_pretrained(tiny_folder, style=Style(**tiny.STYLE), config=config)
    questions = [f"{i} {'x' * (i % 50)}" for i in range(30)]
    first = llm.generate([CHUNKS] * 30, questions, max_tokens=20)
    again = llm.generate([CHUNKS] * 30, questions[::-1], max_tokens=20)[::-1]
    assert [r.token_ids for r in first] == [r.token_ids for r in again]
    pool = llm.engine.scheduler.prefix.pool
    assert pool.num_free == pool.num_pages and llm.compilations_after_warmup == 0


def test_a_run_that_finds_the_queue_full_lets_the_others_get_on(random_llm, engine, monkeypatch):
    monkeypatch.setattr(engine.scheduler, "_max_waiting", 1)
    first = engine.run(iter([request(random_llm, max_tokens=3) for _ in range(9)]))
    while engine.room:
        next(first)
    second = engine.run([request(random_llm, "", "other?", max_tokens=3)])
    assert sum(isinstance(event, Done) for event in second) == 1
    assert sum(isinstance(event, Done) for event in first) == 9


@pytest.fixture
def cleanup():
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_an_interruption_while_a_program_is_called_waits_until_the_caches_are_back(
    random_llm, engine, monkeypatch, cleanup, kind
):
    # In the background of a shell a process ignores interruptions.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    cleanup.callback(signal.signal, signal.SIGINT, before)
    asked = request(random_llm, "<local>abc", max_tokens=30)
    (alone,) = responses(engine.run([asked]))
    compiled = dict(engine.runner._compiled)

    def interrupted(run):
        def call(*arguments):
            result = run(*arguments)  # the caches that went in are gone
            signal.raise_signal(signal.SIGINT)
            return result

        return call

    engine.add(asked)
    with monkeypatch.context() as patch:
        for which, run in compiled.items():
            if which[0] == kind:
                patch.setitem(engine.runner._compiled, which, interrupted(run))
        with pytest.raises(KeyboardInterrupt):
            finish(engine)
    assert list(map(facts, responses(finish(engine)))) == [facts(alone)]
