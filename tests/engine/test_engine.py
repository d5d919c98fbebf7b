import jax
import numpy as np
import pytest

from da_jax import (
    Decline,
    Done,
    ModeChange,
    PrefillProgress,
    RequestError,
    SamplingParams,
    TextDelta,
)
from da_jax.protocol.modes import Mode

CHUNKS = [f"part {letter}: " + letter * 12 for letter in "abcd"]
QUESTION = "which part?"


@pytest.fixture
def engine(random_llm):
    yield random_llm.engine
    pool = random_llm.engine.scheduler._pool
    assert random_llm.engine.idle and pool.num_free == pool.num_pages  # nothing leaks, ever


def finish(engine):
    """Runs to the end; responses by request number, and all events."""
    events = []
    while not engine.idle:
        events += engine.step()
    return {e.request_id: e.response for e in events if isinstance(e, Done)}, events


def ask(random_llm, text="", **options):
    return random_llm.request(CHUNKS, QUESTION, forced=text, **options)


def test_streamed_text_joined_is_the_text_and_done_comes_last(random_llm, engine):
    script = 'ü<focus magic_chunks="1">né €</focus><local>漢字 🙂</local> <focus>x'
    events = list(random_llm.stream(CHUNKS, QUESTION, forced=script, max_tokens=110))
    response = events[-1].response
    deltas = [e for e in events if isinstance(e, TextDelta)]
    assert "".join(e.text for e in deltas) == response.text
    assert response.text.startswith(script)
    by_mode = {mode: "".join(e.text for e in deltas if e.mode is mode) for mode in Mode}
    assert by_mode[Mode.FOCUS] == "né €</focus>"
    assert by_mode[Mode.LOCAL] == "漢字 🙂</local>"
    changes = [(e.mode, e.focus) for e in events if isinstance(e, ModeChange)]
    wide = (Mode.GLOBAL, ())
    assert changes[:4] == [(Mode.FOCUS, (1,)), wide, (Mode.LOCAL, ()), wide]
    assert [e.tag for e in events if isinstance(e, Decline)] == ["<focus>"]
    progress = [e.done for e in events if isinstance(e, PrefillProgress)]
    assert progress == sorted(progress) and progress[-1] == response.prompt_tokens
    assert [isinstance(e, Done) for e in events] == [False] * (len(events) - 1) + [True]


def test_a_batch_of_mixed_modes_gives_what_each_request_gives_alone(random_llm, engine):
    scripts = [
        "<local>abc",
        'x<focus magic_chunks="2,3">yy</focus>z',
        "plain",
        "",
        "<local>a</local>",
    ]
    requests = [ask(random_llm, text, max_tokens=40 + i) for i, text in enumerate(scripts)]
    alone = []
    for request in requests:
        (done,) = [e for e in engine.run([request]) if isinstance(e, Done)]
        alone.append(done.response)
    together = [e.response for e in engine.run(requests) if isinstance(e, Done)]
    together.sort(key=lambda r: r.completion_tokens)
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    assert [r.summary for r in together] == [r.summary for r in alone]


def test_a_seeded_request_is_not_changed_by_its_neighbours(random_llm, engine):
    seeded = ask(random_llm, temperature=1.5, seed=5, max_tokens=30)
    first = next(e.response for e in engine.run([seeded]) if isinstance(e, Done))
    others = [ask(random_llm, temperature=20.0, max_tokens=20) for _ in range(3)]
    numbers = [engine.add(request) for request in (*others, seeded)]
    responses, _ = finish(engine)
    assert responses[numbers[-1]].token_ids == first.token_ids
    unseeded = {responses[n].token_ids for n in numbers[:3]}
    assert len(unseeded) == 3


def test_a_stop_string_over_several_tokens_does_not_leak(random_llm, engine):
    response = random_llm.generate(
        CHUNKS, QUESTION, forced="one two END", stop="END", max_tokens=40
    )
    assert response.text == "one two " and response.finish_reason == "stop"
    assert response.answer == "one two"
    assert response.completion_tokens == len("one two END")


def test_what_follows_a_stop_string_in_a_forced_beginning_is_no_part_of_the_answer(random_llm):
    response = random_llm.generate(
        CHUNKS, QUESTION, forced="one END<|im_start|>two<|im_start|>", stop="END", max_tokens=40
    )
    assert (response.text, response.answer, response.finish_reason) == ("one ", "one", "stop")


