"""The commands, in this process: what they print and how they refuse."""

import json
import sys

import numpy as np
import pytest

from da_jax.cli import main as cli

pytestmark = pytest.mark.long

SMALL = ["--page-size", "16", "--prefill-chunk", "512", "--max-model-len", "2048"]


def call(monkeypatch, capsys, *arguments):
    """(exit code, standard output, standard error) of `da-jax arguments`."""
    monkeypatch.setattr(sys, "argv", ["da-jax", *arguments])
    with pytest.raises(SystemExit) as done:
        cli.main()
        sys.exit(0)
    out = capsys.readouterr()
    return done.value.code or 0, out.out, out.err


@pytest.fixture
def da_jax(monkeypatch, capsys):
    return lambda *arguments: call(monkeypatch, capsys, *arguments)


def test_generate_without_arguments_answers_the_shipped_example(da_jax, tmp_path):
    from da_jax.cli.generate import EXAMPLE

    code, out, _ = da_jax("generate", "--json", "--trace", str(tmp_path / "trace.json"), *SMALL)
    result = json.loads(out)
    assert code == 0
    assert list(result) == [
        "text", "answer", "finish_reason", "prompt_tokens", "completion_tokens",
        "attended_tokens", "attended_tokens_vanilla", "reduction", "modes", "focus",
        "compilations_after_warmup",
    ]  # fmt: skip
    assert result["answer"] == json.loads(EXAMPLE.read_text())["answer"]
    assert result["finish_reason"] == "stop" and result["compilations_after_warmup"] == 0
    assert result["focus"] == {"attempts": 1, "successes": 1, "declines": {}}
    assert 0 < result["attended_tokens"] < result["attended_tokens_vanilla"]
    modes = result["modes"]
    assert sum(m["attended_tokens"] for m in modes.values()) == result["attended_tokens"]
    assert sum(m["tokens"] for m in modes.values()) == result["completion_tokens"]
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert sum(s["attended"] for s in trace["steps"]) == result["attended_tokens"]
    assert len(trace["steps"]) == result["completion_tokens"] - 1


def test_generate_shows_what_the_caller_declares(da_jax, tmp_path):
    trace = tmp_path / "trace.json"
    common = ("generate", "--json", "--max-tokens", "4", "--trace", str(trace), *SMALL)
    hidden = []
    for visible in ("none", "1, 3"):
        assert da_jax(*common, "--visible", visible)[0] == 0
        steps = json.loads(trace.read_text())["steps"]
        hidden.append({step["vanilla"] - step["attended"] for step in steps})
    (none,), (two,) = hidden
    assert none > two > 0
    result = json.loads(da_jax(*common, "--initial", "focus:1")[1])
    assert result["modes"]["focus"]["tokens"] == 1  # then it writes <global>
    code, _, err = da_jax(*common, "--visible", "999")
    assert code == 1 and "visible names 999, but the prompt has chunks 1 to" in err


def test_generate_prints_text_and_a_table_for_people(da_jax):
    code, out, _ = da_jax("generate", *SMALL)
    assert code == 0
    assert "<focus magic_chunks=" in out and "everything visible" in out
    assert "focus 1 of 1 honoured" in out


def test_generate_reads_standard_input_and_its_arm_is_accounted(da_jax, monkeypatch, tmp_path):
    path = tmp_path / "document.txt"
    path.write_text("some text\n")
    with path.open() as handle:
        monkeypatch.setattr(sys, "stdin", handle)
        code, out, _ = da_jax(
            "generate", "--document", "-", "--question", "what?", "--arm", "unmasked",
            "--max-tokens", "5", "--json", *SMALL,
        )  # fmt: skip
    result = json.loads(out)
    assert code == 0 and result["reduction"] == 0 and result["completion_tokens"] <= 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "--question", "why?"], "--question needs a --document"),
        (["generate", "--document", "x.txt"], "--document needs a --question"),
        (["generate", "--document", "no.txt", "--question", "why?"], "no.txt"),
        (["generate", "--model", "no-such-folder"], "no folder"),
        (["generate", "--revision", "v1"], "revision 'v1' is for hub ids, and 'tiny' is a folder"),
        (["generate", "--max-tokens", "0"], "max_tokens is 0"),
        (["generate", "--arm", "masked"], "masked"),
        (["generate", "--visible", "3-5"], "--visible is '3-5'; give chunk numbers of up to"),
        (["generate", "--initial", "focus"], "the initial mode is 'focus'; use 'global', 'local'"),
        (["generate", "--attention", "cuda"], "unknown attention backend"),
        (["generate", "--per-layer-embeddings", "disk"], "must be one of auto, device, host"),
        (["generate", "--per-layer-embeddings", "host"], "but this qwen3 has none; use 'auto'"),
        (["convert", "no-such-folder", "out"], "no folder"),
        (["bench", "aot", "--batch", "8"], "--batch: kernels have no such option; name a --model"),
        (["bench", "aot", "--kv-dtype", "int8", "--weights", "int8"], "--weights, --kv-dtype: k"),
        (["bench", "aot", "--tensor-parallel", "2", "--context", "9"], "--context, --tensor-p"),
        (["bench", "aot", "--model", "tiny", "--full", "--backend", "xla"], "--backend, --full: "),
        (["bench", "aot", "--model", "tiny", "--weights", "bf16"], "it must be auto or int8"),
    ],
)
def test_bad_arguments_are_one_line_that_names_them(da_jax, arguments, words):
    code, out, err = da_jax(*arguments)
    assert code == 1 and out == ""
    assert words in err and "Traceback" not in err


