"""A run: what it keeps, how it goes on after an interruption, and what it refuses."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support import eval_tasks

from da_jax.checkpoints.tiny import language as lang
from da_jax.engine.request import SamplingParams
from da_jax.evals import folder as folder_module
from da_jax.evals import planning, run
from da_jax.evals.task import Group, Score
from da_jax.protocol.modes import Arm

pytestmark = pytest.mark.long


def test_a_run_keeps_every_response_with_its_account(lab, undisturbed):
    records = lab.records(undisturbed)
    assert len(records) == 2 * 2 * 3 * 3
    for record in records.values():
        assert record.score == 1.0 and record.completion_tokens == len(record.token_ids)
        assert sum(run[1] for run in record.trace) == record.completion_tokens - 1
        assert sum(run[2] for run in record.trace) == record.summary["attended"]["total"]
        assert sum(run[3] for run in record.trace) == record.summary["read"]["total"]
        # What is in the chunks that it read is what was asked: the question names the keys.
        assert record.focused_chunks == record.evidence_chunks != ()
    assert all(records[(*key[:3], "da")].prompt_sha256 == records[key].prompt_sha256
               for key in records)  # fmt: skip


def test_a_model_that_knows_only_declarations_has_one_response_for_two_arms(lab, undisturbed):
    records = lab.records(undisturbed)
    for key, record in records.items():
        if record.arm == "vanilla":
            assert dataclasses.replace(record, arm="unmasked") == records[(*key[:3], "unmasked")]
        assert (record.summary["reduction"] == 0) == (record.arm != "da")


def test_an_interrupted_run_goes_on_to_the_same_records(lab, undisturbed, tmp_path):
    for stop in (1, 7):

        def watch(folder, done, stop=stop):
            if done >= stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            lab.run(tmp_path / "run", watch=watch)
        lab.llm.loop.step()  # tells of what was cancelled
        assert lab.llm.loop.idle
    with (tmp_path / "run" / "records.jsonl").open("a") as file:
        file.write('{"task": "one", "gro')  # a kill in the middle of a line
    selection = lab.selection()
    with lab.folder(tmp_path / "run", selection) as folder:
        assert len(folder.notes) == 1 and "20 bytes" in folder.notes[0]
        assert 7 <= len(folder.prompts) < 36
    assert lab.run(tmp_path / "run") == 0
    assert lab.records(tmp_path / "run") == lab.records(undisturbed)


@pytest.mark.parametrize("block", [1, 7, 2**20])
@pytest.mark.parametrize("text", ["", "a\nbb\n", "a\nbb\nccc", "ccc", "\n"])
def test_what_follows_the_last_newline_is_cut_off(monkeypatch, tmp_path, text, block):
    monkeypatch.setattr(folder_module, "_BLOCK", block)
    (tmp_path / "file").write_text(text)
    kept = text[: text.rfind("\n") + 1]
    assert folder_module._drop_torn_line(tmp_path / "file") == len(text) - len(kept)
    assert (tmp_path / "file").read_text() == kept


def test_a_run_may_grow(lab, undisturbed, tmp_path):
    small = lab.selection(lengths=(200,), n=2, arms=(Arm.DA,))
    assert lab.run(tmp_path, small) == 0
    assert len(lab.records(tmp_path)) == 4
    before = (tmp_path / "records.jsonl").read_bytes()
    assert lab.run(tmp_path) == 0
    assert (tmp_path / "records.jsonl").read_bytes().startswith(before)
    assert lab.records(tmp_path) == lab.records(undisturbed)


def test_sampled_responses_depend_on_the_seed_alone(lab, tmp_path):
    hot = SamplingParams(temperature=2.0)
    texts = []
    for name, seed, arms in (
        ("a", 1, (Arm.DA, Arm.UNMASKED)),
        ("b", 1, (Arm.DA,)),
        ("c", 2, (Arm.DA,)),
    ):
        selection = lab.selection(arms=arms, n=2)
        lab.run(tmp_path / name, selection, sampling=hot, sampling_seed=seed)
        records = lab.records(tmp_path / name)
        texts.append({key: record.text for key, record in records.items() if key[3] == "da"})
    assert texts[0] == texts[1] != texts[2]


class Judged(eval_tasks.Facts):
    """A task whose judge is out of reach at times."""

    down = True

    def score(self, example, answer):
        if self.down and example.index % 2:
            raise ConnectionError("the judge does not answer")
        return Score(super().score(example, answer).value, {"judge": "me"})


def test_a_response_outlives_its_judge(lab, tmp_path):
    task = Judged("one", "one", Group.SINGLE)
    selection = lab.selection(tasks=(task,))
    assert lab.run(tmp_path, selection) == 6  # one of three examples, in three arms, at two lengths
    lines = (tmp_path / "unscored.jsonl").read_text().splitlines()
    assert {json.loads(line)["reason"] for line in lines} == {
        "ConnectionError: the judge does not answer"
    }
    assert len(lab.records(tmp_path)) == 12
    assert lab.run(tmp_path, selection) == 6
    task.down = False
    asked = []
    add, lab.llm.loop.add = lab.llm.loop.add, asked.append
    try:
        assert lab.run(tmp_path, selection) == 0
    finally:
        lab.llm.loop.add = add
    assert not asked and not (tmp_path / "unscored.jsonl").exists()
    records = lab.records(tmp_path)
    assert len(records) == 18
    assert all(r.score == 1 and r.score_details == {"judge": "me"} for r in records.values())


def test_scores_alone_need_no_model(lab, tmp_path):
    task = Judged("one", "one", Group.SINGLE)
    selection = lab.selection(tasks=(task,))
    assert lab.run(tmp_path, selection) == 6
    plan = planning.make(selection, lab.prompts)
    task.down = False
    with lab.folder(tmp_path, selection) as folder:
        assert run.unanswered(plan, folder) == 0
        assert run.evaluate(None, selection, plan, lab.prompts, folder) == 0
        more = planning.make(lab.selection(), lab.prompts)
        with pytest.raises(ValueError, match="18 responses are missing; give a model"):
            run.evaluate(None, lab.selection(), more, lab.prompts, folder)
    assert len(lab.records(tmp_path)) == 18


def test_an_interruption_waits_for_no_judge(lab, tmp_path):
    held = threading.Event()

    class Slow(eval_tasks.Facts):
        def score(self, example, answer):
            if example.index:
                held.wait(300)
            return super().score(example, answer)

    def watch(folder, done):
        if done:
            raise KeyboardInterrupt

    begun = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            lab.run(tmp_path, lab.selection(tasks=(Slow("one", "one", Group.SINGLE),)), watch=watch)
    finally:
        held.set()
    assert time.monotonic() - begun < 200
    lab.llm.loop.step()  # tells of what was cancelled
    assert lab.llm.loop.idle


def test_the_program_ends_while_answers_are_scored():
    code = """