@pytest.mark.parametrize(
    ("script", "options", "text", "reason"),
    [
        ("yes<|im_end|>", {}, "yes", "stop"),
        ("yes<|im_end|>no", {"ignore_eos": True, "max_tokens": 6}, "yesno", "length"),
        ("ab", {"stop_token_ids": (1,)}, "a", "stop"),
        ("abcd", {"max_tokens": 4}, "abcd", "length"),
        ("<answer>4</answer>", {"stop_after_answer": True}, "<answer>4</answer>", "stop"),
        (
            '<tool_call>{"name": 1}</tool_call>',
            {},
            '<tool_call>{"name": 1}</tool_call>',
            "tool_call",
        ),
    ],
)
def test_how_a_response_ends(random_llm, engine, script, options, text, reason):
    if "stop_token_ids" in options:
        options = {"stop_token_ids": tuple(random_llm.tokenizer.encode("b"))}
    response = random_llm.generate(CHUNKS, QUESTION, forced=script, **{"max_tokens": 60, **options})
    assert (response.text, response.finish_reason) == (text, reason)
    assert response.answer == text.replace("<answer>", "").replace("</answer>", "")


def test_a_prompt_that_cannot_fit_is_refused_and_others_go_on(random_llm, engine):
    number = engine.add(ask(random_llm, max_tokens=10))
    with pytest.raises(RequestError, match=r"\d+ tokens, but max_model_len is 512"):
        random_llm.request("x" * 600, QUESTION)
    with pytest.raises(RequestError, match=r"\[4711\] are beyond the model's vocabulary of 512"):
        ask(random_llm, stop_token_ids=(4711,))
    responses, _ = finish(engine)
    assert responses[number].completion_tokens == 10


def test_a_response_ends_at_the_longest_length(random_llm, engine):
    response = random_llm.generate(CHUNKS, QUESTION, max_tokens=10_000, ignore_eos=True)
    assert response.finish_reason == "length"
    assert response.prompt_tokens + response.completion_tokens == 512


def test_requests_wait_for_pages_and_all_are_answered(random_llm, engine):
    numbers = [engine.add(ask(random_llm, max_tokens=300, ignore_eos=True)) for _ in range(5)]
    before = engine.scheduler.preemptions
    responses, _ = finish(engine)
    assert engine.scheduler.preemptions > before  # there are fewer pages than four would need
    assert sorted(responses) == numbers
    assert len({r.token_ids for r in responses.values()}) == 1


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_cancel_ends_one_request_and_no_other(random_llm, engine, steps):
    stays, goes = (engine.add(ask(random_llm, max_tokens=50, ignore_eos=True)) for _ in range(2))
    for _ in range(steps):
        engine.step()
    engine.cancel(goes)
    engine.cancel(goes)  # twice is harmless
    engine.cancel(10**6)
    responses, _ = finish(engine)
    assert responses[goes].finish_reason == "cancelled"
    assert responses[goes].completion_tokens < 50
    assert responses[stays].completion_tokens == 50


def test_logprobs_are_sorted_and_agree_with_the_choice(random_llm, engine):
    response = random_llm.generate(CHUNKS, QUESTION, max_tokens=5, logprobs=4)
    assert len(response.logprobs) == 5
    for entry in response.logprobs:
        assert len(entry.top) == 4 and entry.top[0] == (entry.token_id, entry.logprob)
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True) and values[0] < 0
    assert random_llm.generate(CHUNKS, QUESTION, max_tokens=5).logprobs == ()


def test_special_tokens_are_hidden_from_the_client_but_end_tags_do_act(random_llm, engine):
    response = random_llm.generate(
        CHUNKS, QUESTION, forced="<local>a<|im_start|></think>b", max_tokens=20
    )
    assert response.text.startswith("<local>a</think>b")
    assert [mode for _, mode in response.segments] == [Mode.GLOBAL, Mode.LOCAL, Mode.GLOBAL]


def test_tokens_without_text_are_never_chosen(random_llm, engine):
    response = random_llm.generate(
        CHUNKS, QUESTION, temperature=50.0, seed=1, max_tokens=200, ignore_eos=True
    )
    assert max(response.token_ids) < len(engine.table) < 512
    assert len(set(response.token_ids)) > 50


def test_buffers_are_donated(random_llm, engine):
    before = jax.tree.leaves(engine.runner.caches)
    random_llm.generate(CHUNKS, QUESTION, max_tokens=3)
    assert before and all(array.is_deleted() for array in before)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"presence_penalty": 3}, "presence_penalty is 3"),
        ({"stop": ("",)}, "stop is"),
        ({"stop_token_ids": tuple(range(9))}, "stop_token_ids"),
        ({"logprobs": 21}, "logprobs is 21"),
    ],
)
def test_bad_parameters_name_the_value(options, words):
    with pytest.raises(ValueError, match=words):
        SamplingParams(**options)


