"""The compact tasks: examples that follow from their text, and exact scores."""

import re

import numpy as np
import pytest

from da_jax.checkpoints.tiny import language as lang
from da_jax.checkpoints.tiny import scenes
from da_jax.checkpoints.tiny.export import make_tokenizer
from da_jax.evals import compact, suites
from da_jax.evals.task import Group
from da_jax.protocol.modes import ModeTracker

EVERY = compact.TASKS | compact.SHORT
SUITE = suites.load(["compact"])
TOKENIZER = make_tokenizer(lang.VOCABULARY)


def count(text):
    return len(TOKENIZER.encode(text).ids)


def drawn(name, length=400, n=6, seed=0):
    return list(EVERY[name].examples(length, n, seed, count))


@pytest.mark.parametrize("name", EVERY)
def test_evidence_is_where_it_is_said_to_be_and_leads_to_what_is_expected(name):
    for example in drawn(name):
        quotes = [example.text[start:end] for start, end in example.evidence]
        keys = re.findall(r"(\w+)=", example.question)
        follows = [re.fullmatch(r"(\w+)=(?: (\w+)=|(\w+))", quote).groups() for quote in quotes]
        if len(keys) == 1:
            for key, link, _ in follows:
                assert key == keys[0]
                keys = [link]
            assert (follows[-1][2],) == example.expected
        else:
            assert tuple(value for _, _, value in follows) == example.expected
            assert [key for key, _, _ in follows] == keys


@pytest.mark.parametrize("name", EVERY)
def test_the_asked_key_has_one_value_or_two_mentions(name):
    for example in drawn(name):
        for key in re.findall(r"(\w+)=", example.question):
            mentions = re.findall(rf"\b{key}=(?:\w+| \w+=)", example.text)
            if "mrcr" in name:
                assert len(mentions) == 2 and len(set(mentions)) == 2
                order = "second" in example.question
                assert mentions[order] == f"{key}={example.expected[0]}"
            else:
                assert len([m for m in mentions if m != f"{key}="]) == 1


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("length", [250, 900])
def test_examples_fill_their_length_and_follow_from_seed_and_index(name, length):
    first = drawn(name, length, 3)
    assert first == drawn(name, length, 5)[:3] != drawn(name, length, 3, seed=1)
    for index, example in enumerate(first):
        assert (example.task, example.index) == (name, index)
        assert 0.6 * length < count(example.text) + count(example.question) <= length


def test_another_tokenizer_gets_shorter_documents():
    by_letter = list(EVERY["compact_niah_multikey"].examples(2000, 2, 0, len))
    assert all(1000 < len(e.text) + len(e.question) <= 2000 for e in by_letter)


def test_a_length_that_holds_no_example_is_refused():
    with pytest.raises(ValueError, match="compact_mrcr_2: no document of 20 tokens"):
        drawn("compact_mrcr_2", length=20)


@pytest.mark.parametrize("name", EVERY)
def test_the_right_responses_score_one_and_others_zero(name):
    """Answers as the tracker of the engine gives them, with and without declarations."""
    task = EVERY[name]
    for example in drawn(name, n=4):
        answers = right_answers(example)
        for answer in answers:
            assert task.score(example, answer).value == 1
            broken = answer.replace(f"answer={example.expected[0]}", "answer=zebras")
            assert task.score(example, broken).value == 0
            assert task.score(example, answer.partition("answer=")[0]).value == 0
        if example.details["spelled"]:
            score = task.score(example, answers[0].replace("2=", "2=z", 1))
            assert score.value == 0 and score.details == {"value": True, "letters": False}


def right_answers(example):
    """What the last LOCAL block, and a plain response, hold; from question and values alone."""
    value = example.expected[0]
    spelt = ""
    if example.question.startswith("read"):
        letters = [f"{i}={letter}" for i, letter in enumerate(value, 1)]
        spelt = f" spell={value} {' '.join(letters)} back {' '.join(letters[::-1])}"
    text = f"{spelt} answer={','.join(example.expected)}"
    tracker = ModeTracker(9)
    tracker.feed(f'<focus magic_chunks="2"> X=y</focus><local>{text}</local>')
    return [tracker.answer(), f" X={value}{text}"]


def test_short_forms_ask_for_the_same_without_letters():
    for name in compact.SHORT:
        long, short = drawn(name.removesuffix("_short"), n=2), drawn(name, n=2)
        assert all(e.question.startswith("read ") for e in long)
        assert all(e.question.startswith("find ") for e in short)
        assert not any(e.details["spelled"] for e in short)


def test_groups_are_those_of_the_evidence():
    for task in SUITE:
        hops = {example.details["hops"] for example in drawn(task.name, n=8)}
        assert (task.group is Group.MULTI) == (min(hops) > 1)
    assert sum(task.group is Group.MULTI for task in SUITE) == 3
    assert len(SUITE) == 11 and len(suites.load(["compact_short"])) == 9


def test_documents_hold_only_pairs_that_training_never_saw():
    trained = set()
    for seed in range(30):
        scene = scenes.make_scene(np.random.default_rng(seed), "mixed", 40, held_out=False)
        trained |= set(re.findall(r"\w+=(?:\w+| \w+=)", scene.text))
    for name in EVERY:
        for example in drawn(name):
            assert not trained & set(re.findall(r"\w+=(?:[a-z0-9]+| \w+=)", example.text))