def test_a_binary_document_is_refused(da_jax, tmp_path):
    (tmp_path / "image").write_bytes(b"\xff\xd8\xff")
    code, _, err = da_jax("generate", "--document", str(tmp_path / "image"), "--question", "what?")
    assert code == 1 and "no UTF-8 text" in err


def test_env_tells_backends_and_versions(da_jax):
    code, out, _ = da_jax("env", "--json")
    facts = json.loads(out)
    assert code == 0 and facts["packages"]["jax"] and facts["devices"]
    assert {row["name"]: row["available"] for row in facts["attention"]}["xla"]
    assert facts["attention_default"] == "xla"
    assert facts["attention_why"].startswith("first of mosaic_tpu, mosaic_gpu, triton, xla")
    assert "needs a TPU" in da_jax("env")[1]


def test_convert_writes_an_orbax_checkpoint_that_loads(da_jax, tiny_folder, tmp_path):
    code, out, _ = da_jax("convert", str(tiny_folder), str(tmp_path / "out"), "--dtype", "float32")
    assert code == 0 and "wrote" in out
    assert (tmp_path / "out" / "params").is_dir() and (tmp_path / "out" / "config.json").exists()


def test_bench_attention_prints_rows(da_jax):
    code, out, _ = da_jax("bench", "attention", "--context", "512", "--batch", "1", "--json")
    rows = json.loads(out)
    assert code == 0 and {"backend", "context", "batch", "visible", "ms", "bytes"} <= rows[0].keys()
    full = {row["backend"]: row["bytes"] for row in rows if row["visible"] == 1}
    assert all(row["bytes"] < full[row["backend"]] for row in rows if row["visible"] < 1)


def test_bench_attention_takes_the_layer_and_refuses_what_makes_none(da_jax):
    small = ("bench", "attention", "--context", "256", "--batch", "1", "--json")
    heads = ("--q-heads", "4", "--kv-heads", "2", "--head-dim", "64", "--page-size", "16")
    code, out, _ = da_jax(*small, *heads, "--kv-dtype", "int8")
    assert code == 0 and json.loads(out)[0]["bytes"] == 16 * 2 * (16 * 128 + 2 * 4 * 128)
    fp8 = [da_jax(*small, *heads, "--kv-dtype", name) for name in ("fp8", "float8_e4m3fn")]
    assert [code for code, _, _ in fp8] == [0, 0]
    rows = [json.loads(out)[0] for _, out, _ in fp8]
    assert rows[0]["bytes"] == rows[1]["bytes"] == json.loads(out)[0]["bytes"]
    auto, float32 = (
        json.loads(da_jax(*small, *heads, *chosen)[1])[0]["bytes"]
        for chosen in ((), ("--kv-dtype", "float32"))
    )
    assert auto == float32 == 16 * 2 * 16 * 128 * 4
    for wrong, message in (
        (("--kv-dtype", "int4"), "'int4'; it must be one of auto, int8, fp8, float32, bfloat16"),
        (("--kv-heads", "5"), "multiple of the KV heads"),
        (("--dtype", "int8"), "'int8'; it must be one of float32"),
        (("--backend", "mosaic_tpu"), "needs a TPU"),
        (("--backend", "xla", "--tune"), "no settings"),
    ):
        code, _, error = da_jax(*small, *wrong)
        assert code == 1 and message in error


