import json
import os
import random
from types import SimpleNamespace

import numpy as np
import pytest
from support.dense import dense_logits

pytest.importorskip("lm_eval", reason="needs the extra eval")
from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks.ruler import fwe_utils, qa_utils, vt_utils

import da_jax
from da_jax.evals import harness
from da_jax.evals.harness_model import ContextTooLong, HarnessModel, _cut
from da_jax.evals.harness_split import split_prompt

os.environ["HF_HUB_OFFLINE"] = "1"
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(datasets|lm_eval|dill|multiprocess)"),
]


def instance(kind, *args, doc=None, task="a_task"):
    return Instance(kind, doc or {}, args, 0, metadata=(task, 0, 1))


@pytest.fixture
def tiny_llm(lab):
    return lab.llm


def dense_logprobs(llm, ids):
    """float64 [T, V] log-probabilities of what follows each prefix of some tokens."""
    tokens = np.zeros((1, 512), np.int32)  # one length, so that it compiles once
    tokens[0, : len(ids)] = ids
    mask = np.tril(np.ones((512, 512), bool))
    model = llm.engine.runner.model(llm.engine.runner.weights)
    logits = dense_logits(model, tokens, mask)[0, : len(ids)].astype(np.float64)
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def expected(llm, context, continuation):
    logprobs = dense_logprobs(llm, [*context, *continuation])[len(context) - 1 : -1]
    best = logprobs.argmax(-1)
    total = logprobs[np.arange(len(continuation)), continuation].sum()
    return total, bool((best == continuation).all())


def test_log_likelihoods_are_those_of_a_dense_forward_pass(random_llm):
    model = HarnessModel(random_llm)
    pairs = [("The capital of France is", " Paris"), ("", "abc"), ("two words ", "and more")]
    context = model.tok_encode("once upon")
    greedy = int(dense_logprobs(random_llm, context)[-1].argmax())
    pairs.append(("once upon", random_llm.tokenizer.decode([greedy])))
    found = model.loglikelihood([instance("loglikelihood", *pair) for pair in pairs], True)
    encoded = [(model.tok_encode(a) or [model.eot_token_id], model.tok_encode(b)) for a, b in pairs]
    encoded[2] = (model.tok_encode("two words"), model.tok_encode(" and more"))  # spaces move
    for (score, is_greedy), ids in zip(found, encoded):
        total, best = expected(random_llm, *ids)
        assert score == pytest.approx(total, abs=2e-3)
        assert is_greedy is best
    assert found[-1][1] is True and found[0][1] is False


def test_a_context_is_cut_from_the_left_alone_and_a_continuation_never(random_llm):
    text = "".join(chr(97 + n % 26) for n in range(600))
    request = instance("loglikelihood", text, "the end")
    with pytest.raises(ContextTooLong, match=r"1 of 1 .* 600 tokens and 7 tokens after"):
        HarnessModel(random_llm).loglikelihood([request], True)
    model = HarnessModel(random_llm, truncate=True)
    (score, _), = model.loglikelihood([request], True)  # fmt: skip
    kept = model.tok_encode(text)[-(512 - 7) :]
    total, _ = expected(random_llm, kept, model.tok_encode("the end"))
    assert score == pytest.approx(total, abs=5e-3)
    assert model.truncated == 1
    with pytest.raises(ContextTooLong, match=r"the continuation .* has 512 tokens"):
        model.loglikelihood([instance("loglikelihood", "a", "b" * 512)], True)


def test_rolling_windows_score_every_token_once(random_llm):
    model = HarnessModel(random_llm)
    text = "".join(chr(97 + n * n % 26) for n in range(700))
    ids = model.tok_encode(text)
    # The engine holds 512 tokens: the first window scores 511 after the prefix, and the last one
    # scores the other 189 with as much context as fits.
    first = expected(random_llm, [model.prefix_token_id], ids[:511])[0]
    last = expected(random_llm, ids[700 - 512 : 511], ids[511:])[0]
    found, short, none = model.loglikelihood_rolling(
        [instance("loglikelihood_rolling", t) for t in (text, "abc", "")], True
    )
    assert found == pytest.approx(first + last, abs=2e-2)
    prefix = [model.prefix_token_id]
    assert short == pytest.approx(
        expected(random_llm, prefix, model.tok_encode("abc"))[0], abs=2e-3
    )
    assert none == 0


