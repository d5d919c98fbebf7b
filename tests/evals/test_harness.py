import json
import os

import numpy as np
import pytest
from support.dense import dense_logits

pytest.importorskip("lm_eval", reason="needs the extra eval")
from lm_eval.api.instance import Instance

from da_jax.evals import harness
from da_jax.evals.harness_model import ContextTooLong, HarnessModel, _cut, split_prompt

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
    assert model.raised == 1
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


@pytest.mark.parametrize(
    ("example", "prompt", "document", "question"),
    [
        (
            {"context": "Fact one.\n\nFact two. " * 5, "question": "Which?", "title": "t"},
            "Read.\n\n" + "Fact one.\n\nFact two. " * 5 + "\n\nNow answer.\nQ: Which?\nA:",
            ("Fact one.\n\nFact two. " * 5).strip(),
            "Read.\n\nNow answer.\nQ: Which?\nA:",
        ),
        ({"prompt": "a\nb\nc?"}, "a\nb\nc? The answer is", "a\nb", "c? The answer is"),
        ({"p": "edge\nx -> y\n\nWhich?"}, "edge\nx -> y\n\nWhich?", "edge\nx -> y", "Which?"),
        ({}, "only a question", "", "only a question"),
    ],
)  # fmt: skip
def test_a_prompt_is_cut_where_the_example_says_its_context_ends(
    example, prompt, document, question
):
    assert split_prompt(example, prompt) == (document, question)


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
    with pytest.raises(ValueError, match="length 1024 is too short"):
        harness.evaluate(random_llm, ["ruler_qa_squad"], lengths=(4096, 1024))


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


def test_a_task_by_log_likelihood_runs_in_the_plain_arm_alone(tiny_llm, task):
    choice = {
        key: value for key, value in task.items() if key not in ("generation_kwargs", "metric_list")
    } | {"output_type": "multiple_choice", "doc_to_choice": ["apple", "silver", "lemon"]}
    with pytest.raises(ValueError, match="tiny_lookup: scored by log-likelihood"):
        harness.evaluate(tiny_llm, [choice])
    report = harness.evaluate(tiny_llm, [choice], arms=["vanilla"], chat=False)
    assert 0 <= report["arms"]["vanilla"]["results"]["tiny_lookup"]["acc,none"] <= 1
    assert report["arms"]["vanilla"]["n-samples"]["tiny_lookup"]["effective"] == 3
