"""Forced responses: what they are made of, and the mix of modes that the engine makes of them."""

import pytest

from da_jax.bench import drive
from da_jax.bench.transcript import EXPECTED, Mix, mix_of, synthetic, transcript
from da_jax.protocol.modes import Mode, ModeTracker
from da_jax.protocol.trace import Step

pytestmark = pytest.mark.long

COUNT = 2000


@pytest.fixture(scope="module")
def vocabularies(tiny_model):
    return {"checkpoint": (tiny_model.table, tiny_model.words), "synthetic": synthetic(512)}


def modes_of(table, ids, chunks):
    """The mode before each token, by the tracker alone, and the chunks in focus."""
    tracker, modes = ModeTracker(chunks), []
    for i in ids:
        modes.append((tracker.mode, tracker.focus))
        tracker.feed(table.bytes_of(i).decode())
    return modes, tracker.stats


@pytest.mark.parametrize("name", ["checkpoint", "synthetic"])
@pytest.mark.parametrize("seed", range(4))
def test_the_mix_is_within_2_percent_at_2000_tokens(vocabularies, name, seed):
    table, words = vocabularies[name]
    ids = transcript(words, COUNT, 16, seed)
    modes, stats = modes_of(table, ids, 16)
    assert len(ids) == COUNT
    for mode, share in EXPECTED.modes.items():
        assert abs(sum(m is mode for m, _ in modes) / COUNT - share) < 0.02
    assert abs(sum(b">" in table.bytes_of(i) for i in ids) / COUNT - EXPECTED.tags) < 0.005
    assert {len(focus) for mode, focus in modes if mode is Mode.FOCUS} == {2}
    assert not stats.declines and not stats.quoted and not stats.mismatched


def test_rows_of_a_batch_do_not_change_modes_together(vocabularies):
    _, words = vocabularies["synthetic"]
    table, _ = vocabularies["synthetic"]
    ends = [
        {at for at, i in enumerate(transcript(words, 400, 16, seed)) if b">" in table.bytes_of(i)}
        for seed in range(8)
    ]
    assert all(len(a & b) < len(a) / 2 for a in ends for b in ends if a is not b)


def test_mix_of_counts_steps_and_tokens_that_end_a_tag():
    table, words = synthetic(64)
    steps = [Step(Mode.GLOBAL, 9, 16, 9), Step(Mode.LOCAL, 3, 16, 10)]
    mix = mix_of(steps, [*words.encode("<local>"), *words.filler[:2].tolist()], table)
    assert mix == Mix({Mode.GLOBAL: 0.5, Mode.FOCUS: 0.0, Mode.LOCAL: 0.5}, 0.25)


@pytest.mark.parametrize(
    ("chunks", "mix", "words"),
    [(1, EXPECTED, "at least 2"), (16, Mix(EXPECTED.modes, 0.2), "a mix with fewer tags")],
)
def test_a_transcript_that_cannot_be_is_refused(vocabularies, chunks, mix, words):
    with pytest.raises(ValueError, match=words):
        transcript(vocabularies["synthetic"][1], 100, chunks, mix=mix)


def test_the_engine_sees_the_mix_that_was_asked_for(tiny_engine, tiny_model):
    from da_jax.protocol.modes import Arm

    requests = drive.transcripts(tiny_model, Arm.DA, 2, 100, 400)
    for response in drive.run(tiny_engine, requests).responses:
        mix = mix_of(response.steps, response.token_ids, tiny_model.table)
        modes, _ = modes_of(tiny_model.table, response.token_ids, drive.CHUNKS)
        for mode in Mode:
            share = sum(m is mode for m, _ in modes[1:]) / (len(modes) - 1)
            assert mix.modes[mode] == pytest.approx(share)