def test_generation_is_greedy_and_ends_at_a_stop_string_or_its_cap(random_llm):
    model = HarnessModel(random_llm)
    context = model.tok_encode("once upon a time")
    options = {"until": [], "max_gen_toks": 12, "do_sample": False, "temperature": 1}
    (written,) = model.generate_until(
        [instance("generate_until", "once upon a time", options)], True
    )
    ids = list(model.accounts[0].response.token_ids)
    known = dense_logprobs(random_llm, [*context, *ids])[:, : len(random_llm.tokenizer)]
    assert known[len(context) - 1 : -1].argmax(-1).tolist() == ids and len(ids) == 12
    assert written == random_llm.tokenizer.decode(ids, skip_special_tokens=True).strip()
    stop = written[3:5]
    request = instance("generate_until", "once upon a time", {**options, "until": stop})
    assert model.generate_until([request], True) == [written[: written.find(stop)].strip()]


def test_caps_are_raised_and_options_that_are_unknown_refused(random_llm):
    model = HarnessModel(random_llm, min_gen_toks=6)
    requests = [instance("generate_until", "once", {"max_gen_toks": n}) for n in (2, 9)]
    model.generate_until(requests, True)
    assert [account.response.completion_tokens for account in model.accounts] == [6, 9]
    assert model.raised == 1 and model.lowered == 0
    model = HarnessModel(random_llm, min_gen_toks=6, max_tokens=3)
    model.generate_until([*requests, instance("generate_until", "once", {})], True)
    assert [account.response.completion_tokens for account in model.accounts] == [3, 3, 3]
    assert (model.raised, model.lowered, model.max_gen_toks) == (1, 1, 3)
    with pytest.raises(ValueError, match=r"\['num_beams'\], which da-jax does not have"):
        model.generate_until([instance("generate_until", "a", {"num_beams": 3})], True)


def test_prompt_and_response_that_do_not_fit_are_refused_before_the_run(random_llm):
    fits, long = (instance("generate_until", "x" * n, {"max_gen_toks": 12}) for n in (500, 501))
    model = HarnessModel(random_llm)
    with pytest.raises(ContextTooLong, match=r"1 of 2 .*a_task, has a context of 501"):
        model.generate_until([fits, long], True)
    assert not model.accounts and random_llm.engine.idle
    cut = HarnessModel(random_llm, truncate=True)
    cut.generate_until([long], True)
    assert cut.accounts[0].response.prompt_tokens == 500 and cut.truncated == 1


def test_the_document_is_cut_from_the_left_in_the_arms_that_declare(random_llm):
    model = HarnessModel(random_llm, arm="da", truncate=True)
    context = "word " * 200 + "\nlast line of it\n\nWhat is it?"
    prompt = model._prompt({}, context, 300)
    assert len(prompt) <= 300 and model.truncated == 1
    assert "last line of it" in prompt.text and "What is it?" in prompt.text


def chat_of(model, prefix=None, system=None):
    """What the harness gives for one turn of 400 words and a question."""
    turns = [] if system is None else [{"role": "system", "content": system}]
    text = "Read.\n\n" + " ".join(f"w{n:03}" for n in range(400)) + "\n\nQuestion: What is last?"
    turns.append({"role": "user", "content": text})
    if prefix:
        turns.append({"role": "assistant", "content": prefix})
    return model.apply_chat_template(turns, add_generation_prompt=not prefix)


@pytest.mark.parametrize(("prefix", "system"), [(None, None), ("It is", "Be brief.")])
def test_the_chat_template_stays_where_a_document_is_cut(random_llm, prefix, system):
    model = HarnessModel(random_llm, truncate=True)
    context = chat_of(model, prefix, system)
    whole = random_llm.tokenizer.encode(context, add_special_tokens=False)
    assert len(whole) > 400
    kept = random_llm.tokenizer.decode(model._prompt({}, context, 400).ids)
    head, tail = context.split("Read.\n\n")[0], context.split("w399")[1]
    assert kept.startswith(head) and kept.endswith("w399" + tail) and "w000" not in kept
    assert "<|im_start|>user" in head and "assistant" in tail and (prefix or "") in tail
    assert model.truncated == 1
    assert model._prompt({}, context, len(whole)).ids.tolist() == whole  # nothing is cut
    assert model.truncated == 1


