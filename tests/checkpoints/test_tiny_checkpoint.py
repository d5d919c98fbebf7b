"""The checkpoint that ships: it loads, obeys its declarations, and answers."""

import json
import sys
from pathlib import Path

import pytest
import tokenizers

import da_jax.checkpoints.tiny as tiny
from da_jax.checkpoints.tiny import evaluate, train
from da_jax.checkpoints.tiny import language as lang
from da_jax.checkpoints.tiny.export import STYLE, make_tokenizer
from da_jax.engine.llm import LLM
from da_jax.protocol.modes import Mode

HERE = Path(tiny.__file__).parent


@pytest.fixture(scope="module")
def llm():
    return LLM.from_pretrained("tiny", dtype="float32", max_model_len=4096)


def test_the_folder_is_small_and_of_this_language(llm):
    size = sum(f.stat().st_size for f in (HERE / "checkpoint").rglob("*") if f.is_file())
    assert size < 5e6
    assert llm.renderer.style == STYLE
    shipped = tokenizers.Tokenizer.from_file(str(HERE / "checkpoint" / "tokenizer.json"))
    assert shipped.to_str() == make_tokenizer().to_str()


@pytest.mark.parametrize("arm", ["da", "unmasked", "vanilla"])
def test_the_example_is_answered_exactly(llm, arm):
    example = json.loads((HERE / "example.json").read_text())
    response = llm.generate(example["document"], example["question"], arm=arm, max_tokens=128)
    assert response.answer == example["answer"]
    assert response.finish_reason == "stop"
    assert (response.summary["reduction"] > 0.5) == (arm == "da")
    assert {mode for _, mode in response.segments} == set(Mode)


def test_the_answer_of_the_example_follows_from_its_document():
    example = json.loads((HERE / "example.json").read_text())
    key = example["question"].removeprefix("spell ").removesuffix("=?")
    value = example["document"].partition(f" {key}=")[2].split()[0].rstrip(".")
    assert example["answer"].endswith(f"answer={value}")


def test_it_does_what_its_card_says_on_held_out_questions(llm):
    """A small sample; ``evaluate.py`` measures more."""
    results = evaluate.measure(llm, seeds=3, count=len(lang.KINDS) * 2)
    assert results["exact_da"] >= 0.95
    assert results["exact_unmasked"] >= 0.95
    assert results["wrong_id_masked"] <= 0.05
    assert results["wrong_id_unmasked"] >= 0.9
    assert results["reduction_100_chunks"] >= 0.3
    assert results["reduction_long_local"] >= 0.6


def test_training_does_not_overwrite_a_checkpoint(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train"])
    with pytest.raises(SystemExit):
        train.main()
    assert "holds a checkpoint already" in capsys.readouterr().err


def test_cases_are_held_out_and_follow_from_the_seed():
    first = evaluate.cases(3, 10, (4, 8))
    assert first == evaluate.cases(3, 10, (4, 8))
    assert [case.question.kind for case in first[:5]] == list(lang.KINDS)
    assert all(case.text.endswith(f"{case.answer}{lang.LOCAL_END}") for case in first)
    forced = [case.wrong_id() for case in first if case.question.kind == "one"]
    assert all(ids[-2] == lang.IDS[lang.FOCUS] for ids in forced)
    assert all(ids[-1] != ids[4] for ids in forced)
