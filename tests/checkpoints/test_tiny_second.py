"""The checkpoint of the second step: the first one's floors hold, and it does the compact tasks."""

import jax
import numpy as np
import pytest
import tokenizers

from da_jax.checkpoints import hub
from da_jax.checkpoints.tiny import evaluate, second, tasks
from da_jax.checkpoints.tiny import language as lang
from da_jax.checkpoints.tiny.export import make_tokenizer
from da_jax.checkpoints.tiny.train import Stage
from da_jax.engine.llm import LLM
from da_jax.evals import compact, suites
from da_jax.protocol.modes import Mode

pytestmark = pytest.mark.long

FOLDER = hub.SHIPPED["tiny-2"]


@pytest.fixture(scope="module")
def llm():
    return LLM.from_pretrained("tiny-2", dtype="float32", max_model_len=4096)


def test_the_folder_is_small_and_of_this_language(llm):
    assert sum(f.stat().st_size for f in FOLDER.rglob("*") if f.is_file()) < 3e6
    assert llm.renderer.style == tasks.STYLE
    shipped = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    assert shipped.to_str() == make_tokenizer(lang.VOCABULARY).to_str()


def test_the_floors_of_the_first_step_hold(llm):
    """A small sample; the model card has more."""
    results = evaluate.measure(llm, seeds=3, count=len(lang.KINDS) * 2)
    assert results["exact_da"] >= 0.95
    assert results["exact_unmasked"] >= 0.95
    assert results["wrong_id_masked"] <= 0.05
    assert results["wrong_id_unmasked"] >= 0.9
    assert results["reduction_100_chunks"] >= 0.3
    assert results["reduction_long_local"] >= 0.6


def test_vanilla_is_an_arm_of_its_own_that_masks_answer_as_well_as(llm):
    count = lambda text: len(llm.tokenizer.encode(text, add_special_tokens=False))
    asked = [(t, e) for t in suites.load(["compact"]) for e in t.examples(500, 4, 7, count)]
    documents, questions = ([getattr(e, n) for _, e in asked] for n in ("document", "question"))
    for arm in ("da", "vanilla"):
        responses = llm.generate(documents, questions, arm=arm, max_tokens=128)
        scores = [t.score(e, r.answer).value for (t, e), r in zip(asked, responses)]
        assert np.mean(scores) >= 0.9
        if arm == "da":
            sums = [
                (r.summary["attended"]["total"], r.summary["attended_vanilla"]) for r in responses
            ]
            assert np.divide(*np.sum(sums, 0)) <= 0.4
    example = next(iter(compact.TASKS["compact_niah_multikey"].examples(300, 1, 0, len)))
    plain, declared = (
        llm.generate(example.document, example.question, arm=arm, max_tokens=128)
        for arm in ("vanilla", "da")
    )
    assert plain.prompt_tokens < declared.prompt_tokens
    assert "<" not in plain.text and {mode for _, mode in plain.segments} == {Mode.GLOBAL}
    assert declared.text.count("<focus") == 1


@pytest.mark.slow
def test_training_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch):
    plan = (Stage(2, (second.shape((2, 3), 96, 1, 2),)),)
    monkeypatch.setattr(second, "SAVE_EVERY", 1)
    monkeypatch.setattr(second, "report_held_out", lambda *_: None)
    whole = second.train(3, tmp_path / "whole", plan)
    draw, calls = second.make_batch, []

    def stopped(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return draw(*arguments)

    monkeypatch.setattr(second, "make_batch", stopped)
    with pytest.raises(KeyboardInterrupt):
        second.train(3, tmp_path / "parts", plan)
    resumed = second.train(3, tmp_path / "parts", plan)
    assert len(calls) == 3
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed)):
        np.testing.assert_array_equal(a, b)


def test_it_starts_from_the_first_checkpoint_and_draws_new_words_anew():
    embed = np.asarray(second.first_params(seed=0)["embed"])
    norms = np.linalg.norm(embed, axis=1)
    new = [lang.IDS[word] for word in lang.LATER]
    old = [lang.IDS[f" {key}="] for key in lang.KEYS]
    assert 0.5 < norms[new].mean() / norms[old].mean() < 2
    cosine = (embed[new] @ embed[new].T) / np.outer(norms[new], norms[new])
    assert np.abs(cosine - np.eye(len(new))).max() < 0.95  # no two are alike
    np.testing.assert_array_equal(embed, second.first_params(seed=0)["embed"])
