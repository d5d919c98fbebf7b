"""Strategies decode the same; the simulated device does what the program does."""

import dataclasses

import numpy as np
import pytest

from da_jax.bench import bursts, drive
from da_jax.bench.ahead import Ahead
from da_jax.bench.simulated import FixedPatience, Simulated
from da_jax.protocol.modes import Arm

pytestmark = pytest.mark.long

PLAN = bursts.Plan(batches=(2,), context=512, new_tokens=80, bursts=(1, 16))
COLUMNS = {
    "strategy", "chip", "model", "batch", "context", "steps_per_token", "tok_s",
    "host_us_per_token", "exposed_us_per_token", "tokens_per_burst", "best",
}  # fmt: skip


@pytest.fixture(scope="module")
def rows(tiny_model):
    return list(bursts.rows(tiny_model, PLAN))


def test_every_strategy_has_a_row_here_and_on_each_chip(rows):
    names = [
        "pause, fixed burst 1", "pause, fixed burst 16", "pause, measured patience",
        "one step ahead, redo",
    ]  # fmt: skip
    assert [row["strategy"] for row in rows] == names * (1 + len(bursts.CHIPS))
    assert all(COLUMNS <= row.keys() for row in rows)
    for group in (rows[:4], rows[4:8], rows[8:]):
        best = max(group, key=lambda row: row["tok_s"])
        assert best["best"] and len({row["chip"] for row in group}) == 1
    assert len({row["attended_tokens"] for row in rows[:4]}) == 1


def test_steps_are_those_that_the_strategy_says(rows):
    single, long, _, ahead = rows[:4]
    assert single["steps_per_token"] == 1 and single["tokens_per_burst"] == 2
    assert 1 <= long["steps_per_token"] < 2 and long["tokens_per_burst"] > 2
    # One step again wherever a mode changed: at about one token of 25 of each of two rows.
    assert 1 < ahead["steps_per_token"] < 1.2


def test_the_simulated_device_makes_the_steps_of_the_real_one(tiny_model, tiny_engine):
    requests = drive.transcripts(tiny_model, Arm.DA, 2, 300, 150)
    for patience in (0.3, 2.0, np.inf):
        tiny_engine.timing = FixedPatience(patience)
        real = drive.run(tiny_engine, requests)
        engine = drive.build(tiny_model, 2, 512, prefill=False, compiled=False, prefix_cache=False)
        engine.timing = FixedPatience(patience)
        simulated = Simulated(engine)
        run = drive.run(engine, requests)
        assert (simulated.steps, simulated.bursts) == (real.steps, real.bursts)
        assert [r.token_ids for r in run.responses] == [r.token_ids for r in real.responses]
        assert run.attended == real.attended


def test_strategies_that_differ_are_refused(tiny_model, tiny_engine):
    run = drive.run(tiny_engine, drive.transcripts(tiny_model, Arm.DA, 2, 100, 60))
    response = run.responses[0]
    entry = dataclasses.replace(response.logprobs[-1], logprob=response.logprobs[-1].logprob + 1)
    other = dataclasses.replace(response, logprobs=(*response.logprobs[:-1], entry))
    words = dataclasses.replace(run, responses=(other, *run.responses[1:]))
    bursts._check_equal({"a": run, "b": run})
    for wrong in (words, dataclasses.replace(run, entries=run.entries - 1)):
        with pytest.raises(RuntimeError, match="strategies differ"):
            bursts._check_equal({"a": run, "b": wrong})


def test_a_step_that_is_not_made_again_would_be_noticed(tiny_model, tiny_engine, monkeypatch):
    engine = drive.build(
        tiny_model, 2, 512, prefill=False, compiled=False, burst=1, prefix_cache=False
    )
    requests = drive.transcripts(tiny_model, Arm.DA, 2, 150, 80)
    ahead = Ahead(engine)
    found = {"pause": drive.run(tiny_engine, requests), "ahead": ahead.run(requests)}
    bursts._check_equal(found)
    real = Ahead._launch

    def never_again(self, sequences, views, index, fed, kept, only=None):
        return kept if only else real(self, sequences, views, index, fed, kept)

    monkeypatch.setattr(Ahead, "_launch", never_again)
    with pytest.raises(RuntimeError, match="strategies differ"):
        bursts._check_equal(found | {"ahead": ahead.run(requests)})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"batches": (0,)}, "batches are"),
        ({"bursts": ()}, "bursts are"),
        ({"new_tokens": 1}, "new_tokens is 1"),
        ({"context": 100, "new_tokens": 80}, "context is 100"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        bursts.Plan(**fields)
