"""`da-jax eval` and `da-jax report`, in this process and on the engine of the other tests."""

import dataclasses
import importlib.util
import json
import sys

import pytest
from support import eval_tasks

from da_jax.cli import eval as command
from da_jax.cli import main as cli
from da_jax.evals import suites
from da_jax.evals.report import plots

pytestmark = pytest.mark.long


@pytest.fixture
def da_jax(lab, monkeypatch, capsys):
    """Runs a command; returns (exit code, standard output, standard error)."""
    monkeypatch.setitem(suites._SUITES, "facts", ("support.eval_tasks", "TASKS"))
    loaded = []

    def load(folder, **options):
        loaded.append(options["config"])
        return lab.llm

    monkeypatch.setattr(command.LLM, "from_pretrained", load)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["da-jax", *map(str, arguments)])
        with pytest.raises(SystemExit) as done:
            cli.main()
            sys.exit(0)
        out = capsys.readouterr()
        return done.value.code or 0, out.out, out.err

    call.loaded = loaded
    return call


FACTS = ("eval", "--suite", "facts", "--lengths", "120,200", "--n", "2")


def test_a_run_ends_with_a_report_and_a_finished_one_loads_nothing(da_jax, lab, tmp_path):
    code, out, err = da_jax(*FACTS, "--out", tmp_path, "--arms", "da,vanilla")
    assert (code, err) == (0, "")
    assert out.splitlines()[0].split() == [
        "arm", "accuracy", "less", "vanilla", "attended", "of", "vanilla", "steps",
    ]  # fmt: skip
    assert "vanilla" in out and "100.0 [" in out and "report.html" in out
    records = lab.records(tmp_path)
    assert len(records) == 2 * 2 * 2 * 2
    (config,) = da_jax.loaded
    assert config.max_model_len == max(r.prompt_tokens for r in records.values()) + 64
    assert config.max_waiting == 2 * config.max_num_seqs
    settings = json.loads((tmp_path / "settings.json").read_text())["settings"]
    assert {"checkpoint", "tokenizer", "engine", "sampling", "tasks", "style"} <= settings.keys()
    code, out, _ = da_jax(*FACTS, "--out", tmp_path, "--arms", "da,vanilla", "--json")
    assert code == 0 and len(da_jax.loaded) == 1
    macro = json.loads(out)["models"][0]["all"]["macro"]
    assert macro["arms"]["da"]["n"] == 8 and macro["compared"]["da/vanilla"]["attended"] < 1
    code, out, _ = da_jax("report", tmp_path, "--no-html")
    assert code == 0 and "report.html" not in out and not (tmp_path / "report.html").exists()
    code, out, _ = da_jax(*FACTS, "--out", tmp_path)
    assert code == 0 and len(lab.records(tmp_path)) == 24 and len(da_jax.loaded) == 2
    code, _, err = da_jax(*FACTS, "--out", tmp_path, "--temperature", "1", "--page-size", "32")
    assert code == 1 and "engine.page_size: 64 there, 32 now" in err
    assert "sampling.temperature: 0.0 there, 1.0 now" in err


def test_an_interruption_says_how_to_go_on(da_jax, monkeypatch, tmp_path):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(command.run, "evaluate", stop)
    code, out, err = da_jax(*FACTS, "--out", tmp_path)
    assert code == 130 and out == ""
    assert f"interrupted; 0 of 24 responses are in {tmp_path}. The same command goes on" in err


def test_unscored_responses_are_told_and_fail_the_command(da_jax, monkeypatch, tmp_path):
    def score(self, example, answer):
        if example.index:
            raise ConnectionError("no judge")
        return score_of(self, example, answer)

    score_of = eval_tasks.Facts.score
    monkeypatch.setattr(eval_tasks.Facts, "score", score)
    code, out, err = da_jax(*FACTS, "--out", tmp_path)
    assert code == 1 and "12 of 24 responses could not be scored" in err
    assert "The last reason: ConnectionError: no judge" in err
    assert "vanilla" in out
    assert "12 responses wait for a score" in (tmp_path / "report.md").read_text()
    monkeypatch.setattr(eval_tasks.Facts, "score", score_of)
    assert da_jax(*FACTS, "--out", tmp_path)[0] == 0
    assert len(da_jax.loaded) == 1  # what lacks a score alone needs no model


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--suite", "fact"), "unknown suite or task 'fact'; did you mean 'facts'"),
        (("--suite", "facts", "--lengths", "4k"), "--lengths is '4k'; give whole numbers"),
        (("--suite", "facts", "--arms", "da,masked"), "arm is 'masked'"),
        (("--suite", "facts", "--n", "0"), "n is 0; it must be at least 1"),
        (("--suite", "facts", "--max-tokens", "-1"), "max_tokens is -1"),
        (("--suite", "facts", "--lengths", "20"), "task one, length 20: no example is as short"),
        (("--suite", "facts", "--max-model-len", "300", "--lengths", "300"), "raise it to"),
        (("--suite", "facts", "--lengths", "2000", "--max-tokens", "9000"), "declares 8192"),
        (("--suite", "facts", "--model", "no-such"), "no folder"),
        (("--suite", "facts", "--style", "fancy"), "style 'fancy'"),
        (("--suite", "facts", "--judge-max-tokens", "1.5"), "--judge-max-tokens is 1.5; give a"),
        (("--suite", "facts", "--judge-temperature", "cold"), "'cold'; give a number, or none"),
        (("--suite", "lm_eval:ruler", "--temperature", "1"), "--temperature: tasks of lm-eval"),
        (
            ("--suite", "lm_eval:ruler", "--judge", "m", "--data", "d", "--accept", "longbench"),
            "--data, --accept, --judge: tasks of lm-evaluation-harness",
        ),
        (("--suite", "lm_eval:ruler", "--allow-download"), "--allow-download: tasks of lm-eval"),
        (("--suite", "lm_eval:a", "--arms", "vanilla, fast"), "unknown arms ['fast']: choose"),
        (("--suite", "lm_eval:a", "--max-tokens", "0"), "max_tokens is 0; it must be at least 1"),
        (("--suite", "lm_eval:ruler_vt", "--lengths", "512"), "length 512 is too short for ruler"),
        (("--suite", "lm_eval:ruler,facts"), "name it alone"),
    ],
)
def test_bad_arguments_are_refused_before_a_model_is_loaded(da_jax, tmp_path, arguments, words):
    code, out, err = da_jax("eval", "--n", "1", "--out", tmp_path / "run", *arguments)
    assert code == 1 and out == "" and not da_jax.loaded
    assert words in err and "Traceback" not in err
    assert not (tmp_path / "run" / "records.jsonl").exists() or not (
        (tmp_path / "run" / "records.jsonl").read_bytes()
    )


