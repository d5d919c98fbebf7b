"""The proof of the mask: it passes on engines that are right, and each fault fails its check."""

import dataclasses
import functools
import json
import re
import sys

import jax
import numpy as np
import pytest
from support import devices, tiny

from da_jax import LLM, Style
from da_jax.cli import main as cli
from da_jax.cli import verify as command
from da_jax.engine import compilations
from da_jax.engine.sequence import Sequence
from da_jax.evals import poison, probes, script, verify
from da_jax.evals.oracle import Oracle
from da_jax.evals.verify import Status, failed
from da_jax.protocol.modes import Mode
from da_jax.protocol.trace import Trace

pytestmark = pytest.mark.long

NAMES = ["likelihood", "oracle", "poison", "probes", "pages", "programs"]


@pytest.fixture(scope="module")
def llm(lab):
    return lab.llm


@pytest.fixture(autouse=True)
def oracle_once(monkeypatch, known={}):  # noqa: B006
    """No fault changes what the oracle says, so each of its passes is made once."""
    compute = Oracle.logprobs

    def logprobs(self, ids, visible, which, response):
        key = self._runner, self._exact, ids.tobytes(), which.tobytes()
        if key not in known:
            known[key] = compute(self, ids, visible, which, response)
        return known[key]

    monkeypatch.setattr(Oracle, "logprobs", logprobs)


def run(llm):
    checks = verify.verify(llm, llm.engine.runner.plan.dtype)
    return {check.name: check for check in checks}


def faults(llm):
    return failed(list(run(llm).values()))


def test_the_shipped_checkpoint_passes_with_figures_that_fit_together(llm):
    checks = run(llm)
    assert list(checks) == NAMES
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
    made = compilations.made_here()
    poison.cleanse(random_llm.engine)
    assert compilations.made_here() == made  # one program for all layers, made once
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(random_llm.engine.runner.caches))