def test_a_field_is_cut_and_what_stands_before_it_stays(random_llm):
    model = HarnessModel(random_llm, truncate=True)
    text = " ".join(f"w{n:03}" for n in range(400))
    context = f"Read this:\n\n{text}\n\nQuestion: What is last?"
    kept = random_llm.tokenizer.decode(model._prompt({"text": text}, context, 300).ids)
    assert kept.startswith("Read this:\n\n") and kept.endswith("w399\n\nQuestion: What is last?")
    assert "w000" not in kept


def test_a_start_token_and_the_template_stay_where_a_context_is_cut(random_llm):
    model = HarnessModel(random_llm, truncate=True)
    context = chat_of(model)
    head = context.split("Read.")[0]
    ids, start = model.tok_encode(context), len(model.tok_encode(head))
    assert model._last(context, ids, 100) == ids[:start] + ids[-(100 - start) :]
    bos = random_llm.tokenizer.bos_token_id
    if bos is not None:
        assert model._last("x", [bos, *ids], 100) == [bos, *ids[-99:]]
    assert model._last("x", ids, len(ids)) == ids


def test_an_answer_that_repeats_the_prefix_is_returned_without_it(random_llm):
    model = HarnessModel(random_llm)
    options = {"until": [], "max_gen_toks": 6}
    (written,) = model.generate_until([instance("generate_until", "once", options)], True)
    row = {"gen_prefix": written[:2]}
    (rest,) = model.generate_until([instance("generate_until", "once", options, doc=row)], True)
    assert rest == written[2:].lstrip()


def test_the_answer_ends_at_the_first_of_the_stop_strings():
    assert _cut("one\ntwo. three", (".", "\n")) == "one"
    assert _cut("one", ("x",)) == "one"


def test_bad_settings_are_refused(random_llm):
    with pytest.raises(ValueError, match="arm is 'fast'"):
        HarnessModel(random_llm, arm="fast")
    with pytest.raises(ValueError, match="loaded already"):
        HarnessModel(random_llm, max_model_len=3)
    with pytest.raises(ValueError, match="leave apply_chat_template off"):
        HarnessModel(random_llm, arm="da").apply_chat_template([{"role": "user", "content": "a"}])
    with pytest.raises(ValueError, match="lets nothing be declared"):
        HarnessModel(random_llm, arm="da").loglikelihood([instance("loglikelihood", "a", "b")])
    with pytest.raises(ValueError, match="max_tokens is 0; it must be at least 1"):
        HarnessModel(random_llm, max_tokens=0)
    with pytest.raises(ValueError, match="unknown arms \\['fast'\\]: choose among vanilla, unm"):
        harness.evaluate(random_llm, ["anything"], arms=["fast", "da"])
    with pytest.raises(ValueError, match="no arm is named; choose among vanilla, unmasked, da"):
        harness.evaluate(random_llm, ["anything"], arms=())
    with pytest.raises(ValueError, match=r"4096, 8192 with the limit 4: .* give one length"):
        harness.evaluate(random_llm, ["niah_single_1"], lengths=(4096, 8192), limit=4)
    with pytest.raises(ValueError, match="limit is 0; it must be at least 1"):
        harness.evaluate(random_llm, ["niah_single_1"], limit=0)


def words(text, add_special_tokens):
    return text.split()


def letters(text, add_special_tokens):
    return list(text)


@pytest.mark.parametrize(
    ("task", "length", "encode", "problem"),
    [
        ("ruler_vt", 1023, words, "length 1023 is too short for ruler_vt: .* give 1024 or more"),
        ("ruler", 512, words, "length 512 is too short for ruler:"),
        ("longcxt", 512, words, "length 512 is too short for longcxt:"),
        ("ruler_cwe", 1024, letters, None),
        ("ruler_vt", 8192, letters, "never end with this tokenizer: .* are 900 tokens"),
        ("ruler_vt", None, letters, "never end with this tokenizer"),
        ("ruler_vt", 1024, words, None),
        ("ruler_qa_squad", 300, letters, None),
        ("niah_single_1", 300, letters, None),
    ],
)
def test_tasks_of_ruler_that_would_never_end_are_refused(task, length, encode, problem):
    tasks = [{"task": "mine"}, task]
    options = harness.HarnessOptions(lengths=None if length is None else (length,))

    def check():
        harness.check(tasks, ["da"], options)
        harness._check_tokenizer(tasks, SimpleNamespace(encode=encode))

    if problem is None:
        check()
    else:
        with pytest.raises(ValueError, match=problem):
            check()


