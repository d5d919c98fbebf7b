"""The proof of the mask: it passes on engines that are right, and each fault fails its check."""

import dataclasses
import json
import re
import sys

import jax
import numpy as np
import pytest

from da_jax.cli import main as cli
from da_jax.cli import verify as command
from da_jax.engine.sequence import Sequence
from da_jax.evals import poison, script, verify
from da_jax.evals.verify import Status, failed
from da_jax.protocol.modes import Mode
from da_jax.protocol.trace import Trace

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def llm(lab):
    return lab.llm


def run(llm):
    return {check.name: check for check in verify.verify(llm, "float32")}


def faults(llm):
    return failed(list(run(llm).values()))


def test_the_shipped_checkpoint_passes_with_figures_that_fit_together(llm):
    checks = run(llm)
    assert list(checks) == ["likelihood", "poison", "pages", "programs"]
    assert not failed(list(checks.values()))
    likelihood, poisoned, pages = (checks[n].figures for n in ("likelihood", "poison", "pages"))
    assert likelihood["v_is_d"] and likelihood["v"] == pytest.approx(likelihood["d"])
    assert likelihood["m"] - likelihood["d"] > 0.1  # it reads, so it misses what is hidden
    assert likelihood["narrow_tokens"] > 30 and min(likelihood["shares"]) > 0.9
    assert pages["operation"] == pages["account"] == pages["protocol"] < pages["everything"]
    assert poisoned["hidden_tokens"] > 1000 and poisoned["noticed_when_visible"] == 2


def test_the_random_model_passes_and_keeps_its_caches(random_llm):
    document, _ = script.write(random_llm)
    ask = lambda: random_llm.score(document.chunks, document.question, "<local>abc")
    before = ask()
    checks = run(random_llm)
    assert not failed(list(checks.values()))
    assert not checks["likelihood"].figures["v_is_d"]
    np.testing.assert_array_equal(ask(), before)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(random_llm.engine.runner.caches))


@pytest.mark.parametrize("name", ["gemma4_e2b", "qwen3_5"])
def test_sliding_and_recurrent_models_pass(family_llm, name):
    llm, _ = family_llm(name)
    assert not faults(llm)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_pages_of_8_bits_pass_and_their_poison_is_noticed(tiny_folder, random_llm, kv_dtype):
    config = dataclasses.replace(random_llm.engine.config, kv_dtype=kv_dtype, max_num_seqs=2)
    llm = type(random_llm).from_pretrained(
        tiny_folder, style=random_llm.renderer.style, config=config
    )
    checks = run(llm)
    assert not failed(list(checks.values()))
    assert checks["poison"].words.startswith("a huge number")


def test_a_mask_that_does_nothing_fails(llm, monkeypatch):
    build = Sequence._build_view
    monkeypatch.setattr(Sequence, "_build_view", lambda self, *_: build(self, Mode.GLOBAL, ()))
    checks = run(llm)
    assert failed(list(checks.values())) == ["likelihood", "poison", "pages"]
    assert set(checks["likelihood"].figures["shares"]) == {0}


def test_a_mask_that_hides_a_page_too_many_fails(llm, monkeypatch):
    build = Sequence._build_view

    def short(self, mode, focus):
        view = build(self, mode, focus)
        if mode is not Mode.FOCUS:
            return view
        keep = np.arange(len(view.span)) != 1
        pad = lambda x: np.append(x[keep], np.int32(0))
        return dataclasses.replace(
            view, span=pad(view.span), block=pad(view.block), count=view.count - 1,
            first=view.first[np.arange(view.count) != 1],
        )  # fmt: skip

    monkeypatch.setattr(Sequence, "_build_view", short)
    checks = run(llm)
    assert failed(list(checks.values())) == ["pages"]
    wrong = checks["pages"].figures["wrong"]
    assert wrong["operation"] == wrong["account"] == wrong["mask"] != []


def test_a_mask_that_shows_another_chunk_fails(llm, monkeypatch):
    build = Sequence._build_view
    other = {(2,): (3,), (1, 3, 4): (1, 2, 4), (): ()}
    monkeypatch.setattr(
        Sequence, "_build_view", lambda self, mode, focus: build(self, mode, other[focus])
    )
    assert faults(llm) == ["poison", "pages"]


def test_a_declaration_that_acts_a_token_late_fails(llm, monkeypatch):
    view = Sequence.view
    last = {}

    def late(self):
        now = view(self)
        before, length = last.get(self.request_id, (now, self.length))
        if length != self.length:
            before = last.setdefault(("old", self.request_id), now)
            last["old", self.request_id] = now
        last[self.request_id] = now, self.length
        return before

    monkeypatch.setattr(Sequence, "view", late)
    assert {"poison", "pages"} & set(faults(llm))


def test_an_operation_that_heeds_pages_but_not_slots_fails(llm, monkeypatch):
    runner, page = llm.engine.runner, llm.engine.config.page_size
    decode = runner.decode

    def whole_pages(rows, what):
        used = np.arange(rows.mask.span.shape[1]) < rows.mask.count[:, None]
        span = np.where(used, np.int32(page << 16), rows.mask.span)
        return decode(rows._replace(mask=rows.mask._replace(span=span)), what)

    monkeypatch.setattr(runner, "decode", whole_pages)
    assert faults(llm) == ["poison"]