def test_a_forced_beginning_is_written_in_full_whatever_it_holds(random_llm, engine):
    text = "a END <tool_call>x</tool_call><answer>1</answer><|im_end|>rest"
    options = dict(stop="END", stop_after_answer=True, max_tokens=len(text), logprobs=0)
    response = random_llm.generate(CHUNKS, QUESTION, forced=text, **options)
    ids = random_llm.tokenizer.encode(text)
    assert list(response.token_ids) == ids and response.text == "a "
    assert len(random_llm.score(CHUNKS, QUESTION, text)) == len(ids)
    assert random_llm.score(CHUNKS, QUESTION, "").shape == (0,)
    with pytest.raises(RequestError, match="forced tokens do not fit"):
        random_llm.generate(CHUNKS, QUESTION, forced="abcdef", max_tokens=5)


def test_presence_penalty_reaches_over_bursts(random_llm, engine, monkeypatch):
    """Each burst is told of every token so far, of those requests that have a penalty."""
    told, decode = [], engine.runner.decode
    bits = lambda row: np.unpackbits(row.view(np.uint8), bitorder="little")

    def spy(rows, what):
        told.append([set(np.flatnonzero(bits(row)).tolist()) for row in what.seen])
        return decode(rows, what)

    monkeypatch.setattr(engine.runner, "decode", spy)
    options = dict(max_tokens=40, ignore_eos=True, temperature=9.0)
    request = ask(random_llm, presence_penalty=0.5, **options)
    (done,) = (e for e in engine.run([request]) if isinstance(e, Done))
    tokens, burst = done.response.token_ids, engine.config.burst
    assert len(told) >= 39 // burst
    for (seen,) in told:
        assert seen == set(tokens[: next(n for n in range(41) if set(tokens[:n]) == seen)])
    assert told[-1][0] >= set(tokens[: -burst - 1])
    told.clear()
    random_llm.generate(CHUNKS, QUESTION, **options)
    assert told and not any(seen for (seen,) in told)


def test_an_abandoned_stream_is_cancelled_and_leaves_no_events(random_llm, engine):
    stream = random_llm.stream(CHUNKS, QUESTION, max_tokens=100, ignore_eos=True)
    next(stream)
    stream.close()
    assert engine.idle
    response = random_llm.generate(CHUNKS, QUESTION, max_tokens=3)
    assert response.completion_tokens == 3


def test_interleaved_streams_get_their_own_events(random_llm, engine):
    texts = ["first " * 4, "second " * 4]
    alone = [random_llm.generate(CHUNKS, QUESTION, forced=t, max_tokens=40) for t in texts]
    streams = [random_llm.stream(CHUNKS, QUESTION, forced=t, max_tokens=40) for t in texts]
    events: list[list] = [[], []]
    while len(streams) > sum(isinstance(e[-1], Done) for e in events if e):
        for stream, seen in zip(streams, events):
            seen.extend(event for event in [next(stream, None)] if event is not None)
    assert [seen[-1].response.text for seen in events] == [r.text for r in alone]
    for seen in events:
        assert len({event.request_id for event in seen}) == 1


def test_a_request_added_by_hand_is_served_while_another_runs(random_llm, engine):
    number = engine.add(ask(random_llm, max_tokens=5, ignore_eos=True))
    random_llm.generate(CHUNKS, QUESTION, max_tokens=30, ignore_eos=True)
    responses, _ = finish(engine)
    assert responses[number].completion_tokens == 5


def test_a_request_that_cannot_be_built_leaves_nothing_behind(random_llm, engine):
    good = ask(random_llm, max_tokens=5)
    for bad in ({"scaffold": "foo"}, {"answer_mode": "foo"}, {"top_k": 2**31}, {"max_tokens": 5.0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            list(engine.run([good, ask(random_llm, **bad)]))
    assert engine.idle


def test_a_fault_in_a_step_loses_no_event(random_llm, engine, monkeypatch):
    def fault(*_):
        raise OSError("device lost")

    number = engine.add(ask(random_llm, max_tokens=1))
    other = engine.add(ask(random_llm, max_tokens=9, ignore_eos=True))
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "decode", fault)
        for _ in range(5):
            with pytest.raises(OSError, match="device lost"):
                while not engine.idle:
                    engine.step()
    responses, _ = finish(engine)
    assert responses[number].completion_tokens == 1
    assert responses[other].completion_tokens == 9


def test_a_stream_closed_while_another_runs_a_burst_harms_nobody(random_llm, engine, monkeypatch):
    doomed = random_llm.stream(CHUNKS, QUESTION, max_tokens=90, ignore_eos=True)
    stays = random_llm.stream(CHUNKS, QUESTION, max_tokens=60, ignore_eos=True)
    next(doomed)
    next(stays)
    decode = engine.runner.decode

    def close_meanwhile(*arguments):
        choice = decode(*arguments)
        doomed.close()
        return choice

    monkeypatch.setattr(engine.runner, "decode", close_meanwhile)
    assert list(stays)[-1].response.completion_tokens == 60
