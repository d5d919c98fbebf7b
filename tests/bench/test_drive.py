"""Prompts that count as prefilled, and what a probe adds up."""

import dataclasses

import numpy as np
import pytest

from da_jax.bench import drive
from da_jax.engine.request import Request, SamplingParams
from da_jax.engine.runner import Runner
from da_jax.protocol.modes import Arm

pytestmark = pytest.mark.long


def test_a_prompt_is_scaffold_chunks_and_scaffold():
    prompt = drive.random_prompt(np.random.default_rng(0), 1000, 400, drive.CHUNKS)
    (_, head), (tail, end) = prompt.scaffold
    assert prompt.chunks[0][0] == head == 10 and prompt.chunks[-1][1] == tail and end == 400
    assert all(a[1] == b[0] for a, b in zip(prompt.chunks, prompt.chunks[1:]))
    assert len(prompt.chunks) == drive.CHUNKS


def test_prompts_of_a_batch_share_no_page(tiny_model):
    requests = drive.transcripts(tiny_model, Arm.DA, 8, 100, 2)
    assert len({request.prompt.ids[:16].tobytes() for request in requests}) == 8


def test_arms_force_the_same_transcript_on_the_same_prompt(tiny_model):
    da, unmasked = (
        drive.transcripts(tiny_model, arm, 2, 100, 50) for arm in (Arm.DA, Arm.UNMASKED)
    )
    assert [r.forced for r in da] == [r.forced for r in unmasked]
    assert all((a.prompt.ids == b.prompt.ids).all() for a, b in zip(da, unmasked))
    assert da[0].forced != da[1].forced


def test_a_run_repeats_whatever_the_caches_held(tiny_model, tiny_engine):
    requests = drive.transcripts(tiny_model, Arm.DA, 2, 200, 80)
    first = drive.run(tiny_engine, requests)
    drive.run(tiny_engine, drive.transcripts(tiny_model, Arm.UNMASKED, 2, 400, 30, seed=5))
    second = drive.run(tiny_engine, requests)
    for one, other in zip(first.responses, second.responses):
        assert one.token_ids == other.token_ids
        np.testing.assert_allclose(
            [e.logprob for e in one.logprobs], [e.logprob for e in other.logprobs], atol=1e-4
        )


def test_what_the_device_read_is_what_the_account_says(tiny_model, tiny_engine):
    for arm in (Arm.DA, Arm.UNMASKED):
        run = drive.run(tiny_engine, drive.transcripts(tiny_model, arm, 2, 300, 100))
        assert run.entries * tiny_engine.runner.plan.page_size == run.read
        assert run.tokens == 2 * 99 and run.steps >= 99 and run.bursts <= run.steps
        assert 0 < run.exposed <= run.host and run.seconds > 0
    assert run.steps == 99  # nobody pauses where nothing changes


def test_a_probe_leaves_the_runner_as_it_was(tiny_engine):
    with drive.Probe(tiny_engine):
        assert "decode" in vars(tiny_engine.runner)
    assert tiny_engine.runner.decode.__func__ is Runner.decode


def test_what_cannot_be_seated_is_refused_and_leaves_nothing(tiny_model, tiny_engine):
    many = drive.transcripts(tiny_model, Arm.DA, 3, 100, 50)
    with pytest.raises(ValueError, match="do not fit at once"):
        drive.seat(tiny_engine, many)
    free = Request(many[0].prompt, SamplingParams(), Arm.DA)
    with pytest.raises(ValueError, match="first token forced"):
        drive.seat(tiny_engine, [dataclasses.replace(free, forced=())])
    assert tiny_engine.scheduler.idle
    tiny_engine.step()  # tells of those that were cancelled
