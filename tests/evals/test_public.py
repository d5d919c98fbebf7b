import json
import zipfile

import pytest

from da_jax.evals import planning
from da_jax.evals.public import TASKS, PublicOptions, SourceError, scoring
from da_jax.evals.public import sources as sources_lib
from da_jax.evals.task import Score, Task


class Parrot:
    """A judge that says what it was asked."""

    def score(self, question, reference, response):
        return Score(1.0, {"asked": (question, reference, response)})


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = data if isinstance(data, list) else [data]
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))


def words(text):
    return len(text.split())


@pytest.fixture
def options(tmp_path):
    accepted = frozenset({"longbench", "zero_scrolls"})
    return PublicOptions(
        folder=tmp_path, accepted=accepted, judge=Parrot(), show=lambda text: None
    )  # fmt: skip


def only(name, options, n=1, length=1000):
    task = TASKS[name](options)
    return task, list(task.examples(length, n, 0, words))


def test_the_fifteen_sources_have_the_papers_groups(options):
    made = {name: make(options) for name, make in TASKS.items()}
    assert len(made) == 15 and all(task.name == name for name, task in made.items())
    groups = [task.group.value for task in made.values()]
    assert groups == ["single"] * 10 + ["multi"] * 5
    assert all(task.licence and task.description and task.origin for task in made.values())
    synthetic = {
        name for name, task in made.items() if "not those that the paper" in task.description
    }
    assert synthetic == {
        "longbench_qmsum", "longbench2_multidoc_qa", "loogle_summarization",
        "longbench2_singledoc_qa",
    }  # fmt: skip


def test_ruler_asks_with_the_last_line_and_counts_every_output(options, tmp_path):
    text = "Some magic numbers are hidden.\nOne is: 7.\nWhat are all of them? They are"
    row = {"index": 0, "input": text, "outputs": ["7", "12"], "length": 20}
    write(tmp_path / "ruler/niah_single_1/validation.jsonl", row)
    task, (example,) = only("ruler_niah_single_1", options)
    assert example.document == "Some magic numbers are hidden.\nOne is: 7."
    assert example.question == "What are all of them? They are"
    assert task.score(example, "7 and 12").value == 1
    assert task.score(example, "only 12").value == 0.5


def test_qmsum_is_judged_against_its_answers(options, tmp_path):
    row = {
        "input": "What of X?",
        "context": "A: X is late.",
        "answers": ["It is late"],
        "length": 9,
    }
    write(tmp_path / "longbench/qmsum.jsonl", row | {"all_classes": None, "_id": "1"})
    task, (example,) = only("longbench_qmsum", options)
    assert example.document == "A: X is late." and example.question.startswith("What of X?")
    asked = task.score(example, "Late.").details["asked"]
    assert asked == (example.question, "It is late", "Late.")


def test_longbench_v2_is_cut_by_domain_and_scored_by_letter(options, tmp_path):
    rows = [
        {
            "_id": str(i), "domain": domain, "sub_domain": "s", "difficulty": "easy",
            "length": "short", "question": f"Which {i}?", "choice_A": "one", "choice_B": "two",
            "choice_C": "three", "choice_D": "four", "answer": "C", "context": f"text {i}",
        }
        for i, domain in enumerate(
            ["Single-Document QA", "Multi-Document QA", "Code Repository Understanding",
             "Long-dialogue History Understanding"]
        )
    ]  # fmt: skip
    (tmp_path / "longbench-v2").mkdir()
    (tmp_path / "longbench-v2/data.json").write_text(json.dumps(rows))
    names = ["singledoc_qa", "multidoc_qa", "code_repo", "dialogue_history"]
    for number, name in enumerate(names):
        task, (example,) = only(f"longbench2_{name}", options)
        assert example.document == f"text {number}" and f"Which {number}?" in example.question
        assert "(B) two" in example.question and example.expected == ("C",)
        assert task.score(example, "The answer is (C)").value == 1
        assert task.score(example, "B").value == 0


