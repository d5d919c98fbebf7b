"""Guided declarations on the device: a random model writes valid tags once it has begun one."""

import pytest

from da_jax import RequestError

pytestmark = pytest.mark.long

CHUNKS = ["part a: aaaa", "part b: bbbb", "part c"]


def ask(llm, forced, seed=0, **options):
    options = {"guided": True, "temperature": 1.0, "max_tokens": 150} | options
    return llm.generate(CHUNKS, "?", forced=forced, seed=seed, ignore_eos=True, **options)


@pytest.mark.parametrize("arm", ["da", "unmasked"])
@pytest.mark.parametrize("forced", ["<focus", "x <foc", "a <local", "</answer", ""])
def test_a_random_model_declares_what_exists(random_llm, arm, forced):
    forced = forced and forced + "us" * forced.endswith("<foc")
    for seed in range(3):
        response = ask(random_llm, forced, seed, arm=arm)
        assert response.summary["declines"] == {}
        assert response.summary["focus"]["successes"] == ("<focus" in forced)


def test_without_a_guide_it_does_not(random_llm):
    response = ask(random_llm, "<focus", guided=False)
    assert response.summary["focus"]["successes"] == 0


def test_neighbours_are_not_masked(random_llm):
    """A guided row and one that is not, in one batch, each write what they write alone."""
    requests = [
        random_llm.request(
            CHUNKS, "?", forced=random_llm.tokenizer.encode("<focus"), guided=guided, seed=7,
            temperature=1.0, max_tokens=60, ignore_eos=True,
        )
        for guided in (True, False)
    ]  # fmt: skip
    together = random_llm._responses(requests)
    alone = [random_llm._responses([request])[0] for request in requests]
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    assert together[0].token_ids != together[1].token_ids


def test_what_was_forced_and_cannot_be_honoured_is_declined_as_ever(random_llm):
    response = ask(random_llm, "<focus foo")
    assert sum(response.summary["declines"].values()) <= 1


def test_stopping_at_what_tags_need_is_refused_at_once(random_llm):
    with pytest.raises(RequestError, match="only tokens that write '='"):
        ask(random_llm, "", stop_token_ids=tuple(random_llm.tokenizer.encode("=")))