def test_an_operation_that_visits_a_page_more_than_is_accounted_fails(llm, monkeypatch):
    runner = llm.engine.runner
    decode = runner.decode

    def more(rows, what):
        choice = jax.device_get(decode(rows, what))
        return choice._replace(entries=choice.entries + 1)

    monkeypatch.setattr(runner, "decode", more)
    checks = run(llm)
    assert failed(list(checks.values())) == ["pages"]
    wrong = checks["pages"].figures["wrong"]
    assert len(wrong["operation"]) == checks["pages"].figures["steps"]
    assert not wrong["account"] and not wrong["mask"]


def test_an_account_that_is_a_page_short_fails(llm, monkeypatch):
    record, page = Trace.record, llm.engine.config.page_size
    monkeypatch.setattr(
        Trace,
        "record",
        lambda self, mode, attended, read: record(self, mode, attended, read - page),
    )
    checks = run(llm)
    assert failed(list(checks.values())) == ["pages"]
    wrong = checks["pages"].figures["wrong"]
    assert wrong["account"] and not wrong["operation"] and not wrong["mask"]
    assert re.search(r"account wrong at \d+ steps, first 1$", checks["pages"].words)


def test_something_that_compiles_for_a_new_length_fails(llm, monkeypatch):
    runner = llm.engine.runner
    decode, double = runner.decode, jax.jit(lambda x: x * 2.5)

    def anew(rows, what):
        double(np.ones(1 + int(what.position.max()) // 100, np.float32))
        return decode(rows, what)

    monkeypatch.setattr(runner, "decode", anew)
    checks = run(llm)
    assert failed(list(checks.values())) == ["programs"]
    assert checks["programs"].figures["compiled"] > 1


def test_poison_that_is_not_there_fails(llm, monkeypatch):
    nothing = (lambda pages, *_: pages), (lambda pages, *_: pages)
    monkeypatch.setattr(poison, "_programs", lambda pages: nothing)
    checks = run(llm)
    assert failed(list(checks.values())) == ["poison"]
    assert checks["poison"].figures["noticed_when_visible"] == 0


def test_what_cannot_run_is_no_pass(llm, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    checks = run(llm)
    assert checks["poison"].status is Status.NOT_RUN
    assert failed(list(checks.values())) == ["poison"]
    assert "NOT RUN: 2 processes" in checks["poison"].words


def test_the_script_knows_its_modes_as_the_scanner_reads_them(llm):
    document, response = script.write(llm)
    found = llm.generate(
        document.chunks, document.question, forced=response.ids, max_tokens=len(response.ids)
    )
    assert [step.mode for step in found.steps] == [mode for mode, _ in response.states[:-1]]
    assert found.summary["focus"] == {"attempts": 2, "successes": 2, "declines": 0}
    assert [response.chosen_under[block[0]][0] for block in response.blocks] == [
        Mode.FOCUS, Mode.LOCAL, Mode.FOCUS,
    ]  # fmt: skip


@pytest.fixture
def da_jax(llm, monkeypatch, capsys):
    """Runs the command on the engine of the other tests."""
    monkeypatch.setattr(command.LLM, "from_pretrained", lambda folder, **options: llm)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["da-jax", "verify", *map(str, arguments)])
        with pytest.raises(SystemExit) as done:
            cli.main()
            sys.exit(0)
        out = capsys.readouterr()
        return done.value.code or 0, out.out, out.err

    return call


def test_the_command_prints_the_checks_and_a_verdict(da_jax):
    code, out, err = da_jax()
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [line.split()[:2] for line in lines[1:5]] == [
        ["PASS", f"{name}:"] for name in ("likelihood", "poison", "pages", "programs")
    ]
    assert lines[-1] == "all checks passed"


def test_a_failure_is_exit_status_1_also_with_json(da_jax, monkeypatch):
    monkeypatch.setattr(verify, "MOST", 1.0)
    code, out, _ = da_jax("--json")
    result = json.loads(out)
    assert code == 1 and result["passed"] is False
    assert [check["status"] for check in result["checks"]] == ["fail", "pass", "pass", "pass"]
    code, out, _ = da_jax()
    assert code == 1 and out.splitlines()[-1] == "failed or not run: likelihood"


def test_a_model_without_full_attention_is_refused_before_it_is_loaded(da_jax, monkeypatch):
    read = command.hf_config.read

    def sliding_only(folder):
        config = read(folder)
        layers = tuple(
            dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, window=8))
            for layer in config.layers
        )
        return dataclasses.replace(config, layers=layers)

    monkeypatch.setattr(command.hf_config, "read", sliding_only)
    monkeypatch.setattr(command.LLM, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    code, out, err = da_jax()
    assert code == 1 and out == "" and "has no full-attention layer, only sliding ones" in err