def test_the_chat_template_is_the_models_own(random_llm):
    model = HarnessModel(random_llm)
    turns = [{"role": "user", "content": "hi"}]
    assert model.apply_chat_template(turns) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    turns.append({"role": "assistant", "content": "It is"})
    assert model.apply_chat_template(turns, add_generation_prompt=False).endswith(
        "assistant\nIt is"
    )
    assert model.chat_template(True) == random_llm.tokenizer.chat_template
    assert "/" not in model.tokenizer_name and model.tokenizer_name.endswith("vanilla")


class FourCharacters:
    """Counts tokens for the generators of RULER."""

    def __call__(self, text):
        return SimpleNamespace(input_ids=range(len(text) // 4))


def ruler_rows():
    """A row of each form, from the harness's own generators where they need no download."""
    np.random.seed(0)
    random.seed(0)
    tokenizer, length = FourCharacters(), 1500
    documents = [f"Town {n} has a mill.\nIt was built in {1500 + n}." for n in range(200)]
    asked = [{"query": "When was the mill of town 7 built?", "outputs": ["1507"], "context": [7]}]
    lines = ["The grass is green. The sky is blue."] * 120
    lines[40] = "One of the special magic numbers for red-fox is: 1234567."
    needle = "Some special magic number is hidden within the following text.\n"
    needle += "\n".join(lines) + f"\n{QUESTIONS['niah'][0]}"
    said = "The special magic number for red-fox mentioned in the provided text is"
    example = vt_utils.sys_vartrack_w_noise_random(tokenizer, 1, 500, incremental=5)[0]
    traced = vt_utils.sys_vartrack_w_noise_random(tokenizer, 1, length, icl_example=example)
    return {
        "qa": qa_utils.generate_samples(tokenizer, documents, asked, length, num_samples=1)[0],
        "vt": traced[0],
        "fwe": fwe_utils.sys_kwext(tokenizer, length, num_samples=1)[0],
        "niah": {"input": needle, "gen_prefix": said, "outputs": ["1234567"], "max_length": length},
    }


QUESTIONS = {
    "qa": ("Question: When was the mill of town 7 built?", "It was built in 1507."),
    "vt": ("Question: Find all variables that are assigned the value ", "VAR "),
    "fwe": ("Question: Do not provide any explanation.", "coded text"),
    "niah": ("What is the special magic number for red-fox mentioned in the text?", "is: 1234567."),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_ruler_asks_outside_of_the_document_in_every_arm(random_llm, name):
    row = ruler_rows()[name]
    task = ConfigurableTask(
        config={
            "task": name,
            "output_type": "generate_until",
            "dataset_path": "",
            "custom_dataset": lambda **options: {"test": Dataset.from_list([row])},
            "test_split": "test",
            "doc_to_text": "{{input}}",
            "doc_to_target": "{{outputs}}",
            "gen_prefix": "{{gen_prefix}}",
            "target_delimiter": " ",
            "generation_kwargs": {"until": []},
            "metric_list": [{"metric": "exact_match"}],
        }
    )
    (row,) = task.test_docs()
    plain = task.fewshot_context(row, 0, gen_prefix=task.doc_to_prefix(row))
    asked, evidence = QUESTIONS[name]
    document, question = split_prompt(row, plain)
    assert evidence in document and not document.split("\n")[-1].startswith("Question:")
    assert question.startswith(asked) and question.endswith(row["gen_prefix"])
    assert len(question) < 600 < len(document)
    assert document.split() + question.split() == plain.split()  # nothing is lost
    prompt = HarnessModel(random_llm, arm="da")._prompt(row, plain, 512)
    (start, _), (_, end) = prompt.chunks[0], prompt.chunks[-1]
    ids = prompt.ids.tolist()
    assert question not in random_llm.tokenizer.decode(ids[start:end])
    assert question in random_llm.tokenizer.decode(ids[end:])
    # The plain arm has the prefix as the start of its own turn.
    model = HarnessModel(random_llm)
    chat = task.fewshot_context(
        row, 0, gen_prefix=task.doc_to_prefix(row), apply_chat_template=True,
        chat_template=model.apply_chat_template,
    )  # fmt: skip
    user, turn = chat.split("<|im_start|>assistant\n")
    assert turn == row["gen_prefix"] and asked in user and row["gen_prefix"] not in user


@pytest.fixture
def task(tmp_path):
    """A task of the tiny checkpoint's language, of the harness's own form."""
    rows = [
        {"context": "Kamora=apple\nBelune=silver\nTodira=lemon", "key": key, "value": value}
        for key, value in (("Kamora=", "apple"), ("Belune=", "silver"), ("Todira=", "lemon"))
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "task": "tiny_lookup",
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(data)}, "cache_dir": str(tmp_path / "cache"),
        },
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{context}}\n\nQuestion: what is {{key}}?",
        "doc_to_target": "{{value}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip


def test_a_task_runs_in_every_arm_on_the_same_examples(tiny_llm, task, tmp_path):
    report = harness.evaluate(
        tiny_llm, [task], limit=2, min_gen_toks=64, out=tmp_path / "out", samples=True
    )
    assert list(report["arms"]) == ["vanilla", "unmasked", "da"]
    assert report["da_jax"] == da_jax.__version__
    assert report["model"].items() >= {"dtype": "float32", "kv_dtype": "float32"}.items()
    assert report["model"]["device"] and report["model"]["folder"].endswith("checkpoint")
    apart = report["differences"]["tiny_lookup"]["exact_match,none"]
    assert list(apart) == ["unmasked", "da"]
    for arm, found in apart.items():
        values = [
            report["arms"][name]["results"]["tiny_lookup"]["exact_match,none"]
            for name in (arm, "vanilla")
        ]
        assert found["value"] == pytest.approx(values[0] - values[1]) and found["n"] == 2
    for arm in report["arms"].values():
        assert arm["cost"]["tiny_lookup"]["responses"] == 2
        assert arm["model"]["raised"] == 2 and arm["model"]["truncated"] == 0
    costs = [arm["cost"]["tiny_lookup"] for arm in report["arms"].values()]
    assert len({cost["prompt_tokens"] for cost in costs}) == 1  # it knows only the DA prompt
    assert all(cost["read"] >= cost["attended"] > 0 for cost in costs)
    assert json.loads((tmp_path / "out" / "lm_eval.json").read_text()) == json.loads(
        json.dumps(report, default=str)
    )
    lines = {}
    for arm in report["arms"]:
        path = tmp_path / "out" / f"lm_eval_samples_{arm}_tiny_lookup.jsonl"
        lines[arm] = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line["doc"]["value"] for line in lines[arm]] == ["apple", "silver"]
        assert all("<" not in line["resps"][0][0] for line in lines[arm])