def test_bench_kv_scores_the_questions_of_the_shipped_checkpoint(da_jax):
    code, out, _ = da_jax("bench", "kv", "--windows", "2", "--kv-dtype", "auto", "--kv-dtype",
                          "int8", "--json")  # fmt: skip
    exact, int8 = json.loads(out)
    assert code == 0 and (exact["kv_dtype"], int8["kv_dtype"]) == ("float32", "int8")
    assert exact["delta"] == 0 and exact["tokens"] == int8["tokens"] > 20
    assert 0 < exact["nll"] < 0.1 and abs(int8["nll"] - exact["nll"] - int8["delta"]) < 2e-5
    assert int8["kv_bytes_per_token"] < exact["kv_bytes_per_token"] / 3


def test_bench_kv_scores_a_text_as_one_dense_pass_does(da_jax, tiny_folder, tmp_path):
    from support.dense import dense_logits
    from transformers import AutoTokenizer

    from da_jax.checkpoints import hf

    text = "some text of bytes, which are tokens here. " * 20
    (tmp_path / "text.txt").write_text(text)
    options = ("--model", str(tiny_folder), "--text", str(tmp_path / "text.txt"), "--kv-dtype",
               "auto", "--prompt-tokens", "30", "--new-tokens", "20")  # fmt: skip
    code, out, _ = da_jax("bench", "kv", *options, "--windows", "2", "--json")
    (row,) = json.loads(out)
    ids = np.array(AutoTokenizer.from_pretrained(tiny_folder).encode(text))
    pieces = np.stack([ids[:50], ids[len(ids) // 2 :][:50]])
    logits = dense_logits(
        hf.load(tiny_folder, dtype=np.float32), pieces, np.tril(np.ones((50, 50), bool))
    )[:, 29:-1].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    scored = np.take_along_axis(logprobs, pieces[:, 30:, None], axis=2)
    assert code == 0 and row["tokens"] == 40
    assert row["nll"] == pytest.approx(-scored.mean(), abs=1e-4)
    code, _, err = da_jax("bench", "kv", *options, "--windows", "30")
    assert code == 1 and "30 pieces of 50 need 1,500" in err


def test_generate_prints_the_memory_plan_on_standard_error(da_jax):
    code, _, err = da_jax("generate", "--kv-dtype", "int8", "--memory-fraction", "0.5",
                          "--max-tokens", "2", "--json", *SMALL)  # fmt: skip
    assert code == 0 and "50% usable; weights" in err
    assert "caches" in err and "in int8: pages" in err
    assert "2,048 tokens of context in all: 1 of 1 sequences at 2,048 tokens" in err
    code, _, err = da_jax("generate", "--kv-cache-bytes", "1000000", *SMALL)
    assert code == 1 and "max_model_len=" in err and "or raise kv_cache_bytes" in err


def test_bench_engine_and_bursts_print_rows_with_the_machine(da_jax, monkeypatch):
    from da_jax.bench import bursts, drive, engine

    plans = []

    def rows(model, plan, progress):
        plans.append((model, plan))
        progress("a case")
        return [{"system": "da", "predicted_ratio": 0.5}, {"system": "da-jax"}]

    monkeypatch.setattr(drive, "load", lambda *name: name)
    for module in (bursts, engine):
        monkeypatch.setattr(module, "rows", rows)
    code, out, error = da_jax("bench", "engine", "--batch", "2", "--context", "999", "--json")
    assert code == 0 and "a case" in error
    assert [row["system"] for row in json.loads(out)] == ["da", "da-jax"]
    assert all(row["machine"]["device"] and row["machine"]["threads"] for row in json.loads(out))
    da_jax("bench", "engine")
    code, out, _ = da_jax("bench", "bursts", "--burst", "3", "--context", "400")
    assert code == 0 and "da-jax" in out
    first, default, last = plans
    assert first[0] == ("tiny", "auto") and first[1].cases == [(2, 999)]
    assert default[1].cases == ((1, 2048), (8, 2048), (32, 2048), (1, 7936))
    assert last[1] == bursts.Plan(context=400, bursts=[3])


def test_bench_commands_refuse_what_makes_no_case(da_jax):
    for arguments, message in (
        (("engine", "--context", "100"), "context is 100"),
        (("engine", "--batch", "0"), "batch is 0"),
        (("bursts", "--batch", "0"), "batches are [0]"),
        (("device", "--out", "x.json", "--minutes", "0"), "minutes is 0"),
    ):
        code, _, error = da_jax("bench", *arguments)
        assert code == 1 and message in error


def test_bench_tables_are_for_people(capsys):
    from da_jax.cli import bench

    bench._print_several([], {"first": [{"a": 1, "b": "[x]"}], "second": [{"c": 2.5}]}, False)
    out = capsys.readouterr().out
    assert "first" in out and "[x]" in out and "second" in out and "2.5" in out