@pytest.mark.parametrize("literal", [True, False])
def test_loogle_gives_an_example_for_each_pair(options, tmp_path, literal):
    pairs = [{"Q": "Who?", "A": "Ada", "S": ["It was Ada."]}, {"Q": "When?", "A": "1843"}]
    row = {"input": "It was Ada.", "title": "t", "qa_pairs": str(pairs) if literal else pairs}
    write(tmp_path / "loogle/longdep_qa.jsonl", row | {"output": "none"})
    _, found = only("loogle_longdep_qa", options, n=2)
    assert {(e.question, e.expected) for e in found} == {("Who?", ("Ada",)), ("When?", ("1843",))}
    masks = {"<mask-0>": "Ada"}
    write(
        tmp_path / "loogle/shortdep_cloze.jsonl",
        row | {"qa_pairs": [{"Q": "<mask-0> wrote.", "A": masks}]},
    )
    _, (cloze,) = only("loogle_shortdep_cloze", options)
    assert cloze.question.startswith("<mask-0> wrote.") and json.loads(cloze.expected[0]) == masks
    write(
        tmp_path / "loogle/longdep_summarization.jsonl",
        {"input": "A paper.", "title": "p", "qa_pairs": "none", "output": "Its abstract."},
    )
    _, (summary,) = only("loogle_summarization", options)
    assert (summary.document, summary.expected) == ("A paper.", ("Its abstract.",))


def scrolls_row(document, query, output):
    head = "You are given a text.\n\nText:\n"
    return {
        "id": "1", "pid": "1_0", "input": f"{head}{document}\n\n{query}", "output": output,
        "document_start_index": len(head), "document_end_index": len(head) + len(document),
        "query_start_index": len(head) + len(document) + 2, "truncation_seperator": "...",
    }  # fmt: skip


def test_zero_scrolls_is_cut_at_its_own_offsets_also_in_a_zip(options, tmp_path):
    row = scrolls_row("A story.", "Question: Who?\n(A) a\n(B) b\n\nAnswer:", "(B) b")
    (tmp_path / "zero_scrolls").mkdir()
    with zipfile.ZipFile(tmp_path / "zero_scrolls/quality.zip", "w") as archive:
        archive.writestr("quality/validation.jsonl", json.dumps(row) + "\n")
        archive.writestr("quality/test.jsonl", json.dumps({**row, "output": None}) + "\n")
    task, (example,) = only("zeroscrolls_quality", options)
    assert example.document == "A story."
    assert example.question.startswith("You are given a text.") and "(B) b" in example.question
    assert task.score(example, "B").value == 1 and task.score(example, "(A)").value == 0
    write(
        tmp_path / "zero_scrolls/space_digest/validation.jsonl",
        scrolls_row("Good. Bad.", "What percentage?", "50%"),
    )
    task, (example,) = only("zeroscrolls_space_digest", options)
    assert task.score(example, "It is 60%.").value == 0.5
    write(
        tmp_path / "zero_scrolls/space_digest/validation.jsonl", scrolls_row("Good.", "What?", None)
    )
    with pytest.raises(SourceError, match=r"the test split .* hides"):
        only("zeroscrolls_space_digest", options)


def test_examples_are_short_enough_different_and_the_same_for_a_seed(options, tmp_path):
    rows = [{"input": f"{'w ' * n}\nq{n}?", "outputs": ["x"]} for n in (1, 2, 3, 3, 50)]
    write(tmp_path / "ruler/niah_single_2.jsonl", rows)
    task, found = only("ruler_niah_single_2", options, n=3, length=10)
    assert {e.question for e in found} == {"q1?", "q2?", "q3?"} and len(found) == 3
    assert found == list(task.examples(10, 3, 0, words))
    orders = {tuple(e.question for e in task.examples(10, 3, s, words)) for s in range(20)}
    assert len(orders) > 1
    assert found[:2] == list(task.examples(10, 2, 0, words))  # a run may grow
    assert found == list(task.examples(10, 128, 0, words))  # there are no more
    assert list(task.examples(1, 4, 0, words)) == []