@pytest.mark.parametrize("name", ["gemma4_e2b", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def test_sliding_and_recurrent_models_pass(family_llm, name):
    llm, _ = family_llm(name)
    assert not faults(llm)


def test_a_mask_that_does_nothing_fails(llm, monkeypatch):
    build = Sequence._build_view
    monkeypatch.setattr(Sequence, "_build_view", lambda self, *_: build(self, Mode.GLOBAL, ()))
    checks = run(llm)
    assert failed(list(checks.values())) == ["likelihood", "oracle", "poison", "pages"]
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
    assert failed(list(checks.values())) == ["oracle", "probes", "pages"]
    wrong = checks["pages"].figures["wrong"]
    assert wrong["operation"] == wrong["account"] == wrong["mask"] != []


def test_a_mask_that_shows_another_chunk_fails(llm, monkeypatch):
    build = Sequence._build_view
    other = {(2,): (3,), (1, 3, 4): (1, 2, 4), (): ()}
    monkeypatch.setattr(
        Sequence, "_build_view", lambda self, mode, focus: build(self, mode, other[focus])
    )
    assert faults(llm) == ["oracle", "poison", "probes", "pages"]


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
    assert faults(llm) == ["oracle", "poison"]


def cut(entries):
    """Of every page but the first and the last two, its first slot alone."""
    page, span, block = entries
    span[1:-2] = (span[1:-2] & 0xFFFF) | ((span[1:-2] & 0xFFFF) + 1 << 16)
    return page, span, block


def without_one(entries):
    """Without a page in the middle, which is of a chunk."""
    return [np.delete(x, len(x) // 2) for x in entries]


def with_one_more(entries, table, size):
    """With the last page that is not there, all of it."""
    hidden = np.setdiff1d(np.arange(entries[2].max()), entries[2])
    if not len(hidden):
        return entries
    at = np.searchsorted(entries[2], hidden[-1])
    new = table[hidden[-1]], size << 16, hidden[-1]
    return [np.insert(x, at, value) for x, value in zip(entries, new)]


def change_masks(llm, monkeypatch, program, change):
    """Makes a program heed another mask than it is given."""
    runner, size = llm.engine.runner, llm.engine.config.page_size
    run_program, where = getattr(runner, program), {"decode": 0, "prefill": 2}[program]

    def changed(*inputs, **options):
        rows = inputs[where]
        mask = rows.mask._replace(**{name: x.copy() for name, x in rows.mask._asdict().items()})
        for row in np.flatnonzero(mask.count > 4):
            fields = [x[row] for x in (mask.page, mask.span, mask.block)]
            extra = (rows.block_table[row], size) if change is with_one_more else ()
            new = change([x[: mask.count[row]].copy() for x in fields], *extra)
            mask.count[row] = len(new[0])
            for field, values in zip(fields, new):
                field[: len(values)] = values
        inputs = [*inputs[:where], rows._replace(mask=mask), *inputs[where + 1 :]]
        return run_program(*inputs, **options)

    monkeypatch.setattr(runner, program, changed)


TOO_LITTLE = [
    (program, change) for program in ("decode", "prefill") for change in (cut, without_one)
]


@pytest.mark.parametrize("program, change", TOO_LITTLE)
def test_an_operation_that_sees_too_little_fails(llm, monkeypatch, program, change):
    change_masks(llm, monkeypatch, program, change)
    checks = run(llm)
    assert {"oracle", "probes"} <= set(failed(list(checks.values())))
    missed = checks["probes"].figures["missed"]
    assert {probe["program"] for probe in missed} == {program}


def test_an_operation_that_reads_one_more_page_fails(llm, monkeypatch):
    change_masks(llm, monkeypatch, "decode", with_one_more)
    checks = run(llm)
    assert failed(list(checks.values())) == ["oracle", "poison", "pages"]
    assert checks["pages"].figures["wrong"]["operation"]
    assert not checks["pages"].figures["wrong"]["mask"]


@pytest.fixture(scope="module")
def narrow_llm(tmp_path_factory):
    """An engine that rounds, by the name of its reference case, its dtype and that of its pages."""

    @functools.cache
    def load(name, dtype, kv_dtype):
        folder = tiny.write_folder(tmp_path_factory.mktemp(name) / "model", name)
        config = dataclasses.replace(tiny.ENGINE, dtype=dtype, kv_dtype=kv_dtype)
        return LLM.from_pretrained(folder, style=Style(**tiny.STYLE), config=config)

    return load


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "name, dtype, kv_dtype",
    [
        # Most of its layers are recurrent: hiding moves its likelihoods by less than rounding.
        ("qwen3_5", "bfloat16", "auto"),
        slow("gemma4_e2b", "bfloat16", "auto"),
        slow("qwen3", "bfloat16", "auto"),
        slow("qwen3", "float16", "auto"),
        slow("qwen3_moe", "bfloat16", "auto"),
        slow("qwen3", "float32", "int8"),
        slow("qwen3", "bfloat16", "int8"),
        slow("qwen3", "bfloat16", "fp8"),
        slow("gemma4_e2b", "bfloat16", "int8"),
    ],
)
def test_models_that_round_pass_and_their_faults_fail(
    narrow_llm, monkeypatch, name, dtype, kv_dtype
):
    llm = narrow_llm(name, dtype, kv_dtype)
    checks = run(llm)
    assert not failed(list(checks.values()))
    assert checks["poison"].words.startswith("NaN" if kv_dtype == "auto" else "a huge number")
    few = TOO_LITTLE[1:3]  # one of each
    for program, change in few if (name, dtype) == ("qwen3_5", "bfloat16") else TOO_LITTLE:
        with monkeypatch.context() as patch:
            change_masks(llm, patch, program, change)
            assert "probes" in faults(llm)
    change_masks(llm, monkeypatch, "decode", with_one_more)
    assert "poison" in faults(llm)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "gemma4_e2b"])
def test_models_that_two_devices_share_pass(name):
    child = devices.start(f"verify:{name}:2", devices=2)
    (found,) = devices.results(child)
    assert found["failed"] == []
    assert found["oracle"]["m"]["largest"] < 1e-4


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


def test_steps_that_are_not_in_the_account_fail(llm, monkeypatch):
    answer = verify._Proof.answer

    def short(self, request):
        response = answer(self, request)
        return dataclasses.replace(response, steps=response.steps[:-1])

    monkeypatch.setattr(verify._Proof, "answer", short)
    checks = run(llm)
    assert failed(list(checks.values())) == ["pages"]
    words, made = checks["pages"].words, checks["pages"].figures["made"]
    assert words.startswith(f"{made - 1} steps")
    assert words.endswith(f"; the operation made {made} steps, and the response takes {made}")


def test_requests_that_never_end_fail(llm, monkeypatch):
    monkeypatch.setattr(verify, "_answer_batches", lambda proof: 2)
    checks = run(llm)
    assert failed(list(checks.values())) == ["programs"]
    assert checks["programs"].words.endswith("; 2 requests never ended")


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
    monkeypatch.setattr(poison, "in_place", lambda *_: lambda pages, *_: pages)
    monkeypatch.setattr(probes, "in_place", lambda *_: lambda pages, *_: pages)
    checks = run(llm)
    assert failed(list(checks.values())) == ["poison", "probes"]
    assert checks["poison"].figures["noticed_when_visible"] == 0


def test_what_cannot_run_is_no_pass(llm, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    checks = run(llm)
    alone = ["oracle", "poison", "probes"]
    assert failed(list(checks.values())) == alone
    assert {checks[name].status for name in alone} == {Status.NOT_RUN}
    assert "NOT RUN: 2 processes" in checks["poison"].words


def test_a_device_without_room_for_a_dense_pass_is_no_pass(llm, monkeypatch):
    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(Oracle, "logprobs", full)
    checks = run(llm)
    assert failed(list(checks.values())) == ["oracle"]
    assert checks["oracle"].status is Status.NOT_RUN
    assert "--tensor-parallel" in checks["oracle"].words


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
    assert [line.split()[:2] for line in lines[1:7]] == [["PASS", f"{name}:"] for name in NAMES]
    assert lines[-1] == "all checks passed"


def test_a_failure_is_exit_status_1_also_with_json(da_jax, monkeypatch):
    monkeypatch.setattr(verify, "MOST", 1.0)
    code, out, _ = da_jax("--json")
    result = json.loads(out)
    assert code == 1 and result["passed"] is False
    assert [check["status"] for check in result["checks"]] == ["fail", *["pass"] * 5]
    code, out, _ = da_jax()
    assert code == 1 and out.splitlines()[-1] == "failed or not run: likelihood"


def test_sequences_that_are_too_short_are_refused_with_the_options_that_help(
    da_jax, llm, monkeypatch
):
    monkeypatch.setattr(llm.engine, "max_len", 100)
    code, out, err = da_jax()
    assert code == 1 and out == ""
    assert re.search(r"sequences of \d+ tokens with pages of 16, but max_model_len is 100", err)
    assert "--max-model-len" in err and "--page-size" in err and "document" not in err


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
