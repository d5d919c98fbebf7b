"""offline15 and its controls: answers that follow from the evidence, in one way."""

import hashlib
import itertools
import json
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from support.offline_solvers import SOLVERS, candidates

from da_jax.evals.offline import CONTROLS, TASKS, words
from da_jax.evals.task import Group
from da_jax.protocol.modes import ModeTracker

EVERY = {**TASKS, **CONTROLS}
SHORTEST = 512


def count(text):
    return len(text) // 4


def example(task, length, seed, index=0):
    found = EVERY[task].examples(length, index + 1, seed, count)
    return next(itertools.islice(found, index, None))


every_task = pytest.mark.parametrize("task", EVERY)
each_of_offline15 = pytest.mark.parametrize("task", TASKS)
lengths = st.integers(SHORTEST, 8192)
seeds = st.integers(0, 10**6)
few = settings(max_examples=15, deadline=None)


def gold(of):
    """The right answer, as a model would write it at its end."""
    prefix = of.details.get("prefix", "")
    return prefix + (of.expected[0] if len(of.expected) == 1 else ", ".join(of.expected))


def test_ten_tasks_have_one_place_and_five_have_several():
    groups = [task.group for task in TASKS.values()]
    assert groups == [Group.SINGLE] * 10 + [Group.MULTI] * 5
    assert {task.group for task in CONTROLS.values()} == {Group.CONTROL}
    assert len(EVERY) == 18 and all(name == task.name for name, task in EVERY.items())


def test_every_arm_has_the_same_room_to_reason_in():
    assert {task.max_tokens for task in EVERY.values()} == {1024}


@every_task
@few
@given(length=lengths, seed=seeds)
def test_the_answer_follows_from_document_and_question(task, length, seed):
    of = example(task, length, seed)
    assert tuple(SOLVERS[task](of.document, of.question)) == of.expected


@each_of_offline15
@few
@given(length=lengths, seed=seeds)
def test_without_any_piece_of_the_evidence_the_answer_is_another(task, length, seed):
    of = example(task, length, seed)
    assert of.evidence
    for start, end in of.evidence:
        document = of.document[:start] + of.document[end:]
        assert tuple(SOLVERS[task](document, of.question)) != of.expected


@pytest.mark.parametrize("task", [name for name in TASKS if name != "mrcr_2"])
@few
@given(length=lengths, seed=seeds)
def test_the_evidence_alone_is_enough(task, length, seed):
    of = example(task, length, seed)
    document = "\n".join(of.document[start:end] for start, end in of.evidence)
    assert tuple(SOLVERS[task](document, of.question)) == of.expected


@few
@given(length=lengths, seed=seeds)
def test_evidence_of_a_repeated_request_is_the_turn_that_is_asked_for(length, seed):
    of = example("mrcr_2", length, seed)
    ((start, end),) = of.evidence
    request, text = of.document[start:end].split("\nAssistant:\n")
    assert text.split("\n")[0] == of.expected[0]
    assert of.document.count(request) == 2
    assert of.document[:start].count(request) == of.details["which"] - 1


@pytest.mark.parametrize("task", CONTROLS)
def test_evidence_of_a_control_is_the_whole_document(task):
    of = example(task, 1024, 0)
    assert of.evidence == ((0, len(of.document)),)


@every_task
@few
@given(length=lengths, seed=seeds)
def test_evidence_is_in_order_and_its_depths_are_told(task, length, seed):
    of = example(task, length, seed)
    borders = list(itertools.chain(*of.evidence))
    assert borders == sorted(set(borders)) and borders[-1] <= len(of.document)
    for (start, end), depth in zip(of.evidence, of.details["depths"], strict=True):
        assert of.document[start:end] == of.document[start:end].strip()
        assert depth == pytest.approx(start / len(of.document), abs=1e-4)
    json.dumps(of.details)


@every_task
@few
@given(length=st.integers(640, 8192), seed=seeds)
def test_the_length_is_used_and_kept(task, length, seed):
    of = example(task, length, seed)
    used = count(of.document) + count(of.question)
    assert 0.85 * length <= used <= length