def test_differences_are_paired_and_only_of_means():
    def result(values, reported):
        samples = [
            {"doc_id": n, "filter": "none", "metrics": ["4096", "f1"], "4096": value, "f1": 0.5}
            for n, value in enumerate(values)
        ]
        return {"samples": {"t": samples}, "results": {"t": {"4096,none": reported, "f1,none": 9}}}

    scores = {
        "da": harness._scores(result([1.0, -1, 0.5, 0.0], 0.5)),
        "vanilla": harness._scores(result([1.0, 1.0, 0.0, 0.0], 0.5)),
    }
    found = harness._differences(scores)
    assert list(found["t"]) == ["4096,none"] and list(found["t"]["4096,none"]) == ["da"]
    entry = found["t"]["4096,none"]["da"]
    assert entry["value"] == pytest.approx(1 / 6) and entry["n"] == 3  # 1-1, .5-0, 0-0
    assert (entry["low"], entry["high"]) == (0, 0.5)
    assert harness._differences({"da": scores["da"]}) == {}


def test_a_task_by_log_likelihood_runs_in_the_plain_arm_alone(tiny_llm, task):
    choice = {
        key: value for key, value in task.items() if key not in ("generation_kwargs", "metric_list")
    } | {"output_type": "multiple_choice", "doc_to_choice": ["apple", "silver", "lemon"]}
    with pytest.raises(ValueError, match="tiny_lookup: scored by log-likelihood"):
        harness.evaluate(tiny_llm, [choice])
    report = harness.evaluate(tiny_llm, [choice], arms=["vanilla"], chat=False)
    assert 0 <= report["arms"]["vanilla"]["results"]["tiny_lookup"]["acc,none"] <= 1
    assert report["arms"]["vanilla"]["n-samples"]["tiny_lookup"]["effective"] == 3
