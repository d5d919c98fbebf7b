"""Rows of the engine's benchmark: their columns, and that their ratios are those of their rates."""

import importlib.util

import pytest

from da_jax.bench import drive, engine
from da_jax.protocol.modes import Mode

pytestmark = pytest.mark.long

PLAN = engine.Plan(cases=((2, 512),), new_tokens=20, transcript_tokens=60, repeats=1)
TORCH = importlib.util.find_spec("torch") is not None
SPEED = {"prefill_tok_s", "decode_tok_s", "ttft_s", "decode_ms_per_step"}


@pytest.fixture(scope="module")
def random_model(tiny_folder):
    """The random Qwen 3 with weights as a Hugging Face folder; its transcripts are synthetic."""
    from da_jax.bench.transcript import synthetic

    model = drive.load(str(tiny_folder))
    table, words = synthetic(model.vocabulary)
    return drive.Model(model.name, model.network, table, frozenset(), words, model.folder)


@pytest.fixture(scope="module")
def rows(random_model, tmp_path_factory):
    """All rows of one case, with transformers where torch is, and the folder of its profile."""
    folder = tmp_path_factory.mktemp("profile")
    plan = engine.Plan(**{**vars(PLAN), "transformers": TORCH, "profile": folder})
    return list(engine.rows(random_model, plan)), folder


def test_each_case_has_a_row_for_each_system(rows):
    systems = ["da-jax", *["transformers"] * TORCH, "unmasked", "da"]
    assert [row["system"] for row in rows[0]] == systems
    ours = rows[0][0]
    assert SPEED <= ours.keys()
    assert 2e3 / ours["decode_ms_per_step"] == pytest.approx(ours["decode_tok_s"], rel=0.01)
    seconds = 2 * 492 / ours["prefill_tok_s"]
    assert 0 < ours["ttft_s"] <= seconds * 1.01 + 1e-3  # one prompt after the other
    assert 0 < ours["exposed_us_per_token"] <= ours["host_us_per_token"]
    assert all((row["batch"], row["context"]) == (2, 512) for row in rows[0])


@pytest.mark.skipif(not TORCH, reason="needs torch")
def test_ratios_to_transformers_are_those_of_the_rates(rows):
    ours, theirs = rows[0][:2]
    assert SPEED <= ours.keys() & theirs.keys() and theirs["threads"] >= 1 and theirs["torch"]
    assert ours["ratio"] == pytest.approx(ours["decode_tok_s"] / theirs["decode_tok_s"], abs=2e-3)
    assert ours["prefill_ratio"] == pytest.approx(
        ours["prefill_tok_s"] / theirs["prefill_tok_s"], abs=2e-3
    )


def test_ratios_of_declarations_are_those_of_the_times_and_the_pages(rows):
    unmasked, da = rows[0][-2:]
    assert unmasked["ratio"] == unmasked["predicted_ratio"] == unmasked["steps_per_token"] == 1
    assert da["ratio"] == pytest.approx(
        da["decode_ms_per_step"] / unmasked["decode_ms_per_step"], rel=0.05
    )
    assert da["read_share"] <= da["predicted_ratio"] <= 1 and da["read_share"] < 1
    assert da["attended_share"] < da["read_share"] and unmasked["attended_share"] == 1
    for mode in Mode:  # the same transcript
        assert da[f"{mode.value}_share"] == unmasked[f"{mode.value}_share"]
    assert sum(da[f"{mode.value}_share"] for mode in Mode) == pytest.approx(1, abs=2e-3)


def test_a_profile_of_each_case_is_written(rows):
    assert list((rows[1] / "batch2_context512").rglob("*.xplane.pb"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"cases": ((1, 100),)}, "context is 100"),
        ({"cases": ((0, 512),)}, "batch is 0"),
        ({"new_tokens": 1}, "new_tokens is 1"),
        ({"repeats": 0}, "repeats is 0"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        engine.Plan(**fields)


def test_what_the_checkpoint_cannot_have_is_refused(tiny_model):
    with pytest.raises(ValueError, match="declares 8192 positions"):
        next(engine.rows(tiny_model, engine.Plan(cases=((1, 9000),))))
    pytest.importorskip("torch")
    with pytest.raises(ValueError, match=r"no \*\.safetensors"):
        next(engine.rows(tiny_model, engine.Plan(cases=((1, 512),), transformers=True)))