@every_task
def test_the_length_is_that_of_the_tokenizer(task):
    long = example(task, 4096, 0)
    (short,) = EVERY[task].examples(4096, 1, 0, lambda text: len(text) // 2)
    assert len(short.document) < 0.6 * len(long.document)


@every_task
def test_a_long_document_takes_few_counts(task):
    counted = []

    def counting(text):
        counted.append(text)
        return len(text) // 4

    next(EVERY[task].examples(32768, 1, 5, counting))
    assert len(counted) <= 2 * 6  # document and question


@every_task
def test_examples_are_the_same_every_time_and_more_of_them_begin_with_the_same(task):
    three, five = (list(EVERY[task].examples(1024, n, 3, count)) for n in (3, 5))
    assert three == five[:3]
    assert [of.index for of in five] == [0, 1, 2, 3, 4]
    assert len({of.document for of in five}) == 5
    assert {of.task for of in five} == {task}


@every_task
def test_seeds_and_lengths_give_other_examples(task):
    of = [example(task, *of).document for of in ((1024, 0), (1024, 1), (1025, 0), (2048, 0))]
    assert len(set(of)) == 4


@every_task
def test_a_length_below_the_least_is_refused_with_the_least(task):
    with pytest.raises(ValueError, match=rf"{task}.*needs at least \d+ tokens.*got 10") as refused:
        example(task, 10, 0)
    least = int(str(refused.value).split("at least ")[1].split()[0])
    assert least <= SHORTEST
    with pytest.raises(ValueError, match="give a greater length"):
        example(task, 10, 0)


@every_task
@few
@given(length=lengths, seed=seeds)
def test_the_right_answer_scores_one_in_whatever_form(task, length, seed):
    of = example(task, length, seed)
    wrong = candidates(task, of.document, of.question)[0]
    for answer in (
        gold(of),
        f"Answer: {gold(of)}",
        f"  **Answer:**\n{gold(of)}\n",
        f"First I took {wrong} for it, but no.\nANSWER: {gold(of)}",
    ):
        assert EVERY[task].score(of, answer).value == 1, answer


@pytest.mark.parametrize("task", [name for name in EVERY if name != "mrcr_2"])
@few
@given(length=lengths, seed=seeds)
def test_wrong_answers_score_nothing(task, length, seed):
    of = example(task, length, seed)
    every = candidates(task, of.document, of.question)
    assert set(of.expected) <= set(every) or task == "counting"
    wrong = [value for value in every if value not in of.expected]
    score = EVERY[task].score
    for answer in ["", "I do not know.", "Answer:", *wrong[:20]]:
        assert score(of, answer).value == 0, answer
        assert score(of, f"Answer: {answer}").value == 0, answer


@pytest.mark.parametrize(
    "task", ["niah_multikey_2", "niah_multikey_3", "kv_retrieval", "meeting_qa", "code_lookup",
             "variable_tracking", "babilong_2", "counting", "dialogue_cloze", "structured_data"]
)  # fmt: skip
@few
@given(length=st.integers(1024, 8192), seed=seeds)
def test_a_list_of_all_candidates_scores_nothing(task, length, seed):
    of = example(task, length, seed)
    every = candidates(task, of.document, of.question)
    assert len(every) > len(of.expected)
    assert EVERY[task].score(of, "Answer: " + ", ".join(every)).value == 0


@pytest.mark.parametrize("task", ["graphwalks", "common_words", "frequent_words"])
@few
@given(length=st.integers(2048, 8192), seed=seeds)
def test_sets_score_f1(task, length, seed):
    of = example(task, length, seed)
    every = candidates(task, of.document, of.question)
    if task == "graphwalks":
        every.remove(of.details["start"])  # the question names it
    expected = set(of.expected)
    wrong = next(value for value in every if value not in expected)
    score = EVERY[task].score
    n = len(expected)
    listed = score(of, ", ".join(every)).value
    assert listed == pytest.approx(2 * n / (n + len(every)))
    assert listed < 0.5
    assert score(of, ", ".join([*of.expected, wrong])).value == pytest.approx(2 * n / (2 * n + 1))
    assert score(of, ", ".join(of.expected[1:])).value == pytest.approx(2 * (n - 1) / (2 * n - 1))


@few
@given(length=st.integers(1024, 8192), seed=seeds)
def test_a_repeated_text_scores_by_likeness_after_its_prefix(length, seed):
    of = example("mrcr_2", length, seed)
    score = EVERY["mrcr_2"].score
    prefix, text = of.details["prefix"], of.expected[0]
    other = next(
        found
        for found in candidates("mrcr_2", of.document, of.question)
        if found != text
    )  # fmt: skip
    assert score(of, text).value == 0
    assert score(of, "").value == score(of, prefix).value == 0
    assert score(of, f"{prefix} {text}").value == 1
    assert score(of, f"It is the one that begins with {prefix}.\n{prefix}{text}").value == 1
    assert score(of, prefix + other).value < 1  # 0.41 on average
    assert score(of, f"{prefix}{text}\nThat is all.").value == 1
    assert score(of, prefix + of.document).value < 1  # its first line
    assert 0.9 < score(of, prefix + text[:-4]).value < 1


@pytest.mark.parametrize("task", ["niah_single_noise", "kv_retrieval", "mrcr_2"])
def test_needles_lie_anywhere_alike(task):
    of = list(EVERY[task].examples(2048, 400, 1, count))
    places = [place for one in of for place in one.details["depths"]]
    fourths = [sum(i <= 4 * place < i + 1 for place in places) for i in range(4)]
    assert sum(fourths) == 400
    assert stats.chisquare(fourths).pvalue > 0.001


def test_pairs_are_an_object_of_json():
    of = example("kv_retrieval", 4096, 0)
    assert json.loads(of.document)[of.details["key"]] == of.expected[0]


def test_no_distractor_has_the_key_of_the_needle():
    of = example("niah_multikey_2", 65536, 0)
    keys = [line.split()[4] for line in of.document.splitlines()]
    assert len(set(keys)) == len(keys) > 4000


@pytest.mark.parametrize("task", ["niah_single_prose", "niah_multikey_3", "kv_retrieval"])
def test_an_answer_may_repeat_the_key_that_is_asked_for(task):
    of = example(task, 2048, 0)
    score, key = EVERY[task].score, of.details["key"]
    assert score(of, f"The value of {key} is {of.expected[0]}.").value == 1
    assert score(of, f"The value of {key} is not there.").value == 0


@few
@given(seed=seeds)
def test_nobody_buys_or_gives_anything_else_in_the_city_of_the_cloze(seed):
    of = example("dialogue_cloze", 32768, seed)
    (start, end), _ = of.evidence
    who, city = re.match(r"(\w+): When I was in (\w+) I", of.document[start:end]).groups()
    assert of.document.count(f"{who}: When I was in {city} I bought") == 1
    assert of.document.count(f"{who}: What I brought from {city} I") == 1


def test_one_region_sold_most_also_in_short_tables():
    for of in EVERY["structured_data"].examples(120, 300, 0, count):
        assert SOLVERS["structured_data"](of.document, of.question) == list(of.expected)


def test_people_of_the_tasks_do_not_occur_in_the_prose():
    document = example("niah_single_prose", 100_000, 0).document
    assert not [name for name in words.FIRST_NAMES if name in document]


def test_a_text_longer_than_the_prose_repeats_it_in_another_order():
    of = example("niah_single_prose", 150_000, 0)
    paragraphs = of.document.split("\n\n")
    assert len(of.document) > 590_000
    assert paragraphs.count(paragraphs[3]) >= 2
    again = paragraphs.index(paragraphs[3], 4)
    assert paragraphs[again + 1] != paragraphs[4]


def answered(task, form, **changes):
    """The score of an answer that a model could have written, with the values in their places."""
    of = example(task, 2048, 3)
    values = {"all": ", ".join(of.expected), **of.details, **changes}
    return EVERY[task].score(of, form.format(**values))


@pytest.mark.parametrize(
    ("task", "form"),
    [
        ("graphwalks", "Answer: The nodes that are asked for, from {start}, are {all}."),
        ("graphwalks", "Answer: [_{all}_]"),
        ("frequent_words", "Answer: the three most common words are {all}"),
        ("common_words", "Remote motives divide tomatoes. Answer: remote motive: {all}"),
        ("variable_tracking", "Answer: {all} (FINAL)"),
        ("variable_tracking", "Those with the VALUE are **{all}**."),
        ("counting", "Answer: {all}. No one else counts."),
        ("counting", "Answer: {all}.0"),
        ("babilong_2", "Answer: _{all}_"),
        ("dialogue_cloze", "__Answer:__ __{all}__"),
        ("structured_data", "_Answer_: _{all}_"),
        ("passkey", "_Answer: {all}_"),
    ],
)
def test_what_a_model_writes_around_a_right_answer_costs_nothing(task, form):
    assert answered(task, form).value == 1


def test_words_that_are_wrong_still_cost():
    of = example("frequent_words", 2048, 3)
    others = [word for word in of.document.split() if word not in of.expected]
    score = answered("frequent_words", "Answer: {all}, {other}", other=others[0].title())
    assert score.value == pytest.approx(6 / 7) and score.details["extra"] == [others[0]]
    assert answered("graphwalks", "Answer: {all}, {other}", other="0" * 10).value < 1
    assert answered("graphwalks", "Answer: {start}").value == 0
    assert answered("counting", "Answer: {all} or 12").value == 0
    assert answered("counting", "Answer: {all}.5").value == 0


@every_task
@few
@given(length=lengths, seed=seeds)
def test_no_value_is_longer_than_a_focus_may_copy(task, length, seed):
    of = example(task, length, seed)
    assert all(len(value.split()) <= 12 for value in of.expected)


@every_task
def test_no_question_says_where_a_response_ends(task):
    """That is for the instructions to declare: the answer is inside of the last LOCAL text."""
    question = example(task, 1024, 0).question
    assert "Give the answer as " in question
    assert not re.search(r"(?i)\b(end with|end in|finish|nothing after|last line)\b", question)


@pytest.mark.parametrize("task", [name for name in EVERY if name != "mrcr_2"])
@pytest.mark.parametrize("arm", ["vanilla", "da"])
def test_a_response_that_obeys_question_and_instructions_is_right_in_every_arm(task, arm):
    of = example(task, 1024, 0)
    text = f"Answer: {gold(of)}"
    if arm == "da":
        text = (
            '<global>It is in chunk 1.</global><focus magic_chunks="1">some words</focus>'
            f"<local>So it is known.<answer>{text}</answer></local>"
        )
    tracker = ModeTracker(3, arm=arm)
    tracker.feed(text)
    tracker.finish()
    assert EVERY[task].score(of, tracker.answer()).value == 1


DIGESTS = {
    "niah_single_noise": "66d6d5315e544449",
    "niah_single_prose": "d9c66650e047ebec",
    "niah_single_uuid": "3e427fb4444c07e7",
    "niah_multikey_2": "394a4c4d8cb1c5b1",
    "niah_multikey_3": "f0be6ef7b26fe7ac",
    "kv_retrieval": "b4ec81bcec2b1909",
    "passkey": "e757e959ece8c833",
    "mrcr_2": "892e0df05e427963",
    "meeting_qa": "408d52221e512696",
    "code_lookup": "6475cffb1be6556c",
    "variable_tracking": "e1e16bcd57491090",
    "graphwalks": "66af2b79606c741b",
    "babilong_2": "6db8a37d75c1cd8c",
    "counting": "c441561f1db722ca",
    "dialogue_cloze": "2b73af0676f018da",
    "common_words": "87c56716fdd66e66",
    "frequent_words": "47a74a8a2152c8b7",
    "structured_data": "cfa434829de977d9",
}


@every_task
def test_examples_do_not_change(task):
    """A result can only be compared with another of the same examples, on whatever Python."""
    found = [
        [of.document, of.question, of.expected, of.evidence, of.details]
        for of in EVERY[task].examples(2000, 2, 7, count)
    ]
    digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
    assert digest[:16] == DIGESTS[task]


def test_tasks_need_no_jax():
    code = "import sys, da_jax.evals.offline; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