def test_a_missing_or_damaged_source_is_an_error_that_says_what_to_do(options, tmp_path):
    with pytest.raises(
        SourceError, match=r"data\.json is missing; get it from https.*put it there"
    ):
        only("longbench2_code_repo", options)
    (tmp_path / "ruler").mkdir()
    path = tmp_path / "ruler/niah_single_3.jsonl"
    path.write_text('{"input": "a')
    with pytest.raises(SourceError, match="is damaged"):
        only("ruler_niah_single_3", options)
    path.write_text('{"prompt": "a\\nb"}\n')
    with pytest.raises(SourceError, match=r"row 1: not as published \(KeyError: 'input'\)"):
        only("ruler_niah_single_3", options)
    with pytest.raises(SourceError, match="name a --judge"):
        TASKS["longbench_qmsum"](PublicOptions())


def test_data_without_a_licence_is_not_read_before_it_is_accepted(tmp_path):
    with pytest.raises(SourceError, match=r"states no licence.*accepted=\{'zero_scrolls'\}"):
        only("zeroscrolls_quality", PublicOptions(folder=tmp_path))


def test_the_licence_is_shown_before_the_first_row(tmp_path):
    shown = []
    write(tmp_path / "ruler/niah_single_1.jsonl", {"input": "a\nb?", "outputs": ["x"]})
    only("ruler_niah_single_1", PublicOptions(folder=tmp_path, show=shown.append))
    assert len(shown) == 1 and "apache-2.0" in shown[0]


class Hub:
    """Stands in for huggingface_hub."""

    def __init__(self, licence, path):
        self.licence, self.path = licence, path

    def dataset_info(self, name):
        return type("Info", (), {"card_data": {"license": self.licence}})


def test_another_licence_on_the_hub_stops_the_download(options, tmp_path, monkeypatch):
    import huggingface_hub

    fetched = tmp_path / "elsewhere.json"
    write(fetched, {"input": "t", "qa_pairs": [{"Q": "q", "A": "a"}]})
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: Hub("cc-by-nc-4.0", fetched))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a, **k: str(fetched))
    allowed = sources_lib.dataclasses.replace(options, allow_download=True)
    with pytest.raises(SourceError, match=r"states the licence 'cc-by-nc-4.0', not 'cc-by-sa-4.0'"):
        only("loogle_longdep_qa", allowed)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: Hub("cc-by-sa-4.0", fetched))
    _, (example,) = only("loogle_longdep_qa", allowed)
    assert example.expected == ("a",)


@pytest.mark.parametrize(
    ("answer", "chosen"),
    [
        ("B", "B"), ("(D)", "D"), ("The answer is (C).", "C"), ("Answer: A", "A"),
        ("A thing is odd, so the correct answer is B", "B"), ("not sure", None),
        ("Between A and C I choose C", "C"), ("The answer is **option (C)**.", "C"),
        ("The answer is (C). Option A is wrong because it is never said.", "C"),
        ("The answer is (B), since every other option is a distractor.", "B"),
        ("(B) A man who lost his way.", "B"), ("B. Vitamin C", "B"), ("**D**", "D"),
        ("The correct option is B. C and D are never mentioned.", "B"),
        ("ANSWER: C. D is wrong", "C"), ("The answer is definitely (C). (A) is not.", "C"),
        ("The best choice is (A), not (B).", "A"), ("A man did it, hence D.", "D"),
        ("I looked for the answer. (A) says so, but (C) is what the text says.", "C"),
        ("**Answer:** (B)", "B"), ("I choose (C), a man of A rank.", "C"),
        ("Option (C) is right; option (D) is not.", "C"), (r"\boxed{C}, since D is not", "C"),
        ("The answer must be (D). Not (A).", "D"), ("The answer is most likely B, not C", "B"),
        ("Answer - C. D is wrong", "C"), ("(b)", "B"), ("a", "A"), ("a or b", None),
        ("The answer is not A; it is B.", "B"), ("The answer is a long text. (D)", "D"),
    ],
)  # fmt: skip
def test_a_letter_is_read_from_an_answer(answer, chosen):
    assert scoring.letter(answer, "B").details == {"chosen": chosen}


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("40%", 1), ("30", 0.5), ("about 60.0 %", 0.25), ("140%", 0), ("?", 0), ("- 40%", 1),
        ("Of 50 reviews 20 are positive, so 40%.", 1), ("Chunk 3 has 12; 40 percent in all", 1),
        ("40 per cent of the 50 reviews", 1), ("40 Percent of 50", 1), ("40,0% of 50", 1),
        ("The percentage is 40. There were 50 reviews.", 1), ("Answer: 40 of 100", 1),
    ],
)  # fmt: skip
def test_percentages_lose_half_for_each_ten_points(answer, value):
    assert scoring.percentage(answer, "40%").value == pytest.approx(value)