import threading, types
from da_jax.evals import run
started, task = threading.Event(), types.SimpleNamespace()
task.score = lambda example, answer: (started.set(), threading.Event().wait(300))
scorers = run._Scorers()
for _ in range(20):
    scorers.submit(task, None, "")
started.wait()
scorers.close()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


def test_a_fault_in_a_scorer_ends_the_run_and_loses_nothing(lab, tmp_path):
    class Faulty(eval_tasks.Facts):
        def score(self, example, answer):
            return Score(None)

    task = Faulty("one", "one", Group.SINGLE)
    selection = lab.selection(tasks=(task,), lengths=(120,), n=1, arms=(Arm.DA,))
    with pytest.raises(TypeError):
        lab.run(tmp_path, selection)
    assert len((tmp_path / "unscored.jsonl").read_text().splitlines()) == 1
    selection = dataclasses.replace(selection, tasks=(eval_tasks.TASKS["one"],))
    assert lab.run(tmp_path, selection) == 0


def test_what_other_settings_made_is_not_mixed(lab, undisturbed):
    selection = lab.selection(seed=1, max_tokens=32)
    with pytest.raises(ValueError) as caught:
        lab.folder(undisturbed, selection, extra="new").__enter__()
    lines = str(caught.value).splitlines()
    assert "name another folder" in lines[0] and set(lines[1:]) == {
        "  tasks.one: 64 there, 32 now",
        "  tasks.two: 64 there, 32 now",
        "  seed: 0 there, 1 now",
        '  extra: nothing there, "new" now',
    }


def test_a_folder_without_responses_takes_any_settings(lab, undisturbed, tmp_path):
    for seed in (0, 1):
        with lab.folder(tmp_path, lab.selection(seed=seed)):
            pass
    assert json.loads((tmp_path / "settings.json").read_text())["settings"]["seed"] == 1
    (tmp_path / "settings.json").unlink()
    (tmp_path / "records.jsonl").write_bytes((undisturbed / "records.jsonl").read_bytes())
    with pytest.raises(ValueError, match=r"has responses but no settings\.json"):
        lab.folder(tmp_path, lab.selection()).__enter__()