def test_without_matplotlib_nothing_begins(da_jax, monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        plots.importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    code, _, err = da_jax(*FACTS, "--out", tmp_path / "run")
    assert code == 1 and "pip install 'da-jax[eval]'" in err and not (tmp_path / "run").exists()
    assert da_jax(*FACTS, "--out", tmp_path / "run", "--no-html", "--arms", "da")[0] == 0


def test_a_report_of_several_runs_needs_a_place(da_jax, undisturbed, tmp_path):
    code, _, err = da_jax("report", undisturbed, tmp_path)
    assert code == 1 and "--out is missing" in err
    code, _, err = da_jax("report", tmp_path)
    assert code == 1 and "has no settings.json" in err


def test_another_judge_is_another_setting(da_jax, tmp_path):
    judged = (*FACTS, "--arms", "da", "--out", tmp_path, "--judge-url", "http://localhost:1/v1")
    assert da_jax(*judged, "--judge", "one")[0] == 0
    assert (
        json.loads((tmp_path / "settings.json").read_text())["settings"]["judge"]["model"] == "one"
    )
    code, _, err = da_jax(*judged, "--judge", "two", "--judge-max-tokens", "none")
    assert code == 1 and 'judge.model: "one" there, "two" now' in err
    assert "judge.max_tokens: 1024 there, null now" in err


def test_another_device_or_jax_is_not_mixed_in(da_jax, undisturbed, monkeypatch, tmp_path):
    assert da_jax(*FACTS, "--arms", "da", "--out", tmp_path)[0] == 0
    here = command.current_target()
    monkeypatch.setattr(command, "current_target", lambda: dataclasses.replace(here, kind="TPU v9"))
    monkeypatch.setattr(command.jax, "__version__", "0.99")
    code, _, err = da_jax(*FACTS, "--arms", "da,vanilla", "--out", tmp_path)
    assert code == 1 and 'device: "cpu" there, "TPU v9" now' in err
    assert '"0.99" now' in err and "go on with the settings, device and versions that are" in err


def test_where_the_examples_come_from_is_kept(da_jax, tmp_path):
    assert da_jax(*FACTS, "--arms", "da", "--out", tmp_path)[0] == 0
    about = json.loads((tmp_path / "settings.json").read_text())["about"]
    assert about["sources"]["one"] == {
        "description": "looks facts up", "origin": "generated", "licence": "Apache-2.0",
    }  # fmt: skip


def test_tasks_of_the_harness_say_which_model_answered(da_jax, monkeypatch, tmp_path):
    pytest.importorskip("lm_eval", reason="needs the extra eval")
    from da_jax.evals import harness

    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"context": "Kamora=apple\nBelune=silver", "value": "apple"}) + "\n")
    mine = {
        "task": "mine",
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(rows)}, "cache_dir": str(tmp_path / "cache"),
        },
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{context}}\n\nQuestion: what is Kamora=?",
        "doc_to_target": "{{value}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip
    evaluate = harness.evaluate
    monkeypatch.setattr(  # a configuration, as reading those of all tasks takes seconds
        harness, "evaluate", lambda llm, tasks, **options: evaluate(llm, [mine], **options)
    )
    code, out, err = da_jax(
        "eval", "--suite", "lm_eval:mine", "--arms", "vanilla, da", "--max-tokens", "5",
        "--n", "1", "--out", tmp_path / "run",
    )  # fmt: skip
    assert code == 0, err
    assert "less vanilla" in out and "exact_match" in out
    report = json.loads((tmp_path / "run" / "lm_eval.json").read_text())
    assert list(report["arms"]) == ["vanilla", "da"]
    assert report["settings"]["max_tokens"] == 5
    for arm in report["arms"].values():
        assert arm["cost"]["mine"]["completion_tokens"] <= 5 and arm["model"]["lowered"] == 1
    found = report["model"]
    assert found["model"] == "tiny" and found["checkpoint"].keys() == {"config", "weights"}
    assert len(found["tokenizer"]) == 64 and found["dtype"] == "float32" and found["device"]
