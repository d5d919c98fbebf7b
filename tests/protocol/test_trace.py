"""Attended-token accounting against sums made by hand."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from da_jax.protocol.modes import Mode, ModeTracker
from da_jax.protocol.trace import Step, Trace

STATS = ModeTracker(1).stats


def test_a_response_seen_whole_attends_prompt_plus_t_at_step_t():
    trace = Trace(10)
    trace.prefill()
    for t in range(1, 4):  # a response of 4 tokens
        trace.record(Mode.GLOBAL, 10 + t, 16)
    summary = trace.summary(STATS)
    assert summary["tokens"] == {"total": 4, "global": 4, "focus": 0, "local": 0}
    assert summary["attended"]["total"] == summary["attended_vanilla"] == 11 + 12 + 13
    assert summary["read"]["total"] == 48
    assert summary["reduction"] == 0


def test_a_response_of_one_token_has_no_decode_step():
    trace = Trace(10)
    trace.prefill()
    summary = trace.summary(STATS, "length")
    assert (summary["tokens"]["total"], summary["attended_vanilla"]) == (1, 0)
    assert summary["reduction"] == 0


@given(
    st.integers(0, 50),
    st.lists(st.tuples(st.sampled_from(Mode), st.floats(0, 1), st.integers(0, 99)), min_size=1),
)
def test_totals_are_the_sums_of_the_log(prompt, steps):
    trace = Trace(prompt, log=True)
    trace.prefill()
    expected = []
    for t, (mode, part, read) in enumerate(steps, 1):
        attended = 1 + int(part * (prompt + t - 1))
        trace.record(mode, attended, read)
        expected.append(Step(mode, attended, read, prompt + t))
    assert trace.steps == expected
    summary = trace.summary(STATS)
    for mode in Mode:
        own = [step for step in expected if step.mode is mode]
        assert summary["tokens"][mode.value] == len(own) + (mode is Mode.GLOBAL)
        assert summary["attended"][mode.value] == sum(step.attended for step in own)
        assert summary["read"][mode.value] == sum(step.read for step in own)
    vanilla = sum(step.vanilla for step in expected)
    assert summary["attended_vanilla"] == vanilla
    assert summary["attended"]["total"] == trace.attended
    assert summary["reduction"] == pytest.approx(1 - trace.attended / vanilla)


def test_the_summary_is_json_and_holds_what_was_declared():
    tracker = ModeTracker(2)
    tracker.feed('<focus magic_chunks="1">a</local><focus>`<local>`<answer>b</answer>')
    trace = Trace(5)
    trace.prefill()
    trace.record(Mode.LOCAL, 3, 8)
    summary = json.loads(json.dumps(trace.summary(tracker.stats, "stop")))
    assert summary["prompt_tokens"] == 5
    assert summary["reduction"] == 0.5
    assert summary["focus"] == {"attempts": 2, "successes": 1, "declines": 1}
    assert summary["declines"] == {"empty": 1}
    assert (summary["mismatched_closers"], summary["quoted"]) == (1, 1)
    assert (summary["transitions"], summary["format_correct"]) == (4, True)
    assert summary["finish_reason"] == "stop"


def test_impossible_records_are_refused():
    trace = Trace(10)
    with pytest.raises(RuntimeError, match="prefill"):
        trace.record(Mode.GLOBAL, 11, 16)
    trace.prefill()
    with pytest.raises(RuntimeError, match="one Trace per response"):
        trace.prefill()
    for attended in (0, 12):
        with pytest.raises(ValueError, match=f"step 1 attends {attended} .*1 to 11"):
            trace.record(Mode.GLOBAL, attended, 16)