def test_another_prompt_under_the_same_settings_is_refused(lab, undisturbed):
    class Other(eval_tasks.Facts):
        def _example(self, rng, length, index):
            example = super()._example(rng, length, index)
            return dataclasses.replace(example, question=f"{example.question}?")

    tasks = (Other("one", "one", Group.SINGLE), eval_tasks.TASKS["two"])
    with pytest.raises(ValueError, match=r"task one, length 120, example 0, arm da: .* is not"):
        lab.run(undisturbed, lab.selection(tasks=tasks))


def test_a_folder_has_one_writer(lab, tmp_path):
    selection = lab.selection()
    with lab.folder(tmp_path, selection):
        with pytest.raises(ValueError, match=f"process {os.getpid()} writes to"):
            lab.folder(tmp_path, selection).__enter__()
    with lab.folder(tmp_path, selection):
        pass


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda lines: ["{}", *lines], "line 1 is damaged"),
        (lambda lines: [*lines, lines[0]], "two records of"),
    ],
)
def test_a_damaged_folder_is_refused(lab, undisturbed, tmp_path, damage, words):
    for name in ("settings.json", "records.jsonl"):
        (tmp_path / name).write_bytes((undisturbed / name).read_bytes())
    lines = damage((tmp_path / "records.jsonl").read_text().splitlines())
    (tmp_path / "records.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=words):
        lab.folder(tmp_path, lab.selection()).__enter__()


def test_what_does_not_fit_is_refused_before_anything_runs(lab):
    plan = planning.make(lab.selection(max_tokens=40), lab.prompts)
    longest = max(
        len(lab.prompts.render(case.example, Arm.DA))
        for case in planning.cases(lab.selection(), lab.prompts.count)
    )
    assert plan.longest == longest + 40 <= 320
    assert planning.max_model_len(plan, None, 320) == plan.longest
    with pytest.raises(ValueError, match=f"task .*, length 200, .* raise it to {plan.longest}"):
        planning.max_model_len(plan, plan.longest - 1, 320)
    with pytest.raises(ValueError, match=r"declares 50 positions.*lower --lengths or --max-tokens"):
        planning.max_model_len(plan, None, 50)
    with pytest.raises(ValueError, match="task one, length 50: no example is as short"):
        planning.make(lab.selection(lengths=(50,)), lab.prompts)


def test_evidence_is_found_in_own_chunks_and_in_those_that_the_prompt_cuts(lab):
    case = next(planning.cases(lab.selection(), lab.prompts.count))
    example = case.example
    prompt = lab.prompts.render(example, Arm.DA)
    (at,) = (i for i, text in enumerate(prompt.chunk_texts, 1) if example.expected[0] in text)
    assert planning.evidence_chunks(example, prompt) == (at,)
    own = dataclasses.replace(example, document=("ab", "", "cde", "f"), evidence=((2, 3), (5, 6)))
    assert planning.evidence_chunks(own, lab.prompts.render(own, Arm.DA)) == (3, 4)
    touching = dataclasses.replace(own, evidence=((0, 2),))
    assert planning.evidence_chunks(touching, lab.prompts.render(own, Arm.DA)) == (1,)
    both = dataclasses.replace(own, evidence=((1, 3),))
    assert planning.evidence_chunks(both, lab.prompts.render(own, Arm.DA)) == (1, 3)


def test_a_killed_run_goes_on_to_the_same_records(lab, undisturbed, tmp_path):
    out = tmp_path / "run"
    command = [
        sys.executable, "-m", "support.eval_tasks", "eval", "--suite", "facts", "--lengths",
        "120,200", "--n", "3", "--out", str(out), "--max-num-seqs", "4", "--page-size", "16",
        "--prefill-chunk", "256", "--kv-cache-bytes", str(2**24),
    ]  # fmt: skip
    environment = os.environ | {"DA_JAX_PROGRAMS": str(tmp_path / "programs")}
    where = Path(__file__).parents[1]
    first = subprocess.Popen(command, cwd=where, env=environment)
    records = out / "records.jsonl"
    until = time.monotonic() + 300
    while not records.exists() or records.read_bytes().count(b"\n") < 3:
        assert first.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    killed = records.read_bytes()
    assert killed.count(b"\n") < 36
    subprocess.run(command, cwd=where, env=environment, check=True, capture_output=True)
    assert records.read_bytes().startswith(killed[: killed.rfind(b"\n") + 1])
    assert lab.records(out) == lab.records(undisturbed)
    again = subprocess.run(
        [*command, "--seed", "1"], cwd=where, env=environment, capture_output=True, text=True
    )
    assert again.returncode == 1 and "seed: 0 there, 1 now" in again.stderr


def test_the_language_of_the_facts_is_the_checkpoint_s():
    example = next(eval_tasks.TASKS["two"].examples(200, 1, 0, len))
    assert len(example.expected) == 2 and set(example.expected) <= set(lang.VALUES)