def test_a_run_takes_what_there_is(options, tmp_path):
    rows = [{"input": f"w\nq{n}?", "outputs": ["x"]} for n in range(3)]
    write(tmp_path / "ruler/niah_single_2.jsonl", rows)
    task, _ = only("ruler_niah_single_2", options, n=1, length=10)
    asked = lambda task, length=10: list(
        planning.cases(planning.Selection((task,), (length,), 128), words)
    )
    assert [case.example.index for case in asked(task)] == [0, 1, 2]
    with pytest.raises(ValueError, match="niah_single_2 has no example of up to 1 tokens; add a"):
        asked(task, 1)

    class Generated(Task):
        name, examples, score = task.name, task.examples, task.score

    with pytest.raises(ValueError, match="has 3 examples of length 10, but --n is 128"):
        asked(Generated())


class Prompt:
    """Stands in for a rendered prompt: each of its bytes is a token."""

    def __init__(self, text):
        self.ids = list(text.encode())

    def __len__(self):
        return len(self.ids)


class Plain:
    """Stands in for the prompts of a model."""

    count = staticmethod(words)
    asked = staticmethod(lambda arm: arm)
    render = staticmethod(lambda example, arm: Prompt(f"{example.text} {example.question}"))


def test_an_example_is_asked_at_the_least_length_that_it_fits_and_once(options, tmp_path):
    rows = [{"input": f"{'w ' * n}\nq{n}?", "outputs": ["x"]} for n in range(1, 13)]
    write(tmp_path / "ruler/niah_single_2.jsonl", rows)
    task = TASKS["ruler_niah_single_2"](options)
    found = {}
    for case in planning.cases(planning.Selection((task,), (8, 4, 5, 100), 128), words):
        size = words(case.example.document) + words(case.example.question)
        found.setdefault(case.length, []).append(size)
    assert {length: sorted(sizes) for length, sizes in found.items()} == {
        4: [2, 3, 4], 5: [5], 8: [6, 7, 8], 100: [9, 10, 11, 12, 13],
    }  # fmt: skip
    # A length that no example needs has none.
    lengths = [c.length for c in planning.cases(planning.Selection((task,), (1, 4), 2), words)]
    assert lengths == [4, 4]


def test_a_run_on_public_data_grows_by_greater_lengths_alone(options, tmp_path):
    rows = [{"input": f"{'w ' * n}\nq{n}?", "outputs": ["x"]} for n in range(1, 9)]
    write(tmp_path / "ruler/niah_single_2.jsonl", rows)
    task = TASKS["ruler_niah_single_2"](options)
    plan = lambda *lengths: planning.make(planning.Selection((task,), lengths, 128), Plain)
    assert len(plan(4, 6).prompts) == 3 * 5
    for lengths in ((4, 6), (4, 6, 9), (4,)):
        planning.check_prompts(plan(*lengths), plan(4, 6).prompts)
    refused = "a lesser length was added.*; name another folder|would count twice"
    with pytest.raises(ValueError, match=refused):
        planning.check_prompts(plan(4, 6), plan(6).prompts)
    # What stands at the same places may be the same by chance; then what is left over tells.
    there = {key: sha for key, sha in plan(6).prompts.items() if sha in plan(4).prompts.values()}
    last = {(name, 6, 99, arm): sha for (name, _, _, arm), sha in there.items()}
    with pytest.raises(ValueError, match=r"as example 99 of length 6, and would count twice"):
        planning.check_prompts(plan(4, 6), last)
