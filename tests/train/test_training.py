"""Training the checkpoint that ships, a little: from examples to a folder that answers."""

import dataclasses
import json
import math

import numpy as np
import pytest
from support import tiny
from typer.testing import CliRunner

from da_jax import LLM
from da_jax.checkpoints import hf
from da_jax.checkpoints.tiny import evaluate
from da_jax.cli.main import app
from da_jax.train import run as training
from da_jax.train.step import Settings, Trainer

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """Eight questions whose answers are, wrongly, always the same: that has to be learnt."""
    path = tmp_path_factory.mktemp("data") / "examples.jsonl"
    asked = [c for c in evaluate.cases(5, 40, (3, 3)) if c.question.kind == "one"]
    lines = [
        {
            "document": case.document.text,
            "question": case.question.text,
            "response": case.text.replace(f"answer={case.answer.split('=')[1]}", "answer=zebra"),
        }
        for case in asked
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path, lines


def test_steps_reduce_the_loss_and_the_folder_answers_as_it_was_taught(examples, tmp_path):
    path, lines = examples
    arguments = ["train", "--model", "tiny", "--data", str(path), "--out", str(tmp_path / "out")]
    arguments += ["--steps", "12", "--batch", "4", "--lr", "3e-3", "--length", "256", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    measured = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    losses = [line["loss"] for line in measured]
    assert [line["step"] for line in measured] == list(range(1, 13))
    assert losses[-1] < losses[0] / 4 and np.isfinite(losses).all()
    llm = LLM.from_pretrained(
        tmp_path / "out", dtype="float32", max_model_len=256, max_num_seqs=1, prefill_chunk=256
    )
    answers = llm.generate(
        [line["document"] for line in lines], [line["question"] for line in lines], max_tokens=32
    )
    assert np.mean([a.answer == "answer=zebra" for a in answers]) >= 0.75
    assert all(a.finish_reason == "stop" for a in answers)


def test_a_folder_that_holds_something_is_not_written_to(examples, tmp_path):
    (tmp_path / "file").write_text("x")
    job = training.Job("tiny", examples[0], tmp_path, Settings(steps=1))
    with pytest.raises(ValueError, match="is not empty; name a new folder"):
        training.run(job)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "batch is 0; it must be at least 1"),
        ({"masked": 1.5}, "masked is 1.5; it is a share"),
        ({"batch": 100}, "has 8 examples, and a batch takes 100"),
        ({"longest": 20}, "line 1: .* more than 20"),
        ({"dtype": "float16"}, "float16, whose range gradients leave; train in bfloat16"),
    ],
)
def test_what_cannot_work_is_refused_before_a_step(examples, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        job = training.Job("tiny", examples[0], tmp_path / "o", Settings(steps=1), **changes)
        training.run(job)
    assert not (tmp_path / "o").exists()


def job(examples, out, **changes):
    settings = Settings(steps=3, rate=3e-3)
    return training.Job(
        "tiny", examples[0], out, settings, **{"batch": 4, "longest": 256, **changes}
    )


def weights(folder):
    model = hf.load(folder, dtype="float32")
    return {path: leaf.get_value() for path, leaf in hf.flat_parameters(model).items()}


class Killed(Exception):
    pass


def test_a_job_that_was_stopped_goes_on_as_if_it_had_not_been(examples, tmp_path):
    whole = training.run(job(examples, tmp_path / "whole"))
    out, seen = tmp_path / "out", []

    def stop(step, measured):
        seen.append(measured)
        if step == 2:
            raise Killed

    with pytest.raises(Killed):
        training.run(job(examples, out, save_every=1), stop)
    other = job(examples, out, masked=0.5)
    with pytest.raises(ValueError, match=r"unfinished training with masked 0.75, and now .* 0.5"):
        training.run(other)
    rest = training.run(job(examples, out))
    assert [*seen[:1], *rest] == whole
    expected = weights(tmp_path / "whole")
    for path, value in weights(out).items():
        np.testing.assert_array_equal(value, expected[path], err_msg=path)
    assert not (out / "training").exists()


def test_nothing_is_left_of_a_job_that_saved_nothing(examples, tmp_path):
    def stop(step, measured):
        raise Killed

    with pytest.raises(Killed):
        training.run(job(examples, tmp_path / "out", save_every=3), stop)
    assert not (tmp_path / "out").exists()


def test_a_loss_that_is_no_number_ends_the_training(examples, tmp_path):
    hot = dataclasses.replace(job(examples, tmp_path / "out"), settings=Settings(9, rate=1e30))
    with pytest.raises(
        FloatingPointError, match=r"step [2-9]: the loss is .*; choose a lower rate"
    ):
        training.run(hot)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "changes",
    [{"steps": 0}, {"rate": 0.0}, {"rate": math.inf}, {"warmup": 2.0}, {"weight_decay": -1.0}],
)
def test_settings_out_of_range_are_named(changes):
    with pytest.raises(ValueError, match=f"{next(iter(changes))} is"):
        Settings(**{"steps": 1} | changes)


def test_a_rate_may_rise_over_all_steps():
    rate = Settings(steps=3, warmup=1.0).optimizer()  # a cosine over no steps is none
    assert rate.init({"w": np.zeros((2, 2), np.float32)})


def test_a_model_in_8_bits_is_refused(tiny_folder):
    model = hf.load(tiny_folder, dtype=np.float32, quantized=True)
    with pytest.raises(ValueError, match="in 8 bits; train the checkpoint"):
        Trainer(model, Settings(steps=1))


def test_what_is_saved_untrained_is_what_was_loaded(tiny_folder, tmp_path):
    model = hf.load(tiny_folder, dtype="bfloat16")
    training.save(Trainer(model, Settings(steps=1)).model(), tiny_folder, tmp_path / "saved")
    again = hf.load(tmp_path / "saved", dtype="bfloat16")
    for path, leaf in hf.flat_parameters(model).items():
        other = hf.flat_parameters(again)[path].get_value()
        np.testing.assert_array_equal(leaf.get_value(), other, err_msg=path)
    assert (tmp_path / "saved" / "tokenizer.json").exists()


def test_the_end_of_a_turn_is_the_templates(tmp_path):
    from da_jax.engine.llm import load_tokenizer

    tokenizer = load_tokenizer(tiny.write_folder(tmp_path / "model"))
    start, end = (tokenizer.convert_tokens_to_ids(f"<|im_{name}|>") for name in ("start", "end"))
    assert training.end_of_turn(tokenizer, frozenset({0, end})) == end
    with pytest.raises(ValueError, match="ends a turn with none of the tokens \\[3\\]"):
        training.end_of_turn(tokenizer, frozenset({3}))
    assert start != end
